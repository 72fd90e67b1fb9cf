"""Calls from several threads, from callbacks, from finalizers and from forks."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs transformers: pip install 'vllm_kernels[demo]'")

from engines import FUZZ_SECONDS, SMALL, by_transformers, greedy, prompts
from tiny_models import tiny_model
from transformers import AutoTokenizer

from vllm_kernels.__main__ import TOY_MODEL
from vllm_kernels.engine.engine import Engine
from vllm_kernels.engine.engine_lock import EngineLock
from vllm_kernels.engine.request import FinishReason, SamplingParams

CALLS = 10_000 if FUZZ_SECONDS else 240
CANCELLED = 10_000 if FUZZ_SECONDS else 300


def check_no_leak(engine: Engine) -> None:
    assert not engine.has_unfinished and not engine._requests and not engine._queues
    assert engine.manager.num_sequences == 0
    assert engine.statistics().cache.used_blocks == 0
    engine.manager.check_integrity()


@contextmanager
def hook(engine: Engine, call: Callable[[], object]) -> Iterator[None]:
    """Lets each pass call something from inside the model."""
    handle = engine.model.get_input_embeddings().register_forward_pre_hook(lambda *_: call())
    try:
        yield
    finally:
        handle.remove()


def test_threads_get_their_own_tokens(overlap: bool) -> None:
    """8 threads, each with streams (some left early) and batches of its own."""
    model = tiny_model()
    texts = prompts((5, 19, 33, 8, 40, 3))
    expected = [by_transformers(model, text) for text in texts]

    def wrong(engine: Engine, call: int) -> int:
        rng = random.Random(call)
        chosen = rng.sample(range(len(texts)), rng.randint(1, 3))
        lengths = [rng.randint(1, 12) for _ in chosen]
        params = [SamplingParams(max_tokens=length) for length in lengths]
        if rng.random() < 0.5:
            outputs = engine.generate([texts[i] for i in chosen], params)
            got = [output.completions[0].tokens for output in outputs]
        else:
            read = rng.choice((1, 12))
            lengths = [min(length, read) for length in lengths]
            got = [
                [output.token for output, _ in zip(engine.stream(texts[i], one), range(read))]
                for i, one in zip(chosen, params)
            ]
        return sum(
            tokens != expected[i][:length] for tokens, i, length in zip(got, chosen, lengths)
        )

    with Engine(model, overlap=overlap, **SMALL) as engine:
        with ThreadPoolExecutor(8) as pool:
            num_wrong = sum(pool.map(lambda call: wrong(engine, call), range(CALLS)))
        print(f"{CALLS} calls from 8 threads, {num_wrong} with wrong tokens")
        assert num_wrong == 0
        check_no_leak(engine)


def test_step_by_several_threads(overlap: bool) -> None:
    """Each token is returned once, to one of the threads, and in order."""
    model = tiny_model()
    texts = prompts()
    expected = [by_transformers(model, text) for text in texts]
    with Engine(model, overlap=overlap, **SMALL) as engine:
        got: dict[int, list[tuple[int, int]]] = {}
        lock = threading.Lock()

        def serve() -> None:
            while engine.has_unfinished:
                with lock:  # so that outputs of two steps are not swapped after the calls
                    for output in engine.step():
                        got.setdefault(output.request_id, []).append(output.token)

        for text in texts:
            engine.add_request(text, SamplingParams(max_tokens=20))
        threads = [threading.Thread(target=serve) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [got[request] for request in sorted(got)] == expected
        check_no_leak(engine)


def test_threads_wait_in_order_of_arrival() -> None:
    """A long call does not keep others out until its end."""
    model = tiny_model()
    long, short = prompts((5, 7))
    with Engine(model, **SMALL) as engine, ThreadPoolExecutor(1) as pool:
        params = SamplingParams(max_tokens=600)
        result = pool.submit(engine.generate, [long], params)
        while engine.statistics().num_running == 0:
            time.sleep(0.001)
        for _ in range(5):
            engine.generate([short], SamplingParams(max_tokens=3))
            assert not result.done()
        assert len(result.result()[0].completions[0].tokens) == 600


@pytest.mark.parametrize("method", ["step", "generate", "stream", "add_request", "abort", "close"])
def test_a_call_from_inside_a_step_is_refused(method: str) -> None:
    """It would deadlock, or run a pass inside a pass."""
    calls: dict[str, Callable[[Engine], Any]] = {
        "step": Engine.step,
        "generate": lambda engine: engine.generate([[1]]),
        "stream": lambda engine: next(engine.stream([1])),
        "add_request": lambda engine: engine.add_request([1]),
        "abort": lambda engine: engine.abort(0),
        "close": Engine.close,
    }
    (text,) = prompts((5,))
    with Engine(tiny_model(), **SMALL) as engine:
        expected = greedy(engine, [text])
        engine.add_request(text)
        with hook(engine, lambda: calls[method](engine)):
            with pytest.raises(RuntimeError, match="expected no call from inside a step"):
                engine.step()
            with (
                pytest.warns(RuntimeWarning, match="from inside a step"),
                pytest.raises(RuntimeError, match="expected no call from inside a step"),
            ):
                engine.generate([text])
        engine.step()
        assert greedy(engine, [text]) == expected


def test_a_tokenizer_that_calls_the_engine_is_refused() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TOY_MODEL)
    model = tiny_model(vocab_size=len(tokenizer))
    with Engine(model, tokenizer, **SMALL) as engine:

        def decode(*arguments: Any, **options: Any) -> str:
            engine.statistics()
            return ""

        tokenizer.decode = decode
        engine.add_request("A class")
        (output,) = engine.step()
        assert output.finish_reason is FinishReason.ERROR
        assert "from inside a step" in str(output.error)
        check_no_leak(engine)


def test_a_stream_that_is_collected_inside_a_step(overlap: bool) -> None:
    """Its finalizer runs where the lock is held. The request ends with the step."""
    model = tiny_model()
    texts = prompts((5, 9))
    expected = by_transformers(model, texts[0])
    with Engine(model, overlap=overlap, **SMALL) as engine:
        streams = [engine.stream(texts[1], SamplingParams(max_tokens=20))]
        next(streams[0])
        with hook(engine, streams.clear):
            assert greedy(engine, texts[:1]) == [expected]
        check_no_leak(engine)


def test_a_stream_that_another_thread_closes() -> None:
    with Engine(tiny_model(), **SMALL) as engine:
        stream = engine.stream([1, 2], SamplingParams(max_tokens=20))
        next(stream)
        thread = threading.Thread(target=stream.close)
        thread.start()
        thread.join()
        assert list(stream) == []
        check_no_leak(engine)


def test_abort_by_another_thread() -> None:
    with Engine(tiny_model(), **SMALL) as engine, ThreadPoolExecutor(2) as pool:
        params = SamplingParams(max_tokens=1_000)
        results = [
            pool.submit(engine.generate, [[1, 2]], params),
            pool.submit(lambda: list(engine.stream([3, 4], params))),
        ]
        while engine.statistics().num_running < 2:
            time.sleep(0.001)
        for request in (0, 1):
            engine.abort(request)
        (output,) = results[0].result()
        assert output.completions[0].finish_reason is FinishReason.ABORT
        assert all(one.finish_reason is None for one in results[1].result())
        check_no_leak(engine)


def test_close_while_other_threads_are_served() -> None:
    with ThreadPoolExecutor(2) as pool:
        engine = Engine(tiny_model(), **SMALL)
        params = SamplingParams(max_tokens=1_000)
        results = [
            pool.submit(engine.generate, [[1, 2], [5]], params),
            pool.submit(lambda: list(engine.stream([3, 4], params))),
        ]
        while engine.statistics().num_running < 3:
            time.sleep(0.001)
        engine.close()
        for result in results:
            with pytest.raises(RuntimeError, match="Engine: it was closed"):
                result.result()
        assert engine.manager.num_sequences == 0 and not engine.has_unfinished


def test_cancelled_requests_leave_no_blocks(overlap: bool) -> None:
    """By abort, by closing a stream and by deleting one, from 4 threads."""
    texts = prompts((5, 19, 33, 8))

    def cancel(engine: Engine, call: int) -> None:
        rng = random.Random(call)
        params = SamplingParams(max_tokens=20, n=rng.randint(1, 3), temperature=1.0)
        if rng.random() < 0.5:
            request = engine.add_request(rng.choice(texts), params)
            for _ in range(rng.randint(0, 2)):
                engine.step()
            with suppress(KeyError):  # another thread's steps may have finished it
                engine.abort(request)
            return
        stream = engine.stream(rng.choice(texts), params)
        for _ in range(rng.randint(0, 3)):
            next(stream)
        if rng.random() < 0.5:
            stream.close()

    with Engine(tiny_model(), overlap=overlap, **SMALL) as engine:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda call: cancel(engine, call), range(CANCELLED)))
        gc.collect()
        while engine.has_unfinished:
            engine.step()
        used = engine.statistics().cache.used_blocks
        print(f"{CANCELLED} requests cancelled from 4 threads, {used} blocks in use")
        check_no_leak(engine)


def test_a_fork_is_refused() -> None:
    with Engine(tiny_model(), **SMALL) as engine:
        stream = engine.stream([1, 2])
        next(stream)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                engine.step()
            except RuntimeError as error:
                code = 0 if f"got one in its fork {os.getpid()}" in str(error) else 2
            del stream  # its finalizer must not raise or wait
            os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert len(list(stream)) == 15


def test_pickling_and_copying_are_refused() -> None:
    with Engine(tiny_model(), **SMALL) as engine:
        for call in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="Engine: expected no pickling or copying"):
                call(engine)


def test_an_interrupt_while_waiting_for_the_lock() -> None:
    """The waiting thread leaves the queue, and the lock still works."""
    lock = EngineLock()
    has_lock, may_go = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            has_lock.set()
            may_go.wait()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    thread = threading.Thread(target=hold)
    thread.start()
    has_lock.wait()
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(KeyboardInterrupt), lock:
            raise AssertionError("the lock was free")
    finally:
        signal.signal(signal.SIGALRM, before)
    may_go.set()
    thread.join()
    with lock:
        assert not lock.try_acquire()
    assert lock.try_acquire()
    lock.release()
