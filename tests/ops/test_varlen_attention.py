"""varlen_attention against a float64 reference: keys and values without pages.

Queries and keys have unit variance; rows that no sequence owns are NaN, before, between (where a
sequence has no keys) and behind.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from helpers import assert_compiles, assert_graph_replays, opcheck, raises
from paged_attention_cases import (
    EIGHT_BITS,
    NAN,
    assert_near,
    make_case,
    per_head,
    quantized,
    scales_of,
)
from torch import Tensor

import vllm_kernels
from vllm_kernels import reference


@pytest.fixture
def device(device: str) -> str:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    if device == "cuda" and not has_kernel("vllm_kernels::varlen_attention", "CUDA"):
        pytest.skip("varlen_attention has no CUDA implementation")
    return device


@dataclass
class Case:
    """The arguments of one call, in the op's own words."""

    query: Tensor
    key: Tensor
    value: Tensor
    query_start_loc: Tensor
    key_start_loc: Tensor
    options: dict[str, object] = field(default_factory=dict)
    max_query_len: int | None = None
    max_key_len: int | None = None

    def tensors(self) -> tuple[Tensor, ...]:
        return self.query, self.key, self.value, self.query_start_loc, self.key_start_loc

    def run(self, **options: object) -> Tensor | tuple[Tensor, Tensor]:
        lens = {"max_query_len": self.max_query_len, "max_key_len": self.max_key_len}
        options = {**self.options, **lens, **options}
        return vllm_kernels.varlen_attention(*self.tensors(), **options)

    def naive(self) -> tuple[Tensor, Tensor]:
        return reference.varlen_attention(*self.tensors(), **self.options)

    def owned(self) -> slice:
        """The query tokens that sequences own."""
        return slice(int(self.query_start_loc[0]), int(self.query_start_loc[-1]))


def make(
    device: str,
    dtype: torch.dtype,
    queries: list[int],
    keys: list[int],
    heads: int = 8,
    kv_heads: int = 2,
    head_size: int = 64,
    stored: torch.dtype | None = None,
    scales_per_head: bool = False,
    **options: object,
) -> Case:
    """See the module's docstring. One more row of nobody lies before and behind each tensor."""
    stored = stored or dtype
    key, value = torch.randn(2, sum(keys) + 2, kv_heads, head_size)
    key[[0, -1]] = value[[0, -1]] = NAN
    if stored in EIGHT_BITS:
        k_scale, v_scale = scales_of(stored, kv_heads, scales_per_head)
        key, value = quantized(key, stored, k_scale), quantized(value, stored, v_scale)
        options |= {"k_scale": k_scale, "v_scale": v_scale}
    query = torch.randn(sum(queries) + 2, heads, head_size)
    starts = [torch.tensor([1, *counts]).cumsum(0).int() for counts in (queries, keys)]
    return Case(
        query=query.to(device, dtype),
        key=key.to(device, stored),
        value=value.to(device, stored),
        query_start_loc=starts[0].to(device),
        key_start_loc=starts[1].to(device),
        options={k: v.to(device) if isinstance(v, Tensor) else v for k, v in options.items()},
        max_query_len=max([0, *queries]),
    )


def check(case: Case) -> None:
    out = torch.full_like(case.query, NAN)
    got, lse = case.run(out=out, return_lse=True)
    assert got is out and lse.shape == got.shape[:2] and lse.dtype == torch.float32
    rows = case.owned()
    value = case.value.float()
    out_and_spread, want_lse = replace(case, value=torch.cat([value, value.abs()], -1)).naive()
    want, spread = out_and_spread.chunk(2, -1)
    lens = case.key_start_loc.diff().tolist()
    scale = case.options.get("scale", case.query.shape[-1] ** -0.5)
    assert_near(
        got[rows], want[rows], spread[rows], case.query[rows], scale, lens,
        (lse[rows], want_lse[rows]),
    )  # fmt: skip
    made = torch.full_like(case.query, NAN)
    options = {"alibi_slopes": None, "softcap": 0.0, "sinks": None, "k_scale": None}
    options |= {"v_scale": None, "scale": scale} | case.options
    causal, window = options.pop("causal", True), options.pop("window", (-1, -1))
    torch.ops.vllm_kernels.varlen_attention(
        made, None, *case.tensors(), **options, window_left=window[0],
        window_right=0 if causal else window[1], max_query_len=case.max_query_len or len(got),
        zero_unowned=True, max_key_len=case.max_key_len or 0,
    )  # fmt: skip
    assert torch.equal(made[rows], got[rows]) and torch.equal(case.run(), made)
    for nobody in (slice(0, rows.start), slice(rows.stop, None)):
        assert got[nobody].isnan().all() and (lse[nobody] == -torch.inf).all()
        assert not made[nobody].any()


# --- right results

RAGGED = [5, 1, 17, 0, 40, 3, 2], [5, 90, 60, 12, 33, 0, 3]  # Sq > Sk, Sq = 0 and Sk = 0 among them


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
@pytest.mark.parametrize("eight", [None, *EIGHT_BITS], ids=lambda x: str(x).split(".")[-1])
def test_dtypes(device, dtype, causal, eight):
    check(make(device, dtype, *RAGGED, stored=eight, causal=causal))
    check(make(device, dtype, [1, 1, 1], [1, 300, 0], stored=eight, causal=causal))


@pytest.mark.parametrize("head_size", [32, 40, 64, 80, 96, 128, 192, 256])
def test_head_sizes(device, head_size):
    for index, dtype in enumerate((torch.float32, torch.float16, torch.bfloat16)):
        causal = index != 1
        check(make(device, dtype, [3, 70], [37, 80], head_size=head_size, causal=causal))
        if head_size % 16 == 0:
            eight = {"stored": EIGHT_BITS[index], "scales_per_head": True}
            check(make(device, dtype, [3, 7], [37, 8], head_size=head_size, causal=causal, **eight))


@pytest.mark.parametrize("heads, kv_heads", [(3, 3), (5, 1), (14, 2), (64, 1), (71, 1)])
def test_groups(device, heads, kv_heads):
    for causal in (True, False):
        shapes = {"heads": heads, "kv_heads": kv_heads, "causal": causal}
        check(make(device, torch.float32, [11, 2], [140, 23], **shapes))
        check(make(device, torch.bfloat16, [11, 2], [140, 23], head_size=128, **shapes))


@pytest.mark.parametrize("left", [-1, 0, 1, 16, 33, 2**40])
@pytest.mark.parametrize("right", [-1, 0, 1, 17, 2**31 - 1, 2**40])
def test_windows(device, left, right):
    window = {"window": (left, right), "causal": False}
    check(make(device, torch.float32, *RAGGED, **window))
    check(make(device, torch.bfloat16, [130], [150], **window))


def test_causality_cuts_the_right_window(device, dtype):
    case = make(device, dtype, *RAGGED, window=(20, 5))
    check(case)
    rows = case.owned()
    assert torch.equal(case.run()[rows], case.run(window=(20, 0), causal=False)[rows])


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
@pytest.mark.parametrize("names", [["alibi_slopes"], ["softcap"], ["sinks"], ["scale"],
                                   ["alibi_slopes", "window", "softcap", "sinks"]],
                         ids=lambda names: "+".join(names))  # fmt: skip
def test_options(device, dtype, names, causal):
    options = {
        "alibi_slopes": per_head(8, 0.01, 0.4),
        "window": (21, 9),
        "softcap": 2.0,
        "sinks": per_head(8, -3.0, 4.0),
        "scale": 0.3,
    }
    chosen = {name: options[name] for name in names}
    check(make(device, dtype, *RAGGED, causal=causal, **chosen))


def test_prompts(device, dtype):
    """Many query tokens, with and without a prefix."""
    shapes = {"heads": 4, "kv_heads": 2, "head_size": 128}
    check(make(device, dtype, [150, 70], [150, 300], **shapes))
    check(make(device, dtype, [150, 70], [150, 300], causal=False, **shapes))


def test_rows_that_see_nothing(device, dtype):
    """Queries before the first key, sequences without keys: 0 and -inf, or the sink."""
    sinks = per_head(8, -1.0, 1.0).to(device)
    for given in (None, sinks):
        case = make(device, dtype, [5, 4], [2, 0], sinks=given)
        check(case)
        out, lse = case.run(return_lse=True)
        nothing = torch.full((8,), -torch.inf) if given is None else given.cpu()
        blind = [1, 2, 3, 6, 7, 8, 9]
        assert not out[blind].any() and torch.equal(lse[blind].cpu(), nothing.expand(7, 8))
    no_keys = replace(case, key=case.key[:0], value=case.value[:0])
    no_keys.key_start_loc.zero_()
    assert not no_keys.run()[1:10].any()


def test_as_paged_attention(device, dtype):
    """The same tokens in pages: causal, and all of them."""
    paged = make_case(device, dtype, [40, 130], [40, 7], layout="NHD")
    rows = []
    for cache in (paged.key_cache, paged.value_cache):
        tokens = [
            cache[paged.block_tables[seq, : -(-length // 16)].long()].flatten(0, 1)[:length]
            for seq, length in enumerate([40, 130])
        ]
        rows.append(torch.cat(tokens))
    starts = torch.tensor([0, 40, 170], dtype=torch.int32, device=device)
    queries = paged.options["query_start_loc"]
    for causal in (True, False):
        want = vllm_kernels.paged_attention(
            *paged.tensors(), layout="NHD", query_start_loc=queries, causal=causal
        )
        got = vllm_kernels.varlen_attention(paged.query, *rows, queries, starts, causal=causal)
        bound = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
        torch.testing.assert_close(got, want, rtol=bound, atol=bound)


# --- memory


def test_slices_of_a_packed_qkv(device, dtype):
    case = make(device, dtype, [5, 40], [5, 40], heads=8, kv_heads=4)
    packed = torch.cat([case.query, case.key, case.value], dim=1)
    query, key, value = packed.split([8, 4, 4], dim=1)
    assert not query.is_contiguous() and not value.is_contiguous()
    wide = torch.full((query.shape[0], 20, 64), 7.0, device=device, dtype=dtype)
    got = replace(case, query=query, key=key, value=value).run(out=wide[:, 4:12])
    assert torch.equal(got[case.owned()], case.run()[case.owned()])
    assert (wide[:, :4] == 7).all() and (wide[:, 12:] == 7).all()


def test_any_outer_strides_of_keys(device, dtype):
    """Heads before tokens, and one head that stands for all."""
    case = make(device, dtype, [5, 40], [50, 40], heads=8, kv_heads=4)
    want = case.run()[case.owned()]
    heads_first = {
        name: getattr(case, name).transpose(0, 1).contiguous().transpose(0, 1)
        for name in ("key", "value")
    }
    assert torch.equal(replace(case, **heads_first).run()[case.owned()], want)
    one = replace(case, key=case.key[:, :1].expand(-1, 4, -1), value=case.value[:, 1:2])
    one.value = one.value.expand(-1, 4, -1)
    assert one.key.stride(1) == 0
    check(one)


def test_strides_past_int32(device):
    if device == "cuda" and torch.cuda.mem_get_info()[0] < 16 * 2**30:
        pytest.skip("needs 16 GiB of GPU memory")
    case = make(device, torch.float16, [3, 2], [3, 4], heads=2, kv_heads=1)
    want = case.run()[case.owned()]
    stride = 2**28 + 64  # times 8 tokens; the CPU maps untouched pages lazily
    storage = torch.empty(8 * stride + 4096, device=device, dtype=torch.float16)
    far = [storage[start:].as_strided(case.key.shape, (stride, 64, 1)) for start in (0, 2048)]
    far[0][:8].copy_(case.key[:8])
    far[1][:8].copy_(case.value[:8])
    assert torch.equal(replace(case, key=far[0], value=far[1]).run()[case.owned()], want)


# --- what must not matter


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
def test_nan_stays_in_its_sequence_and_head(device, dtype, causal):
    case = make(device, dtype, [20, 40, 3], [30, 40, 130], causal=causal)
    want = case.run()
    for name in ("key", "value"):
        poisoned = getattr(case, name).clone()
        poisoned[1 + 30 + 39, 1] = NAN  # the last token of sequence 1, KV head 1
        got = replace(case, **{name: poisoned}).run()
        assert got[60, 4:].isnan().all() and torch.equal(got[60, :4], want[60, :4])
        assert torch.equal(got[1:61, :4], want[1:61, :4])
        for rows in (slice(1, 21), slice(61, 64)):
            assert torch.equal(got[rows], want[rows])
    case.query[5, 3] = NAN
    got = case.run()
    assert got[5, 3].isnan().all()
    keep = torch.ones(66, 8, dtype=torch.bool, device=device)
    keep[[0, 65]] = False
    assert torch.equal(got[1:5], want[1:5]) and torch.equal(got[6:64], want[6:64])


@pytest.mark.parametrize("bad", [NAN, float("inf")])
def test_reference_of_a_value_that_is_not_finite(bad):
    case = make("cpu", torch.float32, [9], [30])
    case.value[1 + 27, 1] = bad  # seen by the last three queries, KV head 1
    out = case.naive()[0][case.owned()]
    assert out[:6].isfinite().all() and not out[6:, 4:].isfinite().any()


def test_keys_outside_the_window_have_no_influence(device):
    case = make(device, torch.float32, [6], [37], window=(4, 3), causal=False)
    want = case.run()[1:7]
    seen = range(37 - 6 - 4, 37)
    for token in set(range(37)) - set(seen):
        case.key[1 + token] = case.value[1 + token] = NAN
    assert torch.equal(case.run()[1:7], want)


def test_two_runs_agree_bit_for_bit(device, dtype):
    case = make(device, dtype, [70, 1, 130], [700, 513, 130])
    rows = case.owned()
    assert torch.equal(case.run()[rows], case.run()[rows])


def test_fixed_split_size(device, dtype):
    """A sequence has the same bits alone and in a batch."""
    case = make(device, dtype, [33, 1, 70], [2100, 5, 1300])
    in_batch = case.run(fixed_split_size=512)[case.owned()]
    for seq in range(3):
        queries, keys = (
            slice(*starts[seq : seq + 2].tolist())
            for starts in (case.query_start_loc, case.key_start_loc)
        )
        tensors = case.query[queries], case.key[keys], case.value[keys]
        starts = (torch.tensor([0, len(x)], device=device).int() for x in tensors[:2])
        alone = vllm_kernels.varlen_attention(
            *tensors, *starts, **case.options, max_query_len=case.max_query_len,
            fixed_split_size=512,
        )  # fmt: skip
        first = queries.start - case.owned().start
        assert torch.equal(alone, in_batch[first : first + len(alone)])


def test_max_key_len_is_a_hint(device, dtype):
    """Results are right with every value."""
    case = make(device, dtype, [9, 16, 0, 16], [2100, 40, 7, 1300])
    for longest in (None, 0, 1, 40, 2100, 2**40):
        check(replace(case, max_key_len=longest))


@pytest.mark.parametrize("queries", [[], [0, 0]], ids=["no_sequence", "no_token"])
def test_empty(device, dtype, queries):
    case = make(device, dtype, queries, [4] * len(queries))
    out = torch.full_like(case.query, 3.0)
    case.run(out=out)
    assert (out == 3).all()


# --- bad input


def test_bad_input(device):
    case = make(device, torch.float32, [3, 4], [5, 6])
    q, k, v, starts = case.query, case.key, case.value, case.query_start_loc
    one = torch.ones(1, device=device)
    bad = [
        ({"query": q[0]}, r"query: expected shape \[num_tokens, num_heads, head_size\], got"),
        ({"query": q[:, :7]}, r"query: expected num_heads to be a multiple of num_kv_heads = 2 "
                              r"\(from key\), got shape \[9, 7, 64\]$"),
        ({"query": q.double()},
         r"query: expected float32, float16, bfloat16 or float8_e4m3fn, got float64"),
        ({"key": k[0]}, r"key: expected shape \[num_keys, num_kv_heads, head_size\], got shape"),
        ({"key": k.half()}, r"key: expected float32 \(from query\), float8_e4m3fn, float8_e5m2 or "
                            r"int8, got float16$"),
        ({"value": v.half()}, r"value: expected float32 \(from key\), got float16$"),
        ({"value": v[:-1]}, r"value: expected num_keys = 13 \(from key\) at dimension 0, got"),
        ({"value": v[..., :32]}, r"value: expected head_size = 64 \(from query\) at dimension 2"),
        ({"key": k.transpose(1, 2).contiguous().transpose(1, 2)}, r"key: expected .*stride"),
        ({"query_start_loc": starts.long()}, r"query_start_loc: expected int32, got int64"),
        ({"key_start_loc": starts.long()}, r"key_start_loc: expected int32, got int64; cast it"),
        ({"key_start_loc": starts[:2]}, r"key_start_loc: expected num_seqs \+ 1 = 3 \(from "
                                        r"query_start_loc\) at dimension 0, got shape \[2\]$"),
        ({"window": (-2, 0)}, r"window_left: expected a number of tokens >= 0 \(-1: all\), got -2"),
        ({"window": (0, -2), "causal": False}, r"window_right: expected a number of tokens >= 0"),
        ({"softcap": -1.0}, r"softcap: expected a finite number >= 0 \(0: none\), got -1"),
        ({"sinks": one}, r"sinks: expected num_heads = 8 \(from query\) at dimension 0"),
        ({"alibi_slopes": one}, r"alibi_slopes: expected num_heads = 8 \(from query\) at dimensi"),
        ({"k_scale": 0.5},
         r"k_scale: expected a float32 tensor of one element or \[num_kv_heads\], got 0\.5$"),
        ({"k_scale": one}, r"k_scale: expected None: only 8-bit caches have scales, this one is "),
        ({"max_query_len": -1}, r"max_query_len: expected a length >= 0, got -1$"),
        ({"max_key_len": -1}, r"max_key_len: expected a length >= 0 \(0: not known\), got -1$"),
        ({"fixed_split_size": -1}, r"fixed_split_size: expected a number of tokens >= 0 \(0: as "),
        ({"workspace": one}, r"workspace: expected uint8, got float32"),
        ({"out": q}, r"out and query overlap in memory$"),
        ({"out": q.half()}, r"out: expected float32 \(from query\), got float16$"),
    ]  # fmt: skip
    names = ("query", "key", "value", "query_start_loc", "key_start_loc")
    for change, message in bad:
        with raises(rf"^varlen_attention: {message}"):
            vllm_kernels.varlen_attention(**{**dict(zip(names, case.tensors())), **change})
    with raises(
        r"^varlen_attention: query: expected a head_size of 32 to 256 in steps of 8 for a "
    ):
        vllm_kernels.varlen_attention(q[..., :24].clone(), k[..., :24], v[..., :24], starts, starts)
    q.requires_grad_()
    with raises(r"^varlen_attention: \w+: requires grad, .*no_grad\(\)$"):
        case.run()


def test_bad_starts_on_the_cpu():
    """Looked at before anything is computed; out stays as it was."""
    start = "expected a token of query, at most max_query_len past the one before, in"
    key = "expected a token of key, not before the one before, in"
    for name, at, value, message in (
        ("query_start_loc", 1, 0, rf"query_start_loc\[1\] = 0: {start} \[1, 6\)$"),
        ("query_start_loc", 2, 99, rf"query_start_loc\[2\] = 99: {start} \[4, 9\)$"),
        ("key_start_loc", 0, -1, rf"key_start_loc\[0\] = -1: {key} \[0, 14\)$"),
        ("key_start_loc", 1, 0, rf"key_start_loc\[1\] = 0: {key} \[1, 14\)$"),
        ("key_start_loc", 2, 14, rf"key_start_loc\[2\] = 14: {key} \[6, 14\)$"),
    ):
        case = make("cpu", torch.float32, [3, 4], [5, 6])
        getattr(case, name)[at] = value
        out = torch.zeros_like(case.query)
        with raises(rf"^varlen_attention: {message}"):
            case.run(out=out)
        assert not out.any()


# --- torch


def test_opcheck_and_compile(device):
    case = make(device, torch.bfloat16, [3, 4], [5, 40], sinks=per_head(8, -1, 1))
    out, lse = case.run(return_lse=True)
    opcheck(
        "varlen_attention", torch.empty_like(out), torch.empty_like(lse), *case.tensors(), 0.125,
        None, -1, 0, 0.0, case.options["sinks"], None, None, 4, None, False, None, 0, 40,
    )  # fmt: skip
    assert_compiles(lambda: case.run(return_lse=True))
    compiled = torch.compile(lambda: case.run(return_lse=True), fullgraph=True, backend="aot_eager")
    rows = case.owned()
    assert torch.equal(compiled()[0][rows], out[rows])
    assert torch.equal(compiled()[1][rows], lse[rows])


def test_the_op_that_makes_its_result(device, dtype):
    """It gives what the general op gives, by default and with options."""
    case = make(device, dtype, [3, 4], [5, 40], sinks=per_head(8, -1, 1))
    op = torch.ops.vllm_kernels.varlen_attention.result
    sinks, rows = case.options["sinks"], case.owned()
    query, key = torch.randn(7, 8, 64), torch.randn(7, 2, 64)  # every token has an owner
    starts = torch.tensor([0, 3, 7], dtype=torch.int32)
    plain = [x.to(device) for x in (query.to(dtype), key.to(dtype), key.to(dtype), starts, starts)]
    torch.library.opcheck(op, (*plain, 4, 0.125, -1, 0, 0.0, sinks, 40))
    for given, options in (
        ((), {}),
        (
            (0.25, 3, 0, 2.0, sinks, 40),
            {"scale": 0.25, "window": (3, 0), "softcap": 2.0, "sinks": sinks},
        ),
        ((None, -1, 2), {"causal": False, "window": (-1, 2)}),
    ):
        want = vllm_kernels.varlen_attention(*case.tensors(), max_query_len=4, **options)
        got = op(*case.tensors(), 4, *given)
        assert got.is_contiguous() and torch.equal(got[rows], want[rows])
    with raises(r"^varlen_attention: query: expected 3 dimensions, got shape \[8, 64\]$"):
        op(case.query[0], *case.tensors()[1:], 4)


def test_replayed_graph(device):
    """Other lengths than those of the capture, and tokens of nobody."""
    if device != "cuda":
        pytest.skip("CUDA graphs")
    for causal in (True, False):
        case = make(device, torch.bfloat16, [3, 70, 9], [90, 70, 40], causal=causal)
        out = torch.full_like(case.query, NAN)

        def refill(case: Case = case) -> None:
            case.query_start_loc.copy_(torch.tensor([0, 50, 50, 61]))
            case.key_start_loc.copy_(torch.tensor([2, 30, 100, 190]))

        def want(case: Case = case) -> Tensor:
            return case.run(out=torch.full_like(case.query, NAN)).nan_to_num(5.0)

        filled = torch.empty_like(out)

        def call(case: Case = case, out: Tensor = out, filled: Tensor = filled) -> None:
            out.fill_(NAN)
            filled.copy_(case.run(out=out).nan_to_num(5.0))

        assert_graph_replays(call, refill, filled, want)
