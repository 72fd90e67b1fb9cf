"""The requests that an engine has not finished, and where their tokens go."""

from __future__ import annotations

import time
from collections import deque
from traceback import clear_frames

from .output_processor import OutputProcessor
from .outputs import TokenOutput
from .recovery import name_requests, set_request_ids
from .request import Request
from .sampling.pending_tokens import PendingTokens
from .scheduler import Scheduler

__all__ = ["OpenRequests"]


class OpenRequests:
    """Unfinished requests, and their outputs until somebody takes them.

    Args:
        outputs: It appends tokens to sequences, and ends them.
        scheduler: The engine's scheduler.

    Attributes:
        by_id: The requests.
        queues: Outputs for stream() and generate(), by request id.
        undelivered: Outputs of the other requests. The next step() returns these.
    """

    def __init__(self, outputs: OutputProcessor, scheduler: Scheduler) -> None:
        self.outputs = outputs
        self.by_id: dict[int, Request] = {}
        self.queues: dict[int, deque[TokenOutput]] = {}
        self.undelivered: list[TokenOutput] = []
        self._scheduler = scheduler

    def add(self, request: Request, queue: deque[TokenOutput] | None) -> None:
        """Adds a request. Its outputs go to ``queue``, or to ``undelivered`` if that is None."""
        self.by_id[request.id] = request
        if queue is not None:
            self.queues[request.id] = queue

    def end(self, request: Request, error: Exception | None = None) -> None:
        """Ends an unfinished request, by ABORT or with an error."""
        del self.by_id[request.id]
        if error is not None:
            set_request_ids(error, [request.id])
            clear_frames(error.__traceback__)  # they hold tensors
        self.undelivered = [one for one in self.undelivered if one.request_id != request.id]
        outputs = self.outputs.end(request, time.perf_counter(), error)
        if error is not None or request.id in self.queues:
            self.queues.get(request.id, self.undelivered).extend(outputs)

    def take(self, pending: PendingTokens) -> None:
        """Fetches the tokens of a pass and appends them to their sequences.

        A request ends with an error if its logits are not finite or the tokenizer fails.
        """
        try:
            new = pending.fetch()
        except Exception as error:  # of the pass, which ran asynchronously
            name_requests(error, pending.sequences)
            raise
        now = time.perf_counter()
        for sequence, tokens in zip(pending.sequences, new):
            sequence.num_pending = 0
            if sequence.finish_reason is not None:  # it ended meanwhile: drop the tokens
                continue
            request = sequence.request
            queue = self.queues.get(request.id, self.undelivered)
            try:
                if sequence in pending.extras.errors:
                    raise pending.extras.errors[sequence]
                if sequence in pending.extras.drafted:
                    self._scheduler.accept(sequence, len(tokens) - 1)
                for token in tokens:
                    queue.append(self.outputs.add_token(sequence, token, now))
                    if sequence.finish_reason is not None:
                        break
            except Exception as error:
                self.end(request, error)
                continue
            if request.is_finished:
                del self.by_id[request.id]
