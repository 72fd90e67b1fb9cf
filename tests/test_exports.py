"""What type checkers see is what there is: exports, the stub of `_C`."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path

import torch

import vllm_kernels
from vllm_kernels import _C, ops

PACKAGE = Path(__file__).parent.parent / "vllm_kernels"
ROOMS = [
    importlib.import_module(f"vllm_kernels.ops.{path.stem}")
    for path in sorted((PACKAGE / "ops").glob("[a-z]*.py"))
]
INTERNAL = {"raise_bad_index", "scanned_devices", "start_explaining", "take_explanation"}
"""Registered for the package itself."""


def static_all(module: str) -> list[str]:
    """The list of strings that a type checker reads; an error if it is computed."""
    for node in ast.parse((PACKAGE / module).read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    raise AssertionError(f"{module} has no __all__")


def test_exports_are_static():
    assert static_all("__init__.py") == vllm_kernels.__all__
    assert static_all("ops/__init__.py") == ops.__all__
    for module in ("__init__.py", "ops/__init__.py"):
        assert "import *" not in (PACKAGE / module).read_text()


def test_exports_are_those_of_the_rooms():
    rooms = {name for room in ROOMS for name in room.__all__}
    assert set(ops.__all__) == rooms | {"check", "explain"}
    assert set(ops.__all__) <= set(vllm_kernels.__all__)
    for name in vllm_kernels.__all__:
        assert hasattr(vllm_kernels, name)


def test_ops_are_the_registered_ones():
    prefix = "vllm_kernels::"
    registered = {
        name.removeprefix(prefix).split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith(prefix)
    }
    assert set(vllm_kernels.OPS) == registered - INTERNAL


def test_the_stub_names_all_of_the_module():
    tree = ast.parse((PACKAGE / "_C.pyi").read_text()).body
    stub: dict[str, set[str]] = {}
    for node in tree:
        if isinstance(node, ast.ClassDef):
            stub[node.name] = {_name(member) for member in node.body} - {""}
        elif isinstance(node, ast.FunctionDef | ast.AnnAssign):
            stub[_name(node)] = set()
    assert {name for name in stub if name[0] != "_"} == _public(_C)
    for name, members in stub.items():
        if inspect.isclass(getattr(_C, name, None)):
            there = _public(getattr(_C, name)) - _public(RuntimeError)
            only_instances = {"needed", "free"} if name == "OutOfBlocks" else set()
            assert {m for m in members if m[0] != "_"} - only_instances == there, name


def _name(node: ast.stmt) -> str:
    if isinstance(node, ast.AnnAssign):
        return ast.unparse(node.target)
    return getattr(node, "name", "")


def _public(thing: object) -> set[str]:
    return {name for name in dir(thing) if name[0] != "_"}
