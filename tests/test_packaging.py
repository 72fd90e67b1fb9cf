"""What an sdist and a wheel contain: sources, never a library of this machine; the commit."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from vllm_kernels import _requirements

ROOT = Path(__file__).parent.parent
NAMES = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CMakeLists.txt")
FOLDERS = ("csrc", "cmake", "tests", "tools", "docs", "vllm_kernels")
DUMMIES = ("_C.cpython-38.so", "libvllm_kernels.so", "libvllm_kernels_cuda.so", "x.o", "x.pyc")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A copy of the sources, with libraries as a build leaves them."""
    copy = tmp_path / "clone"
    skip = shutil.ignore_patterns("*.so", "__pycache__", "lab", "_commit.py")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, copy / folder, ignore=skip)
    for name in NAMES:
        shutil.copy(ROOT / name, copy / name)
    for name in DUMMIES:
        (copy / "vllm_kernels" / name).write_bytes(b"\x7fELF")
    return copy


def setup(clone: Path, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "setup.py", "--quiet", *arguments],
        cwd=clone, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def sdist(clone: Path) -> tuple[str, dict[str, bytes]]:
    """The name, and the files of the archive."""
    setup(clone, "sdist")
    (archive,) = (clone / "dist").iterdir()
    files = {}
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            if member.isfile():
                file = tar.extractfile(member)
                assert file is not None
                files[member.name.partition("/")[2]] = file.read()
    return archive.name, files


def git(clone: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *identity, *arguments], cwd=clone, check=True, capture_output=True)


def binaries(names: list[str]) -> list[str]:
    return [name for name in names if re.search(r"\.(so|o|py[cod])$", name)]


def test_an_sdist_has_no_binaries_and_all_sources(clone: Path):
    name, files = sdist(clone)
    assert name == "vllm_kernels-0.1.0.tar.gz"  # no clone: no commit
    assert not binaries(list(files))
    for source in (
        "tests/conftest.py", "tests/helpers.py", "tests/ops/test_rms_norm.py",
        "tests/csrc/CMakeLists.txt", "tools/keep_output.sh", "cmake/cuda.cmake",
        "csrc/stubs/torch_cuda.cpp", "docs/install.md", "vllm_kernels/_C.pyi",
        "vllm_kernels/toy_model/model.safetensors", "vllm_kernels/toy_model/LICENSE",
    ):  # fmt: skip
        assert source in files, source


def test_packages_have_no_binaries(clone: Path):
    """Not even where MANIFEST.in forgets them: CMake puts the libraries into a wheel."""
    (clone / "MANIFEST.in").write_text("")
    setup(clone, "build_py", "--build-lib", "lib")
    there = [str(path) for path in (clone / "lib").rglob("*") if path.is_file()]
    assert not binaries(there)
    for kept in ("py.typed", "_C.pyi", "toy_model/model.safetensors"):
        assert (clone / "lib" / "vllm_kernels" / kept).exists()


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_is_stamped(clone: Path, tmp_path: Path):
    (clone / ".gitignore").write_text("*.so\n*.egg-info\ndist\n")
    git(clone, "init", "-q")
    git(clone, "add", ".")
    git(clone, "commit", "-q", "-m", "one")
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=clone, capture_output=True, text=True)
    commit = done.stdout.strip()
    name, files = sdist(clone)
    assert name == f"vllm_kernels-0.1.0.dev0+g{commit[:8]}.tar.gz"
    stamp = files["vllm_kernels/_commit.py"].decode()
    assert f'COMMIT = "{commit}"' in stamp and "RELEASE = False" in stamp
    shutil.rmtree(clone / "dist")
    git(clone, "tag", "v0.1.0")
    name, files = sdist(clone)
    assert name == "vllm_kernels-0.1.0.tar.gz"
    assert "RELEASE = True" in files["vllm_kernels/_commit.py"].decode()
    # A build from the sdist, without git, knows its commit.
    shutil.rmtree(clone / ".git")
    shutil.rmtree(clone / "dist")
    (clone / "vllm_kernels" / "_commit.py").write_text(stamp)
    assert sdist(clone)[0] == f"vllm_kernels-0.1.0.dev0+g{commit[:8]}.tar.gz"


def test_the_range_of_transformers_is_that_of_the_extra():
    (oldest, old_minor), (newest, new_minor) = _requirements.TRANSFORMERS
    text = (ROOT / "pyproject.toml").read_text()
    assert f'"transformers>={oldest}.{old_minor},<{newest}.{new_minor}"' in text


@pytest.mark.parametrize(
    "found, complaint",
    [
        ("4.57.1", "x needs transformers >= 5.17, < 5.24, found 4.57.1: "),
        ("5.24.0.dev0", "found 5.24.0.dev0"),
        ("6.0", "found 6.0"),
        (None, "x needs transformers >= 5.17, < 5.24, found none: "),
    ],
)
def test_another_transformers_is_one_sentence(monkeypatch, found, complaint):
    def version(package: str) -> str:
        if found is None:
            raise _requirements.PackageNotFoundError(package)
        return found

    monkeypatch.setattr(_requirements, "version", version)
    with pytest.raises(ImportError, match=re.escape(complaint)):
        _requirements.require_transformers("x")


@pytest.mark.parametrize("found", ["5.17.0", "5.23.2"])
def test_a_transformers_in_range_is_taken(monkeypatch, found):
    monkeypatch.setattr(_requirements, "version", lambda package: found)
    _requirements.require_transformers("x")


def test_the_remedy_is_for_a_wheel_or_for_a_clone(monkeypatch, tmp_path):
    assert _requirements.install_line("demo").endswith("--no-build-isolation '.[demo]'")
    monkeypatch.setattr(_requirements, "__file__", str(tmp_path / "vllm_kernels" / "x.py"))
    assert _requirements.install_line("demo") == "pip install 'vllm_kernels[demo]'"
