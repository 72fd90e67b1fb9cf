"""Errors of an engine: exact texts, which begin with "Engine:", and their classes."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

pytest.importorskip("transformers", reason="needs transformers: pip install 'vllm_kernels[demo]'")

from engines import SMALL, greedy
from tiny_models import tiny_model
from transformers import T5Config, T5ForConditionalGeneration

import vllm_kernels as vk
from vllm_kernels.engine.async_engine import AsyncEngine
from vllm_kernels.engine.engine import Engine
from vllm_kernels.engine.request import SamplingParams
from vllm_kernels.engine.sparse import PageSelection


def t5() -> T5ForConditionalGeneration:
    config = T5Config(
        d_model=64, d_kv=32, num_layers=1, num_heads=2, d_ff=64, vocab_size=100,
        decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config).eval()


def of_tiny_model(**options: object) -> Callable[[], object]:
    return lambda: Engine(tiny_model(), **{**SMALL, **options})


CONSTRUCTOR = {
    "T5": (lambda: Engine(t5()), NotImplementedError, "encoder-decoder models are not served"),
    "layout": (
        of_tiny_model(layout="nhd"),
        ValueError,
        "layout: expected vllm or NHD or HND, got 'nhd'",
    ),
    "no word": (of_tiny_model(layout=None), TypeError, "layout: expected a str, got None"),
    "no dtype": (of_tiny_model(cache_dtype=[1]), TypeError, "cache_dtype: expected a str, got [1]"),
    "dtype": (
        of_tiny_model(cache_dtype="fp9"),
        ValueError,
        "cache_dtype: expected auto, fp8, fp8_e4m3, fp8_e5m2, int8, int8_per_token, "
        "int4_per_token, got fp9",
    ),
    "scale a token": (
        of_tiny_model(cache_dtype="int8_per_token", k_scale=0.5),
        ValueError,
        "k_scale: expected 1.0 (only 8-bit caches have one scale, this one is int8_per_token), got "
        "0.5",
    ),
    "sparse, int4": (
        lambda: Engine(
            tiny_model(head_dim=64),
            **SMALL | {"cache_dtype": "int4_per_token", "sparse": PageSelection(budget=80)},
        ),
        NotImplementedError,
        "sparse: expected None with cache_dtype='int4_per_token', got PageSelection(budget=80, "
        "sink_pages=1, recent_pages=4, dense_layers=2, per_kv_head=False)",
    ),
    "int4, head size": (
        lambda: Engine(tiny_model(head_dim=48), **SMALL | {"cache_dtype": "int4_per_token"}),
        NotImplementedError,
        "head size: expected a multiple of 32 from 32 to 256 for int4_per_token, got 48",
    ),
    "sparse, a scale a token": (
        of_tiny_model(cache_dtype="int8_per_token", sparse=PageSelection(budget=80)),
        NotImplementedError,
        "sparse: expected None with cache_dtype='int8_per_token', got PageSelection(budget=80, "
        "sink_pages=1, recent_pages=4, dense_layers=2, per_kv_head=False)",
    ),
    "block_size": (
        of_tiny_model(block_size=3),
        NotImplementedError,
        "block_size: expected a power of two from 1 to 256, got 3",
    ),
    "scale": (
        of_tiny_model(cache_dtype="int8", k_scale=0.0),
        ValueError,
        "k_scale: expected more than 0 and finite, got 0.0",
    ),
    "text": (
        of_tiny_model(v_scale="1"),
        TypeError,
        "v_scale: expected a number or a tensor, got '1'",
    ),
    "pool": (
        of_tiny_model(num_blocks=10**12),
        ValueError,
        "num_blocks: expected 1 to 2147483645, got 1000000000000",
    ),
    "host": (
        of_tiny_model(host_bytes=10**18),
        ValueError,
        "num_host_blocks: expected 0 to 2147483645, got 122070312500000",
    ),
    "tokens": (
        of_tiny_model(max_batch_tokens=3),
        ValueError,
        "max_batch_tokens: expected at least 4 (from max_batch_size), got 3",
    ),
}


@pytest.mark.parametrize("call, kind, text", CONSTRUCTOR.values(), ids=CONSTRUCTOR)
def test_constructor(call: Callable[[], object], kind: type[Exception], text: str) -> None:
    """The engine is named, whichever of its parts refuses."""
    with pytest.raises(vk.Error, match=f"^Engine: {re.escape(text)}$") as raised:
        call()
    assert isinstance(raised.value, kind)


def test_a_cache_that_does_not_fit() -> None:
    model = tiny_model()
    text = r"^Engine: 10,000,000 blocks: need [\d,]+ bytes on cpu, free [\d,]+$"
    with pytest.raises(vk.OutOfMemory, match=text) as raised:
        Engine(model, **SMALL | {"num_blocks": 10**7, "block_size": 256})
    assert isinstance(raised.value, MemoryError)
    Engine(model, **SMALL).close()  # the model is free again


def test_busy() -> None:
    """A call inside a step, and calls that need an engine without requests."""
    with Engine(tiny_model(), **SMALL) as engine:
        engine.add_request([1, 2])
        for name in ("reset", "warm_up"):
            text = f"^Engine: {name}: expected no unfinished sequences, got 1$"
            with pytest.raises(vk.EngineBusy, match=text):
                getattr(engine, name)()
        hook = engine.model.get_input_embeddings().register_forward_pre_hook(
            lambda *_: engine.statistics()
        )
        with pytest.raises(vk.EngineBusy, match=r"^Engine: expected no call from inside a step"):
            engine.step()
        hook.remove()
    assert issubclass(vk.EngineBusy, vk.Error) and issubclass(vk.Error, RuntimeError)


def test_unknown_request() -> None:
    with Engine(tiny_model(), **SMALL) as engine:
        with pytest.raises(vk.UnknownRequest) as raised:
            engine.abort("7")
        assert str(raised.value) == "Engine: abort: unknown or finished request '7'"
        assert isinstance(raised.value, KeyError)


def test_sampling_params_by_name() -> None:
    """The keyword is the one of vLLM's ``LLM.generate``."""
    params = SamplingParams(max_tokens=3)
    with Engine(tiny_model(), **SMALL) as engine:
        expected = greedy(engine, [[1, 2]], max_tokens=3)
        (output,) = engine.generate([[1, 2]], sampling_params=params)
        assert [output.completions[0].tokens] == expected
        assert [[one.token for one in engine.stream([1, 2], sampling_params=params)]] == expected
        engine.add_request([1, 2], sampling_params=params)
        assert len(engine.step()) == 1
        text = r"^Engine: sampling_params: expected SamplingParams, got \{'n': 2\}: give Sampling"
        with pytest.raises(vk.InvalidType, match=text):
            engine.generate([[1]], sampling_params={"n": 2})


def test_async_engine_limits() -> None:
    text = r"^AsyncEngine: max_requests: expected at least 1, got 0$"
    with (
        Engine(tiny_model(), **SMALL) as engine,
        pytest.raises(vk.InvalidArgument, match=text),
    ):
        AsyncEngine(engine, max_requests=0)


def test_closed() -> None:
    engine = Engine(tiny_model(), **SMALL)
    engine.close()
    with pytest.raises(vk.Error, match=r"^Engine: it was closed: make a new one$"):
        engine.step()
