"""paged_attention over int8 with a scale a token and KV head, and over int4 that has a zero, too,
against the float64 reference."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from helpers import assert_compiles, assert_graph_replays, needs_cuda_library, opcheck, raises
from paged_attention_cases import (
    NAN,
    Case,
    alone,
    assert_near,
    check,
    make_case,
    per_head,
    with_token_scales,
    with_token_zeros,
)
from torch import Tensor

import vllm_kernels
from vllm_kernels import reference

BF16 = torch.bfloat16


@pytest.fixture(params=[8, 4], ids=["int8", "int4"])
def bits(request: pytest.FixtureRequest) -> int:
    return request.param


def token_case(bits: int, device: str, dtype: torch.dtype, *sizes: object, span: float = 4.0,
               **options: object) -> Case:  # fmt: skip
    case = with_token_scales(make_case(device, dtype, *sizes, stored=torch.int8, **options), span)
    return case if bits == 8 else with_token_zeros(case)


def int4_takes(head_size: int) -> bool:
    return head_size in range(32, 257, 32)


def scales_of(case: Case) -> tuple[Tensor, Tensor]:
    return case.options["k_token_scales"], case.options["v_token_scales"]


def with_scales(case: Case, key: Tensor, value: Tensor) -> Case:
    return case.with_options(k_token_scales=key, v_token_scales=value)


def without_zeros(case: Case) -> Case:
    """Its zeros are 0, but NaN in slots without a token."""
    names = [name for name in case.options if name.endswith("token_zeros")]
    return case.with_options(**{name: 0 * case.options[name] for name in names})


def slot_of(case: Case, seq: int, token: int) -> tuple[int, int]:
    """Its page and its place there."""
    page = case.block_tables[seq, token // case.block_size].item()
    return page, token % case.block_size


@pytest.mark.parametrize("block_size", [1, 4, 8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("queries", [None, [1, 5, 0, 3, 2]], ids=["decode", "mixed"])
def test_layouts(bits, device, dtype, layout, block_size, queries):
    lens = [300, block_size + 4, 1 if queries is None else 0, 2 * block_size + 3, 40]
    check(token_case(bits, device, dtype, lens, queries, block_size=block_size, layout=layout))


@pytest.mark.parametrize("head_size", [32, 64, 80, 96, 112, 128, 160, 192, 224, 256])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (20, 2), (48, 1)], ids=str)
def test_heads(bits, device, layout, head_size, heads):
    if bits == 4 and not int4_takes(head_size):
        pytest.skip("int4 has other head sizes")
    sizes = {"heads": heads[0], "kv_heads": heads[1], "head_size": head_size, "layout": layout}
    for dtype in (BF16, torch.float16):
        check(token_case(bits, device, dtype, [700, 33, 1, 129], **sizes))
    check(token_case(bits, device, BF16, [700, 33, 9, 129], [3, 1, 4, 2], **sizes))


@pytest.mark.parametrize("head_size", [64, 80, 128, 192, 256])
@pytest.mark.parametrize("block_size", [4, 16, 64])
def test_prompts(bits, device, layout, head_size, block_size):
    """As many query tokens as prefill kernels serve; and keys before them."""
    if bits == 4 and not int4_takes(head_size):
        pytest.skip("int4 has other head sizes")
    sizes = {"head_size": head_size, "block_size": block_size, "layout": layout}
    for dtype in (BF16, torch.float16):
        check(token_case(bits, device, dtype, [330, 200, 90], [250, 200, 1], **sizes))


def test_a_prompt_whose_keys_are_gathered(bits, device, layout):
    check(token_case(bits, device, BF16, [700, 1100], [600, 1100], layout=layout, head_size=128))


@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 50},
        {"softcap": 20.0},
        {"alibi_slopes": per_head(8, 0.01, 0.4)},
        {"sinks": per_head(8, -1, 1)},
        {"causal": False},
        {"scale": 0.3},
        {"sliding_window": 70, "softcap": 20.0, "sinks": per_head(8, -1, 1)},
    ],
    ids=lambda options: "+".join(options),
)
@pytest.mark.parametrize("queries", [None, [1, 5, 2, 8], [130, 5, 33, 70]], ids=str)
def test_options(bits, device, layout, queries, options):
    lens = [400, 33, 47, 100]
    check(token_case(bits, device, BF16, lens, queries, layout=layout, **options))


@pytest.mark.parametrize("queries", [None, [4, 2], [130, 150]], ids=str)
@pytest.mark.parametrize("value_scale", [1e-6, 1e-3, 1e3])
def test_values_of_widely_different_sizes(bits, device, dtype, layout, queries, value_scale):
    """Rows of V between 1e-3 and 1e3 times `value_scale`; no weight is out of float16's range."""
    case = token_case(
        bits, device, dtype, [400, 170], queries, span=1e6, layout=layout, head_size=128
    )
    key, value = scales_of(case)
    if dtype == torch.float16:  # so that the result is in its range
        value_scale = min(max(value_scale, 0.1), 1.0)
    check(with_scales(case, key, value * value_scale))


@pytest.mark.parametrize("queries", [None, [4, 2], [130, 150]], ids=str)
def test_keys_of_widely_different_sizes(bits, device, layout, queries):
    """Rows of K between 1e-3 and 1e3: nearly all weight is on one token. (Up to 1 where a prompt's
    kernel rounds K to bfloat16: larger logits are as inexact as those of a bfloat16 cache.)"""
    case = token_case(bits, device, BF16, [400, 170], queries, layout=layout)
    key, value = scales_of(case)
    rounds = device == "cuda" and case.max_query_len == 150
    most = 0 if rounds else 3
    exponents = (most + 3) * torch.rand_like(key) - 3
    scales = torch.where(key.isnan(), NAN, 10**exponents / 32)
    case = with_scales(case, scales, value)
    want, want_lse = case.naive()
    out, lse = case.run_with_lse()
    torch.testing.assert_close(lse.double(), want_lse, rtol=2e-5, atol=1e-2 if rounds else 1e-3)
    scale = 10**most * case.query.shape[-1] ** -0.5
    lens = case.seq_lens.tolist()
    assert_near(out, want, case.spread(), case.query, scale, lens, None, case.lost())


def test_rows_of_zeros(bits, device, layout):
    """Their scale is 0. A sequence of nothing else gives 0 and log(length)."""
    for queries in (None, [3, 2], [150, 120]):
        case = without_zeros(token_case(bits, device, BF16, [300, 200], queries, layout=layout))
        key, value = scales_of(case)
        zeros = torch.where(key.isnan(), NAN, 0.0)
        some = torch.rand_like(key) < 0.5
        check(with_scales(case, torch.where(some, key, zeros), torch.where(some, value, zeros)))
        check(with_scales(case, zeros, value))
        out, lse = with_scales(case, zeros, zeros).run_with_lse()
        assert (out == 0).all()
        if queries is None:
            want = torch.tensor([300.0, 200.0], device=device).log()[:, None].expand_as(lse)
            torch.testing.assert_close(lse, want)


@pytest.mark.parametrize("queries", [None, [3, 2], [150, 120]], ids=str)
def test_constant_rows(device, layout, queries):
    """int4 has scale 0 and a zero for them: of one key for all tokens, out is the mean of zeros."""
    case = token_case(4, device, BF16, [300, 200], queries, layout=layout, head_size=96)
    key, value = scales_of(case)
    constant = torch.where(value.isnan(), NAN, 0.0)
    check(with_scales(case, constant, value))
    check(with_scales(case, key, constant))
    same = case.with_options(k_token_zeros=constant + 1, v_token_zeros=constant + 3)
    out = with_scales(same, constant, constant).run()
    torch.testing.assert_close(out, torch.full_like(out, 3.0))


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33])
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_int4_of_short_sequences(device, dtype, layout, length, block_size):
    """The ends of pages, on both sides."""
    sizes = {"block_size": block_size, "layout": layout, "head_size": 64}
    check(token_case(4, device, dtype, [length, 1], **sizes))
    check(token_case(4, device, dtype, [length + 1, 2], [2, 1], **sizes))


def test_equal_scales_are_one_scale(device, dtype, layout):
    one = make_case(device, dtype, [300, 40, 7], [2, 3, 1], stored=torch.int8, layout=layout)
    case = with_token_scales(one)
    key, value = (torch.full_like(x, 1 / 32) for x in scales_of(case))
    scale = torch.tensor([1 / 32], device=device)
    want = one.with_options(k_scale=scale, v_scale=scale).run()
    unit = 2.0**-7 if dtype == BF16 else 2.0**-10 if dtype == torch.float16 else 2.0**-20
    torch.testing.assert_close(with_scales(case, key, value).run(), want, rtol=unit, atol=unit)


@pytest.mark.parametrize("of", ["k_scales", "v_scales", "k_zeros", "v_zeros"])
def test_a_bad_scale_that_a_tree_mask_hides(bits, device, layout, of):
    """New tokens that see themselves and the context alone: token 2 of 4 is bad."""
    if bits == 8 and "zeros" in of:
        pytest.skip("int8 has no zeros")
    case = token_case(bits, device, BF16, [40], [4], layout=layout)
    case = case.with_options(tree_mask=torch.zeros(4, dtype=torch.int64, device=device))
    page, place = slot_of(case, 0, 38)
    name = of.replace("_", "_token_")
    bad = case.options[name].clone()
    bad[page, :, place] = NAN
    out = case.with_options(**{name: bad}).run()
    assert out.isnan().flatten(1).any(1).tolist() == [False, False, True, False]


@pytest.mark.parametrize("queries", [[1, 1, 1], [5, 3, 1], [150, 120, 1]], ids=str)
@pytest.mark.parametrize("poison", [NAN, math.inf])
@pytest.mark.parametrize("of", ["k_scales", "v_scales", "k_zeros", "v_zeros"])
def test_a_bad_scale_stays_where_its_token_is_seen(bits, device, layout, queries, poison, of):
    """In its sequence and KV head, from its own query token on. So does a bad zero."""
    if bits == 8 and "zeros" in of:
        pytest.skip("int8 has no zeros")
    lens, kv_heads, group = [300, 200, 77], 2, 4
    case = token_case(bits, device, BF16, lens, queries, layout=layout, head_size=128)
    clean, clean_lse = case.run_with_lse()
    seq, late = 0, min(3, queries[0] - 1)  # the last query token but `late`
    page, place = slot_of(case, seq, lens[seq] - 1 - late)
    name = of.replace("_", "_token_")
    bad = case.options[name].clone()
    bad[page, 1, place] = poison
    out, lse = case.with_options(**{name: bad}).run_with_lse()
    first = queries[0] - 1 - late
    seen = torch.zeros(sum(queries), kv_heads * group, dtype=torch.bool, device=device)
    seen[first : queries[0], group:] = True
    reached = seen.clone()  # a prompt's kernel multiplies a tile of query tokens with V at once
    reached[: queries[0], group:] |= device == "cuda" and of[0] == "v" and queries[0] > 100
    if device == "cpu":
        assert torch.equal(out[~reached], clean[~reached])
        assert torch.equal(lse[~seen], clean_lse[~seen])
    # On CUDA rows of a tile raise their maximum together.
    torch.testing.assert_close(out[~reached], clean[~reached], rtol=2.0**-6, atol=2.0**-9)
    torch.testing.assert_close(lse[~seen], clean_lse[~seen])
    if math.isnan(poison):
        assert out[seen].isnan().all()
    elif of[0] == "v":
        assert not out[seen].isfinite().all(-1).any()
    if of[0] == "v":
        torch.testing.assert_close(lse, clean_lse)
    elif math.isnan(poison):
        assert lse[seen].isnan().all()


def test_what_the_writer_wrote(bits, device, dtype, layout):
    """reshape_and_cache_per_token_quant, then attention: as over the gathered keys and values."""
    blocks, block_size, kv_heads, size, length = 9, 16, 2, 64, 130
    case = token_case(bits, device, dtype, [length], layout=layout, spare_blocks=0)
    caches = [torch.zeros_like(case.key_cache), torch.zeros_like(case.value_cache)]
    of_tokens = torch.full((4, blocks, kv_heads, block_size), NAN, device=device)
    scales, zeros = of_tokens[:2], of_tokens[2:] if bits == 4 else [None, None]
    sizes = 10.0 ** torch.randint(-3, 1, (2, length, kv_heads, 1), device=device)
    key, value = (torch.randn(2, length, kv_heads, size, device=device) * sizes).to(dtype)
    token = torch.arange(length, device=device)
    slots = case.block_tables[0, token // 16].long() * 16 + token % 16
    vllm_kernels.reshape_and_cache_per_token_quant(
        key, value, *caches, *scales, slots, layout, *zeros
    )
    out = vllm_kernels.paged_attention(
        case.query, *caches, case.block_tables, case.seq_lens, layout=layout,
        k_token_scales=scales[0], v_token_scales=scales[1], k_token_zeros=zeros[0],
        v_token_zeros=zeros[1],
    )  # fmt: skip
    rows = [torch.empty(length, kv_heads, size, device=device) for _ in range(2)]
    ends = torch.tensor([0, length], dtype=torch.int32, device=device)
    vllm_kernels.gather_paged_kv(
        *rows, *caches, case.block_tables, ends, k_scale=scales[0], v_scale=scales[1],
        layout=layout, k_zero=zeros[0], v_zero=zeros[1],
    )  # fmt: skip
    starts = torch.tensor([0, 1], dtype=torch.int32, device=device)
    want, _ = reference.varlen_attention(case.query, *rows, starts, ends)
    torch.testing.assert_close(out.double(), want, rtol=1e-2, atol=1e-2)
    exact, _ = reference.varlen_attention(case.query, key, value, starts, ends)
    rtol, atol = (5e-2, 2e-2) if bits == 8 else (0.2, 0.2)
    torch.testing.assert_close(out.double(), exact, rtol=rtol, atol=atol)


def test_strides_are_free(bits, device, layout):
    case = token_case(bits, device, BF16, [300, 40], [1, 3], layout=layout, head_size=128)
    want = case.run()
    for pad in (3, 4):  # not a multiple of 16 bytes, and one
        packed = {}
        for name in (name for name in case.options if "_token_" in name):
            blocks, heads, block_size = case.options[name].shape
            wide = torch.full((blocks, heads + 1, block_size + pad), NAN, device=device)
            wide[:, 1:, :block_size] = case.options[name]
            packed[name] = wide[:, 1:, :block_size]
        got = case.with_options(**packed).run()
        torch.testing.assert_close(got, want, rtol=2.0**-7, atol=2.0**-8)


def test_fixed_split_size_makes_a_batch_invariant(bits, device, layout):
    case = token_case(
        bits, device, BF16, [900, 2100, 33, 700], [1, 1, 1, 1], layout=layout, head_size=128,
        fixed_split_size=256,
    )  # fmt: skip
    got = case.run()
    for seq in range(4):
        one, rows = alone(case, seq)
        assert torch.equal(one.run(), got[rows])


def test_page_lists(bits, device, layout):
    """The same bits by tables in CSR form."""
    case = token_case(bits, device, BF16, [300, 40], layout=layout)
    counts = [-(-length // 16) for length in (300, 40)]
    ids = torch.cat([row[:count] for row, count in zip(case.block_tables, counts)])
    last = torch.tensor([300 - 18 * 16, 40 - 32], dtype=torch.int32, device=device)
    ends = torch.tensor([0, counts[0], sum(counts)], dtype=torch.int32, device=device)
    got = vllm_kernels.paged_attention(
        case.query, case.key_cache, case.value_cache, kv_indptr=ends, kv_indices=ids,
        last_page_len=last, max_pages=case.block_tables.shape[1], **case.options,
    )  # fmt: skip
    assert torch.equal(got, case.run())


@needs_cuda_library
@pytest.mark.parametrize("queries", [None, [1, 3, 1], [150, 1, 120]], ids=str)
def test_graph_replay(bits, layout, queries):
    """With other scales, as after a step that wrote to the cache."""
    case = token_case(bits, "cuda", BF16, [700, 33, 160], queries, layout=layout, head_size=128)
    held = with_scales(case, *(x.clone() for x in scales_of(case)))
    other = tuple(x * (0.5 + torch.rand_like(x)) for x in scales_of(case))
    out = torch.empty_like(case.query)
    call = held.with_options(out=out)

    def attend() -> None:
        options = {**call.options, "max_query_len": call.max_query_len}
        vllm_kernels.paged_attention(*call.tensors(), **options)

    def refill() -> None:
        for scales, new in zip(scales_of(held), other):
            scales.copy_(new)

    assert_graph_replays(attend, refill, out, with_scales(case, *other).run)


@needs_cuda_library
def test_after_the_writer(bits, layout):
    """A writer just before, whose scales must not be read early."""
    case = token_case(bits, "cuda", BF16, [1000] * 4, layout=layout, head_size=128)
    key, value = torch.randn(2, 4, 2, 128, device="cuda", dtype=BF16)
    slots = case.block_tables[:, 999 // 16].long() * 16 + 999 % 16
    names = [name for name in case.options if "_token_" in name]
    for _ in range(20):
        of_tokens = {name: case.options[name].clone() for name in names}
        caches = [case.key_cache.clone(), case.value_cache.clone()]
        torch.cuda.synchronize()
        scales, zeros = list(of_tokens.values())[:2], list(of_tokens.values())[2:]
        vllm_kernels.reshape_and_cache_per_token_quant(
            key, value, *caches, *scales, slots, layout, *zeros
        )
        arguments = case.query, *caches, case.block_tables, case.seq_lens
        got = vllm_kernels.paged_attention(*arguments, layout=layout, **of_tokens)
        torch.cuda.synchronize()
        want, _ = reference.paged_attention(*arguments, layout=layout, **of_tokens)
        torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=1e-2)


def test_bad_input():
    case = token_case(8, "cpu", torch.float32, [37, 20])
    key, value = scales_of(case)
    one = torch.ones(1)
    floats = make_case("cpu", torch.float32, [37, 20])
    cases = [
        (case, {"v_token_scales": None},
         r"v_token_scales: expected a tensor, as k_token_scales is one, got None$"),
        (case, {"k_token_scales": None},
         r"k_token_scales: expected a tensor, as v_token_scales is one, got None$"),
        (case, {"k_token_scales": key.double()}, r"k_token_scales: expected float32, got float64"),
        (case, {"v_token_scales": value[:, :1]},
         r"v_token_scales: expected num_kv_heads = 2 \(from value_cache\) at dimension 1, got .*"),
        (case, {"v_token_scales": value[0]}, r"v_token_scales: expected shape .*"),
        (case, {"k_token_scales": key.transpose(1, 2).contiguous().transpose(1, 2)},
         r"k_token_scales: expected .*"),
        (case, {"k_scale": one}, r"k_scale: expected None: every token has its own scale \(from k_"
         r"token_scales\)$"),
        (case, {"v_scale": one}, r"v_scale: expected None: every token has its own scale \(from k_"
         r"token_scales\)$"),
        (floats, {"k_token_scales": key, "v_token_scales": value},
         r"k_token_scales: expected None: only int8 and int4 caches have a scale a token, this "
         r"one is float32$"),
        (case, {"v_token_scales": 1.0}, r"v_token_scales: expected a tensor, got float$"),
    ]  # fmt: skip
    for given, changed, message in cases:
        with raises("^paged_attention: " + message):
            given.with_options(**changed).run()
    with raises("^paged_attention: k_token_scales: requires grad"):
        with_scales(case, key.clone().requires_grad_(), value).run()


def test_bad_input_of_int4():
    case = token_case(4, "cpu", torch.float32, [37, 20])
    int8 = token_case(8, "cpu", torch.float32, [37, 20])
    key, value = (case.options[f"{name}_token_zeros"] for name in ("k", "v"))
    none = {"k_token_scales": None, "v_token_scales": None}
    moved = torch.empty(*key.shape[:2], key.shape[2] + 8)[..., : key.shape[2]]
    cases = [
        (case, {"v_token_zeros": None},
         r"v_token_zeros: expected a tensor, as k_token_zeros is one, got None$"),
        (case, {"k_token_zeros": None, "v_token_zeros": None},
         r"key_cache: expected int8, or k_token_zeros and v_token_zeros for int4, got uint8 alone"),
        (case, {"k_token_zeros": None, "v_token_zeros": None, **none},
         r"key_cache: expected float32 \(from query\), .* or int8, got uint8; say what"),
        (case, none, r"k_token_scales: expected a tensor, as k_token_zeros is one, got None$"),
        (int8, {"k_token_zeros": key, "v_token_zeros": value},
         r"k_token_zeros: expected None: only int4 caches, which are uint8, have a zero a token, "
         r"this one is int8$"),
        (case, {"k_token_zeros": key.double()}, r"k_token_zeros: expected float32, got float64"),
        (case, {"v_token_zeros": value[:1]}, r"v_token_zeros: expected shape .*"),
        (case, {"k_token_zeros": moved}, r"k_token_zeros: expected the strides of k_token_scales, "
         r"which has 32 at dimension 0, got 48$"),
        (case, {"k_scale": torch.ones(1)}, r"k_scale: expected None: every token has its own"),
        (case, {"v_token_zeros": 1.0}, r"v_token_zeros: expected a tensor, got float$"),
    ]  # fmt: skip
    for given, changed, message in cases:
        with raises("^paged_attention: " + message):
            given.with_options(**changed).run()
    with raises("^paged_attention: v_token_zeros: requires grad"):
        case.with_options(v_token_zeros=value.clone().requires_grad_()).run()
    with raises(
        "^paged_attention: query: expected a head_size of 32 to 256 in steps of 32 for an "
        "int4 cache, got 48"
    ):
        replace(case, query=torch.randn(2, 8, 48)).run()


def test_written_tensors_overlap_no_scales(bits):
    case = token_case(bits, "cpu", torch.float32, [37, 20])
    key, _ = scales_of(case)
    out = torch.empty(max(key.numel(), case.query.numel()))
    overlap = out[: key.numel()].view(key.shape)
    given = case.options | {"out": out[: case.query.numel()].view(case.query.shape)}
    for name in (name for name in case.options if name.startswith("k_token")):
        with raises(f"^paged_attention: out and {name} overlap in memory$"):
            vllm_kernels.paged_attention(*case.tensors(), **given | {name: overlap})


def test_opcheck_and_compile(bits, device):
    case = token_case(bits, device, BF16, [37, 5])
    out = torch.empty_like(case.query)
    of_tokens = {name: case.options[name] for name in case.options if "_token_" in name}
    zeros = list(of_tokens.values())[2:]
    opcheck(
        "paged_attention", out, None, *case.tensors(), None, 0.1, None, 0, 0.0, None, None, None,
        "vllm", 1, None, 0, False, 0, None, -1, *scales_of(case), None, False, *zeros,
    )  # fmt: skip
    assert_compiles(case.run)
    meta = [x.to("meta") for x in case.tensors()]
    of_tokens = {name: x.to("meta") for name, x in of_tokens.items()}
    got = vllm_kernels.paged_attention(*meta, **of_tokens)
    assert got.is_meta and got.shape == case.query.shape
    for name in (name for name in of_tokens if name[0] == "v"):
        with raises(f"^paged_attention: {name}: expected"):
            vllm_kernels.paged_attention(*meta, **of_tokens | {name: of_tokens[name][:1]})
