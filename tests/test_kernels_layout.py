"""tools/build_kernels_layout.py: the folder works beside this library, as `kernels` loads it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROGRAM = """
import importlib.util, json, sys
from pathlib import Path
before = set(sys.modules)
import torch
with_torch = set(sys.modules)
variant = Path(sys.argv[1])
name = json.loads((variant / "metadata.json").read_text())["id"]
spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
module = importlib.util.module_from_spec(spec)
sys.modules[name] = module
spec.loader.exec_module(module)

others = {other.split(".")[0] for other in set(sys.modules) - with_torch} - {name}
assert others <= set(sys.stdlib_module_names) | {"torch"}, others
namespace = sys.modules[f"{name}._ops"].NAMESPACE
assert hasattr(getattr(torch.ops, namespace), "rms_norm")
assert not hasattr(torch.ops.vllm_kernels, "rms_norm")

import vllm_kernels
from vllm_kernels.compat import flash_attn

torch.set_grad_enabled(False)
q, k, v = torch.randn(3, 2, 7, 4, 64)
assert torch.equal(module.flash_attn_func(q, k, v, causal=True),
                   flash_attn.flash_attn_func(q, k, v, causal=True))
layer = torch.nn.RMSNorm(64)
layer.variance_epsilon = 1e-6
layer.forward = module.layers.RMSNorm.forward.__get__(layer)
torch.testing.assert_close(layer(q), torch.nn.functional.rms_norm(q, (64,), eps=1e-6),
                           rtol=1e-5, atol=1e-5)
x = torch.randn(5, 128)
torch.testing.assert_close(module.layers.SiluAndMul()(x),
                           torch.nn.functional.silu(x[:, :64]) * x[:, 64:], rtol=1e-5, atol=1e-5)
try:
    module.rms_norm(x, x[:, :3], x[0], 1e-6)
except module.InvalidArgument as error:
    assert str(error).startswith("rms_norm: "), error
else:
    raise AssertionError("no error")
meta = torch.empty(2, 7, 4, 64, device="meta")
assert module.flash_attn_func(meta, meta, meta).is_meta
"""


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (ROOT / f"build/cmake-{sys.implementation.cache_tag}/build.ninja").exists():
        pytest.skip("needs the objects of `make build`")
    target = tmp_path_factory.mktemp("kernels")
    command = [sys.executable, ROOT / "tools/build_kernels_layout.py", target]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


def variant_of(layout: Path, backend: str) -> Path:
    return next((layout / "build").glob(f"torch-stable-abi211-{backend}*-linux"))


def test_module(layout: Path):
    """Own ops beside vllm_kernels', the same results, and no package but torch."""
    variant = variant_of(layout, "cpu")
    program = [sys.executable, "-c", PROGRAM, variant]
    done = subprocess.run(program, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    metadata = json.loads((variant / "metadata.json").read_text())
    assert metadata["python-depends"] == []


def run_offline(program: str, layout: Path) -> None:
    """The folder is the repository vllm/kernels."""
    environment = {"LOCAL_KERNELS": f"vllm/kernels={layout}", "HF_HUB_OFFLINE": "1", "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr


def test_kernels_package(layout: Path):
    """As LOCAL_KERNELS finds it, offline."""
    pytest.importorskip("kernels")
    run_offline(
        "import kernels, torch\n"
        "module = kernels.get_kernel('vllm/kernels', version=1, backend='cpu')\n"
        "q = torch.randn(1, 3, 2, 64)\n"
        "assert module.flash_attn_func(q, q, q).shape == q.shape\n",
        layout,
    )


GENERATE = """
import sys, torch, transformers
from transformers.utils import import_utils
# The newest transformers asks for a version of kernels that the package index may lack.
import_utils.is_kernels_available.__wrapped__.__defaults__ = ("0", "9")

config = transformers.LlamaConfig(
    vocab_size=128, hidden_size=128, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, eos_token_id=None,
)
torch.manual_seed(0)
model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
for parameter in model.parameters():
    parameter.data *= 5  # clear winners
tokens = torch.randint(2, 128, (2, 20))
mask = torch.ones_like(tokens)
mask[0, :7] = 0
texts = {}
for attention in ("eager", "vllm/kernels"):
    model.set_attn_implementation(attention, allow_all_kernels=True)
    texts[attention] = model.generate(tokens, attention_mask=mask, max_new_tokens=12)
assert torch.equal(texts["eager"], texts["vllm/kernels"]), texts
assert any(name.startswith("vllm_kernels_") for name in sys.modules)  # and not the package
assert "vllm_kernels" not in sys.modules
"""


def test_transformers_loads_it(layout: Path):
    """`attn_implementation` names the folder; the tokens are those of eager attention."""
    pytest.importorskip("kernels")
    pytest.importorskip("transformers")
    run_offline(GENERATE, layout)
