"""Our ops for the side-by-side runs of ../shared/peers (its README names the protocol).

DECODE[name] = (layout, prepare), prepare(w) -> f(i) -> out; SMALL[op][name] = make(ns) -> f(i).
"""

from __future__ import annotations

import torch

import vllm_kernels as vk


def _decode(version: int):
    """paged_attention_v1 or _v2 on the peers' workload `w`, layout vllm."""

    def prepare(w):
        keys, values = w.vl()
        if w.kv != "auto":
            keys, values = [k.view(torch.uint8) for k in keys], [v.view(torch.uint8) for v in values]
        out = torch.empty_like(w.q)
        one = torch.ones(1, device="cuda")
        num_heads, head_size = w.q.shape[1:]
        partitions = -(-w.maxlen // 512)
        scratch = []
        if version == 2:
            sums = torch.empty(w.B, num_heads, partitions, device="cuda")
            partial = torch.empty(w.B, num_heads, partitions, head_size, device="cuda", dtype=w.q.dtype)
            scratch = [sums, torch.empty_like(sums), partial]
        op = vk.paged_attention_v2 if version == 2 else vk.paged_attention_v1

        def call(i):
            op(out, *scratch, w.q, keys[i], values[i], w.KH, w.scale, w.bt, w.lens, 16, w.maxlen,
               None, w.kv, one, one)  # fmt: skip
            return out

        return call

    return prepare


def rms_norm(n):
    def call(i):
        vk.rms_norm(n.O[i], n.X[i], n.w, n.eps)
        return n.O[i]

    return call


SMALL = {"rms_norm": {"ours": rms_norm}}
DECODE = {"ours_v1": ("vl", _decode(1)), "ours_v2": ("vl", _decode(2))}
