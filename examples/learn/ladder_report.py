"""The tables of measured steps, in the terminal and in docs/learn, and their plot.

A page of docs/learn marks the place of a table, of one step or of all:

    <!-- measured step 3: python examples/learn/ladder.py --write -->
    ...
    <!-- end of measured -->

`ladder.py --write` fills them. So does `python examples/learn/ladder_report.py FILE`, with what
`ladder.py --json FILE` measured on another machine.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

HERE = Path(__file__).resolve().parent
MEASURED = HERE / "measured.json"
DOCS = HERE.parents[1] / "docs/learn"
PLOT = "ladder.png"
BLOCK = re.compile(
    r"(?P<begin><!-- measured (?P<steps>all|step \d): .*? -->\n).*?"
    r"(?P<end><!-- end of measured -->)",
    re.S,
)
COMMAND = "python examples/learn/ladder.py --write"
NOT_MEASURED = f"*Not measured yet. On a GPU, `{COMMAND}` fills this in.*\n"
COLUMNS = ["step", "us", "MB read", "MB written", "GB/s", "% of ceiling", "gained", "error"]

Measured: TypeAlias = dict[str, Any]


@dataclass
class Record:
    """A step on a workload."""

    workload: str
    step: int
    name: str
    error: float
    us: float
    read: int
    written: int


def rows(records: list[Record], ceiling: float) -> dict[int, list[str]]:
    """A row per step of one workload. `gained`: how many times faster than the step before."""
    us = {record.step: record.us for record in records}
    found = {}
    for r in records:
        rate = (r.read + r.written) / r.us / 1e3
        gained = f"{us[r.step - 1] / r.us:.2f}x" if r.step - 1 in us else "-"
        found[r.step] = [
            f"{r.step} {r.name}", f"{r.us:.1f}", f"{r.read / 1e6:.1f}", f"{r.written / 1e6:.2f}",
            f"{rate:.0f}", f"{rate / ceiling / 10:.0f}", gained, f"{r.error:.1e}",
        ]  # fmt: skip
    return found


def tables(measured: Measured, step: int | None = None) -> str:
    """A table per workload, of all steps or of one."""
    records = [Record(**fields) for fields in measured["records"]]
    lines = [f"{measured['machine']}, {measured['date']}. Ceiling: {measured['ceiling']} TB/s."]
    for workload in dict.fromkeys(r.workload for r in records):
        of_steps = rows([r for r in records if r.workload == workload], measured["ceiling"])
        chosen = [row for number, row in of_steps.items() if step in (None, number)]
        table = [[workload, *COLUMNS[1:]], ["---"] * len(COLUMNS), *chosen]
        lines += ["", *("| " + " | ".join(row) + " |" for row in table)]
    return "\n".join(lines) + "\n"


def filled(page: str, measured: Measured | None) -> str:
    """The page with its tables."""

    def block(match: re.Match[str]) -> str:
        of_all = match["steps"] == "all"
        step = None if of_all else int(match["steps"].split()[1])
        text = tables(measured, step) if measured else NOT_MEASURED
        if measured and of_all:
            text += f"\n![us of each step]({PLOT})\n"
        return f"{match['begin']}{text}{match['end']}"

    return BLOCK.sub(block, page)


def plot(measured: Measured) -> None:
    """Bars of us per step, for each workload. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    records = [Record(**fields) for fields in measured["records"]]
    workloads = list(dict.fromkeys(r.workload for r in records))
    figure, axes = pyplot.subplots(1, len(workloads), figsize=(5 * len(workloads), 3.5))
    for axis, workload in zip(axes, workloads):
        chosen = [r for r in records if r.workload == workload]
        bars = axis.bar([str(r.step) for r in chosen], [r.us for r in chosen])
        axis.bar_label(bars, fmt="%.0f")
        floor = (chosen[-1].read + chosen[-1].written) / measured["ceiling"] / 1e6
        axis.axhline(floor, linestyle="--", color="gray")
        axis.set(title=f"{workload} (dashed: the bytes at the ceiling)", xlabel="step", ylabel="us")
        axis.set_yscale("log")
    figure.tight_layout()
    figure.savefig(DOCS / PLOT, dpi=120)


def write(measured: Measured) -> None:
    """measured.json, and what docs/learn shows of it."""
    MEASURED.write_text(json.dumps(measured, indent=1) + "\n")
    plot(measured)
    for page in DOCS.glob("*.md"):
        page.write_text(filled(page.read_text(), measured))


if __name__ == "__main__":
    write(json.loads(Path(sys.argv[1]).read_text()))
