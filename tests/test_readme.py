"""The README's example runs as printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_example_runs(tmp_path):
    code = re.search(r"<!-- example:.*?```python\n(.*?)```", README.read_text(), re.S).group(1)
    script = tmp_path / "example.py"
    script.write_text(code)
    # From the repository, so that an in-place build is found.
    done = subprocess.run(
        [sys.executable, "-c", f"exec(open({str(script)!r}).read())"],
        cwd=README.parent, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "torch.Size([25, 8, 64]) 3 blocks used"
