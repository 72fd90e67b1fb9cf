"""transformers' flash_attention_2, continuous batching too, by vllm_kernels.compat.install()."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch

transformers = pytest.importorskip("transformers")
batching = pytest.importorskip("transformers.generation.continuous_batching.continuous_api")

from transformers.utils import import_utils  # noqa: E402

from vllm_kernels import compat  # noqa: E402
from vllm_kernels.compat import flash_attn  # noqa: E402


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """compat.install(); the names of calls made."""
    calls = []

    def counted(name: str):
        function = getattr(flash_attn, name)

        @functools.wraps(function)
        def call(*args: object, **kwargs: object) -> object:
            calls.append(name)
            return function(*args, **kwargs)

        return call

    for name in ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"):
        monkeypatch.setattr(flash_attn, name, counted(name))
    compat.install()
    yield calls
    compat.uninstall()


def toy(family: str, **more: object) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        family, vocab_size=128, hidden_size=128, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=256,
        pad_token_id=0, bos_token_id=1, eos_token_id=None, **more,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for parameter in model.parameters():
        parameter.data *= 5  # clear winners
    return model.eval()


def choose(model: transformers.PreTrainedModel, attention: str) -> None:
    """With CUDA reported as present, without which transformers refuses FlashAttention."""
    has_cuda = import_utils.is_torch_cuda_available
    has_flash = import_utils.is_flash_attn_2_available
    has_cuda.cache_clear()
    has_flash.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        assert has_flash()
        if model.config.model_type == "gpt_oss":  # refused, since the real one lacks its sinks
            model.config._attn_implementation = attention
        else:
            model.set_attn_implementation(attention)
    has_cuda.cache_clear()


@pytest.mark.parametrize(
    "family, more",
    [
        ("llama", {}),
        ("mistral", {"sliding_window": 6}),
        ("gemma2", {"sliding_window": 6, "attn_logit_softcapping": 5.0}),
        ("gpt_oss", {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 6}),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_generate(device, installed, family, more):
    """Tokens of an unpadded and of a padded batch are those of eager attention."""
    model = toy(family, **more).to(device)
    tokens = torch.randint(2, 128, (3, 20), device=device)
    mask = torch.ones_like(tokens)
    mask[1, :7] = 0
    mask[2, :19] = 0
    for attention_mask in (torch.ones_like(tokens), mask):
        options = {"attention_mask": attention_mask, "max_new_tokens": 12, "do_sample": False}
        choose(model, "eager")
        want = model.generate(tokens, **options)
        choose(model, "flash_attention_2")
        installed.clear()
        got = model.generate(tokens, **options)
        assert torch.equal(got, want)
        assert installed, "another attention ran"


@pytest.fixture
def inputs_cleared_in_time(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """transformers (5.17 and 5.23) clears a loop's inputs on the default stream and fills them on
    another, which does not wait: on a GPU that others use too, prompts may be cleared after they
    came: the first token of each, or all of them, are 0 then."""
    if device == "cpu":
        return
    reset = batching.ContinuousBatchProcessor.reset

    def reset_and_wait(self: object) -> None:
        reset(self)
        torch.cuda.synchronize()

    monkeypatch.setattr(batching.ContinuousBatchProcessor, "reset", reset_and_wait)


def test_continuous_batching(device, installed, inputs_cleared_in_time):
    """Prompts through the varlen function; decodes, on a GPU, through the cache and its tables."""
    if not hasattr(transformers, "ContinuousBatchingConfig"):
        pytest.skip(f"no ContinuousBatchingConfig in transformers {transformers.__version__}")
    model = toy("llama").to(device)
    prompts = [torch.randint(3, 128, (count,)).tolist() for count in (5, 20, 33)]
    options = transformers.GenerationConfig(
        max_new_tokens=10, do_sample=False, eos_token_id=2, pad_token_id=0
    )
    want = [
        model.generate(torch.tensor([p], device=device), generation_config=options)[0, len(p) :]
        for p in prompts
    ]
    choose(model, "flash_attention_2")
    installed.clear()
    results = model.generate_batch(
        prompts,
        generation_config=options,
        continuous_batching_config=transformers.ContinuousBatchingConfig(
            num_blocks=16, max_batch_tokens=64, max_blocks_per_request=2
        ),
    )
    got = [result.generated_tokens for result in results.values()]
    assert got == [tokens.tolist() for tokens in want]
    assert "flash_attn_varlen_func" in installed
    assert device == "cpu" or "flash_attn_with_kvcache" in installed
