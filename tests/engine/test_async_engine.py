"""An engine for asyncio: streams, cancellation, back-pressure, failures and the end."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs transformers: pip install 'vllm_kernels[demo]'")

from engines import FUZZ_SECONDS, SMALL, by_transformers, prompts
from tiny_models import VOCABULARY, tiny_model
from transformers import PreTrainedModel

from vllm_kernels.engine.async_engine import AsyncEngine
from vllm_kernels.engine.engine import Engine
from vllm_kernels.engine.request import FinishReason, SamplingParams

PARAMS = SamplingParams(max_tokens=20)
LONG = SamplingParams(max_tokens=1_000)
CANCELLED = 10_000 if FUZZ_SECONDS else 200


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60 + 10 * FUZZ_SECONDS))


@asynccontextmanager
async def async_engine(
    model: PreTrainedModel, *, overlap: bool = False, **limits: float
) -> AsyncIterator[AsyncEngine]:
    """Checks that all is free in the end."""
    engine = AsyncEngine(Engine(model, overlap=overlap, **SMALL), **limits)
    async with engine:
        yield engine
        await settled(engine)
        assert not engine.engine.has_unfinished and not engine.engine._queues
        assert engine.engine.statistics().cache.used_blocks == 0
    assert not engine._worker.thread.is_alive() and engine.engine.cache.is_freed


async def settled(engine: AsyncEngine) -> None:
    """Returns when the thread has seen all earlier commands and has nothing to do."""
    await engine.generate([[1]], SamplingParams(max_tokens=1))


async def tokens_of(engine: AsyncEngine, text: list[int], params: Any = PARAMS) -> list[int]:
    return [output.token async for output in engine.stream(text, params)]


def test_each_gets_its_own_tokens(overlap: bool) -> None:
    model = tiny_model()
    texts = prompts()
    expected = [by_transformers(model, text) for text in texts]

    async def test() -> None:
        async with async_engine(model, overlap=overlap) as engine:
            results = await asyncio.gather(
                *(tokens_of(engine, text) for text in texts * 2), engine.generate(texts, PARAMS)
            )
            assert results[:-1] == expected * 2
            assert [one.completions[0].tokens for one in results[-1]] == expected

    run(test())


def test_several_sequences_of_a_request() -> None:
    params = SamplingParams(max_tokens=6, n=3, temperature=1.0, seed=4)
    model = tiny_model()
    with Engine(model, **SMALL) as plain:
        (expected,) = plain.generate([[1, 2, 3]], params)

    async def test() -> None:
        async with async_engine(model) as engine:
            got: list[list[int]] = [[], [], []]
            async for output in engine.stream([1, 2, 3], params):
                got[output.index].append(output.token)
            assert got == [completion.tokens for completion in expected.completions]

    run(test())


@pytest.mark.parametrize("interval", [0, 10])
def test_one_wake_up_per_pass(interval: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or fewer with an interval: then first tokens and ends have one."""

    async def test() -> None:
        async with async_engine(tiny_model(), delivery_interval=interval) as engine:
            loop = asyncio.get_running_loop()
            call, calls = loop.call_soon_threadsafe, 0

            def counting(*arguments: Any) -> Any:
                nonlocal calls
                calls += 1
                return call(*arguments)

            monkeypatch.setattr(loop, "call_soon_threadsafe", counting)
            got = await asyncio.gather(*(tokens_of(engine, [1, 2, at]) for at in range(4)))
            assert [len(tokens) for tokens in got] == [20] * 4
            passes = engine.engine.statistics().scheduler.num_steps
            assert (passes - 2 <= calls <= passes) if interval == 0 else calls <= 2 * 4
            monkeypatch.undo()

    run(test())


def test_cancelled_requests_leave_no_blocks(overlap: bool) -> None:
    """By cancelling the task, leaving the loop, closing the iterator and deleting it."""

    async def cancel(engine: AsyncEngine, call: int) -> None:
        rng = random.Random(call)
        text = [rng.randrange(1, VOCABULARY) for _ in range(rng.randint(1, 30))]
        kind, read = rng.randrange(4), rng.randint(0, 3)
        if kind == 0:
            task = asyncio.create_task(
                engine.generate([text, [1]], LONG) if read else tokens_of(engine, text, LONG)
            )
            for _ in range(rng.randint(0, 50)):
                await asyncio.sleep(0)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            return
        stream = engine.stream(text, LONG)
        for _ in range(read):
            await anext(stream)
        if kind == 1:
            async for _ in stream:
                break
        elif kind == 2:
            await stream.aclose()

    async def test() -> None:
        async with async_engine(tiny_model(), overlap=overlap) as engine:
            for call in range(0, CANCELLED, 10):
                await asyncio.gather(*(cancel(engine, call + at) for at in range(10)))
            gc.collect()
            await asyncio.sleep(0)  # finalizers of iterators are tasks
            await asyncio.sleep(0)
            await settled(engine)
            used = engine.engine.statistics().cache.used_blocks
            print(f"{CANCELLED} coroutines cancelled, {used} blocks in use")

    run(test())


def test_a_slow_reader_is_paused(overlap: bool) -> None:
    """It holds no blocks meanwhile, others go on, and it gets all tokens in the end."""
    model = tiny_model()
    texts = prompts((5, 9))
    expected = [by_transformers(model, text, 60) for text in texts]
    params = SamplingParams(max_tokens=60)

    async def test() -> None:
        async with async_engine(model, overlap=overlap, max_undelivered=8) as engine:
            slow = engine.stream(texts[0], params)
            got = [(await anext(slow)).token]
            for _ in range(3):
                assert await tokens_of(engine, texts[1], params) == expected[1]
            (stream,) = engine._worker.streams
            # What the reader took first may have counted when the stream was paused.
            least = max(8 - stream.taken, 8 // 2 + 1)
            assert least <= stream.undelivered <= 8 + 2 and stream.is_paused
            await settled(engine)
            assert engine.engine.manager.num_sequences == 0
            async for output in slow:
                got.append(output.token)
            assert got == expected[0]
            assert await tokens_of(engine, texts[0], params) == expected[0]

    run(test())


@pytest.mark.parametrize("max_undelivered", [1, 2, 3])
def test_small_limits(max_undelivered: int, overlap: bool) -> None:
    """Streams pause and resume all the time."""
    model = tiny_model()
    texts = prompts()
    expected = [by_transformers(model, text) for text in texts]

    async def test() -> None:
        limits = {"max_undelivered": max_undelivered, "max_requests": 2}
        async with async_engine(model, overlap=overlap, **limits) as engine:
            got = await asyncio.gather(*(tokens_of(engine, text) for text in texts))
            assert got == expected

    run(test())


def test_requests_wait_for_a_place() -> None:
    async def test() -> None:
        async with async_engine(tiny_model(), max_requests=2) as engine:
            streams = [engine.stream([1, at], PARAMS) for at in range(2)]
            for stream in streams:
                await anext(stream)
            third = asyncio.create_task(tokens_of(engine, [5]))
            for _ in range(5):
                await anext(streams[1])
            assert len(engine.engine._requests) <= 2 and not third.done()
            await streams[0].aclose()
            assert len(await third) == 20
            await streams[1].aclose()

    run(test())
    with Engine(tiny_model(), **SMALL) as engine:
        for name in ("max_requests", "max_undelivered"):
            with pytest.raises(ValueError, match=f"AsyncEngine: {name}: expected at least 1, got"):
                AsyncEngine(engine, **{name: 0})
        with pytest.raises(ValueError, match="delivery_interval: expected >= 0, got -1"):
            AsyncEngine(engine, delivery_interval=-1)


def test_a_wrong_request_is_refused_alone() -> None:
    model = tiny_model()
    expected = by_transformers(model, [2, 3])

    async def test() -> None:
        async with async_engine(model) as engine:
            other = asyncio.create_task(tokens_of(engine, [2, 3]))
            with pytest.raises(ValueError, match="prompt: expected tokens from 0 to 127"):
                await tokens_of(engine, [VOCABULARY])
            with pytest.raises(ValueError, match="prompt: expected at least one token"):
                await engine.generate([[1], []], LONG)
            with pytest.raises(TypeError, match="prompts: expected a list"):
                await engine.generate("text")
            assert await other == expected

    run(test())


def test_a_request_that_fails_hurts_no_other() -> None:
    model = tiny_model()
    texts = prompts((5, 9))
    expected = [by_transformers(model, text) for text in texts]
    token = min(set(range(1, VOCABULARY)).difference(*texts, *expected))

    def refuse(_: object, arguments: Any) -> None:
        if (arguments[0] == token).any():
            raise KeyError("poison")

    async def test() -> None:
        async with async_engine(model) as engine:
            handle = model.get_input_embeddings().register_forward_pre_hook(refuse)
            texts_and_poison = [texts[0], [1, token], texts[1]]
            results = await asyncio.gather(
                *(tokens_of(engine, text) for text in texts_and_poison), return_exceptions=True
            )
            assert isinstance(results[1], KeyError) and results[::2] == expected
            outputs = await engine.generate(texts_and_poison, PARAMS)
            assert isinstance(outputs[1].error, KeyError)
            assert outputs[1].completions[0].finish_reason is FinishReason.ERROR
            assert [one.completions[0].tokens for one in outputs[::2]] == expected
            handle.remove()

    with pytest.warns(RuntimeWarning, match="a pass failed"):
        run(test())


def test_close_while_requests_are_served() -> None:
    model = tiny_model()
    (text,) = prompts((5,))
    expected = by_transformers(model, text)

    async def test() -> None:
        engine = AsyncEngine(Engine(model, **SMALL), max_requests=2)
        tasks = [
            asyncio.create_task(call)
            for call in (tokens_of(engine, [1], LONG), engine.generate([[2]], LONG))
        ]
        waiting = asyncio.create_task(tokens_of(engine, [3], LONG))  # for a place
        stream_ended = engine.engine.statistics
        while stream_ended().num_running < 2:
            await asyncio.sleep(0.001)
        await engine.aclose()
        await engine.aclose()  # again: nothing
        for task in (*tasks, waiting):
            with pytest.raises(RuntimeError, match="AsyncEngine: it was closed"):
                await task
        with pytest.raises(RuntimeError, match="AsyncEngine: it was closed"):
            await tokens_of(engine, [1])
        assert engine.engine.cache.is_freed and engine.engine.manager.num_sequences == 0

    run(test())
    assert by_transformers(model, text) == expected  # the model has its attention again


def test_a_thread_that_fails_tells_everyone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        engine = AsyncEngine(Engine(tiny_model(), **SMALL))
        stream = engine.stream([1], LONG)
        await anext(stream)
        others = [asyncio.create_task(tokens_of(engine, [at], LONG)) for at in range(1, 4)]
        others.append(asyncio.create_task(engine.generate([[1]], LONG)))
        await asyncio.sleep(0.01)

        def fails() -> None:
            raise MemoryError("full")

        monkeypatch.setattr(engine.engine, "_advance_or_recover", fails)
        for task in others:
            with pytest.raises(RuntimeError, match="its thread failed: MemoryError") as caught:
                await task
            assert isinstance(caught.value.__cause__, MemoryError)
        with pytest.raises(RuntimeError, match="its thread failed: MemoryError"):
            async for _ in stream:
                pass
        with pytest.raises(RuntimeError, match="its thread failed: MemoryError"):
            await engine.generate([[1]])
        await engine.aclose()
        assert engine.engine.cache.is_freed

    run(test())


def test_direct_calls_by_other_threads() -> None:
    """They serialise with the engine's thread, and end its requests where asked to."""
    model = tiny_model()
    texts = prompts((5, 9))
    expected = [by_transformers(model, text) for text in texts]

    async def test() -> None:
        async with async_engine(model) as engine:
            direct = asyncio.to_thread(engine.engine.generate, texts[:1], PARAMS)
            outputs, tokens = await asyncio.gather(direct, tokens_of(engine, texts[1]))
            assert outputs[0].completions[0].tokens == expected[0] and tokens == expected[1]
            stream = engine.stream(texts[0], LONG)
            request = (await anext(stream)).request_id
            engine.engine.abort(request)
            assert all([one.finish_reason is None async for one in stream])

    run(test())


def test_abort_of_a_paused_stream() -> None:
    """Another thread ends it while the engine's thread sleeps. The reader gets what there is."""

    async def test() -> None:
        async with async_engine(tiny_model(), max_undelivered=4) as engine:
            stream = engine.stream([1, 2], LONG)
            request = (await anext(stream)).request_id
            while not engine._worker._is_idle:
                await asyncio.sleep(0.001)
            engine.engine.abort(request)
            assert len([one async for one in stream]) >= 3

    run(test())


def test_another_event_loop_is_refused() -> None:
    engine = AsyncEngine(Engine(tiny_model(), **SMALL))

    async def test(ends: Callable[[], Any]) -> None:
        await engine.generate([[1]])
        await ends()

    run(test(lambda: asyncio.sleep(0)))
    with pytest.raises(RuntimeError, match="expected the event loop of its first call"):
        run(test(engine.aclose))
    run(engine.aclose())


def test_a_fork_is_refused() -> None:
    async def test() -> None:
        async with async_engine(tiny_model()) as engine:
            await engine.generate([[1]])
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    asyncio.run(tokens_of(engine, [1]))
                except RuntimeError as error:
                    code = 0 if f"its fork {os.getpid()}" in str(error) else 2
                os._exit(code)
            assert os.waitpid(child, 0)[1] == 0

    run(test())


def test_a_forgotten_engine_ends_its_thread() -> None:
    model = tiny_model()
    engine = AsyncEngine(Engine(model, **SMALL))
    thread = engine._worker.thread
    del engine
    gc.collect()
    thread.join(10)
    assert not thread.is_alive() and threading.active_count() >= 1
    Engine(model, **SMALL).close()  # the model is free


def test_the_process_ends_without_aclose() -> None:
    code = """
import asyncio
from engines import SMALL
from tiny_models import tiny_model
from vllm_kernels.integrations.transformers import AsyncEngine, Engine, SamplingParams
engine = AsyncEngine(Engine(tiny_model(), **SMALL))
async def main():
    async for output in engine.stream([1, 2], SamplingParams(max_tokens=1000)):
        print(output.request_id)
        raise SystemExit(3)
asyncio.run(main())
"""
    folders = [os.path.dirname(__file__), os.path.dirname(os.path.dirname(__file__)), *sys.path]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(folders)},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (3, "0\n"), done.stderr
    assert "Exception" not in done.stderr and "terminate" not in done.stderr
