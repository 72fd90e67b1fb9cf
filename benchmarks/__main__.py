"""`python -m benchmarks` runs every benchmark that this machine can run, one process each.

`python -m benchmarks tables` writes RESULTS*.md and the tables of the pages
from the files in benchmarks/results.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from benchmarks import tables


def main() -> int:
    if sys.argv[1:2] == ["tables"]:
        tables.main(sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.parse_args()
    failed = 0
    for script in sorted(Path(__file__).parent.glob("bench_*.py")):
        print(f"== {script.name}", flush=True)
        command = [sys.executable, "-m", f"benchmarks.{script.stem}"]
        failed += subprocess.run(command, check=False).returncode != 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
