"""Fails when an identifier contains a word of the project's former private language.

Identifiers of csrc, vllm_kernels and tests/csrc are split at `_` and at CamelCase. Comments and
strings do not count. WORDS has each old word and its standard term, ALLOWED the legitimate uses.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Old word (or words: singular, plural, ...): the standard term.
WORDS = {
    "team teams": "consumer warpgroup",
    "servant servants filler fillers": "producer warp",
    "ring rings": "pipeline, or circular list",
    "piece pieces": "split, chunk",
    "part parts": "split, partial, slice",
    "counted": "semaphore",
    "posted": "flag-in-data partials",
    "guess guesses guessed": "speculative",
    "predecessor predecessors": "primary kernel",
    "beside": "concurrent launch",
    "fresh": "new token",
    "turn turns turned turning": "rotate",
    "widen widens widened widening": "upcast",
    "narrow narrows narrowed narrowing": "quantize, downcast",
    "slack": "rescale threshold",
    "multiprocessor multiprocessors": "SM",
    "parted": "diverged",
    "settle settles settled": "fence operand",
    "least": "min",
    "sees": "visible",
    "told": "recorded tokens",
    "flight flights": "pending tokens",
    "segment segments": "split, chunk",
}
# Word, or whole identifier: {glob of files: reason}.
ALLOWED = {
    "at_least": {"csrc/*": "quant.h: max(a, b) that propagates NaN"},
    "part": {
        "vllm_kernels/*": "of a tensor or a name, in its plain sense",
        "tests/csrc/test_cpp.py": "of a suite",
    },
    "parts": {"vllm_kernels/*": "of a tensor or a name, in its plain sense"},
    "counted": {"vllm_kernels/demo.py": "a number with its noun"},
    "ReferencesAreCountedAndDoNotWrap": {"tests/*": "reference counts"},
    "MultimodalItemsAreThePartOfTheBlocksTheyReachInto": {"tests/*": "in its plain sense"},
}
STANDARD = {word: term for words, term in WORDS.items() for word in words.split()}

BLANK = {
    "c": re.compile(
        r'//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|^\s*#\s*include[^\n]*',
        re.DOTALL | re.MULTILINE,
    ),
    "py": re.compile(
        r'"""(?:\\.|[^\\])*?"""' r"|'''(?:\\.|[^\\])*?'''"
        r'|"(?:\\.|[^"\\\n])*"' r"|'(?:\\.|[^'\\\n])*'|#[^\n]*",
        re.DOTALL,
    ),
}  # fmt: skip
SUFFIXES = {".cu": "c", ".cuh": "c", ".cpp": "c", ".h": "c", ".py": "py", ".pyi": "py"}


def words_of(identifier: str) -> list[str]:
    """The lower-case words of an identifier: kMaxRows -> k, max, rows."""
    return [
        word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", identifier)
    ]  # fmt: skip


def identifiers(text: str, language: str) -> Iterator[tuple[int, str]]:
    """Line and name of each identifier outside comments and strings."""
    code = BLANK[language].sub(lambda match: "\n" * match.group().count("\n"), text)
    for number, line in enumerate(code.splitlines(), 1):
        for name in re.findall(r"(?<![\w.'])[A-Za-z_]\w*|(?<=\.)[A-Za-z_]\w*", line):
            yield number, name


def is_allowed(word: str, identifier: str, file: str) -> bool:
    return any(
        fnmatch(file, glob) for key in (word, identifier) for glob in ALLOWED.get(key, {})
    )  # fmt: skip


def faults_of(file: str, text: str) -> list[str]:
    found = Counter[tuple[str, str]]()
    lines: dict[tuple[str, str], int] = {}
    for number, name in identifiers(text, SUFFIXES[Path(file).suffix]):
        for word in words_of(name):
            if word in STANDARD and not is_allowed(word, name, file):
                found[name, word] += 1
                lines.setdefault((name, word), number)
    return [
        f"{file}:{lines[name, word]}: {name}: '{word}' is {STANDARD[word]} ({count} times)"
        for (name, word), count in found.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", help="default: the files that git tracks")
    arguments = parser.parse_args()
    files = arguments.files or subprocess.run(
        ["git", "ls-files", "csrc", "vllm_kernels", "tests/csrc"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.split()  # fmt: skip
    files = [file for file in files if Path(file).suffix in SUFFIXES]
    faults = [fault for file in files for fault in faults_of(file, (ROOT / file).read_text())]
    for fault in faults:
        print(fault)
    print(f"check_words: {len(files)} files, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
