"""Writes the folder that Hugging Face's `kernels` loads: `build_kernels_layout.py [FOLDER]`.

`make build` comes first. The default FOLDER is build/kernels. It has one variant for CPU builds of
torch, and one for CUDA if this build has CUDA: the ops, compat and layers, without the manager.
Offline, `LOCAL_KERNELS="org/repo=FOLDER"` makes `kernels` take it for a repository of the hub.
"""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
TEMPLATES = ROOT / "tools/kernels_layout"
MODULES = ("_library", "_log", "_ops", "_types", "_version", "errors")
PACKAGES = ("ops", "compat")
# What transformers looks for at the top, and `kernels` for layers.
EXPORTS = """
from . import layers
from .compat.flash_attn import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
"""


def run(*command: str) -> None:
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def link(build: Path, namespace: str, cuda: bool) -> dict[str, Path]:
    """Links the libraries with this namespace. Returns names to install, and files."""
    cmake = str(Path(sys.executable).parent / "cmake")
    names = ["vllm_kernels", *(["vllm_kernels_cuda"] if cuda else [])]
    run(cmake, "-S", ".", "-B", str(build), f"-DVLLM_KERNELS_HUB_NAMESPACE={namespace}")
    run(cmake, "--build", str(build), "--target", *(f"{name}_hub" for name in names))
    return {f"lib{name}.so": build / f"lib{name}_hub.so" for name in names}


def write_variant(folder: Path, libraries: dict[str, Path], backend: str, facts: dict) -> None:
    folder.mkdir(parents=True)
    package = ROOT / "vllm_kernels"
    for name in MODULES:
        shutil.copy(package / f"{name}.py", folder)
    for name in PACKAGES:
        skip = shutil.ignore_patterns("__pycache__")
        shutil.copytree(package / name, folder / name, ignore=skip)
    for template in TEMPLATES.glob("*.py"):
        shutil.copy(template, folder)
    namespace = facts["namespace"]
    own = (folder / "_ops.py").read_text().replace('= "vllm_kernels"', f'= "{namespace}"')
    (folder / "_ops.py").write_text(own)
    (folder / "__init__.py").write_text((package / "__init__.py").read_text() + EXPORTS)
    names = ("COMMIT", "RELEASE", "VERSION", "CUDA_BUILD")
    (folder / "_commit.py").write_text("".join(f"{name} = {facts[name]!r}\n" for name in names))
    metadata = {
        "name": "vllm-kernels",
        "id": f"{namespace}_{backend}",
        "version": 1,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": backend},
    }
    if backend == "cuda":
        metadata["backend"] = {"type": backend, "archs": facts["architectures"]}
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    for name, library in libraries.items():
        shutil.copy(library, folder / name)
        run("strip", "--strip-unneeded", str(folder / name))


def main() -> None:
    from vllm_kernels import _C, _commit, info

    target = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build/kernels").resolve()
    build = ROOT / "build" / f"cmake-{sys.implementation.cache_tag}"
    architectures = info.built_architectures()
    facts = {
        "namespace": f"vllm_kernels_{_commit.COMMIT[:8] or 'local'}",
        "architectures": [entry.removesuffix("+PTX") for entry in architectures],
        "COMMIT": _commit.COMMIT,
        "RELEASE": _commit.RELEASE,
        "VERSION": _C.version,
        "CUDA_BUILD": _C.cuda_build,
    }
    libraries = link(build, facts["namespace"], cuda=bool(architectures))
    shutil.rmtree(target / "build", ignore_errors=True)
    system = f"{platform.machine()}-{platform.system().lower()}"
    cpu = {name: path for name, path in libraries.items() if "cuda" not in name}
    write_variant(target / f"build/torch-stable-abi211-cpu-{system}", cpu, "cpu", facts)
    if architectures:
        # `kernels` takes a variant for each minor version from this one on.
        variant = f"torch-stable-abi211-cu{_cuda_major()}0-{system}"
        write_variant(target / f"build/{variant}", libraries, "cuda", facts)
    print(target)


def _cuda_major() -> str:
    from vllm_kernels import _C

    return _C.cuda_build.split("nvcc ")[1].split(".")[0]


if __name__ == "__main__":
    main()
