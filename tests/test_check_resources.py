"""tools/check_resources.py on what ptxas may say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parent.parent / "tools" / "check_resources.py"
GOOD = """\
ptxas info    : Compiling entry function 'some_kernel' for 'sm_90a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers, 4096 bytes smem
"""


SERIALIZED = "ptxas info    : ({}) {} in function 'some_kernel'"


@pytest.mark.parametrize(
    "line, status, said",
    [
        ("", 0, "0 with a stack frame or spills, 0 with small ones that are allowed, 0 with"),
        ("    24 bytes stack frame, 8 bytes spill stores, 8 bytes spill loads", 1,
         "norm/some.cu sm_90a some_kernel: 24 bytes stack frame"),
        (SERIALIZED.format("C7510", "wgmma.mma_async is serialized"), 1, "(C7510) wgmma"),
        (SERIALIZED.format("C7519", "warpgroup.arrive is injected"), 1, "(C7519) warpgroup"),
        (SERIALIZED.format("C7520", "wgmma.mma_async is serialized"), 1, "(C7520) wgmma"),
    ],
    ids=["good", "spills", "C7510", "C7519", "C7520"],
)  # fmt: skip
def test_what_ptxas_says(tmp_path, line, status, said):
    logs = tmp_path / "CMakeFiles" / "cuda_kernels.dir" / "csrc" / "cuda" / "norm"
    logs.mkdir(parents=True)
    (logs / "some.cu.o.log").write_text(GOOD + line + "\n")
    done = subprocess.run(
        [sys.executable, str(TOOL), str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == status and said in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    "target, size, stack, spills, status",
    [
        ("sm_100", 128, 16, 24, 0),
        ("sm_100", 128, 24, 24, 1),
        ("sm_100", 128, 16, 4000, 1),
        ("sm_100", 64, 16, 24, 1),
        ("sm_120", 128, 8, 8, 1),
        ("sm_90a", 128, 8, 8, 1),
    ],
)
def test_small_spills_are_allowed_by_name(tmp_path, target, size, stack, spills, status):
    name = "attention/prefill/sm80/instantiations/bf16.cu.o.log"
    log = tmp_path / "CMakeFiles" / "cuda_kernels.dir" / "csrc" / "cuda" / name
    log.parent.mkdir(parents=True)
    said = GOOD.replace("sm_90a", target).replace("some_kernel", f"someLi{size}ELNS0_6KvFormE2E")
    said = said.replace("0 bytes stack", f"{stack} bytes stack").replace(
        "0 bytes spill", f"{spills} bytes spill"
    )
    log.write_text(said)
    assert (
        subprocess.run([sys.executable, str(TOOL), str(tmp_path)], timeout=60).returncode == status
    )


@pytest.mark.parametrize("types, status", [("int", 0), ("int, float", 1)])
def test_a_kernel_of_the_host_alone(tmp_path, types, status):
    """ptxas compiled it for int. The host may launch it for other types, too."""
    source = "namespace ours { template <typename T> static void some_kernel(T) {} }\n"
    source += "void (*pointers[])() = {" + ", ".join(
        f"reinterpret_cast<void (*)()>(ours::some_kernel<{name}>)" for name in types.split(", ")
    ) + "};\n"  # fmt: skip
    folder = tmp_path / "CMakeFiles" / "cuda_kernels.dir" / "csrc" / "cuda"
    folder.mkdir(parents=True)
    subprocess.run(
        ["g++", "-x", "c++", "-c", "-", "-o", folder / "some.cu.o"],
        input=source, text=True, check=True,
    )  # fmt: skip
    said = GOOD.replace("some_kernel", "_ZN4ours11some_kernelIiEEvT_")
    (folder / "some.cu.o.log").write_text(said)
    done = subprocess.run(
        [sys.executable, str(TOOL), str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == status and f"{status} without device code" in done.stdout


def test_no_kernels_is_no_success(tmp_path):
    assert subprocess.run([sys.executable, str(TOOL), str(tmp_path)], timeout=60).returncode == 1
