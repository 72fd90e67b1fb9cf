"""Docstrings: every public function has an example that runs, and says when it raises."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
from collections.abc import Callable

import pytest
import torch

import vllm_kernels

MODULES = {
    "vllm_kernels.ops": vllm_kernels,
    **{
        name: importlib.import_module(name)
        for name in (
            "vllm_kernels.compat.bert_padding",
            "vllm_kernels.compat.flash_attn",
            "vllm_kernels.compat.flash_attn_interface",
            "vllm_kernels.compat.flashinfer",
            "vllm_kernels.compat.flashinfer.sampling",
        )
    },
}
FUNCTIONS: dict[str, Callable[..., object]] = {
    f"{module.removeprefix('vllm_kernels.')}.{name}": getattr(owner, name)
    for module, owner in MODULES.items()
    for name in importlib.import_module(module).__all__
    if inspect.isfunction(getattr(owner, name))
}
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
CONDITION = re.compile(r"^ +\w+(, \w+)*: (for|as|if|on|also|from|naming) ", re.M)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_example_runs(name: str) -> None:
    """On the CPU, with the names that `vllm_kernels.__doc__` gives."""
    function = FUNCTIONS[name]
    text = inspect.getdoc(function) or ""
    own = {function.__name__: function} if "compat" in name else {}
    names = {"torch": torch, "vllm_kernels": vllm_kernels, **own}
    test = doctest.DocTestParser().get_doctest(text, names, name, None, 0)
    assert test.examples, "no example"
    assert not any(doctest.SKIP in example.options for example in test.examples)
    printed: list[str] = []
    failed, _ = doctest.DocTestRunner(optionflags=FLAGS).run(test, out=printed.append)
    assert failed == 0, "".join(printed)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_raises_names_conditions(name: str) -> None:
    text = inspect.getdoc(FUNCTIONS[name]) or ""
    section = text.partition("\nRaises:\n")[2].partition("\n\n")[0]
    assert CONDITION.match(section), section or "no section Raises"
    assert "what was expected and what was given" not in " ".join(section.split())


def test_the_package_lists_what_it_has() -> None:
    words = set(re.findall(r"\w+", vllm_kernels.__doc__ or ""))
    assert not set(vllm_kernels.ops.__all__) - words
