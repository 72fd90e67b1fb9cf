"""A user's code, for mypy and pyright (`make types`); nothing runs it.

A line with `type: ignore` must be an error: both tools report an ignore that hides nothing.
"""
# pyright: reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import assert_type

import vllm_kernels as vk
from vllm_kernels.compat.flash_attn import flash_attn_func
from vllm_kernels.kv_cache import BatchBuffers, KVCacheManager
from vllm_kernels.kv_cache.tensors import KVCache, KVShape


def attend(query: Tensor, key: Tensor, value: Tensor, table: Tensor, lens: Tensor) -> None:
    out = vk.paged_attention(query, key, value, table, lens, layout="NHD")
    assert_type(out, Tensor)
    out.sum()
    out, lse = vk.paged_attention(query, key, value, table, lens, return_lse=True)
    assert_type(lse, Tensor)
    vk.varlen_attention(query, key, value, table, lens).sum()
    vk.cascade_attention(query, key, value, table, lens, 1).sum()
    both = vk.varlen_attention(query, key, value, table, lens, return_lse=True, window=(4, 0))
    assert_type(both, tuple[Tensor, Tensor])
    both = vk.cascade_attention(query, key, value, table, lens, 1, return_lse=True)
    assert_type(both, tuple[Tensor, Tensor])
    vk.paged_attention(query, key, value, table, lens, layout="NHDx")  # type: ignore[call-overload]
    vk.paged_attention(query, key, value, [[3, 1]], lens)  # type: ignore[call-overload]
    vk.paged_attention(query, key, value, table, lens, window=4)  # type: ignore[call-overload]


def draw(logits: Tensor, number: int, maybe: int | None) -> Tensor:
    assert_type(vk.sample(logits, temperature=logits), Tensor)
    tokens, logprobs, ids, ranks = vk.sample(logits, num_logprobs=number)
    assert_type(ranks, Tensor)
    result = vk.sample(logits, num_logprobs=maybe)
    assert_type(result, Tensor | tuple[Tensor, Tensor, Tensor, Tensor])
    vk.sample(logits, num_logprobs="5")  # type: ignore[call-overload]
    return tokens + ids + logprobs


def either(query: Tensor, starts: Tensor, return_lse: bool) -> None:
    result = vk.varlen_attention(query, query, query, starts, starts, return_lse=return_lse)
    assert_type(result, Tensor | tuple[Tensor, Tensor])
    result.sum()  # type: ignore[union-attr]


def write(key: Tensor, pages: Tensor, slots: Tensor, kind: vk.KVCacheDType) -> None:
    one = torch.ones(1)
    vk.reshape_and_cache_flash(key, key, pages, pages, slots, kind, one, one)
    vk.reshape_and_cache(key, key, pages, pages, slots, "fp9", one, one)  # type: ignore[arg-type]
    vk.reshape_and_cache(key, key, pages, pages, slots, "auto", 1.0, 1.0)  # type: ignore[arg-type]
    assert_type(vk.rms_norm(key, key, one, 1e-6), None)
    vk.rms_norm_(key, one)  # type: ignore[attr-defined]


def manage(prompt: list[int]) -> Tensor:
    manager = KVCacheManager(64, 16, windows=(None, 128))
    cached = manager.allocate(1, prompt, num_new=0)
    assert_type(cached, int)
    buffers = BatchBuffers.zeros(8, 64, 256)
    copies = manager.step([1], [len(prompt) - cached], [buffers], tokens=prompt[cached:])
    layout: vk.Layout = "HND"
    cache = KVCache(KVShape(2, 2, 64, torch.bfloat16, layout=layout), 64)
    cache.copy(copies)
    KVShape(2, 2, 64, torch.bfloat16, layout="nhd")  # type: ignore[arg-type]
    KVShape(2, 2, 64, "bfloat16")  # type: ignore[arg-type]
    manager.allocate("request 1", prompt)  # type: ignore[arg-type]
    tables: Tensor = buffers.block_tables[:1].to("cuda")
    return cache.attend(0, torch.zeros(1, 8, 64), tables, buffers.seq_lens[:1])


def compat(query: Tensor) -> Tensor:
    flash_attn_func(query, query, query, causal="yes")  # type: ignore[arg-type]
    out, _, _ = flash_attn_func(query, query, query, return_attn_probs=True)
    return out + flash_attn_func(query, query, query).sum()


def handle(error: vk.Error) -> None:
    assert_type(vk.OPS, list[str])
    assert_type(vk.__version__, str)
    assert_type(vk.cuda_loaded, bool)
    assert isinstance(error, RuntimeError)
