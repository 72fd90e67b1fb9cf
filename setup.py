"""Hands the build over to CMake (CMakeLists.txt); setuptools only says where the result goes.

It also stamps the commit: into vllm_kernels/_commit.py, and into the version of an untagged build.

Environment: VLLM_KERNELS_CUDA=auto|on|off, TORCH_CUDA_ARCH_LIST, CUDA_HOME, MAX_JOBS,
VLLM_KERNELS_BUILD_DIR (objects; one folder may serve several Pythons).
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist

ROOT = Path(__file__).parent.resolve()
COMMIT_FILE = "vllm_kernels/_commit.py"


def _git(*arguments: str) -> str:
    """What git prints; nothing without git, or where ROOT is not a clone's top folder."""
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def _stamp() -> tuple[str, bool]:
    """The commit, and whether it is a release: this clone's, else the sdist's, else ""."""
    top = _git("rev-parse", "--show-toplevel")
    if top and Path(top).resolve() == ROOT:
        changed = _git("status", "--porcelain", "--untracked-files=no")
        commit = _git("rev-parse", "HEAD") + ("-dirty" if changed else "")
        tag = _git("describe", "--exact-match", "--tags", "--match", "v[0-9]*")
        return commit, bool(tag) and not changed
    values: dict[str, object] = {}
    if (ROOT / COMMIT_FILE).exists():
        exec((ROOT / COMMIT_FILE).read_text(), values)
    return str(values.get("COMMIT", "")), bool(values.get("RELEASE", False))


COMMIT, RELEASE = _stamp()
VERSION_TAG = "" if RELEASE or not COMMIT else f".dev0+g{COMMIT[:8]}"


def _write_commit(root: Path) -> None:
    text = f'"""Written by setup.py."""\n\nCOMMIT = "{COMMIT}"\nRELEASE = {RELEASE}\n'
    path = root / COMMIT_FILE
    if not path.exists() or path.read_text() != text:
        path.unlink(missing_ok=True)  # may be a hard link
        path.write_text(text)


class StampedSdist(sdist):
    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        _write_commit(Path(base_dir))


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
        own = ROOT / "build" / f"cmake-{sys.implementation.cache_tag}"
        build = Path(os.environ.get("VLLM_KERNELS_BUILD_DIR") or own)
        jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count() or 1)
        subprocess.run(
            [
                _tool("cmake"),
                *("-S", str(ROOT), "-B", str(build), "-G", "Ninja"),
                *("-U", "*Python*"),  # what an earlier build found, maybe another one
                f"-DCMAKE_MAKE_PROGRAM={_tool('ninja')}",
                f"-DPython_EXECUTABLE={sys.executable}",
                f"-DVLLM_KERNELS_CUDA={os.environ.get('VLLM_KERNELS_CUDA', 'auto')}",
                f"-DVLLM_KERNELS_VERSION={self.distribution.get_version().split('.dev')[0]}",
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
        _write_commit(target.parent)

    def copy_extensions_to_source(self) -> None:
        """Editable and --inplace: setuptools would copy `_C` alone and lose the libraries."""
        built = Path(self.build_lib).resolve() / "vllm_kernels"
        source = ROOT / "vllm_kernels"
        for stale in source.glob("*.so"):
            stale.unlink()
        for library in built.glob("*.so"):
            shutil.copy2(library, source / library.name)
        _write_commit(ROOT)


setup(
    ext_modules=[Extension("vllm_kernels._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild, "sdist": StampedSdist},
    options={"egg_info": {"tag_build": VERSION_TAG}},
)
