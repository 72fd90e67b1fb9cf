"""The documentation site: `make docs` builds it into build/docs, with warnings as errors.

The source folder is the repository, so that a link between two pages works here and on GitHub.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from docutils.nodes import Element
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

project = "vllm_kernels"
copyright = "the vllm_kernels authors"
release = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.M)[1]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
root_doc = "docs/index"
include_patterns = [
    "examples/README.md",
    "docs/**",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "csrc/**.md",
    "vllm_kernels/engine/README.md",
    "vllm_kernels/hf/README.md",
    "benchmarks/RESULTS*.md",
]
exclude_patterns = ["docs/README.md"]  # docs/index.md contains it
html_theme = "furo"
html_title = f"vllm_kernels {release}"
html_additional_pages = {"index": "redirect.html"}
templates_path = ["_templates"]

highlight_language = "none"
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
copybutton_exclude = ".linenos, .gp, .go"

# Folders whose README is the page that lists the others: the patterns of their pages.
FOLDERS = {
    "docs/lab/README": "[!R]*\n*/*",
    "docs/decisions/README": "[!R]*",
    "docs/learn/README": "[!R]*",
}

autodoc_member_order = "bysource"
add_module_names = False
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_use_ivar = True


def add_pages_of_folder(app: Sphinx, page: str, source: list[str]) -> None:
    if page in FOLDERS:
        source[0] += f"\n```{{toctree}}\n:hidden:\n:glob:\n\n{FOLDERS[page]}\n```\n"


def find_by_last_name(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, text: Element
) -> Element | None:
    """`vllm_kernels.paged_attention` is documented in the module where it is defined."""
    if node.get("refdomain") != "py" or node["reftype"] not in ("func", "meth"):
        return None
    node["refspecific"] = True  # in any module
    name = node["reftarget"].removeprefix("vllm_kernels.")
    return env.get_domain("py").resolve_xref(
        env, node["refdoc"], app.builder, node["reftype"], name, node, text
    )


def setup(app: Sphinx) -> None:
    app.connect("missing-reference", find_by_last_name)
    app.connect("source-read", add_pages_of_folder)
