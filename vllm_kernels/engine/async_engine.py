"""An engine for asyncio: a thread runs the passes, coroutines await their tokens."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Items
from contextlib import suppress
from queue import Empty, SimpleQueue
from time import monotonic
from weakref import finalize

from .engine import Engine
from .engine_lock import called_in_fork
from .outputs import (
    RequestOutput,
    TokenOutput,
    output_of,
    raise_if_all_failed,
)
from .prompts import Prompt, params_of_prompts
from .request import FinishReason, Request, SamplingParams

__all__ = ["AsyncEngine"]


class AsyncEngine:
    """Serves the coroutines of one event loop with an engine.

    One background thread owns the engine and runs its passes. Requests and cancellations go to the
    thread by a queue. The tokens of a pass come back in one batch. Ending a coroutine or closing a
    stream ends its request and frees its blocks.

    Back-pressure: at most ``max_requests`` requests are in the engine. Further calls wait in order
    of arrival. A stream whose reader is ``max_undelivered`` tokens behind is paused: it loses its
    blocks, and other requests use them. It goes on when the reader has taken half of the tokens.

    Deliveries: waking many coroutines after each pass takes time from the passes. So passes share a
    delivery if they end within ``delivery_interval``. The first token of a stream and the end of a
    request never wait.

    Args:
        engine: The engine. Its owner is this object now, which also closes it.
        max_requests: Maximum number of unfinished requests in the engine.
        max_undelivered: Maximum number of tokens per stream that wait for their reader. A stream
            may exceed it by the tokens of two passes.
        delivery_interval: Minimum time between two deliveries in seconds. 0 delivers after each
            pass.

    Raises:
        ValueError: A limit is less than 1, or the interval is negative.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_requests: int = 1024,
        max_undelivered: int = 256,
        delivery_interval: float = 0.02,
    ) -> None:
        for name, value in (("max_requests", max_requests), ("max_undelivered", max_undelivered)):
            if value < 1:
                raise ValueError(f"AsyncEngine: {name}: expected at least 1, got {value}")
        if not delivery_interval >= 0:
            raise ValueError(
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
        params: SamplingParams | None = None,
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
            stream = self._open(prompt, params, salt, self._max_undelivered)
            items = stream.items
            try:
                while items or not stream.is_ended:
                    if not items:
                        await stream.next_batch()
                        continue
                    output = items.popleft()
                    stream.taken += 1
                    if output.error is not None:
                        raise output.error
                    if output.finish_reason is not FinishReason.ABORT:
                        yield output
                    if stream.is_paused and stream.undelivered <= self._max_undelivered // 2:
                        self._worker.put(stream.resume)
                if stream.error is not None:
                    raise stream.error
            finally:
                self._close_stream(stream)

    async def generate(
        self,
        prompts: Items[Prompt],
        params: SamplingParams | Items[SamplingParams] | None = None,
        *,
        salt: str | bytes | None = None,
    ) -> list[RequestOutput]:
        """Serves all prompts and returns their outputs in the same order.

        Cancelling the task ends the requests. :meth:`Engine.generate` explains the arguments and
        the errors.
        """
        tasks = [
            asyncio.ensure_future(self._complete(prompt, one, salt))
            for prompt, one in zip(prompts, params_of_prompts(prompts, params))
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
            raise RuntimeError(
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
    """One request, seen by both threads. Its engine treats it as a queue of outputs."""

    def __init__(self, worker: _Worker, max_undelivered: int | None) -> None:
        self._worker = worker
        self._max_undelivered = max_undelivered  # None: the caller wants no tokens
        self.request: Request | None = None
        # The event loop writes these.
        self.items: deque[TokenOutput] = deque()
        self.error: Exception | None = None
        self.is_ended = False
        self.taken = 0
        self.waiter: asyncio.Future[None] | None = None
        # The worker writes these.
        self.sent = 0
        self.is_paused = False

    @property
    def undelivered(self) -> int:
        """The number of tokens that the reader has not taken."""
        return self.sent - self.taken

    def next_batch(self) -> asyncio.Future[None]:
        """Returns a future that is done when there is something new."""
        self.waiter = asyncio.get_running_loop().create_future()
        return self.waiter

    # The worker's side.

    def add(self, prompt: Prompt, params: SamplingParams | None, salt: str | bytes | None) -> None:
        try:
            self.request = self._worker.engine._add(prompt, params, salt, self)
        except Exception as error:
            self._worker.send(self, error)
            self._worker.is_urgent = True
        else:
            self._worker.streams.add(self)

    def append(self, output: TokenOutput) -> None:
        """Takes an output from the engine."""
        limit = self._max_undelivered
        if limit is not None:
            self.sent += 1
            self._worker.send(self, output)
            if self.sent == 1:
                self._worker.is_urgent = True
            if self.sent - self.taken >= limit and not self.is_paused:
                self._worker.full.append(self)
        if output.finish_reason is not None:
            assert self.request is not None
            if self.request.is_finished:
                self.end(None)

    def extend(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            self.append(output)

    def end(self, error: Exception | None) -> None:
        if self in self._worker.streams:
            assert self.request is not None
            self._worker.streams.remove(self)
            self._worker.engine._queues.pop(self.request.id, None)
            self._worker.send(self, error)
            self._worker.is_urgent = True

    def pause(self) -> None:
        """Keeps the request out of passes until the reader has caught up."""
        assert self.request is not None
        self.is_paused = True
        self._worker.engine._set_paused(self.request.id, True)
        self.resume()  # if the reader took its tokens before it could see is_paused

    def resume(self) -> None:
        assert self.request is not None and self._max_undelivered is not None
        if self.is_paused and self.undelivered <= self._max_undelivered // 2:
            self.is_paused = False
            self._worker.engine._set_paused(self.request.id, False)

    def cancel(self) -> None:
        if self in self._worker.streams:
            assert self.request is not None
            self._worker.streams.remove(self)
            self._worker.engine._cancel([self.request.id])


class _Worker:
    """The thread that owns the engine. The engine's lock still guards direct calls."""

    def __init__(self, engine: Engine, delivery_interval: float) -> None:
        self.engine = engine
        self.is_urgent = False  # deliver after this pass
        self._interval = delivery_interval
        self._next_delivery = 0.0
        self.loop: asyncio.AbstractEventLoop | None = None
        self.streams: set[_Stream] = set()  # their requests are not finished
        self.full: list[_Stream] = []  # to pause after this pass
        self._batch: list[tuple[_Stream, TokenOutput | Exception | None]] = []
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

    def send(self, stream: _Stream, item: TokenOutput | Exception | None) -> None:
        """Adds to the batch of this pass. An exception or None means the end of the request."""
        self._batch.append((stream, item))
        if self._is_idle:  # another thread called the engine
            self._commands.put(self._deliver)

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
                self._do_commands(wait=not self.engine._can_advance)
                if self.engine._can_advance and not self._is_closing:
                    self._pass()
        except BaseException as failure:
            self._failure = failure
        for stream in list(self.streams):
            stream.end(self.error())
        try:
            self.engine.close()
        except BaseException as failure:
            self._failure = self._failure or failure
        with self._end_lock:
            self._has_ended = True
        with suppress(RuntimeError):  # the event loop is closed
            self._do_commands(wait=False)  # the engine refuses new requests
            self._deliver()
        atexit.unregister(self._join)

    def _do_commands(self, wait: bool) -> None:
        if wait:
            self._is_idle = True
            self._deliver()
            command = self._commands.get()
            self._is_idle = False
            command()
        with suppress(Empty):
            while True:
                self._commands.get_nowait()()
        if self.is_urgent:
            self._deliver()

    def _pass(self) -> None:
        with self.engine._exclusive():
            self.engine._advance_or_recover()
        while self.full:
            self.full.pop().pause()
        if self.is_urgent or monotonic() >= self._next_delivery:
            self._deliver()

    def _deliver(self) -> None:
        """Sends the batch to the event loop, by one wake-up."""
        self.is_urgent = False
        self._next_delivery = monotonic() + self._interval
        if self._batch:
            batch, self._batch = self._batch, []
            assert self.loop is not None
            self.loop.call_soon_threadsafe(_receive, batch)

    def _join(self) -> None:
        """Ends the thread at the end of the process, before the interpreter goes."""
        self.put(self.close)
        self.thread.join()


def _receive(batch: list[tuple[_Stream, TokenOutput | Exception | None]]) -> None:
    """Hands the items to their streams and wakes the readers. Runs in the event loop."""
    for stream, item in batch:
        if type(item) is TokenOutput:
            stream.items.append(item)
        else:
            stream.is_ended, stream.error = True, item
        waiter = stream.waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
