"""The measured tables: one JSON file a table in benchmarks/results, rendered as RESULTS.md,
RESULTS_OTHER_OPS.md, RESULTS_SEVERAL_GPUS.md and RESULTS_CPU.md. The figures in README.md,
docs/performance.md and docs/scale_out.md come from there (page_tables.py).

    python -m benchmarks tables                       writes these files and the tables of the pages
    python -m benchmarks tables RUN.json --into results/11_decode_peers_h200.json --commit COMMIT

The second form replaces columns and rows of a results file by those of a run. RUN.json is an output
of the peers' bench.py, prefill.py or small.py, or of bench_layer.py.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
from pathlib import Path

from benchmarks import page_tables

CEILING = 4.34e12  # bytes/s, a plain read of an H200's memory
HERE = Path(__file__).parent
RESULTS, RESULTS_GPUS = HERE / "RESULTS.md", HERE / "RESULTS_SEVERAL_GPUS.md"
RESULTS_OTHER, RESULTS_CPU = HERE / "RESULTS_OTHER_OPS.md", HERE / "RESULTS_CPU.md"
OTHER_SECTIONS = (
    "Sampling on a GPU", "Page selection and SparQ on a GPU", "Caches of 8 and 4 bits on a GPU",
)  # fmt: skip
GPUS_SECTION = "Several GPUs of one host"
CPU_SECTIONS = ("Engine on a CPU", "CPU ops", "KV-cache manager")
GENERATED = """\
`python -m benchmarks tables` generates this file from `benchmarks/results`; do not edit it.
Every table names its machine, command and commit, and peers ran in the same run. Slower results
stand here too. [docs/lab](../docs/lab/README.md) explains the figures."""
INTRODUCTION = f"""# Measured results on GPUs

{GENERATED} GPU times are medians over a CUDA
graph with a cold L2. The programs that drive the peers are not part of the repository.
[A plot](plots/decode_h200.png) shows the bandwidth of decode attention. There are tables of
[sampling, page selection and quantized caches](RESULTS_OTHER_OPS.md), of
[several GPUs](RESULTS_SEVERAL_GPUS.md) and of [CPUs](RESULTS_CPU.md), too.
"""
INTRODUCTION_OTHER = f"""# Measured results of sampling, page selection and quantized caches

{GENERATED} GPU times are medians over a CUDA
graph with a cold L2. [RESULTS.md](RESULTS.md) has the tables of the other GPU ops.
"""
INTRODUCTION_GPUS = f"""# Measured results on several GPUs

{GENERATED}
[RESULTS.md](RESULTS.md) has the tables of one GPU, and
[the lab page](../docs/lab/engine/parallel.md) those of other machines.
"""
INTRODUCTION_CPU = f"""# Measured results on CPUs

{GENERATED}
[RESULTS.md](RESULTS.md) has the tables of GPUs.
"""
NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?")


def markdown(columns: list[str], rows: list[list[str | None]]) -> list[str]:
    lines = [columns, ["---"] * len(columns), *rows]
    return ["| " + " | ".join("-" if c is None else str(c) for c in line) + " |" for line in lines]


def page_of(section: str) -> Path:
    if section in CPU_SECTIONS:
        return RESULTS_CPU
    if section in OTHER_SECTIONS:
        return RESULTS_OTHER
    return RESULTS_GPUS if section == GPUS_SECTION else RESULTS


def pages() -> dict[Path, str]:
    """The generated files. Numbers keep the digits they have in benchmarks/results."""
    introductions = (
        (RESULTS, INTRODUCTION), (RESULTS_OTHER, INTRODUCTION_OTHER),
        (RESULTS_GPUS, INTRODUCTION_GPUS), (RESULTS_CPU, INTRODUCTION_CPU),
    )  # fmt: skip
    return {page: render(page, introduction) for page, introduction in introductions}


def render(page: Path, introduction: str) -> str:
    lines, section = introduction.splitlines(), None
    for path in sorted((HERE / "results").glob("*.json")):
        table = json.loads(path.read_text(), parse_float=str)
        if page_of(table["section"]) != page:
            continue
        if table["section"] != section:
            section = table["section"]
            lines += ["", f"## {section}"]
        source = f"{table['machine']}; {table['versions']}; commit {table['commit']}"
        lines += ["", f"**{table['title']}** ({table['unit']}). {table['note']}"]
        lines += [f"{source}, {table['date']}. `{table['command']}`", ""]
        lines += markdown(table["columns"], table["rows"])
    return "\n".join(lines) + "\n"


def dump(table: dict) -> str:
    """JSON with a row a line; a cell of digits is a number with just these digits."""

    def cell(value: str | None) -> str:
        is_number = value is not None and NUMBER.fullmatch(str(value))
        return str(value) if is_number else json.dumps(value, ensure_ascii=False)

    head = {name: value for name, value in table.items() if name != "rows"}
    fields = [f"  {json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}," for k, v in head.items()]
    rows = ["    [" + ", ".join(map(cell, row)) + "]" for row in table["rows"]]
    return "\n".join(["{", *fields, '  "rows": [', ",\n".join(rows), "  ]", "}"]) + "\n"


def beside_peers(records: list[dict], key: str, name: str, size: str, ours: str, digits: int):
    """A row a workload: the time its bytes need, each candidate, and the best peer over ours.

    `key` is the field of the workload, `name` of the candidate, `size` of the bytes. `ours` is the
    candidate that GB/s belongs to, or "best" for the fastest of ours.
    """
    names = list(dict.fromkeys(r[name] for r in records))
    columns = [key, "MB", "us at 4.34 TB/s", *names, "GB/s", "% of ceiling", "best peer / ours"]
    rows = []
    for workload in dict.fromkeys(r[key] for r in records):
        of_workload = [r for r in records if r[key] == workload]
        size_bytes = of_workload[0][size]
        correct = [r for r in of_workload if "us" in r and r.get("right", r.get("ok", True))]
        us = {r[name]: r["us"] for r in correct}
        mine = [t for n, t in us.items() if (n.startswith("ours") if ours == "best" else n == ours)]
        peers = [t for n, t in us.items() if not n.startswith("ours")]
        row = [str(workload), f"{size_bytes / 1e6:.1f}", f"{size_bytes / CEILING * 1e6:.1f}"]
        row += [f"{us[n]:.{digits}f}" if n in us else None for n in names]
        if mine:
            rate = size_bytes / min(mine) * 1e6
            row += [f"{rate / 1e9:.0f}", f"{100 * rate / CEILING:.0f}"]
        else:
            row += [None, None]
        row += [f"{min(peers) / min(mine):.2f}" if mine and peers else None]
        rows.append(row)
    return columns, rows


def small_ops(records: list[dict]):
    """A row an op and number of tokens: ours, its GB/s, vLLM and FlashInfer."""
    columns = ["T", "op", "bytes MB", "ours", "GB/s", "% of 4.34 TB/s", "vLLM", "FlashInfer"]
    us = {(r["T"], r["op"], r["peer"]): f"{r['us']:.2f}" for r in records}
    rows = []
    for r in (r for r in records if r["peer"].startswith("ours")):
        vllm = {"ours_nhd": "vllm_flash_nhd", "ours_x_random": "vllm_legacy"}.get(r["peer"], "vllm")
        flashinfer = "flashinfer" if r["peer"] in ("ours", "ours_nhd") else None
        of_op = (r["T"], r["op"])
        name = r["op"] + r["peer"].removeprefix("ours").replace("_", " ")
        row = [str(r["T"]), name, f"{r['bytes'] / 1e6:.2f}", us[(*of_op, r["peer"])]]
        row += [f"{r['gbps']:.0f}", f"{100e9 * r['gbps'] / CEILING:.0f}"]
        rows.append([*row, us.get((*of_op, vllm)), us.get((*of_op, flashinfer))])
    return columns, rows


def from_run(records: list[dict]):
    """Columns and rows of a run. The keys of its first record tell which program wrote it."""
    if "candidate" in records[0]:
        return beside_peers(records, "batch", "candidate", "bytes", "best", 2)
    if "wl" in records[0]:
        return beside_peers(records, "wl", "peer", "kv_bytes", "ours_pa", 1)
    return small_ops(records)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks tables", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("run", nargs="?", type=Path, help="JSON file that a benchmark wrote")
    parser.add_argument("--into", type=Path, help="the results file that takes its rows")
    parser.add_argument("--commit", help="the commit that was measured")
    arguments = parser.parse_args(argv)
    if arguments.run:
        if not (arguments.into and arguments.commit):
            parser.error("a run needs --into and --commit")
        table = json.loads(arguments.into.read_text(), parse_float=str)
        columns, rows = from_run(json.loads(arguments.run.read_text()))
        today = datetime.date.today().isoformat()
        table |= {"commit": arguments.commit, "date": today, "columns": columns, "rows": rows}
        arguments.into.write_text(dump(table))
    for page, text in pages().items():
        page.write_text(text)
    page_tables.write()


if __name__ == "__main__":
    main()
