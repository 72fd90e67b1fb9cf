"""Docstrings: what is public has an example that runs; functions say when they raise."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
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
MODULES_OF_CLASSES = ["vllm_kernels", "vllm_kernels.kv_cache", "vllm_kernels.kv_cache.tensors",
                      "vllm_kernels.distributed", "vllm_kernels.compat"]  # fmt: skip
if importlib.util.find_spec("transformers"):
    MODULES_OF_CLASSES += [
        "vllm_kernels.integrations.transformers",
        "vllm_kernels.engine.scheduler",
    ]
RECORDS = {
    "AllBlocksCleared", "BlockRemoved", "BlockStored", "Completion", "FinishReason",
    "InstanceCounts", "Logprob", "RequestOutput", "Statistics", "TokenOutput",
}  # fmt: skip
"""Classes whose objects calls return, and nobody else makes."""


def needs_example(value: object) -> bool:
    """`Error` shows what holds for the other exceptions."""
    if inspect.isclass(value):
        is_error = issubclass(value, Exception) and value is not vllm_kernels.Error
        return not is_error and value.__name__ not in RECORDS
    return inspect.isfunction(value) and value not in FUNCTIONS.values()


CLASSES: dict[str, Callable[..., object]] = {
    f"{module}.{name}": value
    for module in MODULES_OF_CLASSES
    for name, value in vars(importlib.import_module(module)).items()
    if name in importlib.import_module(module).__all__ and needs_example(value)
}
"""Public classes, and functions that are no op."""
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
CONDITION = re.compile(r"^ +\w+(, \w+)*: (for|as|if|on|also|from|naming) ", re.M)


def run_example(name: str, owner: Callable[..., object], names: dict[str, object]) -> None:
    """On the CPU, with the names that `vllm_kernels.__doc__` gives."""
    text = inspect.getdoc(owner) or ""
    names = {"torch": torch, "vllm_kernels": vllm_kernels, **names}
    test = doctest.DocTestParser().get_doctest(text, names, name, None, 0)
    assert test.examples, "no example"
    assert not any(doctest.SKIP in example.options for example in test.examples)
    printed: list[str] = []
    failed, _ = doctest.DocTestRunner(optionflags=FLAGS).run(test, out=printed.append)
    assert failed == 0, "".join(printed)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_example_runs(name: str) -> None:
    function = FUNCTIONS[name]
    run_example(name, function, {function.__name__: function} if "compat" in name else {})


@pytest.mark.parametrize("name", CLASSES)
def test_example_of_class_runs(name: str) -> None:
    run_example(name, CLASSES[name], {})


@pytest.mark.parametrize("name", FUNCTIONS)
def test_raises_names_conditions(name: str) -> None:
    text = inspect.getdoc(FUNCTIONS[name]) or ""
    section = text.partition("\nRaises:\n")[2].partition("\n\n")[0]
    assert CONDITION.match(section), section or "no section Raises"
    assert "what was expected and what was given" not in " ".join(section.split())


def test_the_package_lists_what_it_has() -> None:
    words = set(re.findall(r"\w+", vllm_kernels.__doc__ or ""))
    assert not set(vllm_kernels.ops.__all__) - words
