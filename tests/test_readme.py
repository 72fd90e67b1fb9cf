"""The examples of the documents run as printed; links, paths and named tests exist."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

import vllm_kernels
from vllm_kernels.bench.arguments import add_arguments

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]
SOURCES = ("csrc/**/*.h", "csrc/**/*.cpp", "csrc/**/*.cu", "vllm_kernels/**/*.py", "cmake/*.cmake")
EVERY_PAGE = sorted(
    page.relative_to(ROOT).as_posix()
    for pattern in (
        "*.md",
        "docs/**/*.md",
        "examples/*.md",
        "csrc/**/*.md",
        "vllm_kernels/**/*.md",
        "benchmarks/*.md",
    )
    for page in ROOT.glob(pattern)
)
WITH_PATHS = [
    page
    for page in EVERY_PAGE
    if page == "CONTRIBUTING.md" or page.startswith(("csrc/", "docs/decisions/"))
]
NO_FILES = ("build/", "torch/csrc/")
"""How paths begin that a checkout does not have."""
MARK = "<!-- example: run by tests/test_readme.py -->\n"
NOT_RUN = "<!-- not run: "
BLOCK = re.compile(r"(?P<before>[^\n]*\n)```python\n(?P<code>.*?)```", re.S)
PRINTED = {
    ("README.md", "scaled_dot_product_attention"): r"True",
    ("README.md", "Engine"): r"(?s).+\n.+",
    ("docs/attention.md", "reshape_and_cache"): r"torch\.Size\(\[25, 8, 64\]\) 3 blocks used",
    ("docs/attention.md", "combine_attn_partials"): r"True",
    ("docs/attention.md", "varlen_attention"): r"torch\.Size\(\[9, 8, 64\]\)",
    ("docs/containment.md", "block_tables"): (
        r"paged_attention: block_tables: .+\n"
        r"paged_attention: block_tables\[0, 1\] = 9: expected a block in \[0, 4\)"
    ),
    ("docs/context_parallel.md", "local_lens"): r"\[25, 25, 25, 25\] True",
    ("docs/determinism.md", "fixed_split_size"): r"True",
    ("docs/fp8_cache.md", "torch.int8"): r"torch\.Size\(\[1, 8, 64\]\)",
    ("docs/fp8_cache.md", "k_token_zeros"): r"torch\.Size\(\[1, 8, 64\]\)",
    ("docs/fp8_cache.md", "q_scale"): r"torch\.bfloat16",
    ("docs/engine.md", "sampled"): r"(?s).+\n.+\n0 (stop|length)\n1 (stop|length)\n.+",
    ("docs/engine.md", "add_request"): r"2 requests finished",
    ("docs/engine.md", "AsyncEngine"): r"True\ntoo late\n4 tokens",
    ("docs/flash_attn.md", "import flash_attn_func\n\nquery"): r"torch\.Size\(\[2, 7, 8, 64\]\)",
    ("docs/flash_attn.md", "flash_attn_varlen_func"): (
        r"torch\.Size\(\[8, 8, 64\]\)\ntorch\.Size\(\[2, 1, 8, 64\]\)"
    ),
    ("docs/flash_attn.md", "compat.install"): r"",
    ("docs/flashinfer.md", "plan"): r"torch\.Size\(\[2, 8, 64\]\)",
    ("docs/flashinfer.md", "table"): r"torch\.Size\(\[2, 8, 64\]\)",
    ("docs/from_vllm.md", "as ops"): r"torch\.Size\(\[2, 8, 64\]\)",
    ("docs/kv_cache_manager.md", "cache.swap_out"): r"torch\.Size\(\[2, 8, 64\]\) 1 copied",
    ("docs/kv_cache_manager.md", "truncate"): r"needed 3, free 0\n2 blocks used",
    ("docs/kv_cache_manager.md", "shards"): (
        r"\[0, 1, -1, -1, 2, 3, -1, -1, 4\] \[5\] \[0 1\]\n"
        r"\[-1, -1, 0, 1, -1, -1, 2, 3, -1\] \[4\] \[0 1\]"
    ),
    ("docs/layouts.md", "slot_mapping"): (
        r"\[0, 1, 3\] \[2\]\n"
        r"slots of A: \[0, 1, 2, 3, 4, 5, 6, 7, 12\]\nslots of B: \[8, 9, 10\]\n"
        r"slots of the second pass: \[6, 7, 12\]"
    ),
    ("docs/ledger.md", "Ledger"): (
        r"{0: \(\[0, 1\], 8\), 1: \(\[0, 1, 2\], 10\)} owed: 3\n8 blocks are free again"
    ),
    ("docs/page_selection.md", "page_bounds_update"): r"torch.Size\(\[1, 16\]\) \[248\]",
    ("docs/page_selection.md", "PageSelection"): r"True True",
    ("docs/prefix_caching.md", "num_new=0"): r"16 tokens cached, 4 to compute",
    ("docs/prefix_caching.md", "cascade_attention"): r"True",
    ("docs/sampling.md", "token_logprobs"): r"torch.Size\(\[3\]\) torch.Size\(\[3, 6\]\)",
    ("docs/sampling.md", "bitmask=words"): r"\[40, 6\]",
    ("docs/sampling.md", "num_logprobs=2"): r"\[1\] \[\[1, 1, 2\]\] \[1\]",
    ("docs/sampling.md", "spec_verify"): r"\[\[5, 6, 9, -1\]\] \[2\]",
    ("docs/sampling.md", "bad_words"): r"\[(True, ){7}True\]",
    ("docs/sampling.md", "flashinfer"): r"torch.int32 True",
    ("docs/sparq.md", "value_mean_update"): r"torch.Size\(\[1, 8, 64\]\) \[1000\]",
    ("docs/speculative_decoding.md", "PromptLookup"): r"True True",
    ("docs/speculative_decoding.md", "tree_mask"): (
        r"torch\.Size\(\[5, 8, 64\]\) \[1, 3, 5, 11, 21\]"
    ),
    ("docs/structured_output.md", "NoRepetition"): r"True",
    ("docs/serving.md", "threading"): (
        r"(?s).+\nEngine: prompt: expected fewer than 256 tokens \(max_length\), got 600"
    ),
}
"""What each example is about (a word of it that no other example of its page has), and what it
prints."""


def examples(page: str) -> list[str]:
    """The marked examples of a page. Every other block of Python says why it is not run."""
    codes = []
    for block in BLOCK.finditer((ROOT / page).read_text()):
        if block["before"] == MARK:
            codes.append(block["code"])
        else:
            assert block["before"].startswith(NOT_RUN), f"{page}: {block['code'][:80]}"
    return codes


@pytest.mark.parametrize("page, about", PRINTED)
def test_example_runs(page: str, about: str, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = [example for example in examples(page) if about in example]
    if "from transformers" in code:
        pytest.importorskip("transformers")
    exec(compile(code, f"{page}, {about}", "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out.strip()
    assert re.fullmatch(PRINTED[page, about], printed), printed


def test_every_example_is_run() -> None:
    counted = {page: len(examples(page)) for page in PAGES}
    listed = {page: sum(page == where for where, _ in PRINTED) for page in PAGES}
    assert counted == listed


def text_of(page: str | Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.S)


def anchors(page: Path) -> set[str]:
    """GitHub's anchors of a page's headings."""
    headings = re.findall(
        r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.S), re.M
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", EVERY_PAGE)
def test_links_lead_somewhere(page: str) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", text_of(page)):
        if "://" in target:
            continue
        path = (ROOT / page).parent / target if target else ROOT / page
        assert path.exists(), f"{page}: {target}"
        if anchor:
            assert anchor in anchors(path), f"{page}: {target}#{anchor}"


def alternatives(path: str) -> Iterator[str]:
    """`a.{h,cpp}` is `a.h` and `a.cpp`."""
    parts = re.split(r"\{([^}]*)\}", path)
    choices = [part.split(",") if i % 2 else [part] for i, part in enumerate(parts)]
    return ("".join(chosen) for chosen in product(*choices))


@pytest.mark.parametrize("page", WITH_PATHS)
def test_paths_exist(page: str) -> None:
    """A path in backticks is relative to the repository, to csrc or to the page. Stems count."""
    folders = [ROOT, ROOT / "csrc", (ROOT / page).parent]
    for path in re.findall(r"`([\w.{},*-]+/[\w./{},*-]*)`", text_of(page)):
        if path.startswith(NO_FILES):
            continue
        for one in alternatives(path):
            assert any(any(folder.glob(one.rstrip("/") + "*")) for folder in folders), (
                f"{page}: {one}"
            )


def test_named_files_exist() -> None:
    text = text_of("CONTRIBUTING.md")
    for folder, name in (("tests", r"test_[\w*]+\.py"), ("benchmarks", r"bench_\w+")):
        named = re.findall(f"`({name})`", text)
        assert named
        for one in named:
            assert any((ROOT / folder).glob(f"**/{one}*")), one


@pytest.mark.parametrize("page", ["csrc/cpu/README.md", "csrc/torch_ops/README.md"])
def test_named_tests_exist(page: str) -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", text_of(page))
    assert len(named) > 10
    for file, test in named:
        path = ROOT / file if "/" in file else ROOT / "tests/ops" / file
        assert f"def {test}(" in path.read_text(), f"{page}: {file}::{test}"


@pytest.mark.parametrize("folder", ["docs", "docs/lab", "docs/decisions", "docs/learn"])
def test_every_page_is_in_its_index(folder: str) -> None:
    index = (ROOT / folder / "README.md").read_text()
    pages = list((ROOT / folder).glob("**/*.md" if folder == "docs/lab" else "*.md"))
    if folder == "docs":
        pages += (ROOT / "docs/api").glob("*.md")
    for page in pages:
        name = page.relative_to(ROOT / folder).as_posix()
        assert name in ("README.md", "index.md") or f"]({name})" in index, name


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 170


def test_every_op_is_in_the_reference() -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs/api").glob("*.md"))
    for name in vllm_kernels.ops.__all__:
        module = getattr(vllm_kernels, name).__module__
        names = (f"automodule:: {module}\n", f"autofunction:: vllm_kernels.{name}\n")
        assert any(one in pages for one in names), name


def test_names_of_vllm() -> None:
    """docs/from_vllm.md says which names exist here."""
    present, absent = (ROOT / "docs/from_vllm.md").read_text().split("| absent name |")
    present = present.split("## Every name")[1]
    for table, exists in ((present, True), (absent.split("\n## ")[0], False)):
        names = [
            name
            for cell in re.findall(r"^\| (`[^|]+) \|", table, re.M)
            for name in re.findall(r"`(\w+)`", cell)
        ]
        assert len(names) > 10
        for name in names:
            assert hasattr(vllm_kernels, name) is exists, name


def test_environment_variables_are_listed() -> None:
    listed = (ROOT / "docs/environment.md").read_text()
    text = "".join(path.read_text() for pattern in SOURCES for path in ROOT.glob(pattern))
    reads = r"\w*(?:getenv|environ)[.\w]*\(\"(\w+)\"|\$ENV\{(VLLM_KERNELS_\w+)\}"
    read = set(re.findall(reads, text))
    names = {name for pair in read for name in pair if name}
    assert names >= {"VLLM_KERNELS_CHECK", "VLLM_KERNELS_ISA", "VLLM_KERNELS_LOG"}
    for name in names:
        assert f"`{name}`" in listed, name


def test_options_are_listed() -> None:
    page = (ROOT / "docs/benchmark_command.md").read_text()
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser, ROOT)
    for action in parser._actions:
        assert f"`{action.option_strings[0]}" in page, action.option_strings[0]
