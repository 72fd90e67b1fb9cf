"""The README's examples run as printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
PRINTED = {
    "reshape_and_cache": r"torch\.Size\(\[25, 8, 64\]\) 3 blocks used",
    "Engine": r"(?s).+\n.+\n0 (stop|length)\n1 (stop|length)\n.+",
    "PagedCache": r"[1-9]\d* blocks shared by beams",
}
"""What each example is about, and what it prints."""


@pytest.mark.parametrize("about", PRINTED)
def test_example_runs(about: str, tmp_path: Path) -> None:
    if about != "reshape_and_cache":
        pytest.importorskip("transformers")
    examples = re.findall(r"<!-- example:.*?```python\n(.*?)```", README.read_text(), re.S)
    assert len(examples) == len(PRINTED)
    (code,) = [example for example in examples if about in example]
    script = tmp_path / "example.py"
    script.write_text(code)
    # From the repository, so that an in-place build is found.
    done = subprocess.run(
        [sys.executable, "-c", f"exec(open({str(script)!r}).read())"],
        cwd=README.parent, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(PRINTED[about], done.stdout.strip()), done.stdout
