"""FlashAttention's signatures, and its functions over contiguous keys, against an oracle in plain
PyTorch."""

from __future__ import annotations

import inspect

import oracle
import pytest
import torch
from flash_attn_cases import FA2, FA3, NAN, expected_varlen, near, near_lse, random, starts_of
from helpers import ints
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

import vllm_kernels

# --- signatures

FA2_VARLEN = (
    "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale causal "
    "window_size softcap alibi_slopes deterministic return_attn_probs block_table s_aux"
)
FA2_KVCACHE = (
    "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad "
    "block_table softmax_scale causal window_size softcap rotary_interleaved alibi_slopes "
    "num_splits return_softmax_lse s_aux"
)
FA3_VARLEN = (
    "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q seqused_k softmax_scale "
    "causal qv q_descale k_descale v_descale window_size attention_chunk softcap num_splits "
    "pack_gqa deterministic sm_margin return_attn_probs s_aux sinks return_softmax_lse ver"
)
FA3_KVCACHE = (
    "q k_cache v_cache k v qv rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad "
    "page_table cu_seqlens_q cu_seqlens_k_new max_seqlen_q rotary_seqlens q_descale k_descale "
    "v_descale softmax_scale causal window_size attention_chunk softcap rotary_interleaved "
    "scheduler_metadata num_splits pack_gqa sm_margin return_softmax_lse s_aux sinks ver"
)


def test_signatures():
    """Clients look at them, and leave out what they do not find; order counts by position."""
    for function, names in (
        (FA2.flash_attn_varlen_func, FA2_VARLEN), (FA2.flash_attn_with_kvcache, FA2_KVCACHE),
        (FA3.flash_attn_varlen_func, FA3_VARLEN), (FA3.flash_attn_with_kvcache, FA3_KVCACHE),
    ):  # fmt: skip
        assert list(inspect.signature(function).parameters) == names.split()
    parameters = inspect.signature(FA2.flash_attn_func).parameters
    assert (
        " ".join(list(parameters)[:8]) == "q k v dropout_p softmax_scale causal window_size softcap"
    )
    assert "dropout_p" not in inspect.signature(FA3.flash_attn_func).parameters


def test_unsupported_arguments_raise_by_name():
    q = torch.randn(2, 3, 4, 64)
    starts = ints([0, 3, 6], "cpu")
    varlen = (q.flatten(0, 1),) * 3 + (starts, starts, 3, 3)
    for function, arguments, name, value in (
        (FA2.flash_attn_func, (q, q, q), "dropout_p", 0.1),
        (FA2.flash_attn_varlen_func, varlen, "dropout_p", 0.5),
        (FA3.flash_attn_func, (q, q, q), "qv", q),
        (FA3.flash_attn_func, (q, q, q), "attention_chunk", 4),
        (FA3.flash_attn_varlen_func, varlen, "seqused_q", starts[:2]),
        (FA3.flash_attn_varlen_func, varlen, "qv", q),
        (FA3.flash_attn_with_kvcache, (q, q, q), "qv", q),
        (FA3.flash_attn_with_kvcache, (q, q, q), "rotary_seqlens", starts),
        (FA3.flash_attn_with_kvcache, (q, q, q), "attention_chunk", 1),
    ):
        message = rf"^{function.__name__}: {name}: not supported, got "
        with pytest.raises(NotImplementedError, match=message):
            function(*arguments, **{name: value})
    with pytest.raises(RuntimeError, match=r"^flash_attn_func: q: requires grad, .*inference only"):
        FA2.flash_attn_func(q.clone().requires_grad_(), q, q)
    narrow = q[..., :32]
    with pytest.raises(NotImplementedError, match=r"flash_attn_with_kvcache: v_cache: not support"):
        FA2.flash_attn_with_kvcache(q, q, narrow)


# --- contiguous keys


@pytest.mark.parametrize("causal, window", [(True, (-1, -1)), (False, (-1, -1)), (True, (7, 7)),
                                            (False, (5, 3)), (False, (-1, 2)), (False, (0, 0))]
)  # fmt: skip
def test_func(fa, device, dtype, causal, window):
    """transformers' call; more queries than keys and fewer; causality cuts the right window."""
    for length, keys in ((9, 9), (3, 20), (20, 3)):
        q = random(2, length, 6, 64, device=device, dtype=dtype)
        k, v = random(2, 2, keys, 2, 64, device=device, dtype=dtype)
        out, lse, *rest = fa.flash_attn_func(
            q, k, v, causal=causal, window_size=window, softmax_scale=0.2, return_attn_probs=True,
            deterministic=True,
        )  # fmt: skip
        assert rest == ([None] if fa is FA2 else [])
        for row in range(2):
            want = oracle.attention(q[row], k[row], v[row], causal, window, scale=0.2)
            near(out[row], want[0])
            near_lse(lse[row].contiguous(), want[1])
        plain = fa.flash_attn_func(q, k, v, causal=causal, window_size=window, softmax_scale=0.2)
        assert torch.equal(plain, out)


def test_dense_shapes_of_every_legal_kind(fa, device):
    """Empty ones, grouped heads, another length of keys, V's own head size, one key for all."""
    for q, k, v in (
        ((0, 5, 8, 64), (0, 5, 8, 64), 64), ((2, 0, 8, 64), (2, 5, 8, 64), 64),
        ((2, 5, 8, 64), (2, 0, 8, 64), 64), ((2, 5, 8, 20), (2, 7, 1, 20), 256),
    ):  # fmt: skip
        rows = [random(*s, device=device, dtype=torch.bfloat16) for s in (q, k, (*k[:3], v))]
        assert fa.flash_attn_func(*rows).shape == (*q[:3], v)
    q = random(2, 5, 4, 64, device=device, dtype=torch.bfloat16)
    one = q[:1].expand(2, 5, 4, 64)
    assert torch.equal(fa.flash_attn_func(q, one, one), fa.flash_attn_func(q, one.clone(), one))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
def test_varlen(fa, device, dtype, causal):
    queries, keys = [5, 1, 12, 0, 3], [5, 40, 4, 3, 33]
    q = random(sum(queries), 8, 64, device=device, dtype=dtype)
    k, v = random(2, sum(keys), 2, 64, device=device, dtype=dtype)
    position = (q, k, v, starts_of(queries, device), starts_of(keys, device), 12, 40)
    for options, oracles in (
        ({}, {}),
        ({"window_size": (6, 6)}, {"window": (6, 6)}),
        ({"softcap": 2.0}, {"softcap": 2.0}),
        ({"s_aux": torch.linspace(-2, 3, 8, device=device).to(dtype)}, {}),
    ):
        if "s_aux" in options:
            oracles = {"sinks": options["s_aux"]}
        out, lse, *_ = fa.flash_attn_varlen_func(
            *position, causal=causal, return_attn_probs=True, **options
        )
        want = expected_varlen(q, k, v, queries, keys, causal=causal, **oracles)
        near(out, want[0])
        near_lse(lse, want[1])
    assert torch.equal(
        fa.flash_attn_varlen_func(*position, causal=causal),
        fa.flash_attn_varlen_func(*position, causal=causal, window_size=(-1, -1)),
    )


def test_tokens_that_no_sequence_owns(fa, device, dtype):
    q = random(25, 8, 64, device=device, dtype=dtype)
    k, v = random(2, 10, 2, 64, device=device, dtype=dtype)
    starts = starts_of([4, 6], device)
    for options in ({}, {"return_attn_probs": True}, {"softcap": 2.0}):
        call = (k, v, starts, starts, 6, 6)
        torch.empty(8 * q.numel(), device=device).fill_(torch.nan)  # the allocator reuses it
        got = fa.flash_attn_varlen_func(q, *call, causal=True, **options)
        want = fa.flash_attn_varlen_func(q[:10], *call, causal=True, **options)
        out, owned = (x if isinstance(x, torch.Tensor) else x[0] for x in (got, want))
        assert torch.equal(out[:10], owned) and not out[10:].any()


def test_alibi(device, dtype):
    q = random(3, 7, 4, 64, device=device, dtype=dtype)
    k, v = random(2, 3, 12, 2, 64, device=device, dtype=dtype)
    one = torch.linspace(0.05, 0.5, 4, device=device)
    each = torch.stack([one, one * 2, one.flip(0)])
    for causal in (True, False):
        for slopes in (one, each, one.expand(3, 4)):
            out, lse, _ = FA2.flash_attn_func(
                q, k, v, causal=causal, alibi_slopes=slopes, return_attn_probs=True
            )
            for row in range(3):
                mine = slopes if slopes.dim() == 1 else slopes[row]
                want = oracle.attention(q[row], k[row], v[row], causal, slopes=mine)
                near(out[row], want[0])
                near_lse(lse[row].contiguous(), want[1])
        rows = [x.flatten(0, 1) for x in (q, k, v)]
        starts = [starts_of([n] * 3, device) for n in (7, 12)]
        packed = FA2.flash_attn_varlen_func(*rows, *starts, 7, 12, causal=causal, alibi_slopes=each)
        dense = FA2.flash_attn_func(q, k, v, causal=causal, alibi_slopes=each)
        assert torch.equal(packed, dense.flatten(0, 1))


@pytest.mark.parametrize("size, value_size", [(16, 16), (36, 36), (64, 64), (192, 128), (64, 128)])
def test_head_sizes(fa, device, dtype, size, value_size):
    """Sizes that the kernels have not, and V's own (lightllm: 192 with 128)."""
    q = random(20, 4, size, device=device, dtype=dtype)
    k = random(20, 4, size, device=device, dtype=dtype)
    v = random(20, 4, value_size, device=device, dtype=dtype)
    starts = starts_of([8, 12], device)
    out, lse, *_ = fa.flash_attn_varlen_func(
        q=q, k=k, v=v, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=12, max_seqlen_k=12,
        causal=True, return_attn_probs=True,
    )  # fmt: skip
    want = expected_varlen(q, k, v, [8, 12], [8, 12], causal=True)
    near(out, want[0])
    near_lse(lse, want[1])


def test_slices_of_packed_tensors(fa, device, dtype):
    """transformers gives [B, H, S, D] transposed, others slices of a packed qkv."""
    qkv = random(2, 9, 3, 4, 64, device=device, dtype=dtype)
    q, k, v = qkv.unbind(2)
    want = fa.flash_attn_func(*(x.contiguous() for x in (q, k, v)), causal=True)
    assert torch.equal(fa.flash_attn_func(q, k, v, causal=True), want)
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert torch.equal(fa.flash_attn_func(*heads_first, causal=True), want)
    starts = starts_of([9, 9], device)
    rows = qkv.flatten(0, 1)
    packed = fa.flash_attn_varlen_func(*rows.unbind(1), starts, starts, 9, 9, causal=True)
    assert torch.equal(packed, want.flatten(0, 1))
    assert torch.equal(FA2.flash_attn_qkvpacked_func(qkv, causal=True), want)
    assert torch.equal(FA2.flash_attn_kvpacked_func(q, qkv[:, :, 1:], causal=True), want)
    again = FA2.flash_attn_varlen_qkvpacked_func(rows, starts, 9, causal=True)
    assert torch.equal(again, packed)
    again = FA2.flash_attn_varlen_kvpacked_func(
        rows[:, 0], rows[:, 1:], starts, starts, 9, 9, causal=True
    )
    assert torch.equal(again, packed)


def test_eight_bits_with_descales(device):
    """FA3: q, k and v in e4m3, scales [batch, KV heads], of their own or one expanded."""
    queries, keys = [3, 5], [20, 9]
    rows = [torch.randn(n, h, 64, device=device) for n, h in ((8, 4), (29, 2), (29, 2))]
    q, k, v = (x.to(torch.float8_e4m3fn) for x in rows)
    own = torch.tensor([[0.5, 2.0], [1.5, 0.25]], device=device)
    one, row = own[:1, 1:], own[0]
    for given in (own, one.expand(2, 2), one, row, row[None]):
        scale = given.expand(2, 2)
        out = FA3.flash_attn_varlen_func(
            q, k, v, starts_of(queries, device), starts_of(keys, device), 5, 20, causal=True,
            q_descale=given, k_descale=given, v_descale=given,
        )  # fmt: skip
        assert out.dtype == torch.bfloat16
        for row, (i, j) in enumerate(zip(q.split(queries), range(2), strict=True)):
            mine = scale[row][:, None]
            want, _ = oracle.attention(
                (i.double() * mine.repeat_interleave(2, 0)).bfloat16(),
                k.split(keys)[j].double() * mine, v.split(keys)[j].double() * mine, True,
            )  # fmt: skip
            near(out.split(queries)[row], want, 2.0)


class Ops(TorchDispatchMode):
    """Records the ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_eight_bits_are_passed_on_unchanged(device):
    """One row of descales for all: no op of torch computes."""
    q, k, v = (torch.randn(n, h, 64).to(device, torch.float8_e4m3fn) for n, h in
               ((8, 4), (29, 2), (29, 2)))  # fmt: skip
    starts, keys = starts_of([3, 5], device), starts_of([20, 9], device)
    one, row = torch.rand(1, 1, device=device) + 0.5, torch.rand(2, device=device) + 0.5
    for given in (None, one, one.expand(2, 2), one[0].expand(2), row, row[None], row.expand(2, 2)):
        scale = given if given is None else given.flatten()[:2].contiguous()
        want = vllm_kernels.varlen_attention(
            q, k, v, starts, keys, q_scale=scale, k_scale=scale, v_scale=scale, causal=False
        )
        descales = dict.fromkeys(("q_descale", "k_descale", "v_descale"), given)
        with Ops() as ops:
            got = FA3.flash_attn_varlen_func(
                q, k, v, starts, keys, 8, 20, return_softmax_lse=True, **descales
            )[0]
        views = {"aten::select", "aten::slice", "aten::expand", "aten::view", "aten::t"}
        others = [name for name in ops.names if name not in views | {"aten::new_empty"}]
        assert others == ["vllm_kernels::varlen_attention", "aten::clone"]  # of lse
        assert got.dtype == torch.bfloat16 and torch.equal(got, want)
    pages = [x[:28].view(7, 4, 2, 64) for x in (k, v)]
    table, lens = ints([3, 1, 0, 2, 5, 6], device).view(2, 3), ints([9, 12], device)
    with Ops() as ops:
        got = FA3.flash_attn_with_kvcache(
            q[:2, None], *pages, cache_seqlens=lens, page_table=table, q_descale=row
        )
    assert "aten::_to_copy" not in ops.names and "vllm_kernels::paged_attention" in ops.names
    want = vllm_kernels.paged_attention(q[:2], *pages, table, lens, layout="NHD", q_scale=row)
    assert torch.equal(got[:, 0], want)


def test_eight_bits_of_head_sizes_that_are_padded(device):
    q, k, v = (torch.randn(1, 6, 2, n).to(device, torch.float8_e4m3fn) for n in (20, 20, 40))
    want, _ = oracle.attention(q[0], k[0], v[0], True)
    near(FA3.flash_attn_func(q, k, v, causal=True)[0], want, 2.0)


@pytest.mark.parametrize("size, value_size", [(64, 64), (20, 20), (64, 40), (16, 72)])
def test_seqused_k(device, dtype, size, value_size):
    q = random(5, 4, size, device=device, dtype=dtype)
    k = random(30, 2, size, device=device, dtype=dtype)
    v = random(30, 2, value_size, device=device, dtype=dtype)
    starts = starts_of([10, 20], device)
    k[7:10] = v[7:10] = NAN
    out = FA3.flash_attn_varlen_func(
        q, k, v, starts_of([2, 3], device), starts, 3, 20, seqused_k=ints([7, 20], device),
        causal=True,
    )  # fmt: skip
    for got, i, j in ((out[:2], q[:2], slice(0, 7)), (out[2:], q[2:], slice(10, 30))):
        near(got, oracle.attention(i, k[j], v[j], True)[0])


def test_other_lengths_compile_nothing_again(fa, device):
    """A length that is only a hint is no constant of a compiled function."""
    q = random(6, 4, 64, device=device, dtype=torch.bfloat16)
    keys = random(40, 2, 64, device=device, dtype=torch.bfloat16)
    starts = starts_of([3, 3], device)

    def varlen(keys: torch.Tensor, ends: torch.Tensor, longest: int) -> torch.Tensor:
        return fa.flash_attn_varlen_func(q, keys, keys, starts, ends, 3, longest, causal=True)

    def dense(keys: torch.Tensor) -> torch.Tensor:
        return fa.flash_attn_func(q[None, :1], keys[None], keys[None])

    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    options = {"fullgraph": True, "dynamic": True, "backend": counter}
    compiled = torch.compile(varlen, **options), torch.compile(dense, **options)
    counts = set()
    for length in range(5, 20):
        some, ends = keys[: 2 * length].clone(), starts_of([length, length], device)
        near(compiled[0](some, ends, length), varlen(some, ends, length))
        near(compiled[1](some), dense(some))
        counts.add(counter.frame_count)
    assert len(counts) == 1
