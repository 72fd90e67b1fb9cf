"""The queues of the scheduler: where a sequence waits, and which ones run."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ..request import Sequence

__all__ = ["Queues"]


@dataclass
class Queues:
    """Every unfinished sequence is in one of these."""

    waiting: deque[Sequence] = field(default_factory=deque)  # hold no blocks
    swapped: deque[Sequence] = field(default_factory=deque)  # hold host blocks
    running: list[Sequence] = field(default_factory=list)  # in order of arrival
    held: deque[Sequence] = field(default_factory=deque)  # may not run now; hold no blocks

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running) + len(self.swapped) + len(self.held)

    def clear(self) -> None:
        """Empties all queues."""
        for queue in (self.waiting, self.swapped, self.running, self.held):
            queue.clear()

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence from its queue, if it is in one."""
        for queue in (self.running, self.waiting, self.swapped, self.held):
            if sequence in queue:
                queue.remove(sequence)

    def run(self, sequence: Sequence) -> None:
        """Adds a sequence to the running ones, in order of arrival."""
        running = self.running
        at = len(running)
        while at and running[at - 1].request.arrival > sequence.request.arrival:
            at -= 1
        running.insert(at, sequence)
