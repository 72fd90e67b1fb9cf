"""An engine for asyncio: a thread runs the passes, coroutines await their tokens."""

from __future__ import annotations

import asyncio
import atexit
import os
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Items
from contextlib import suppress
from queue import Empty, SimpleQueue
from time import monotonic
from typing import NamedTuple
from weakref import finalize

from ..errors import Error, InvalidArgument
from .engine import Engine
from .engine_lock import called_in_fork
from .outputs import (
    RequestOutput,
    TokenOutput,
    output_of,
    raise_if_all_failed,
)
from .prompts import Prompt, params_of_prompts
from .request import Request, SamplingParams

__all__ = ["AsyncEngine"]


class AsyncEngine:
    """Serves the coroutines of one event loop with an engine.

    One background thread owns the engine and runs its passes. Requests and cancellations go to the
    thread by a queue. The tokens of a pass come back in one batch. Ending a coroutine or closing a
    stream ends its request and frees its blocks.

    Back-pressure: at most ``max_requests`` requests are in the engine. Further calls wait in order
    of arrival. A stream whose reader is ``max_undelivered`` tokens behind is paused: it loses its
    blocks, and other requests use them. It goes on when the reader has taken half of the tokens.

    Deliveries: waking many coroutines after each pass takes time from the passes, because Python
    runs one thread at a time. So passes share a delivery if they end within ``delivery_interval``.
    The first token of a stream and the end of a request never wait.

    Args:
        engine: The engine. Its owner is this object now, which also closes it.
        max_requests: Maximum number of unfinished requests in the engine.
        max_undelivered: Maximum number of tokens per stream that wait for their reader. A stream
            may exceed it by the tokens of two passes.
        delivery_interval: Minimum time between two deliveries in seconds. 0 delivers after each
            pass.

    Raises:
        ValueError: A limit is less than 1, or the interval is negative.

    Example:
        >>> import asyncio
        >>> from pathlib import Path
        >>> from transformers import AutoModelForCausalLM, AutoTokenizer
        >>> from vllm_kernels.integrations.transformers import AsyncEngine, Engine
        >>> folder = Path(vllm_kernels.__file__).parent / "toy_model"  # or your checkpoint
        >>> model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
        >>> tokenizer = AutoTokenizer.from_pretrained(folder)
        >>> async def serve():
        ...     async with AsyncEngine(Engine(model, tokenizer, max_length=256)) as engine:
        ...         return [output.text async for output in engine.stream("The for statement")]
        >>> len(asyncio.run(serve()))  # max_tokens
        16
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_requests: int = 1024,
        max_undelivered: int = 256,
        delivery_interval: float = 0.05,
    ) -> None:
        for name, value in (("max_requests", max_requests), ("max_undelivered", max_undelivered)):
            if value < 1:
                raise InvalidArgument(f"AsyncEngine: {name}: expected at least 1, got {value}")
        if not delivery_interval >= 0:
            raise InvalidArgument(
                f"AsyncEngine: delivery_interval: expected >= 0, got {delivery_interval}"
            )
        self.engine = engine
        self._places = asyncio.Semaphore(max_requests)
        self._max_undelivered = max_undelivered
        self._worker = _Worker(engine, delivery_interval)
        # The thread must not keep this object alive, and ends with it.
        finalize(self, self._worker.put, self._worker.close).atexit = False

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Ends all requests with RuntimeError, stops the thread and closes the engine."""
        if self._worker.put(self._worker.close):
            await asyncio.to_thread(self._worker.thread.join)

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        salt: str | bytes | None = None,
    ) -> AsyncIterator[TokenOutput]:
        """Serves one prompt and yields each token as soon as it is known.

        Leaving the loop early, cancelling the task or ``aclose()`` of the iterator ends the
        request. :meth:`Engine.add_request` explains the arguments.

        Raises:
            TypeError, ValueError: An argument is wrong.
            RuntimeError: The engine is closed or its thread failed, or this is another event loop.
            Exception: The request could not be served. The tokens before the error were yielded.
        """
        async with self._places:
            stream = self._open(prompt, sampling_params, salt, self._max_undelivered)
            try:
                while stream.items or not stream.is_ended:
                    if not stream.items:
                        await stream.next_batch()
                    items, stream.items = stream.items, []
                    for output in items:
                        stream.taken += 1
                        yield output
                        if stream.is_paused and stream.may_resume:
                            self._worker.put(stream.resume)
                if stream.error is not None:
                    raise stream.error
                if stream.request is not None and stream.request.error is not None:
                    raise stream.request.error
            finally:
                self._close_stream(stream)

    async def generate(
        self,
        prompts: Items[Prompt],
        sampling_params: SamplingParams | Items[SamplingParams] | None = None,
        *,
        salt: str | bytes | None = None,
    ) -> list[RequestOutput]:
        """Serves all prompts and returns their outputs in the same order.

        Cancelling the task ends the requests. :meth:`Engine.generate` explains the arguments and
        the errors.
        """
        tasks = [
            asyncio.ensure_future(self._complete(prompt, one, salt))
            for prompt, one in zip(prompts, params_of_prompts(prompts, sampling_params))
        ]
        try:
            outputs = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        raise_if_all_failed(outputs)
        return outputs

    # Inner workings.

    async def _complete(
        self, prompt: Prompt, params: SamplingParams | None, salt: str | bytes | None
    ) -> RequestOutput:
        """Serves one prompt without a wake-up per token."""
        async with self._places:
            stream = self._open(prompt, params, salt, None)
            try:
                while not stream.is_ended:
                    await stream.next_batch()
            finally:
                self._close_stream(stream)
        if stream.error is not None:
            raise stream.error
        assert stream.request is not None
        return output_of(stream.request)

    def _open(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        salt: str | bytes | None,
        max_undelivered: int | None,
    ) -> _Stream:
        loop, worker = asyncio.get_running_loop(), self._worker
        if worker.is_forked:
            raise worker.error()
        if worker.loop is None:
            worker.loop = loop
        if worker.loop is not loop:
            raise Error(
                "AsyncEngine: expected the event loop of its first call, got another one: make an "
                "engine for each loop"
            )
        stream = _Stream(worker, max_undelivered)
        if not worker.put(lambda: stream.add(prompt, params, salt)):
            raise worker.error()
        return stream

    def _close_stream(self, stream: _Stream) -> None:
        if not stream.is_ended:
            self._worker.put(stream.cancel)


class _Stream:
    """One request, seen by both threads."""

    def __init__(self, worker: _Worker, max_undelivered: int | None) -> None:
        self._worker = worker
        self._max_undelivered = max_undelivered or sys.maxsize
        self.request: Request | None = None
        # The event loop writes these.
        self.items: list[TokenOutput] = []
        self.error: Exception | None = None  # of AsyncEngine, or the refusal of the request
        self.is_ended = False
        self.taken = 0
        self.waiter: asyncio.Future[None] | None = None
        # The worker writes these.
        # Outputs since the last delivery, which the engine appends. None is kept without a limit.
        self.outbox: deque[TokenOutput] = deque(maxlen=0 if max_undelivered is None else None)
        self.sent = 0
        self.is_paused = False

    @property
    def undelivered(self) -> int:
        """The number of tokens that the reader has not taken."""
        return self.sent + len(self.outbox) - self.taken

    @property
    def is_full(self) -> bool:
        """Whether the request has to pause. It is asked once a pass."""
        undelivered = self.sent + len(self.outbox) - self.taken
        return undelivered >= self._max_undelivered and not self.is_paused

    @property
    def may_resume(self) -> bool:
        """Whether the reader has caught up."""
        return self.undelivered <= self._max_undelivered // 2

    def next_batch(self) -> asyncio.Future[None]:
        """Returns a future that is done when there is something new."""
        self.waiter = asyncio.get_running_loop().create_future()
        return self.waiter

    # The worker's side.

    def add(self, prompt: Prompt, params: SamplingParams | None, salt: str | bytes | None) -> None:
        worker = self._worker
        try:
            self.request = worker.engine._add(prompt, params, salt, self.outbox)
        except Exception as error:
            worker.refused.append(_Delivery(self, [], True, error))
        else:
            worker.streams[self] = self.request

    def take(self, error: Exception | None = None) -> _Delivery:
        """Empties the outbox, and forgets the stream if its request has ended."""
        request = self._worker.streams[self]
        items = list(self.outbox)
        self.outbox.clear()
        self.sent += len(items)
        is_ended = request.finish_time is not None or error is not None
        if is_ended:
            items = [output for output in items if output.token >= 0]  # others only tell the end
            del self._worker.streams[self]
            self._worker.engine._queues.pop(request.id, None)
        return _Delivery(self, items, is_ended, error)

    def pause(self) -> None:
        """Keeps the request out of passes until the reader has caught up."""
        assert self.request is not None
        self.is_paused = True
        self._worker.engine._set_paused(self.request.id, True)
        self.resume()  # if the reader took its tokens before it could see is_paused

    def resume(self) -> None:
        assert self.request is not None
        if self.is_paused and self.may_resume:
            self.is_paused = False
            self._worker.engine._set_paused(self.request.id, False)

    def cancel(self) -> None:
        request = self._worker.streams.pop(self, None)
        if request is not None:
            self._worker.engine._exclusive.cancel([request.id])


class _Delivery(NamedTuple):
    """What a stream gets at once."""

    stream: _Stream
    items: list[TokenOutput]
    is_ended: bool
    error: Exception | None


class _Worker:
    """The thread that owns the engine. The engine's lock still guards direct calls."""

    def __init__(self, engine: Engine, delivery_interval: float) -> None:
        self.engine = engine
        self._interval = delivery_interval
        self._next_delivery = 0.0
        self.loop: asyncio.AbstractEventLoop | None = None
        self.streams: dict[_Stream, Request] = {}  # whose end is not delivered
        self.refused: list[_Delivery] = []
        self._is_idle = False
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._pid = os.getpid()
        self._is_closing = False
        self._failure: BaseException | None = None  # why the thread has ended
        self._has_ended = False
        self._end_lock = threading.RLock()  # no command may come after the last one
        self.thread = threading.Thread(target=self._run, name="AsyncEngine", daemon=True)
        self.thread.start()
        atexit.register(self._join)

    @property
    def is_forked(self) -> bool:
        """Whether this process is a fork, which has no such thread."""
        return os.getpid() != self._pid

    def put(self, command: Callable[[], None]) -> bool:
        """Lets the thread call ``command``. Returns False if it has ended or is not in a fork."""
        with self._end_lock:
            if self._has_ended or self.is_forked:
                return False
            self._commands.put(command)
            return True

    def close(self) -> None:
        """Ends the thread. This is a command."""
        self._is_closing = True

    def error(self) -> RuntimeError:
        """Returns what callers get after the end of the thread."""
        if self.is_forked:
            return called_in_fork("AsyncEngine", self._pid)
        if self._failure is None:
            return RuntimeError("AsyncEngine: it was closed: make a new one")
        error = RuntimeError(f"AsyncEngine: its thread failed: {self._failure!r}")
        error.__cause__ = self._failure
        return error

    # Inner workings.

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._pass()
                self._do_commands(wait=self._is_idle)
        except BaseException as failure:
            self._failure = failure
        deliveries = [stream.take(self.error()) for stream in list(self.streams)]
        try:
            self.engine.close()
        except BaseException as failure:
            self._failure = self._failure or failure
        with self._end_lock:
            self._has_ended = True
        with suppress(RuntimeError):  # the event loop is closed
            self._do_commands(wait=False)  # the engine refuses new requests
            self._send(deliveries + self.refused)
        atexit.unregister(self._join)

    def _do_commands(self, wait: bool) -> None:
        with suppress(Empty):
            if wait:
                command = self._commands.get()
                self._is_idle = False
                command()
            while True:
                self._commands.get_nowait()()

    def _pass(self) -> None:
        """Runs a pass if there is work, and delivers tokens."""
        engine = self.engine
        with engine._exclusive:  # also while it reads what other threads' passes may write
            self._is_idle = not engine._can_advance
            if not self._is_idle:
                engine._advance_or_recover()
            deliveries = self._collect() if self._is_time() else []
            full = [stream for stream in self.streams if stream.is_full]
        self._send(deliveries)
        for stream in full:
            stream.pause()

    def _is_time(self) -> bool:
        """Whether to deliver now. First tokens and ends of requests do not wait."""
        return (
            self._is_idle
            or bool(self.refused)
            or monotonic() >= self._next_delivery
            or any(
                request.finish_time is not None or (stream.outbox and not stream.sent)
                for stream, request in self.streams.items()
            )
        )

    def _collect(self) -> list[_Delivery]:
        """Takes what is new for the streams."""
        self._next_delivery = monotonic() + self._interval
        deliveries, self.refused = self.refused, []
        for stream, request in list(self.streams.items()):
            if stream.outbox or request.finish_time is not None:
                deliveries.append(stream.take())
        return deliveries

    def _send(self, deliveries: list[_Delivery]) -> None:
        """Wakes the event loop once."""
        if deliveries:
            assert self.loop is not None
            self.loop.call_soon_threadsafe(_receive, deliveries)

    def _join(self) -> None:
        """Ends the thread at the end of the process, before the interpreter goes."""
        self.put(self.close)
        self.thread.join()


def _receive(deliveries: list[_Delivery]) -> None:
    """Hands the items to their streams and wakes the readers. Runs in the event loop."""
    for stream, items, is_ended, error in deliveries:
        stream.items += items
        stream.is_ended, stream.error = is_ended, error
        waiter, stream.waiter = stream.waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
