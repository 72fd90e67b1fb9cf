"""``vllm_kernels vllm-check``: whether the vLLM that is installed here runs on our kernels."""

from __future__ import annotations

import sys
import tempfile

from ..._requirements import require_vllm
from ..._version import version
from .run_job import run_job

PROMPTS = [[(7 * i + j * j) % 256 for j in range(3 + 30 * i)] for i in range(4)]
LAYERS, TOKENS = 2, 16


def write_model(folder: str) -> None:
    """A Llama with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=512,
        initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def run_check() -> int:
    """Runs a small random model through vLLM twice, without and with our kernels.

    Returns:
        0: our kernels were called for each layer and step, and the tokens are those of vLLM's own.
        1: not so. 2: vLLM is missing, or its version is not supported.
    """
    try:
        require_vllm("vllm-check")
    except ImportError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        with tempfile.TemporaryDirectory() as folder:
            write_model(folder)
            run = {"model": folder, "prompts": PROMPTS, "max_tokens": TOKENS, "engine": {}}
            own, ours = (run_job({"run": run}, on)["run"] for on in (False, True))
    except RuntimeError as error:
        own = ours = {"error": str(error)}
    failure = own.get("error") or ours.get("error")
    if failure:
        print(f"vllm-check: {failure}", file=sys.stderr)
        return 1
    equal = sum(a == b for a, b in zip(own["tokens"], ours["tokens"]))
    called, stray = ours["calls"].get("forward", 0), sum(own["calls"].values())
    print(f"vllm_kernels {version}: {called} calls of its attention when on, {stray} when off")
    print(f"{equal} of {len(PROMPTS)} prompts: the {TOKENS} tokens that vLLM's own attention gives")
    if called < LAYERS * TOKENS or stray or equal < len(PROMPTS):
        print("vllm-check: FAILED", file=sys.stderr)
        return 1
    print("vllm-check: vLLM runs on these kernels")
    return 0
