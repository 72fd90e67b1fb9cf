"""paged_attention against a float64 reference: dtypes, shapes and lengths."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import EPSILON, assert_compiles, opcheck, raises
from paged_attention_cases import EIGHT_BITS, NAN, assert_right, check, make_case, per_head

import vllm_kernels

# --- right results


@pytest.mark.parametrize("eight", [None, *EIGHT_BITS], ids=lambda x: str(x).split(".")[-1])
def test_dtypes(device, dtype, layout, eight):
    check(make_case(device, dtype, [1, 15, 16, 17, 53, 300], stored=eight, layout=layout))
    check(make_case(device, dtype, [20, 130], [3, 7], stored=eight, layout=layout))
    check(make_case(device, dtype, [20, 9, 700], [1, 0, 1], stored=eight, layout=layout))


@pytest.mark.parametrize("block_size", [1, 2, 4, 8, 16, 32, 64, 128, 256])
def test_block_sizes(device, layout, block_size):
    b = block_size
    lens = [1, max(b - 1, 1), b, b + 1, 2 * b + 5, 300]
    queries = [1, 1, min(b, 6), min(b + 1, 4), min(2 * b + 5, 9), 2]
    for dtype, stored in (
        (torch.float32, None),
        (torch.bfloat16, None),
        (torch.bfloat16, torch.int8),
    ):
        check(make_case(device, dtype, lens, block_size=b, stored=stored, layout=layout))
        check(make_case(device, dtype, lens, queries, block_size=b, stored=stored, layout=layout))
    shapes = {"block_size": b, "head_size": 128, "layout": layout}
    check(make_case(device, torch.float16, lens, **shapes))
    check(make_case(device, torch.float16, lens, queries, **shapes))


@pytest.mark.parametrize("head_size", [32, 40, 64, 72, 80, 96, 128, 192, 256])
def test_head_sizes(device, layout, head_size):
    """The other axes are drawn along."""
    for index, dtype in enumerate((torch.float32, torch.float16, torch.bfloat16)):
        shapes = {"head_size": head_size, "block_size": [8, 16, 32][index], "layout": layout}
        check(make_case(device, dtype, [37, 1, 64], **shapes))
        check(make_case(device, dtype, [37, 5, 64], [2, 5, 3], **shapes))
        if head_size % 16 == 0:
            check(make_case(device, dtype, [37, 1, 64], stored=EIGHT_BITS[index], **shapes))


@pytest.mark.parametrize("heads, kv_heads", [(3, 3), (8, 2), (5, 1), (14, 2), (16, 2), (16, 1),
                                             (64, 1), (71, 1)])  # fmt: skip
def test_groups(device, layout, heads, kv_heads):
    shapes = {"heads": heads, "kv_heads": kv_heads, "layout": layout}
    check(make_case(device, torch.float32, [140, 23], **shapes))
    check(make_case(device, torch.bfloat16, [140, 23], [11, 2], head_size=128, **shapes))
    check(make_case(device, torch.float16, [40, 23], [3, 2], stored=torch.int8, **shapes))


@pytest.mark.parametrize("heads", [12, 16, 32, 64], ids=lambda heads: f"{heads}_rows")
@pytest.mark.parametrize("stored", [None, *EIGHT_BITS], ids=str)
def test_pieces_of_many_rows(device, layout, heads, stored):
    """Long sequences beside short ones: pieces, blocks that take several of them, ends of pages."""
    lens, dtype = [2900, 0, 130, 64, 65, 1, 777], torch.bfloat16
    shapes = {"heads": heads, "kv_heads": 1, "layout": layout, "stored": stored}
    check(make_case(device, dtype, lens, head_size=128, **shapes))
    queries = [3, 0, 2, 1, 5, 1, 2]
    check(make_case(device, dtype, lens, queries, head_size=64, block_size=32, **shapes))
    check(make_case(device, dtype, lens, queries, head_size=96, sliding_window=70, **shapes))


@pytest.mark.parametrize("rise", [1 / 430, -1 / 430], ids=["rising", "falling"])
@pytest.mark.parametrize("heads", [8, 16, 32, 64], ids=lambda heads: f"{heads}_rows")
@pytest.mark.parametrize("stored", [None, torch.float8_e4m3fn, torch.int8], ids=str)
def test_maxima_that_move(device, layout, heads, stored, rise):
    """Scores rise by 2^9.5 in 192 tokens: what was summed up before is scaled down, many times."""
    shapes = {"heads": heads, "kv_heads": 1, "head_size": 128, "layout": layout, "stored": stored}
    case = make_case(device, torch.bfloat16, [1500, 70], rise=rise, **shapes)
    case.query += 1.3
    check(case)


@pytest.mark.parametrize("count", range(1, 18))
def test_several_query_tokens(device, layout, count):
    check(make_case(device, torch.float32, [count, 60, 17], [count] * 3, layout=layout))


def test_ragged_and_longer_than_context(device, dtype, layout):
    """The first query tokens of a sequence shorter than them have negative positions: an error on
    the CPU, but for a length of 0."""
    lens, queries = [0, 3, 30, 9, 100], [2, 7, 0, 9, 70]
    case = make_case(device, dtype, lens, queries, layout=layout)
    if device == "cpu":
        with raises(r"^paged_attention: seq_lens\[1\] = 3: expected at least its 7 query tokens$"):
            case.run()
        lens[1] = 7
        case = make_case(device, dtype, lens, queries, layout=layout)
        check(case)
        out, lse = case.run_with_lse()
        assert not out[:2].any() and (lse[:2] == -torch.inf).all()
        assert (lse[2:] > -torch.inf).all()
        return
    check(case)
    out, lse = case.run_with_lse()
    assert not out[:6].any() and (lse[:6] == -torch.inf).all()
    assert (lse[6:] > -torch.inf).all()


@pytest.mark.parametrize("head_size", [64, 128])
def test_lse_changes_no_bit_of_out(device, dtype, layout, head_size):
    """Weights rounded for out, exact ones for lse; with splits over threads, and sinks, too."""
    if device == "cuda":
        pytest.skip("promised for the CPU")
    for stored in (None, torch.int8):
        for lens, sinks in (([16], None), ([1, 40, 700, 5000], per_head(8, -1.0, 1.0))):
            case = make_case(
                device, dtype, lens, head_size=head_size, stored=stored, layout=layout, sinks=sinks
            )
            case.query.mul_(8)
            out, lse = case.run_with_lse()
            assert torch.equal(out, case.run())
            torch.testing.assert_close(lse.double(), case.naive()[1], rtol=1e-5, atol=1e-4)


BATCHES = {  # lengths, query tokens, options, and what explain() says of 16 bits on a Hopper GPU
    "decode": ([30, 9], [1, 1], {}, "decode, head"),
    "kv_ready": ([30, 9], [1, 1], {}, "decode, head"),
    "verification": ([30, 9], [2, 3], {}, "decode_wgmma"),
    "heads of 256": ([30, 9], [2, 3], {"head_size": 256}, "decode (several warps"),
    "split": ([9000], [1], {}, "decode, head"),
    "prompts": ([300, 200], [200, 130], {"heads": 64}, "prefill sm90"),
    "prompts over 8 bits": (
        [60] * 6,
        [24] * 6,
        {"heads": 64, "stored": torch.int8},
        "prefill sm90",
    ),
    "gathered": ([120, 90], [90, 60], {"heads": 64, "block_size": 4}, "are gathered"),
    "pages of 8": ([60] * 6, [24] * 6, {"heads": 64, "block_size": 8}, "prefill sm80"),
    "with decodes": ([300] + [40] * 5, [200] + [1] * 5, {"heads": 64}, "concurrently"),
}


@pytest.mark.parametrize("batch", BATCHES)
def test_tokens_that_no_sequence_owns(device, dtype, layout, batch):
    """They are 0, lse -inf, where the op makes out; a given out stays as it is there."""
    lens, queries, shapes, kernel = BATCHES[batch]
    case = make_case(device, dtype, lens, queries, layout=layout, **shapes)
    first, last = 4, 4 + sum(queries)
    nobody = torch.full_like(case.query[:1], NAN)
    query = torch.cat([nobody.expand(first, -1, -1), case.query, nobody.expand(30, -1, -1)])
    starts = torch.tensor([first, *queries], device=device).cumsum(0).int()
    call = (query, *case.tensors()[1:])
    options = {**case.options, "query_start_loc": starts, "max_query_len": max(queries)}
    options["kv_ready"] = batch == "kv_ready"
    if device == "cuda" and dtype != torch.float32 and torch.cuda.get_device_capability()[0] == 9:
        assert kernel in vllm_kernels.explain(vllm_kernels.paged_attention, *call, **options)
    out, lse = torch.full_like(query, NAN), torch.full(query.shape[:2], 7.0, device=device)
    torch.ops.vllm_kernels.paged_attention(
        out, lse, *call, starts, query.shape[-1] ** -0.5, None, 0, 0.0, None,
        case.options.get("k_scale"), case.options.get("v_scale"), layout, max(queries), None,
        kv_ready=options["kv_ready"], zero_unowned=True,
    )  # fmt: skip
    # Not always by the same kernel: the choice depends on the number of tokens.
    torch.testing.assert_close(out[first:last], case.run(), rtol=2e-2, atol=2e-2)
    for got in vllm_kernels.paged_attention(*call, **options, return_lse=True), (out, lse):
        assert torch.equal(got[0], out) and torch.equal(got[1], lse)
    given = torch.full_like(query, 7.0)
    vllm_kernels.paged_attention(*call, **options, out=given)
    assert torch.equal(given[first:last], out[first:last])
    for rows in (slice(0, first), slice(last, None)):
        assert not out[rows].any() and (lse[rows] == -torch.inf).all()
        assert (given[rows] == 7).all()


def test_no_sequence_owns_a_token(device, layout):
    case = make_case(device, torch.float32, [], [], layout=layout)
    query = torch.full((5, 8, 64), NAN, device=device)
    starts = torch.zeros(1, dtype=torch.int32, device=device)
    out, lse = torch.full_like(query, NAN), torch.full(query.shape[:2], 7.0, device=device)
    torch.ops.vllm_kernels.paged_attention(
        out, lse, query, *case.tensors()[1:], starts, 1.0, None, 0, 0.0, None, None, None, layout,
        1, None, zero_unowned=True,
    )  # fmt: skip
    assert not out.any() and (lse == -torch.inf).all()


def test_zeros_need_an_out_without_gaps(device):
    case = make_case(device, torch.bfloat16, [30], [2])
    wide = torch.zeros(2, 9, 64, dtype=torch.bfloat16, device=device)
    shifted = torch.zeros(2 * 8 * 64 + 1, dtype=torch.bfloat16, device=device)[1:].view(2, 8, 64)
    for out, message in ((wide[:, :8], "contiguous"), (shifted, "memory aligned to 16 bytes")):
        with raises(rf"^paged_attention: out: expected .*{message}"):
            torch.ops.vllm_kernels.paged_attention(
                out, None, *case.tensors(), case.options["query_start_loc"], 1.0, None, 0, 0.0,
                None, None, None, "vllm", 2, None, zero_unowned=True,
            )  # fmt: skip


def test_a_negative_position_sees_tokens_if_not_causal(device, layout):
    """More query tokens than tokens: no error where all of them see the same."""
    case = make_case(device, torch.float32, [2, 30], [5, 7], layout=layout, causal=False)
    check(case)
    assert case.run()[:5].abs().amin(-1).amin() > 0


def test_prefill(device, dtype, layout):
    check(make_case(device, dtype, [150, 70], [150, 70], heads=4, kv_heads=4, layout=layout))


def test_context_0(device, dtype, layout):
    sinks = per_head(8, -1.0, 1.0)
    for given in (None, sinks):
        case = make_case(device, dtype, [0, 5, 0], layout=layout, sinks=given)
        check(case)
        out, lse = case.run_with_lse()
        assert not out[[0, 2]].any()
        nothing = torch.full((8,), -torch.inf) if given is None else given
        assert torch.equal(lse[[0, 2]].cpu(), nothing.expand(2, 8))


def test_large_scores_stay_finite(device, dtype, layout):
    case = make_case(device, dtype, [33, 600], layout=layout, scale=2e4)
    out, lse = case.run_with_lse()
    assert not out.isnan().any() and lse.isfinite().all()
    clear = ((out.double() - case.naive()[0]).abs().amax(-1) < 0.05).float().mean().item()
    assert clear > 0.9  # near ties may fall either way


def test_long_context(device, layout):
    check(make_case(device, torch.float32, [20_000, 5], heads=4, kv_heads=1, layout=layout))


def test_as_v1(device, dtype):
    """One query token a sequence, layout vllm and nothing else: the very result of v1."""
    case = make_case(device, dtype, [1, 40, 700])
    one = torch.ones(1, device=device)
    want = torch.empty_like(case.query)
    vllm_kernels.paged_attention_v1(
        want, case.query, case.key_cache, case.value_cache, 2, 0.125, case.block_tables,
        case.seq_lens, 16, 700, None, "auto", one, one,
    )  # fmt: skip
    assert_right(case, want)
    if device == "cpu":
        assert torch.equal(case.run(), want)


def test_halves_merge_to_the_whole(device, dtype, layout):
    """Attention to the first pages and to the others, merged by their log-sum-exp."""
    case = make_case(device, dtype, [200, 97, 48, 350], layout=layout)
    first = torch.full_like(case.seq_lens, 48)
    halves = []
    for lens, tables in (
        (first, case.block_tables),
        (case.seq_lens - first, case.block_tables[:, 3:]),
    ):
        half = replace(case, seq_lens=lens, block_tables=tables)
        halves.append(half.run_with_lse())
    (prefix, prefix_lse), (suffix, suffix_lse) = halves
    merged = torch.empty_like(case.query)
    lse = torch.empty_like(prefix_lse.t().contiguous())
    vllm_kernels.merge_attn_states(
        merged, prefix, prefix_lse.t().contiguous(), suffix, suffix_lse.t().contiguous(), lse
    )
    want, want_lse = case.naive()
    torch.testing.assert_close(lse.t().double(), want_lse, rtol=1e-5, atol=1e-5)
    error = (merged.double() - want).norm() / want.norm()
    assert error <= max(EPSILON[dtype], 2e-6)


@pytest.mark.parametrize("queries", [None, [1, 3, 20, 0, 90]], ids=["decode", "several"])
@pytest.mark.parametrize("block_size", [1, 16, 256])
def test_threads_give_right_results(layout, queries, block_size):
    """Work is cut by the number of threads; every cut must be right."""
    before = torch.get_num_threads()
    case = make_case(
        "cpu", torch.float32, [2000, 0, 129, 1, 400], queries, heads=4, block_size=block_size,
        layout=layout, sinks=per_head(4, -1, 1),
    )  # fmt: skip
    try:
        for threads in (1, 2, 3, 7, 16):
            torch.set_num_threads(threads)
            assert_right(case, case.run_with_lse())
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("stored", [None, *EIGHT_BITS], ids=lambda x: str(x).split(".")[-1])
@pytest.mark.parametrize("heads, kv_heads", [(3, 3), (12, 6), (20, 20), (35, 7), (72, 8), (160, 2)])
def test_kv_heads_read_together(dtype, stored, heads, kv_heads):
    """A CPU reads KV heads that lie side by side in NHD together, as many as the work allows."""
    before = torch.get_num_threads()
    slopes, sinks = per_head(heads, 0.01, 0.4), per_head(heads, -1, 1)
    shapes = {"heads": heads, "kv_heads": kv_heads, "layout": "NHD", "stored": stored}
    shapes |= {"scales_per_head": stored is not None, "alibi_slopes": slopes, "sinks": sinks}
    try:
        for threads, lens in ((1, [700, 0, 40]), (2, [1, 16, 300]), (5, [1200, 33])):
            torch.set_num_threads(threads)
            head_size = 48 if threads == 2 else 128
            case = make_case("cpu", dtype, lens, head_size=head_size, **shapes)
            assert_right(case, case.run_with_lse())
            case = case.with_options(sliding_window=90, softcap=20.0)
            assert_right(case, case.run())
    finally:
        torch.set_num_threads(before)


# --- nothing to do


@pytest.mark.parametrize("queries", [None, []], ids=["decode", "several"])
def test_empty_batch(device, dtype, layout, queries):
    case = make_case(device, dtype, [], queries, layout=layout)
    out, lse = case.run_with_lse()
    assert out.shape == (0, 8, 64) and lse.shape == (0, 8)


@pytest.mark.parametrize("queries", [None, [3, 90]], ids=["decode", "several"])
@pytest.mark.parametrize("stored", [None, torch.float8_e4m3fn], ids=str)
def test_empty_pool(device, layout, stored, queries):
    """No blocks: no tokens to see. Lengths that say otherwise: CUDA skips ids of no block."""
    shapes = {"stored": stored, "layout": layout, "spare_blocks": 0}
    case = make_case(device, torch.bfloat16, [0, 0], queries, **shapes)
    case.key_cache, case.value_cache = (
        torch.empty_like(cache, memory_format=torch.contiguous_format)
        for cache in (case.key_cache, case.value_cache)
    )
    check(case)
    if device == "cuda":
        case.seq_lens.fill_(20)
        out, lse = case.run_with_lse()
        assert torch.equal(out, torch.zeros_like(out))
        assert torch.equal(lse, torch.full_like(lse, -torch.inf))


@pytest.mark.parametrize("queries", [[1, 0, 1, 0], [2, 0, 5, 0]], ids=["decode", "several"])
def test_sequences_without_query_tokens(device, layout, queries):
    """Padded rows of a CUDA graph; what lies in query past the last sequence stays as it is."""
    case = make_case(device, torch.float32, [30, 40, 300, 0], queries, layout=layout)
    case.block_tables[1] = -1
    check(case)
    more = replace(case, query=torch.cat([case.query, torch.randn_like(case.query)]))
    got = more.run()
    assert torch.equal(got[: sum(queries)], case.run())
    assert got[sum(queries) :].isnan().all()


# --- torch


# Schema and fake kernels do not depend on the dtype.
@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=["bf16"])
@pytest.mark.parametrize("queries", [None, [3, 4]], ids=["decode", "several"])
def test_opcheck_and_compile(device, dtype, layout, queries):
    case = make_case(device, dtype, [5, 40], queries, layout=layout, sinks=per_head(8, -1, 1))
    out, lse = case.run_with_lse()
    workspace = vllm_kernels.paged_attention_workspace(device)
    opcheck(
        "paged_attention", torch.empty_like(out), torch.empty_like(lse), *case.tensors(),
        case.options.get("query_start_loc"), 0.125, None, 0, 0.0, case.options["sinks"], None, None,
        layout, 4, workspace,
    )  # fmt: skip
    assert_compiles(lambda: case.run_with_lse())
    compiled = torch.compile(lambda: case.run_with_lse(), fullgraph=True, backend="aot_eager")()
    assert torch.equal(compiled[0], out) and torch.equal(compiled[1], lse)
