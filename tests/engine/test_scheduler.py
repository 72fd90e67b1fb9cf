"""The scheduler without a model: a memory of token ids stands for keys and values.

Every plan is carried out on that memory, and what a model would read through the block tables is
compared with the tokens of the sequences.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers", reason="needs transformers: pip install 'vllm_kernels[demo]'")

from vllm_kernels.engine.plan import Plan
from vllm_kernels.engine.request import FinishReason, Request, SamplingParams, Sequence
from vllm_kernels.engine.scheduler import Scheduler
from vllm_kernels.kv_cache import BatchBuffers, KVCacheManager

BLOCK_SIZE = 4
MAX_LENGTH = 64


class Memory:
    """A scheduler, and what its plans do to a cache whose entries are token ids."""

    def __init__(
        self,
        num_blocks: int,
        *,
        host_blocks: int = 0,
        windows: tuple[int, ...] = (0,),
        batch_size: int = 4,
        batch_tokens: int = 16,
        prefix_caching: bool = True,
        overlap: bool = False,
    ) -> None:
        self.manager = KVCacheManager(
            num_blocks,
            BLOCK_SIZE,
            num_host_blocks=host_blocks,
            windows=windows,
            prefix_caching=prefix_caching,
        )
        self.buffers = [
            BatchBuffers.zeros(batch_size, MAX_LENGTH // BLOCK_SIZE, batch_tokens) for _ in windows
        ]
        self.scheduler = Scheduler(
            self.manager,
            self.buffers,
            max_batch_size=batch_size,
            max_batch_tokens=batch_tokens,
            max_length=MAX_LENGTH,
            prefix_caching=prefix_caching,
        )
        self.device = np.full((num_blocks, BLOCK_SIZE), -1)
        self.host = np.full((max(host_blocks, 1), BLOCK_SIZE), -1)
        self.requests: list[Request] = []
        self.overlap = overlap
        self.pending: list[Sequence] | None = None  # whose next tokens are drawn and not known yet

    def add(self, prompt: list[int], **params: object) -> Request:
        request = Request(
            len(self.requests), prompt, SamplingParams(**params), arrival=len(self.requests)
        )
        self.scheduler.add(request)
        self.requests.append(request)
        return request

    def step(self) -> Plan | None:
        pending, self.pending = self.pending, None
        if pending is not None:
            plan = self.scheduler.schedule_ahead()
            if plan is None:
                self._take(pending)
                return self.step()
            assert set(plan.sequences) <= set(pending)
            self._pass(plan)
            self._take(pending)
            self.scheduler.record(plan)
        else:
            plan = self.scheduler.schedule()
            if plan is None:
                return None
            self._pass(plan)
        ready = self.scheduler.computed(plan)
        for sequence in ready:
            sequence.num_pending = 1
        if self.overlap:
            self.pending = ready
        else:
            self._take(ready)
        return plan

    def run(self) -> None:
        for _ in range(10_000):
            if self.step() is None:
                break
        else:
            pytest.fail("the scheduler makes no progress")
        self.manager.check_integrity()
        assert self.manager.num_sequences == 0
        for request in self.requests:
            for sequence in request.sequences:
                assert sequence.output == expected(request, sequence.index), sequence

    def _pass(self, plan: Plan) -> None:
        self._write(plan)
        for row, (sequence, count) in enumerate(zip(plan.sequences, plan.counts)):
            self._check(row, sequence, count)

    def _write(self, plan: Plan) -> None:
        for copies in plan.copies:
            source, destination = {
                "copy": (self.device, self.device),
                "swap_out": (self.device, self.host),
                "swap_in": (self.host, self.device),
            }[copies.kind]
            for block, other in copies.pairs:
                destination[other] = source[block]
        assert sum(plan.counts) == plan.num_tokens <= self.scheduler.max_batch_tokens
        assert len(plan.sequences) <= self.scheduler.max_batch_size
        assert plan.counts[: plan.num_single] == [1] * plan.num_single
        for buffers in self.buffers:
            slots = buffers.slot_mapping[: plan.num_tokens].numpy()
            assert len(set(slots)) == len(slots), "two tokens in one slot"
            input_ids = plan.input_ids
            if input_ids is None:
                input_ids = [next_token(s.tokens, s.index) for s in plan.sequences]
            self.device.reshape(-1)[slots] = input_ids

    def _check(self, row: int, sequence: Sequence, count: int) -> None:
        """What attention reads for this row is the sequence's tokens."""
        length = sequence.num_computed + count
        tokens = [*sequence.tokens, next_token(sequence.tokens, sequence.index)]
        for window, buffers in zip(self.manager.windows, self.buffers):
            assert buffers.seq_lens[row] == length
            first = max(sequence.num_computed - window + 1, 0) if window else 0
            table = buffers.block_tables[row].numpy()
            for place in range(first, length):
                got = self.device[table[place // BLOCK_SIZE], place % BLOCK_SIZE]
                assert got == tokens[place], (sequence.id, place)

    def _take(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            sequence.num_pending = 0
            if sequence.finish_reason is not None:
                continue
            token = next_token(sequence.tokens, sequence.index)
            sequence.tokens.append(token)
            if token in sequence.request.params.stop_token_ids:
                self.scheduler.finish(sequence, FinishReason.STOP)
            elif sequence.num_output == sequence.request.params.max_tokens:
                self.scheduler.finish(sequence, FinishReason.LENGTH)


def next_token(tokens: list[int], index: int) -> int:
    return (31 * sum(tokens) + 7 * len(tokens) + index) % 5


def expected(request: Request, index: int) -> list[int]:
    tokens = list(request.prompt)
    for _ in range(request.params.max_tokens):
        tokens.append(next_token(tokens, index))
        if tokens[-1] in request.params.stop_token_ids:
            break
    return tokens[len(request.prompt) :]


requests_strategy = st.lists(
    st.tuples(
        st.lists(st.integers(0, 1), min_size=1, max_size=30),  # alike: many common prefixes
        st.integers(1, 20),  # max_tokens
        st.integers(1, 3),  # n
        st.integers(0, 6),  # steps until the next request
        st.integers(0, 9),  # 0: aborted before the next one; 1 to 4: a token that ends it
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=int(os.environ.get("SCHEDULER_EXAMPLES", "60")), deadline=None)
@given(
    requests=requests_strategy,
    num_blocks=st.integers(27, 60),
    host_blocks=st.sampled_from([0, 8, 40]),
    windows=st.sampled_from([(0,), (6,), (0, 6)]),
    batch_tokens=st.sampled_from([4, 7, 16]),
    prefix_caching=st.booleans(),
    overlap=st.booleans(),
)
def test_every_sequence_reads_its_own_tokens(
    requests: list[tuple[list[int], int, int, int, int]],
    num_blocks: int,
    host_blocks: int,
    windows: tuple[int, ...],
    batch_tokens: int,
    prefix_caching: bool,
    overlap: bool,
) -> None:
    memory = Memory(
        num_blocks,
        host_blocks=host_blocks,
        windows=windows,
        batch_tokens=batch_tokens,
        prefix_caching=prefix_caching,
        overlap=overlap,
    )
    for prompt, max_tokens, n, steps, fate in requests:
        stop = [fate] if 1 <= fate <= 4 else []
        request = memory.add(prompt, max_tokens=max_tokens, n=n, stop_token_ids=stop)
        for _ in range(steps):
            memory.step()
        if fate == 0:
            for sequence in request.sequences:
                if sequence.finish_reason is None:
                    memory.scheduler.finish(sequence, FinishReason.ABORT)
            memory.requests.remove(request)
    memory.run()


@pytest.mark.parametrize(("host_blocks", "swapped"), [(0, False), (64, True)])
def test_preemption(host_blocks: int, swapped: bool) -> None:
    memory = Memory(24, host_blocks=host_blocks, prefix_caching=False)
    for start in range(4):
        memory.add([start] * 10, max_tokens=30)
    memory.run()
    statistics = memory.scheduler.statistics
    assert (statistics.num_swapped > 0) is swapped
    assert (statistics.num_recomputed > 0) is not swapped
    # The oldest was never preempted.
    assert memory.requests[0].sequences[0].num_preemptions == 0


def test_long_prompts_do_not_hold_up_decoding() -> None:
    memory = Memory(64, batch_tokens=8)
    memory.add([1, 2], max_tokens=20)
    memory.step()
    memory.add([3] * 40, max_tokens=2)
    plans = [memory.step() for _ in range(6)]
    for plan in plans[:5]:
        assert plan is not None and plan.counts == [1, 7]
    assert plans[5] is not None and plans[5].counts == [1, 5]


def test_sequences_of_a_request_share_the_prompt() -> None:
    memory = Memory(64)
    memory.add([1] * 10, max_tokens=4, n=4)
    memory.step()
    assert memory.scheduler.num_running == 4
    assert memory.manager.statistics().used_blocks == 3  # not 12
    memory.run()
    assert memory.manager.statistics().num_copies == 3  # of the last block, for all but one


def test_prefix_is_computed_once() -> None:
    memory = Memory(64)
    prompt = [1, 2, 3, 4] * 5
    memory.add(prompt, max_tokens=2)
    memory.run()
    second = memory.add([*prompt, 9], max_tokens=2)
    plan = memory.step()
    assert plan is not None and plan.counts == [1] and second.num_cached_tokens == 20
    third = memory.add(prompt, max_tokens=2)  # all of it is there: one token must be computed
    memory.run()
    assert third.num_cached_tokens == 16
    assert memory.scheduler.statistics.num_cached_tokens == 36


@pytest.mark.parametrize(
    ("prefix_caching", "length", "running"),
    [
        (True, 16, [1, 3]),  # the third request, of another beginning, does not overtake
        (False, 16, [3, 3]),
        (True, 4, [3, 3]),  # less than an eighth of a pass
    ],
)
def test_followers_of_a_prompt_wait_a_pass(
    prefix_caching: bool, length: int, running: list[int]
) -> None:
    memory = Memory(64, batch_tokens=64, prefix_caching=prefix_caching)
    for first in (1, 1, 30):
        memory.add([*range(first, first + length), 60 + len(memory.requests)], max_tokens=3)
    plans = [memory.step(), memory.step()]
    assert [len(plan.sequences) for plan in plans if plan is not None] == running
    memory.run()


def test_a_request_waits_for_places_of_all_its_sequences() -> None:
    memory = Memory(64)
    for _ in range(2):
        memory.add([1, 2, 3], max_tokens=3)
    memory.add([4, 5], max_tokens=3, n=3)
    memory.step()
    assert memory.scheduler.num_running == 2
    memory.run()


def test_what_could_never_run_is_refused() -> None:
    memory = Memory(8)
    for prompt, params, message in (
        ([], {}, "prompt: expected at least one token"),
        ([1] * 64, {}, "prompt: expected fewer than 64 tokens"),
        ([1], {"n": 5}, r"n: expected at most 4 \(max_batch_size\), got 5"),
        ([1] * 20, {"max_tokens": 20}, "40 tokens need 10 blocks, the cache has 8"),
    ):
        with pytest.raises(ValueError, match=message):
            memory.add(prompt, **params)
    assert memory.scheduler.num_unfinished == 0
    memory.add([1] * 20, max_tokens=12)
    memory.run()


@pytest.mark.parametrize("length", range(20, 60, 3))
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_what_is_accepted_is_served(length: int, prefix_caching: bool) -> None:
    """A prompt that fits because windows give blocks back, though not all of it in all groups."""
    memory = Memory(20, windows=(0, 4), batch_tokens=8, prefix_caching=prefix_caching)
    for _ in range(3):
        try:
            memory.add(list(range(length)), max_tokens=4)
        except ValueError as error:
            assert "blocks, the cache" in str(error)
            assert length > 50
        else:
            assert length < 60
    memory.run()


def test_a_request_that_finds_no_room_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(8)
    memory.add([1, 2, 3], max_tokens=4)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="request 0: its 3 tok"):
        patch.setattr(memory.scheduler._admission, "admit", lambda *arguments: [])
        memory.step()
    memory.run()


def test_after_a_pass_that_failed_all_is_computed_again() -> None:
    memory = Memory(64)
    memory.add([1] * 20, max_tokens=3, n=2)
    memory.add([2] * 9, max_tokens=8)
    for _ in range(3):
        memory.step()
    memory.scheduler.schedule()
    memory.device[:] = -1  # whatever the pass left behind
    memory.scheduler.failed(memory.requests)
    assert memory.scheduler.num_running == 0 and memory.scheduler.num_unfinished == 3
    memory.run()


def test_sizes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="max_batch_tokens: expected at least 4"):
        Memory(8, batch_tokens=3)
    memory = Memory(8)
    with pytest.raises(ValueError, match="max_batch_size: expected >= 1, got 0"):
        Scheduler(
            memory.manager, memory.buffers, max_batch_size=0, max_batch_tokens=8, max_length=8
        )
