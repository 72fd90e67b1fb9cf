"""paged_attention with each of its options."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from paged_attention_cases import EIGHT_BITS, alone, assert_right, check, make_case, per_head


@pytest.mark.parametrize("queries", [None, [1, 9, 17, 4]], ids=["decode", "several"])
@pytest.mark.parametrize("names", [["alibi_slopes"], ["sliding_window"], ["softcap"], ["sinks"],
                                   ["alibi_slopes", "sliding_window", "softcap", "sinks"]],
                         ids=lambda names: "+".join(names))  # fmt: skip
def test_options(device, dtype, layout, names, queries):
    options = {
        "alibi_slopes": per_head(8, 0.01, 0.4),
        "sliding_window": 21,
        "softcap": 2.0,
        "sinks": per_head(8, -3.0, 4.0),
    }
    chosen = {name: options[name] for name in names}
    check(make_case(device, dtype, [5, 16, 65, 200], queries, layout=layout, **chosen))


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 31, 32, 33, 10**6, 2**40])
def test_windows(device, layout, window):
    shapes = {"layout": layout, "sliding_window": window}
    check(make_case(device, torch.float32, [1, 15, 16, 17, 33, 300], **shapes))
    check(make_case(device, torch.float32, [40, 17, 200], [5, 17, 33], **shapes))


@pytest.mark.parametrize("window", [17, 2**40])
def test_windows_of_negative_positions(device, layout, window):
    """More query tokens than tokens; as many as the kernel for prompts takes."""
    if device == "cpu":
        pytest.skip("a CPU refuses more query tokens than tokens")
    case = {"layout": layout, "sliding_window": window}
    check(make_case(device, torch.bfloat16, [290, 3], [300, 5], **case))


@pytest.mark.parametrize("right", [-1, 0, 1, 20, 2**40])
def test_tokens_after_the_position(device, layout, right):
    """causal=False: all tokens, or some, with and without a window before the position."""
    lens, queries = [40, 17, 200, 3, 1], [5, 17, 33, 7, 1]
    if device == "cpu" and right == 0:  # as if causal: a CPU refuses more query tokens than tokens
        lens[3] = 7
    for index, window in enumerate((0, 1, 25)):
        options = {"causal": False, "window_right": right, "sliding_window": window}
        dtype = (torch.float32, torch.float16, torch.bfloat16)[index]
        check(make_case(device, dtype, lens, queries, layout=layout, **options))
    options |= {"alibi_slopes": per_head(8, 0.01, 0.4), "sinks": per_head(8, -3.0, 4.0)}
    check(make_case(device, torch.float32, lens, queries, layout=layout, **options))
    check(make_case(device, torch.bfloat16, lens, layout=layout, **options))


@pytest.mark.parametrize("softcap", [0.5, 30.0, 1e4])
def test_softcaps(device, softcap):
    case = make_case(device, torch.float32, [40, 130], layout="NHD", softcap=softcap, scale=0.3)
    check(case)


def test_sinks_at_the_ends(device):
    """A sink of -inf is none; a very large one takes everything."""
    case = make_case(device, torch.float32, [40, 0], layout="NHD")
    want, want_lse = case.run_with_lse()
    none = torch.full((8,), -torch.inf, device=device)
    got, lse = case.with_options(sinks=none).run_with_lse()
    assert torch.equal(got, want) and torch.equal(lse, want_lse)
    got, lse = case.with_options(sinks=torch.full((8,), 1e30, device=device)).run_with_lse()
    assert not got.any() and (lse == 1e30).all()


@pytest.mark.parametrize("stored", EIGHT_BITS, ids=lambda x: str(x).split(".")[-1])
def test_scales(device, layout, stored):
    for per in (False, True):
        check(
            make_case(
                device, torch.float32, [7, 100], kv_heads=4, stored=stored, layout=layout,
                scales_per_head=per,
            )
        )  # fmt: skip
    plain = make_case(device, torch.float32, [7, 100], stored=stored, layout=layout)
    only_k = plain.with_options(v_scale=None)
    check(only_k)
    if stored != torch.int8:
        check(only_k.with_options(k_scale=None))


@pytest.mark.parametrize("queries", [[1, 1, 1, 1], [2, 3, 9, 40]], ids=["decode", "several"])
def test_fixed_split_size_make_a_batch_invariant(device, dtype, layout, queries):
    """A sequence alone gives bit for bit what it gives between others."""
    lens = [3000, 45, 700, 1]
    queries = [min(pair) for pair in zip(queries, lens, strict=True)]
    case = make_case(device, dtype, lens, queries, heads=8, layout=layout)
    plain = replace(case, max_query_len=max(queries))
    case = plain.with_options(fixed_split_size=256)
    got = case.run()
    assert_right(plain, got)
    for seq in range(len(lens)):
        one, rows = alone(case, seq)
        assert torch.equal(one.run(), got[rows]), seq


def test_fixed_split_size_where_kv_heads_are_read_together(dtype):
    """A CPU reads as many KV heads of NHD together as the batch and its threads allow."""
    before = torch.get_num_threads()
    shapes = {"heads": 40, "kv_heads": 20, "layout": "NHD", "fixed_split_size": 256}
    case = make_case("cpu", dtype, [1200, 45, 700, 1], **shapes)
    one = replace(
        case, query=case.query[:1], block_tables=case.block_tables[:1], seq_lens=case.seq_lens[:1]
    )
    try:
        for threads in (1, 7):
            torch.set_num_threads(threads)
            assert torch.equal(one.run()[0], case.run()[0])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("bound", [None, 7])
@pytest.mark.parametrize("fixed_split_size", [0, 256])
def test_loose_bound_on_query_tokens(device, dtype, layout, bound, fixed_split_size):
    plain = make_case(device, dtype, [700, 0, 33, 5], [1, 0, 1, 1], layout=layout)
    case = replace(plain.with_options(fixed_split_size=fixed_split_size), max_query_len=bound)
    assert_right(plain, case.run(), case.run_with_lse())


def test_kv_ready_change_nothing(device, dtype, layout):
    case = make_case(device, dtype, [900, 3, 0, 77], heads=8, layout=layout)
    assert torch.equal(case.with_options(kv_ready=True).run(), case.run())
