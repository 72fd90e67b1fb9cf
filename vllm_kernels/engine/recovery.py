"""Finds the requests that make passes fail, so that the other requests go on."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from .request import Request, Sequence
from .scheduler import Scheduler

__all__ = ["ATTEMPTS", "Recovery", "name_requests", "set_request_ids"]

ATTEMPTS = 3
"""Number of failures in a row before the batch is divided, and before a lone request is ended."""


def name_requests(error: Exception, sequences: Iterable[Sequence]) -> None:
    """Adds the ids of the sequences' requests to an exception, as ``request_ids`` and as a note."""
    ids = list(dict.fromkeys(sequence.request.id for sequence in sequences))
    set_request_ids(error, ids)
    if sys.version_info >= (3, 11):
        error.add_note(f"Engine: a pass over requests {ids} failed")


def set_request_ids(error: Exception, ids: list[int]) -> None:
    """Adds ``request_ids`` to an exception."""
    vars(error)["request_ids"] = ids


class Recovery:
    """Bisects a batch whose passes fail.

    A failed pass is recomputed. Requests with 3 failures since their last token are suspects.
    Halves of the suspects then run in isolation, one half after the other. A half that fails is
    halved again. A half is cleared when each of its requests has a new token. A request that fails
    alone 3 times is the culprit.

    Args:
        scheduler: The engine's scheduler, which isolates requests.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._groups: list[list[Request]] = []  # groups to try; the last one runs now
        self._num_output: dict[Request, int] = {}  # number of tokens at the start of the trial
        self._num_unexplained = 0  # failures in a row that name no request

    @property
    def is_searching(self) -> bool:
        """Whether only a group of suspects may run."""
        return bool(self._groups)

    @property
    def is_hopeless(self) -> bool:
        """Whether to give up, because failures in a row name no request."""
        return self._num_unexplained >= ATTEMPTS

    def failed(self, requests: list[Request]) -> Request | None:
        """Records a failed pass over these requests. The list is empty if they are not known.

        Returns:
            The culprit, which the caller must end. None if it is not known yet.
        """
        if not requests:
            self._num_unexplained += 1
            return None
        for request in requests:
            request.num_failures += 1
            request.num_failures_alone += len(requests) == 1
        if len(requests) == 1 and requests[0].num_failures_alone >= ATTEMPTS:
            return requests[0]
        suspects = [request for request in requests if request.num_failures >= ATTEMPTS]
        if suspects and len(requests) > 1:
            if self._groups:
                self._groups.pop()
            middle = len(suspects) // 2
            self._groups += [half for half in (suspects[middle:], suspects[:middle]) if half]
            self._start_trial()
        return None

    def succeeded(self) -> None:
        """Records a pass that did not fail."""
        self._num_unexplained = 0

    def next_trial(self) -> None:
        """Starts the trial of the next group if this one is cleared. Call it before a pass."""
        if self._groups and not any(map(self._is_suspect, self._groups[-1])):
            self._groups.pop()
            self._start_trial()

    # Inner workings.

    def _is_suspect(self, request: Request) -> bool:
        if request.is_finished or request.is_paused:
            return False
        return request.num_output <= self._num_output[request]

    def _start_trial(self) -> None:
        """Isolates the last group. Without a group all requests may run."""
        while self._groups and all(request.is_finished for request in self._groups[-1]):
            self._groups.pop()
        group = self._groups[-1] if self._groups else None
        self._num_output = {request: request.num_output for request in group or ()}
        self._scheduler.isolate(group)
