"""Hands the build over to CMake (CMakeLists.txt); setuptools only says where the result goes.

Environment: VLLM_KERNELS_CUDA=auto|on|off, TORCH_CUDA_ARCH_LIST, CUDA_HOME, MAX_JOBS.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()


def _tool(name: str) -> str:
    """The build tool of this environment: an isolated build's PATH names one that soon is gone."""
    beside_python = Path(sys.executable).parent / name
    found = str(beside_python) if beside_python.exists() else shutil.which(name)
    if found is None:
        raise SystemExit(f"vllm_kernels: {name} not found; pip install {name}")
    return found


class CMakeBuild(build_ext):
    """Configures, builds and installs the three libraries into the package folder."""

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).parent.resolve()
        build = ROOT / "build" / f"cmake-{sys.implementation.cache_tag}"
        jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count() or 1)
        subprocess.run(
            [
                _tool("cmake"),
                *("-S", str(ROOT), "-B", str(build), "-G", "Ninja"),
                f"-DCMAKE_MAKE_PROGRAM={_tool('ninja')}",
                f"-DPython_EXECUTABLE={sys.executable}",
                f"-DVLLM_KERNELS_CUDA={os.environ.get('VLLM_KERNELS_CUDA', 'auto')}",
                f"-DVLLM_KERNELS_VERSION={self.distribution.get_version()}",
            ],
            check=True,
        )
        subprocess.run([_tool("cmake"), "--build", str(build), "--parallel", jobs], check=True)
        # A library of an earlier build (CUDA now off, another Python) must not be shipped.
        for stale in target.glob("*.so"):
            stale.unlink()
        subprocess.run(
            [_tool("cmake"), "--install", str(build), "--prefix", str(target), "--strip"],
            check=True,
        )

    def copy_extensions_to_source(self) -> None:
        """Editable and --inplace: setuptools would copy `_C` alone and lose the libraries."""
        built = Path(self.build_lib).resolve() / "vllm_kernels"
        source = ROOT / "vllm_kernels"
        for stale in source.glob("*.so"):
            stale.unlink()
        for library in built.glob("*.so"):
            shutil.copy2(library, source / library.name)


setup(ext_modules=[Extension("vllm_kernels._C", sources=[])], cmdclass={"build_ext": CMakeBuild})
