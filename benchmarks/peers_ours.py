"""Our ops for the side-by-side runs of ../shared/peers (its README names the protocol).

DECODE[name] = (layout, prepare), prepare(w) -> f(i) -> out; SMALL[op][name] = make(ns) -> f(i).
"""

from __future__ import annotations

import vllm_kernels as vk


def rms_norm(n):
    def call(i):
        vk.rms_norm(n.O[i], n.X[i], n.w, n.eps)
        return n.O[i]

    return call


SMALL = {"rms_norm": {"ours": rms_norm}}
DECODE = {}
