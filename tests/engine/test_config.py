"""The options of an engine: their checks, and what a constructor that fails leaves behind."""

from __future__ import annotations

import dataclasses
import inspect

import numpy as np
import pytest

pytest.importorskip("transformers", reason="needs transformers: pip install 'vllm_kernels[demo]'")

from engines import SMALL, by_transformers, greedy, prompts
from tiny_models import tiny_model

from vllm_kernels.engine import engine as engine_module
from vllm_kernels.engine import passes
from vllm_kernels.engine.config import EngineConfig
from vllm_kernels.engine.engine import Engine
from vllm_kernels.engine.model_runner import ModelRunner
from vllm_kernels.hf.attention_interface import ENGINES


def test_options() -> None:
    """The constructor and its config have the same names, types and defaults."""
    parameters = inspect.signature(Engine).parameters.values()
    options = [
        (one.name, one.annotation, one.default)
        for one in parameters
        if one.kind is inspect.Parameter.KEYWORD_ONLY
    ]
    fields = dataclasses.fields(EngineConfig)
    assert options == [(field.name, field.type, field.default) for field in fields]
    assert Engine.__doc__ is not None
    for name, _, _ in options:
        assert f" {name}: " in Engine.__doc__ or f" {name}, " in Engine.__doc__


@pytest.mark.parametrize(
    ("name", "minimum"),
    [
        ("num_blocks", None),
        ("cache_bytes", None),
        ("max_batch_tokens", 1),
        ("max_length", 8),
        ("host_bytes", 0),
        ("max_batch_size", 1),
    ],
)
def test_sizes(name: str, minimum: int | None) -> None:
    for value, got in (("1G", "'1G'"), (1.5, "1.5")):
        with pytest.raises(TypeError, match=f"^Engine: {name}: expected an integer, got {got}$"):
            EngineConfig(**{name: value})
    assert getattr(EngineConfig(**{name: np.int64(9)}), name) == 9
    if getattr(EngineConfig(), name) is None:
        EngineConfig(**{name: None})
    else:
        with pytest.raises(TypeError, match=f"^Engine: {name}: expected an integer, got None$"):
            EngineConfig(**{name: None})
    if minimum is None:  # what is too small for a block is refused with the block's size
        EngineConfig(**{name: -1})
        return
    EngineConfig(**{name: minimum})
    message = f"^Engine: {name}: expected at least {minimum}, got {minimum - 1}$"
    with pytest.raises(ValueError, match=message):
        EngineConfig(**{name: minimum - 1})


def test_a_config_does_not_change() -> None:
    config = EngineConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.block_size = 32  # type: ignore[misc]
    with pytest.raises(
        TypeError, match=r"Engine\.__init__\(\) got an unexpected keyword.*'blocks'"
    ):
        Engine(tiny_model(), blocks=16)


@pytest.mark.parametrize(
    "part", ["layer_options", "KVCacheManager", "KVCache", "ModelRunner", "Scheduler", "verify"]
)
def test_a_constructor_that_fails(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is as before, and another engine can have it."""
    model = tiny_model()
    (text,) = prompts((9,))
    expected = by_transformers(model, text)
    caches = []

    def fails(*arguments: object, **options: object) -> None:
        raise MemoryError(part)

    class Cache(passes.KVCache):
        def __init__(self, *arguments: object, **options: object) -> None:
            super().__init__(*arguments, **options)
            caches.append(self)

    with monkeypatch.context() as patch:
        patch.setattr(passes, "KVCache", Cache)
        patch.setattr(engine_module if part == "verify" else passes, part, fails)
        with pytest.raises(MemoryError, match=part):
            Engine(model, **SMALL)
    assert len(caches) == (part in ("ModelRunner", "Scheduler", "verify"))
    assert all(cache.is_freed for cache in caches)
    assert model.config._attn_implementation == "sdpa" and model not in ENGINES
    storages = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    assert len(storages) == len(list(model.parameters()))  # none is joined with another
    assert by_transformers(model, text) == expected
    with Engine(model, **SMALL) as engine:
        assert greedy(engine, [text]) == [expected]


def test_close_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps after the one that fails still run."""

    def fails(runner: ModelRunner) -> None:
        raise MemoryError("close")

    monkeypatch.setattr(ModelRunner, "close", fails)
    model = tiny_model()
    engine = Engine(model, fused=False, **SMALL)
    assert ENGINES[model]() is engine
    with pytest.raises(MemoryError, match="close"):
        engine.close()
    assert engine.cache.is_freed and model not in ENGINES
    assert model.config._attn_implementation == "sdpa"
    engine.close()  # again: nothing
