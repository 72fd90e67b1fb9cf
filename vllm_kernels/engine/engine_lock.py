"""The lock around an engine's calls: first come, first served, not reentrant, not forked."""

from __future__ import annotations

import os
import threading
from collections import deque

from ..errors import EngineBusy, Error

__all__ = ["EngineLock", "called_in_fork"]


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
