"""Every test that csrc/kv_cache/README.md names for a fault exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_fault_has_its_tests() -> None:
    table = (ROOT / "csrc/kv_cache/README.md").read_text().split("## Faults")[1]
    rows = [line.split("|")[3] for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 18
    sources = "".join(path.read_text() for path in (ROOT / "tests/csrc/kv_cache").glob("*.cpp"))
    python = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    for row in rows:
        names = re.findall(r"`([^`]+)`", row)
        assert names, row
        for name in names:
            if name.endswith(".py"):
                assert (Path(__file__).parent / name).is_file(), name
            elif "." in name:
                suite, test = name.split(".")
                assert re.search(rf"TEST(_F|_P)?\({suite}, {test}\)", sources), name
            else:
                assert f"def {name}(" in python, name
