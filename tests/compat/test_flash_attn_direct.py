"""Which calls are one op, and that the general way serves all others with the same result."""

from __future__ import annotations

import pytest
import torch
from flash_attn_cases import FA2, Paged, near, random, starts_of, table_name
from helpers import ints

import vllm_kernels
from vllm_kernels.compat import _attention, _direct
from vllm_kernels.engine.op_counter import OpCounter

BF16 = torch.bfloat16
ONE = {"vllm_kernels::attention_with_kvcache": 1}
VARLEN = {"vllm_kernels::varlen_attention": 1}


def calls(fa, device: str) -> list[tuple[dict[str, int], object]]:
    """(what torch dispatches, a call); each call makes its own cache."""

    def cached(paged: bool, count: int, queries: int = 1, **options: object):
        cache = Paged(device, BF16, [30, 7, 16], 16)
        q = random(3, queries, 4, 64, device=device, dtype=BF16)
        k, v = random(2, 3, max(1, count), 2, 64, device=device, dtype=BF16)
        if count:
            options.update(k=k, v=v)
        if paged:
            options.update({table_name(fa): cache.table})
        key, value = random(2, 3, 48, 2, 64, device=device, dtype=BF16)
        caches = (cache.key, cache.value) if paged else (key, value)
        return lambda: fa.flash_attn_with_kvcache(
            q, *caches, cache_seqlens=cache.lens, causal=True, **options
        )

    rows = random(3, 12, 2, 64, device=device, dtype=BF16).unbind()
    starts = starts_of([5, 7], device)
    sinks = torch.linspace(-1, 1, 4, device=device)
    some = [
        (ONE, cached(True, 0)), (ONE, cached(False, 0)), (ONE, cached(True, 1)),
        (ONE, cached(False, 1)), (ONE, cached(True, 3, 3)), (ONE, cached(False, 0, 5)),
        (ONE, cached(True, 1, window_size=(7, 0), softcap=2.0)),
        (ONE, cached(True, 1, s_aux=sinks)),
        (VARLEN, lambda: fa.flash_attn_varlen_func(*rows, starts, starts, 7, 7, causal=True)),
    ]  # fmt: skip
    if fa is FA2:
        cache = Paged(device, BF16, [30, 7], 16)
        ends = starts_of([30, 7], device)
        q = random(12, 4, 64, device=device, dtype=BF16)
        some.append((ONE, lambda: FA2.flash_attn_varlen_func(
            q, cache.key, cache.value, starts, ends, 7, 30, causal=True, block_table=cache.table
        )))  # fmt: skip
    return some


@pytest.mark.parametrize("default_device", [False, True], ids=["plain", "default_device"])
def test_common_calls_are_one_op(fa, device, monkeypatch, default_device):
    some = calls(fa, device)
    torch.set_default_device("meta" if default_device else None)
    try:
        for index, (dispatched, call) in enumerate(some):
            got = call()
            with OpCounter() as counter:
                call()
            assert dict(counter.counts) == dispatched, f"call {index}"
            with monkeypatch.context() as patch:
                patch.setattr(_direct, "with_kvcache", lambda *_, **__: None)
                patch.setattr(_direct, "varlen", lambda *_, **__: None)
                near(call(), got)
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("is_direct", [True, False])
def test_the_longest_keys_are_passed_on(fa, device, monkeypatch, is_direct):
    """max_seqlen_k decides about splits. What is no length counts as not known."""
    rows = random(3, 12, 2, 64, device=device, dtype=BF16).unbind()
    starts = starts_of([5, 7], device)
    given = []
    if is_direct:
        op = _direct._varlen
        monkeypatch.setattr(_direct, "_varlen", lambda *a: given.append(a[11]) or op(*a))
    else:
        op = _attention.varlen_attention
        monkeypatch.setattr(_direct, "varlen", lambda *_: None)
        monkeypatch.setattr(
            _attention, "varlen_attention",
            lambda *a, **options: given.append(options["max_key_len"]) or op(*a, **options),
        )  # fmt: skip
    for longest in (7, None, torch.tensor(7)):
        fa.flash_attn_varlen_func(*rows, starts, starts, 7, longest, causal=True)
    assert given == ([7, 0, 0] if is_direct else [7, None, None])
    want = fa.flash_attn_varlen_func(*rows, starts, starts, 7, 7, causal=True)
    for longest in (-1, 2**70, float("nan")):
        near(fa.flash_attn_varlen_func(*rows, starts, starts, 7, longest, causal=True), want)


def test_plain_decode_is_one_op(device):
    cache = Paged(device, BF16, [30, 7], 16)
    q = random(2, 4, 64, device=device, dtype=BF16)
    arguments = (q, cache.key, cache.value, cache.table, cache.lens)
    with OpCounter() as counter:
        got = vllm_kernels.paged_attention(*arguments, layout="NHD")
    assert dict(counter.counts) == {"vllm_kernels::paged_attention": 1}
    want = torch.empty_like(q)
    vllm_kernels.paged_attention(*arguments, layout="NHD", out=want)
    assert torch.equal(got, want)


def test_what_the_op_refuses_goes_the_general_way(fa, device):
    """int64 lengths and tables, heads that are not contiguous, no window."""
    cache = Paged(device, BF16, [30, 7], 16)
    q = random(2, 3, 4, 64, device=device, dtype=BF16)
    table = {table_name(fa): cache.table}
    shared = {"cache_seqlens": cache.lens, "causal": True}
    want = fa.flash_attn_with_kvcache(q, cache.key, cache.value, **shared, **table)
    heads_first = q.transpose(1, 2).contiguous().transpose(1, 2)
    for query, changed in (
        (heads_first, {}), (q, {"cache_seqlens": cache.lens.long()}),
        (q, {table_name(fa): cache.table.long()}), (q, {"window_size": None}),
    ):  # fmt: skip
        arguments = {**shared, **table, **changed}
        near(fa.flash_attn_with_kvcache(query, cache.key, cache.value, **arguments), want)


def test_a_changed_tensor_is_checked_again(fa, device):
    """After good calls with the same tensors: one that was resized in place is refused by name."""
    cache = Paged(device, BF16, [30, 7], 16)
    q = random(2, 1, 4, 64, device=device, dtype=BF16)
    lens = ints([30, 7], device)

    def call() -> torch.Tensor:
        return fa.flash_attn_with_kvcache(
            q, cache.key, cache.value, cache_seqlens=lens, **{table_name(fa): cache.table}
        )

    assert torch.equal(call(), call())
    lens.resize_(1)
    message = (
        r"^flash_attn_with_kvcache: cache_seqlens: expected shape \[2\], an element for each "
        r"sequence of q, got \[1\]$"
    )
    with pytest.raises(RuntimeError, match=message):
        call()
    lens.resize_(2).fill_(7)
    assert call().shape == q.shape
    q.resize_(2, 1, 4, 32)
    with pytest.raises(RuntimeError, match=r"^flash_attn_with_kvcache: k_cache: expected shape"):
        call()
