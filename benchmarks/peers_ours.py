"""Our ops for the side-by-side runs of ../shared/peers (its README names the protocol).

DECODE[name] = (layout, prepare), PREFILL[name] = prepare; prepare(w) -> f(i) -> out.
SMALL[op][name] = make(ns) -> f(i).
"""

from __future__ import annotations

import torch

import vllm_kernels as vk


def _decode(version: int):
    """paged_attention_v1 or _v2 on the peers' workload `w`, layout vllm."""

    def prepare(w):
        keys, values = w.vl()
        if w.kv != "auto":
            keys, values = (
                [k.view(torch.uint8) for k in keys],
                [v.view(torch.uint8) for v in values],
            )
        out = torch.empty_like(w.q)
        one = torch.ones(1, device="cuda")
        num_heads, head_size = w.q.shape[1:]
        partitions = -(-w.maxlen // 512)
        scratch = []
        if version == 2:
            sums = torch.empty(w.B, num_heads, partitions, device="cuda")
            partial = torch.empty(
                w.B, num_heads, partitions, head_size, device="cuda", dtype=w.q.dtype
            )
            scratch = [sums, torch.empty_like(sums), partial]
        op = vk.paged_attention_v2 if version == 2 else vk.paged_attention_v1

        def call(i):
            op(out, *scratch, w.q, keys[i], values[i], w.KH, w.scale, w.bt, w.lens, 16, w.maxlen,
               None, w.kv, one, one)  # fmt: skip
            return out

        return call

    return prepare


def _caches(w, layout: str):
    """K and V of each copy in `layout`, 8-bit ones as what they are."""
    caches = w.vl() if layout == "vllm" else w.hnd() if layout == "HND" else (w.k, w.v)
    if w.kv == "auto":
        return caches
    return tuple([copy.view(torch.float8_e4m3fn) for copy in cache] for cache in caches)


def _paged_attention(layout: str, kv_ready: bool = False, writes: bool = False):
    """paged_attention on the peers' workload `w`; `writes`: behind its last tokens' writer."""

    def prepare(w):
        keys, values = _caches(w, layout)
        out = torch.empty_like(w.q)
        if writes:  # what lies there is written again
            at = (w.lens - 1).long()
            blocks, offsets = w.bt.long().gather(1, at[:, None] // 16)[:, 0], at % 16
            slots, one = blocks * 16 + offsets, torch.ones(1, device="cuda")
            last = [
                (k[blocks, :, :, offsets].reshape(w.B, w.KH, -1), v[blocks, :, :, offsets])
                for k, v in zip(keys, values, strict=True)
            ]

        def call(i):
            if writes:
                vk.reshape_and_cache(*last[i], keys[i], values[i], slots, w.kv, one, one)
            vk.paged_attention(
                w.q, keys[i], values[i], w.bt, w.lens, scale=w.scale, layout=layout, out=out,
                kv_ready=kv_ready,
            )  # fmt: skip
            return out

        return call

    return prepare


def _several_tokens(layout: str):
    """paged_attention with several query tokens a sequence (the kit's prefill.py)."""

    def prepare(w):
        keys, values = _caches(w, layout)
        out = torch.empty_like(w.q)

        def call(i):
            vk.paged_attention(
                w.q, keys[i], values[i], w.bt, w.lens, query_start_loc=w.cu, max_query_len=w.maxq,
                scale=w.scale, layout=layout, out=out,
            )  # fmt: skip
            return out

        return call

    return prepare


def _varlen(w):
    """varlen_attention on the same workload's contiguous keys."""
    keys, values = w.contig()
    out = torch.empty_like(w.q)
    left = getattr(w, "window", 0) - 1  # the kit's prefill.py has no windows
    window = (left, 0) if left >= 0 else (-1, -1)

    def call(i):
        return vk.varlen_attention(
            w.q, keys[i], values[i], w.cu, w.cuk, max_query_len=w.maxq, max_key_len=w.maxk,
            scale=w.scale, window=window, out=out,
        )  # fmt: skip

    return call


def rms_norm(n):
    def call(i):
        vk.rms_norm(n.O[i], n.X[i], n.w, n.eps)
        return n.O[i]

    return call


def fused_add_rms_norm(n):
    def call(i):
        vk.fused_add_rms_norm(n.X[i], n.S[i], n.w, n.eps)
        return n.X[i]

    return call


def silu_and_mul(n):
    def call(i):
        vk.silu_and_mul(n.O[i], n.X[i])
        return n.O[i]

    return call


def rotary_embedding(n):
    def call(i):
        vk.rotary_embedding(n.pos, n.Q[i], n.K[i], n.D, n.cs, True)
        return n.Q[i]

    return call


def _kv_write(flash: bool, runs: bool = False):
    """Random single slots (decode), or runs of whole pages in random order (prefill)."""

    def make(n):
        tokens, pages = n.K[0].shape[0], n.kx.shape[0]
        slots = n.slots
        if runs:
            arange = torch.arange(16, device="cuda")

            def run():
                first = torch.randperm(pages, device="cuda")[: -(-tokens // 16)] * 16
                return (first[:, None] + arange).flatten()[:tokens].contiguous()

            slots = [run() for _ in n.slots]
        op = vk.reshape_and_cache_flash if flash else vk.reshape_and_cache
        keys, values = (n.kc, n.vc) if flash else (n.kx, n.vx)

        def call(i):
            op(n.K[i], n.V[i], keys, values, slots[i], "auto", n.one, n.one)
            return keys

        call(0)
        block, at = slots[0] // 16, slots[0] % 16
        stored = keys[block, at] if flash else keys[block, :, :, at].reshape(n.K[0].shape)
        assert torch.equal(stored, n.K[0]), "wrong K"
        stored = values[block, at] if flash else values[block, :, :, at]
        assert torch.equal(stored, n.V[0]), "wrong V"
        return call

    return make


SMALL = {
    "rms_norm": {"ours": rms_norm},
    "fused_add_rms": {"ours": fused_add_rms_norm},
    "silu_and_mul": {"ours": silu_and_mul},
    "rope": {"ours": rotary_embedding},
    "kv_write": {
        "ours_nhd": _kv_write(True),
        "ours_x_random": _kv_write(False),
        "ours_x_runs": _kv_write(False, runs=True),
    },
}
DECODE = {
    "ours_v1": ("vl", _decode(1)),
    "ours_v2": ("vl", _decode(2)),
    "ours_pa": ("vl", _paged_attention("vllm")),
    "ours_pa_early": ("vl", _paged_attention("vllm", kv_ready=True)),
    "ours_write_pa": ("vl", _paged_attention("vllm", writes=True)),
    "ours_pa_hnd": ("hnd", _paged_attention("HND")),
    "ours_pa_nhd": ("nhd", _paged_attention("NHD")),
}
PREFILL = {
    "ours_pa": _several_tokens("vllm"),
    "ours_pa_hnd": _several_tokens("HND"),
    "ours_pa_nhd": _several_tokens("NHD"),
    "ours_varlen": _varlen,
}
