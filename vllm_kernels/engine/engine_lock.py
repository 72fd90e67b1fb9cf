"""The lock around an engine's calls: first come, first served, not reentrant, not forked.

Who has it also ends the requests that nobody waits for any more.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..errors import EngineBusy, Error

if TYPE_CHECKING:
    from .open_requests import OpenRequests
    from .tensor_parallel import Ranks

__all__ = ["EngineLock", "Exclusive", "called_in_fork"]


def called_in_fork(name: str, pid: int) -> Error:
    """The error of a call in a fork of process ``pid``, which made the object."""
    return Error(
        f"{name}: expected a call in process {pid}, which made it, got one in its fork "
        f"{os.getpid()}: make an engine in each process"
    )


class EngineLock:
    """Serialises the calls of several threads, in order of arrival.

    ``threading.Lock`` has no order: a thread that generates would take it again at once, and others
    would wait for its last token. This lock goes to the thread that waits longest.

    Raises:
        EngineBusy: The thread holds the lock already.
        Error: The process was forked.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        # Reentrant: the garbage collector may run a stream's cleanup inside these methods.
        self._mutex = threading.RLock()
        self._owner: int | None = None
        self._waiting: deque[tuple[threading.Lock, int]] = deque()

    def __enter__(self) -> None:
        me = threading.get_ident()
        if self._is_forked:
            raise called_in_fork("Engine", self._pid)
        if self._owner == me:
            raise EngineBusy(
                "Engine: expected no call from inside a step (by a hook of the model, a tokenizer "
                "or a signal handler), got one: call the engine after the step"
            )
        gate = None
        try:
            with self._mutex:
                if self._owner is None:
                    self._owner = me
                    return
                gate = threading.Lock()
                gate.acquire()
                self._waiting.append((gate, me))
            gate.acquire()  # release() opens it and makes this thread the owner
        except BaseException:  # KeyboardInterrupt
            with self._mutex:
                if gate is not None and (gate, me) in self._waiting:
                    self._waiting.remove((gate, me))
            if self._owner == me:
                self.release()
            raise

    def __exit__(self, *error: object) -> None:
        self.release()

    def try_acquire(self) -> bool:
        """Takes the lock if it is free. A forked process never gets it."""
        if self._is_forked:
            return False
        with self._mutex:
            if self._owner is not None:
                return False
            self._owner = threading.get_ident()
            return True

    def release(self) -> None:
        """Hands the lock to the thread that waits longest."""
        with self._mutex:
            if self._waiting:
                gate, self._owner = self._waiting.popleft()
                gate.release()
            else:
                self._owner = None

    @property
    def _is_forked(self) -> bool:
        return os.getpid() != self._pid


class Exclusive:
    """An engine's lock in a ``with`` statement, which also ends cancelled requests.

    A contextmanager takes 3 us longer.

    Args:
        requests: The engine's requests.
        ranks: They hear of requests that end.
    """

    __slots__ = ("_cancelled", "_lock", "_ranks", "_requests")

    def __init__(self, requests: OpenRequests, ranks: Ranks | None) -> None:
        self._lock = EngineLock()
        self._cancelled: deque[int] = deque()  # ids of requests that nobody waits for
        self._requests = requests
        self._ranks = ranks

    def __enter__(self) -> None:
        self._lock.__enter__()
        if self._cancelled:
            try:
                self._end_cancelled()
            except BaseException:
                self._lock.release()
                raise

    def __exit__(self, *error: object) -> None:
        self._lock.release()
        if self._cancelled:
            self.cancel(())

    def cancel(self, request_ids: Iterable[int]) -> None:
        """Ends requests without waiting for the lock, so that a finalizer may call it.

        If a thread has the lock, that thread ends the requests when it releases the lock.
        """
        self._cancelled.extend(request_ids)
        while self._cancelled and self._lock.try_acquire():
            try:
                self._end_cancelled()
            finally:
                self._lock.release()

    def _end_cancelled(self) -> None:
        requests = self._requests
        while self._cancelled:
            request_id = self._cancelled.popleft()
            requests.queues.pop(request_id, None)
            if request_id in requests.by_id:
                if self._ranks is not None:
                    self._ranks.note("abort", request_id)
                requests.end(requests.by_id[request_id])
