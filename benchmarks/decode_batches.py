"""Decode batches that the kit's bench.py lacks: few short sequences, unequal lengths, idle SMs.

    . .peers/env.sh
    OURS=benchmarks/peers_ours.py python3 -m benchmarks.decode_batches --wl '9x*' --peers 'fi*'

Arguments are those of bench.py (KIT: ../shared/peers). compare_builds measures the same rows of two
builds. NxL has N sequences of L tokens, and _fp8 an e4m3 cache. Pages in docs/lab/decode explain
them: small_batches.md, ragged_batches.md, waves.md.
"""

from __future__ import annotations

import random
from collections.abc import Callable

Row = tuple[int, int, int, list[int]]  # sequences, query heads, KV heads, tokens of each sequence


def equal(seqs: int, tokens: int, heads: int = 32, kv_heads: int = 8) -> Row:
    return seqs, heads, kv_heads, [tokens] * seqs


def unequal(seqs: int, tokens: Callable[[random.Random], int]) -> Row:
    draw = random.Random(seqs)
    return seqs, 32, 8, [tokens(draw) for _ in range(seqs)]


def skewed(most: int) -> Callable[[random.Random], int]:
    """Log-uniform, a fifth of them long."""

    def tokens(draw: random.Random) -> int:
        return int(most ** draw.random()) if draw.random() < 0.8 else draw.randint(most // 4, most)

    return tokens


SHORT = {
    f"{seqs}x{tokens}": equal(seqs, tokens)
    for seqs in (1, 2, 4, 8, 12, 16, 32)
    for tokens in (64, 128, 300, 512, 1024, 2048)
}
RAGGED = {
    f"ragged_{seqs}x{most}": unequal(seqs, skewed(most))
    for seqs, most in (
        (9, 500), (10, 300), (11, 600), (12, 300), (12, 1000), (12, 2000), (12, 30_000), (13, 200),
        (14, 400), (14, 8000), (15, 1000), (16, 200), (16, 300), (16, 600), (16, 2000), (24, 1000),
        (30, 600),
    )
}  # fmt: skip
LONG = {
    **{
        f"{seqs}x{tokens}": equal(seqs, tokens)
        for seqs in (5, 6, 7, 8, 9, 10, 11, 12, 13, 15, 16)
        for tokens in (1536, 2000, 4000, 8000, 16_000)
    },
    "mqa_70x8000": equal(70, 8000, 16, 1),
    "kv4_18x8000": equal(18, 8000, 32, 4),
    "g8_9x8000": equal(9, 8000, 64, 8),
    "g16_10x4000": equal(10, 4000, 128, 8),
    "9x6000to8000": unequal(9, lambda draw: draw.randint(6000, 8000)),
    "12x12000to16000": unequal(12, lambda draw: draw.randint(12_000, 16_000)),
    "9x1to8000": unequal(9, lambda draw: draw.randint(1, 8000)),
    "12x1to16000": unequal(12, lambda draw: draw.randint(1, 16_000)),
}


def workloads() -> dict[str, tuple]:
    """The rows in the form of bench.WL."""
    import bench

    rows = {**SHORT, **RAGGED, **LONG}
    return {
        **{name: (*row, bench.BF, "auto") for name, row in rows.items()},
        **{f"{name}_fp8": (*row, bench.BF, "fp8") for name, row in rows.items()},
    }


if __name__ == "__main__":
    import bench

    bench.WL = workloads()
    bench.main()
