"""Achieved bandwidth of decode attention against the bytes of its KV cache, as a picture.

python -m benchmarks.plot_decode decode.json benchmarks/plots/decode_h200.png

decode.json is what ../shared/peers/bench.py wrote with --out.
"""

import json
import sys
from pathlib import Path

import matplotlib
from matplotlib import pyplot

from benchmarks.tables import CEILING

matplotlib.use("Agg")
LABELS = {
    "ours_pa": "vllm_kernels.paged_attention, layout vllm",
    "ours_pa_nhd": "vllm_kernels.paged_attention, NHD",
    "fa3": "FlashAttention 3, NHD",
    "fi_tc": "FlashInfer, tensor cores, NHD",
    "xqa": "XQA, NHD",
    "vllm_v2": "vLLM 0.9.2 v2, layout vllm",
}
MARKERS = "osD^vx"


def plot(rows: list[dict], path: Path) -> None:
    figure, axes = pyplot.subplots(1, 2, figsize=(12, 5.5), sharex=True, sharey=True)
    for axis, eight_bits in zip(axes, (False, True)):
        of_cache = [r for r in rows if (r["kv"] != "auto") == eight_bits and "us" in r]
        of_cache = [r for r in of_cache if r["dtype"] == "bfloat16"]
        for (peer, label), marker in zip(LABELS.items(), MARKERS):
            points = sorted((r["kv_bytes"], r["kv_bytes"] / r["us"] / 1e3) for r in of_cache
                            if r["peer"] == peer)  # fmt: skip
            if points:
                axis.plot(*zip(*points), marker=marker, linestyle="none", label=label, alpha=0.8)
        axis.axhline(CEILING / 1e9, color="gray", linestyle="--", label="plain read of memory")
        axis.set_xscale("log")
        axis.set_xlabel("bytes of K and V")
        axis.set_title("fp8 e4m3 cache" if eight_bits else "bfloat16 cache")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("GB/s")
    figure.suptitle("Decode attention on an H200 (cold L2, random block tables)")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="lower center", ncols=4, fontsize=8)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    plot(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
