"""Chooses the tokens of each forward pass.

The scheduler does continuous batching (Yu et al. 2022, Orca, OSDI 22) over paged memory (Kwon et
al. 2023, arXiv:2309.06180). A pass has one token of each decoding sequence, then prompt chunks up
to the token limit (chunked prefill, Agrawal et al. 2024, arXiv:2403.02310). If blocks run short,
the youngest sequence is preempted: swapped to the host, or freed and recomputed later. The
scheduler calls the KV-cache manager and knows no model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import count

import numpy as np

from ...errors import Error, InvalidArgument
from ...kv_cache import BatchBuffers, Integers, KVCacheManager, OutOfBlocks
from ..plan import Copies, Plan, SchedulerStatistics, blocks_at_most, num_usable_blocks
from ..request import FinishReason, Request, Sequence
from .admission import Admission, chunk
from .queues import Queues

__all__ = ["Scheduler"]


class Scheduler:
    """Takes requests and plans forward passes.

    A waiting sequence is held back while another one computes a prefix for it. The prefix must be
    half of its missing tokens and an eighth of ``max_batch_tokens``. The next pass finds the prefix
    cached. Sequences behind it wait too. While sequences run, admission leaves a hundredth of the
    blocks free, so that running sequences can grow without a preemption.

    Args:
        manager: The KV-cache manager. The scheduler owns all of its sequences.
        buffers: Host buffers that each plan fills, one per layer group. Their sizes bound a pass.
        max_batch_size: Maximum number of sequences per pass.
        max_batch_tokens: Maximum number of tokens per pass, >= max_batch_size.
        max_length: Maximum number of tokens per sequence.
        prefix_caching: Whether the manager shares blocks of running sequences.
        may_cascade: Called for each plan. True asks for ``Plan.num_common_blocks``.

    Raises:
        ValueError: A limit is too small.

    Example:
        >>> from vllm_kernels.engine.request import Request, SamplingParams
        >>> from vllm_kernels.engine.scheduler import Scheduler
        >>> from vllm_kernels.kv_cache import BatchBuffers, KVCacheManager
        >>> manager = KVCacheManager(num_blocks=8, block_size=4)
        >>> buffers = BatchBuffers.zeros(max_sequences=2, max_blocks=8, max_tokens=16)
        >>> scheduler = Scheduler(
        ...     manager, [buffers], max_batch_size=2, max_batch_tokens=16, max_length=32
        ... )
        >>> scheduler.add(Request(0, [1, 2, 3, 4, 5], SamplingParams(), arrival=0.0))
        >>> plan = scheduler.schedule()  # then run the model, and sample for these sequences
        >>> plan.counts, plan.input_ids.tolist()
        ([5], [1, 2, 3, 4, 5])
    """

    def __init__(
        self,
        manager: KVCacheManager,
        buffers: list[BatchBuffers],
        *,
        max_batch_size: int,
        max_batch_tokens: int,
        max_length: int,
        prefix_caching: bool = True,
        may_cascade: Callable[[], bool] = lambda: False,
    ) -> None:
        if max_batch_size < 1:
            raise InvalidArgument(f"Scheduler: max_batch_size: expected >= 1, got {max_batch_size}")
        if max_batch_tokens < max_batch_size:
            raise InvalidArgument(
                f"Scheduler: max_batch_tokens: expected at least {max_batch_size} (from "
                f"max_batch_size), got {max_batch_tokens}"
            )
        self.manager = manager
        self.buffers = buffers
        self.max_batch_size = max_batch_size
        self.max_batch_tokens = max_batch_tokens
        self.max_length = max_length
        self.prefix_caching = prefix_caching
        self._may_cascade = may_cascade
        # Only layer groups without a window can cascade.
        self._full_groups = [group for group, window in enumerate(manager.windows) if not window]
        self.statistics = SchedulerStatistics()
        self._queues = Queues()
        self._admission = Admission(
            manager,
            self._queues,
            max_batch_size=max_batch_size,
            max_batch_tokens=max_batch_tokens,
            prefix_caching=prefix_caching,
        )
        self._next_id = count()
        self._isolated: frozenset[Request] | None = None  # only these may run

    # Requests.

    def add(self, request: Request) -> None:
        """Adds a request. Its first sequence waits for admission.

        Raises:
            ValueError: The request does not fit even if it runs alone.
        """
        prompt, params = len(request.prompt), request.params
        if prompt < 1:
            raise InvalidArgument("Engine: prompt: expected at least one token, got none")
        if prompt + 1 > self.max_length:
            raise InvalidArgument(
                f"Engine: prompt: expected fewer than {self.max_length} tokens (max_length), got "
                f"{prompt}"
            )
        if params.n > self.max_batch_size:
            raise InvalidArgument(
                f"Engine: n: expected at most {self.max_batch_size} (max_batch_size), got "
                f"{params.n}"
            )
        longest = min(prompt + params.max_tokens, self.max_length)
        needed = blocks_at_most(longest, self.manager, self.max_batch_tokens)
        there = num_usable_blocks(self.manager)
        if needed > there:
            raise InvalidArgument(
                f"Engine: prompt and max_tokens: {longest} tokens need {needed} blocks, the cache "
                f"has {there}"
            )
        sequence = Sequence(next(self._next_id), request, 0, list(request.prompt))
        request.sequences.append(sequence)
        queues = self._queues
        (queues.waiting if self._may_run(request) else queues.held).append(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Ends a sequence and frees its blocks.

        The prefix cache can still find the blocks, unless the reason is an error.
        """
        self._queues.remove(sequence)
        if sequence.id in self.manager:
            num_computed = 0 if reason is FinishReason.ERROR else None
            self.manager.free(sequence.id, num_computed=num_computed)
        sequence.finish_reason = reason

    def isolate(self, requests: Collection[Request] | None) -> None:
        """Lets only these requests run. None lets all run."""
        self._isolated = None if requests is None else frozenset(requests)
        self.regroup()

    def regroup(self) -> None:
        """Moves sequences in and out of the held queue.

        Paused requests are held, and so are requests outside an isolated group. They lose their
        blocks and are recomputed later.
        """
        queues = self._queues
        for queue in (queues.running, queues.swapped):
            for sequence in [one for one in queue if not self._may_run(one.request)]:
                queue.remove(sequence)
                self.manager.free(sequence.id)
                sequence.num_computed = 0
                queues.held.append(sequence)
        idle = sorted(
            [*queues.waiting, *queues.held], key=lambda one: (one.request.arrival, one.id)
        )
        queues.waiting = deque(one for one in idle if self._may_run(one.request))
        queues.held = deque(one for one in idle if not self._may_run(one.request))

    @property
    def has_runnable(self) -> bool:
        """Whether a sequence waits, runs or is swapped out. Held ones do not count."""
        return self.num_unfinished > len(self._queues.held)

    @property
    def num_unfinished(self) -> int:
        """The number of sequences that wait, run, are swapped out or held."""
        return len(self._queues)

    @property
    def num_running(self) -> int:
        """The number of sequences that hold device blocks."""
        return len(self._queues.running)

    # Passes.

    def may_draft(self) -> list[Sequence]:
        """Returns the sequences that the next pass decodes, and whose tokens may be drafted.

        The parameters of the others depend on the tokens before each drafted one.
        """
        return [
            sequence
            for sequence in self._queues.running
            if sequence.num_to_compute == 1 and sequence.may_draft and self._room(sequence) > 1
        ]

    def schedule(self, drafts: Mapping[Sequence, list[int]] | None = None) -> Plan | None:
        """Plans the next pass and fills the buffers.

        Args:
            drafts: Drafted tokens of decoding sequences. They are verified as far as there is room.

        Returns:
            The plan, or None if no request may run.

        Raises:
            RuntimeError: A request finds too few blocks though nothing else runs.
        """
        if not self.has_runnable:
            return None
        copies: list[Copies] = []
        drafts = dict(drafts or {})
        chosen, budget = self._continue_running(drafts)
        admitted = self._admission.admit(chosen, budget, copies, self.statistics)
        while True:
            if not chosen:  # add() should have refused it
                first = (self._queues.swapped or self._queues.waiting)[0]
                raise Error(
                    f"Engine: request {first.request.id}: its {len(first.tokens)} tokens find too "
                    "few blocks though nothing else runs: abort() it"
                )
            plan = self._step(chosen, copies, drafts)
            if plan is not None:
                break
            if drafts:
                chosen |= dict.fromkeys(drafts, 1)
                drafts.clear()
            elif admitted:  # admission is an estimate: undo it, youngest first
                self._send_back(admitted.pop(), chosen)
            else:
                self._preempt_youngest(chosen, copies)
        self.statistics.num_steps += 1
        self.statistics.num_tokens += plan.num_tokens
        self.statistics.num_drafted += sum(map(len, drafts.values()))
        return plan

    def schedule_ahead(self) -> Plan | None:
        """Plans the next pass before the host knows the tokens of the last one.

        The plan has one token of each running sequence, unless the last pass ends it by length. A
        sequence that ends by a stop token or string is computed once too often.

        Returns:
            The plan, without input_ids. None if the next pass depends on unknown results: after an
            admission, with prompt chunks left, with parameters that depend on the tokens, or if
            blocks run short. Then fetch the tokens and call :meth:`schedule`.
        """
        queues = self._queues
        if queues.swapped or (queues.waiting and self._admission.may_admit(queues.waiting[0])):
            return None
        order = []
        for sequence in queues.running:
            params = sequence.request.params
            if sequence.num_to_compute != 1 or sequence.num_pending != 1 or params.needs_tokens:
                return None
            length = sequence.length
            ends = length - len(sequence.request.prompt) >= params.max_tokens
            if not ends and length < self.max_length:
                order.append(sequence)
        if not order:
            return None
        ids = [sequence.id for sequence in order]
        try:
            pairs = self.manager.step(ids, 1, self.buffers)
        except OutOfBlocks:
            return None
        self.statistics.num_steps += 1
        self.statistics.num_tokens += len(order)
        copies = [Copies("copy", pairs)] if len(pairs) else []
        return Plan(order, [1] * len(order), None, copies, self._common_blocks(ids))

    def record(self, plan: Plan) -> None:
        """Tells the manager the tokens of a plan by :meth:`schedule_ahead`, once they are known.

        The prefix cache needs them to find the plan's full blocks.
        """
        alive = [sequence for sequence in plan.sequences if sequence.finish_reason is None]
        ids = [sequence.id for sequence in alive]
        self.manager.record_tokens(ids, 1, [sequence.tokens[-1] for sequence in alive])

    def computed(self, plan: Plan) -> list[Sequence]:
        """Records that a plan's pass ran.

        Returns:
            The sequences that get a token now, in the order of the plan. A request with ``n`` > 1
            forks after its prompt. Its other sequences follow the first and share its blocks.
            Sequences that ended during the pass are included, because they have logits.
        """
        ready: list[Sequence] = []
        for sequence, num_tokens in zip(plan.sequences, plan.counts):
            sequence.num_computed += num_tokens - len(plan.drafts.get(sequence, ()))
            if sequence.finish_reason is not None:
                ready.append(sequence)
            elif sequence.num_to_compute == 0:
                ready += [sequence, *self._fork(sequence)]
        return ready

    def accept(self, sequence: Sequence, num_accepted: int) -> None:
        """Keeps the first drafted tokens of a pass, and frees the blocks of the others."""
        sequence.num_computed += num_accepted
        self.manager.truncate(sequence.id, sequence.num_computed)
        self.statistics.num_accepted += num_accepted

    def failed(self, requests: Iterable[Request]) -> None:
        """Records that a pass failed, which leaves blocks and queues in an unknown state.

        Args:
            requests: All unfinished requests. Their sequences return to waiting and are
                recomputed.
        """
        self.manager.free_batch(self.manager.sequence_ids())
        self.manager.reset_prefix_cache()
        self._queues.clear()
        for request in requests:
            for sequence in request.sequences:
                if sequence.finish_reason is None:
                    sequence.num_computed = sequence.num_pending = 0
                    self._queues.held.append(sequence)
        self.regroup()
        self.statistics.num_failed_passes += 1

    # Inner workings.

    def _may_run(self, request: Request) -> bool:
        if request.is_paused:
            return False
        return self._isolated is None or request in self._isolated

    def _continue_running(
        self, drafts: dict[Sequence, list[int]]
    ) -> tuple[dict[Sequence, int], int]:
        """Chooses tokens of the running sequences, decoding ones first.

        Drafts that exceed the limits are cut or removed.

        Returns:
            The number of tokens per sequence, and the rest of the token limit.
        """
        budget = self.max_batch_tokens
        chosen: dict[Sequence, int] = {}
        prompts = []
        for sequence in self._queues.running:
            if sequence.num_to_compute == 1:
                chosen[sequence] = 1
                budget -= 1
            else:
                prompts.append(sequence)
        for sequence in list(drafts):
            room = min(budget, self._room(sequence) - 1)
            if chosen.get(sequence) != 1 or room < 1:
                del drafts[sequence]
                continue
            drafts[sequence] = drafts[sequence][:room]
            chosen[sequence] += len(drafts[sequence])
            budget -= len(drafts[sequence])
        for sequence in prompts:
            if budget == 0:
                break
            chosen[sequence] = chunk(sequence, budget)
            budget -= chosen[sequence]
        return chosen, budget

    def _room(self, sequence: Sequence) -> int:
        """Returns the number of tokens that a sequence may still get."""
        return min(
            sequence.request.params.max_tokens - sequence.num_sampled,
            self.max_length - sequence.length,
        )

    def _step(
        self,
        chosen: dict[Sequence, int],
        copies: list[Copies],
        drafts: Mapping[Sequence, list[int]],
    ) -> Plan | None:
        """Allocates slots for all tokens. Returns None if there are too few blocks."""
        # Stable. Single tokens come first, those of the output before those of a prompt.
        order = sorted(chosen, key=lambda one: (chosen[one] > 1, not one.is_decoding))
        counts = [chosen[sequence] for sequence in order]
        input_ids = np.fromiter(
            (
                token
                for sequence, num_tokens in zip(order, counts)
                for token in (
                    *sequence.tokens[sequence.num_computed : sequence.num_computed + num_tokens],
                    *drafts.get(sequence, ()),
                )
            ),
            np.int64,
            sum(counts),
        )
        ids = np.fromiter((sequence.id for sequence in order), np.int64, len(order))
        try:
            pairs = self.manager.step(
                ids, np.array(counts, np.int64), self.buffers, tokens=input_ids
            )
        except OutOfBlocks:
            return None
        if len(pairs):
            copies = [*copies, Copies("copy", pairs)]
        common = self._common_blocks(ids[: counts.count(1)])
        return Plan(order, counts, input_ids, copies, common, drafts)

    def _common_blocks(self, ids: Integers) -> int:
        """Returns the number of leading blocks that all ``ids`` share in full-attention groups."""
        groups = self._full_groups
        if len(ids) < 2 or not groups or not self._may_cascade():
            return 0
        return min(self.manager.num_common_prefix_blocks(ids, group=group) for group in groups)

    def _send_back(self, sequence: Sequence, chosen: dict[Sequence, int]) -> None:
        """Undoes an admission."""
        del chosen[sequence]
        self._queues.running.remove(sequence)
        self.manager.free(sequence.id)
        sequence.num_computed = 0
        self._queues.waiting.appendleft(sequence)

    def _preempt_youngest(self, chosen: dict[Sequence, int], copies: list[Copies]) -> None:
        queues = self._queues
        if len(queues.running) == 1:
            raise Error(
                "Engine: one sequence alone finds too few blocks, which add() should have refused"
            )
        sequence = queues.running.pop()
        chosen.pop(sequence, None)
        sequence.num_preemptions += 1
        if self.manager.num_host_blocks and self.manager.can_swap_out([sequence.id]):
            copies.append(Copies("swap_out", self.manager.swap_out([sequence.id])))
            queues.swapped.appendleft(sequence)
            self.statistics.num_swapped += 1
        else:
            self.manager.free(sequence.id)
            sequence.num_computed = 0
            queues.waiting.appendleft(sequence)
            self.statistics.num_recomputed += 1

    def _fork(self, sequence: Sequence) -> list[Sequence]:
        """Creates the request's other sequences, once its prompt is computed."""
        request = sequence.request
        if sequence.width == 1:
            return []
        children = []
        for index in range(1, request.params.n):
            child = Sequence(
                next(self._next_id), request, index, list(sequence.tokens), sequence.num_computed
            )
            self.manager.fork(sequence.id, child.id)
            self._queues.run(child)
            children.append(child)
        request.sequences += children
        return children
