"""Engines of several ranks, one for each part of a model (tensor parallelism).

All ranks run the same passes, because a pass has collectives. Their schedulers decide alike if they
get the same requests and tokens, so both come from rank 0:

- before a pass, rank 0 broadcasts the calls of its user since the last pass;
- after a pass, it broadcasts the sampled tokens.

The other ranks make the same calls, which are compared, or follow rank 0 (:meth:`Ranks.follow`).
Before each pass they also compare a summary of the scheduler's state.
"""

from __future__ import annotations

import os
import pickle
from contextlib import suppress
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, Any, NoReturn
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import (
    PrefixStore,
    _get_default_store,
    _set_pg_timeout,
)
from transformers import PreTrainedModel

from ..errors import Error, InvalidArgument, Unsupported
from ..hf.tensor_parallel import group_of_model
from .config import EngineConfig
from .request import SamplingParams
from .speculative.options import DraftModel

if TYPE_CHECKING:
    from .engine import Engine
    from .passes import Passes

__all__ = ["Ranks", "time_limit"]

_TIMEOUT = "VLLM_KERNELS_TP_TIMEOUT"  # seconds
_UNLIMITED = timedelta(days=365)
_POLL = timedelta(seconds=1)
_TO_CONNECT = timedelta(minutes=5)
_STEP = [("step",)]
_FAILURE = "failure"  # key of the store
_EQUAL = (
    *("block_size", "layout", "cache_dtype", "k_scale", "v_scale", "cascade", "cuda_graphs"),
    *("fused", "speculative", "sparse"),
)
"""Options of EngineConfig."""
_ids = count()  # the ranks make their engines in the same order

Call = tuple[Any, ...]
"""Name of a method of Engine, and its arguments."""


class Ranks:
    """The ranks of a model, and this one's part in their agreement.

    As a context manager it reports an exception to the other ranks.

    Attributes:
        rank: This rank, from 0.
        failure: Why the ranks cannot go on. None while they can.
        options: A summary of the engine's options that must be equal on all ranks.
    """

    options = 0

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank = group.rank()
        self.failure: Error | None = None
        self._group = group
        self._limit = time_limit()
        self._calls: list[Call] = []  # since the last pass
        self._is_following = False
        self._store = PrefixStore(f"vllm_kernels_engine_{next(_ids)}", _get_default_store())
        # For tensors on the host. Between passes a rank waits as long as no rank fails.
        ranks = dist.get_process_group_ranks(group)
        self._control: Any = dist.new_group(ranks, backend="gloo", timeout=_TO_CONNECT)
        _set_pg_timeout(_UNLIMITED, self._control)
        self._limit_before = group._get_backend(group._device_types[0]).options._timeout
        _set_pg_timeout(self._limit, group)

    @classmethod
    def of(cls, model: PreTrainedModel, config: EngineConfig) -> Ranks | None:
        """Returns the ranks of ``model``, or None if it is whole.

        Raises:
            NotImplementedError: The engine of such a model can use neither torch.compile nor a
                draft model.
        """
        group = group_of_model(model)
        if group is None:
            return None
        if config.compile:
            raise Unsupported(
                f"Engine: compile: expected False with tensor parallelism, got {config.compile!r}"
            )
        if isinstance(config.speculative, DraftModel):  # rounding could give ranks other drafts
            raise Unsupported(
                "Engine: speculative: expected PromptLookup or None with tensor parallelism, got "
                "DraftModel"
            )
        ranks = cls(group)
        # Not the hash of a string, which differs in each process.
        ranks.options = crc32(repr([_plain(getattr(config, name)) for name in _EQUAL]).encode())
        return ranks

    @staticmethod
    def refuse_functions(params: SamplingParams) -> None:
        """Raises Unsupported for parameters that cannot be sent to other ranks."""
        for name in ("logits_mask", "logits_processor"):
            if getattr(params, name) is not None:
                raise Unsupported(
                    f"Engine: {name}: expected None with tensor parallelism, got a function"
                )

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        _set_pg_timeout(self._limit_before, self._group)
        if error is not None:
            self._raise(error)
        if self.failure is None:
            dist.destroy_process_group(self._control)

    # Agreement.

    def smallest(self, number: int) -> int:
        """Returns the smallest of the ranks' numbers."""
        tensor = torch.tensor(number)
        self._wait(dist.all_reduce(tensor, dist.ReduceOp.MIN, self._control, async_op=True))
        return int(tensor)

    def note(self, name: str, *arguments: Any) -> None:
        """Records a call of the user, which the other ranks need before the next pass."""
        if not self._is_following:
            self._calls.append((name, *arguments))

    def begin(self, passes: Passes, name: str = "step") -> None:
        """Waits until all ranks make the call ``name``, and compares the calls before it.

        Raises:
            Error: The calls or the schedulers differ.
        """
        if self._is_following:
            return  # follow() has received the call
        calls, self._calls = [*self._calls, (name,)], []
        try:
            theirs, state = self._from_rank_0(calls, passes)
            if theirs != calls:
                mine, other = _first_difference(calls, theirs)
                raise Error(
                    f"Engine: calls: expected rank 0's {other}, got {mine}: make the same calls on "
                    "every rank, or call follow() on all but rank 0"
                )
            if name != "close":  # which ends all requests
                self._refuse_other_state(passes, state)
        except BaseException as error:
            self._raise(error)

    def end(self, passes: Passes) -> None:
        """Waits until all ranks close their engines."""
        if self.failure is None:
            self.begin(passes, "close")

    def follow(self, engine: Engine) -> None:
        """Repeats rank 0's calls until it closes its engine."""
        if self.rank == 0:
            raise InvalidArgument("Engine: follow: expected another rank than 0, got 0")
        self._is_following = True
        try:
            while not engine.cache.is_freed:
                (*before, last), state = self._from_rank_0([], engine._passes)
                for call in before:
                    _repeat(engine, call)
                if last != ("close",):
                    self._refuse_other_state(engine._passes, state)
                _repeat(engine, last)
        except BaseException as error:
            self._raise(error)

    def agree(self, tokens: Tensor, highest: Tensor) -> tuple[Tensor, Tensor]:
        """Returns rank 0's tokens, and highest logits that are finite where rank 0's are."""
        if not len(tokens):
            return tokens, highest
        both = torch.stack([tokens, highest.isfinite().to(tokens.dtype)])
        dist.broadcast(both, group=self._group, group_src=0)
        return both[0], torch.where(both[1] > 0, 0.0, torch.nan)

    # Failures.

    def fail(self, error: BaseException) -> BaseException:
        """Tells the other ranks that this one cannot go on.

        A rank that waits in a collective finds the message when the collective fails: at once if
        this process ends, else after the time limit.

        Returns:
            The error to raise: ``error``, or that of the rank that failed first.
        """
        if self.failure is not None:
            return error
        is_lost = isinstance(error, dist.DistError) or "gloo" in str(error)
        kind = "" if isinstance(error, Error) else f"{type(error).__name__}: "
        text = f"failed: {kind}{error}"
        if is_lost:
            limit, reason = self._limit.seconds, str(error).partition(". ")[0]
            text = f"lost another one, which ended or did not answer within {limit} s: {reason}"
        first = f"{self.rank} {text}"
        with suppress(RuntimeError):  # the store may have ended with its process
            first = self._store.compare_set(_FAILURE, "", first).decode()
        self.failure = Error(f"Engine: rank {first}")
        return self.failure if is_lost or not first.endswith(f" {text}") else error

    # Inner workings.

    def _from_rank_0(self, calls: list[Call], passes: Passes) -> tuple[list[Call], int]:
        """Returns rank 0's calls, and the state of its scheduler."""
        body = b""
        state = 0
        if self.rank == 0:
            state = _state(passes)
            if calls != _STEP:
                body = pickle.dumps(calls)
        header = torch.tensor([len(body), state])
        self._broadcast(header)
        size, state = header.tolist()
        if not size:
            return _STEP, state
        data = torch.frombuffer(bytearray(body or size), dtype=torch.uint8)
        self._broadcast(data)
        return pickle.loads(data.numpy().tobytes()), state

    def _broadcast(self, tensor: Tensor) -> None:
        self._wait(dist.broadcast(tensor, group=self._control, group_src=0, async_op=True))

    def _wait(self, work: Any) -> None:
        """Waits for the other ranks, unless one of them has failed."""
        while True:
            try:
                work.wait(_POLL)
                return
            except RuntimeError:
                if work.is_completed():
                    raise
            if self._store.check([_FAILURE]):
                raise Error("Engine: another rank failed")  # fail() finds its message

    def _raise(self, error: BaseException) -> NoReturn:
        raised = self.fail(error)
        if raised is not error:
            raise raised from error
        raise error

    def _refuse_other_state(self, passes: Passes, state: int) -> None:
        if _state(passes) != state:
            raise Error(
                "Engine: scheduler: expected the state of rank 0's, got another one: give equal "
                "options and tokenizers on all ranks"
            )


def time_limit() -> timedelta:
    """Returns how long a collective of a pass may take."""
    text = os.environ.get(_TIMEOUT) or "60"
    if not text.isdecimal() or int(text) < 1:
        raise InvalidArgument(f"{_TIMEOUT}={text}: expected a number of seconds from 1")
    return timedelta(seconds=int(text))


def _plain(option: object) -> object:
    return option.tolist() if isinstance(option, Tensor) else option


def _state(passes: Passes) -> int:
    """Returns a summary of an engine's options, scheduler and blocks, equal in every process."""
    scheduler, counts = passes.scheduler, passes.scheduler.statistics
    return hash((
        passes.ranks and passes.ranks.options,
        scheduler.max_batch_size, scheduler.max_batch_tokens, scheduler.max_length,
        scheduler.prefix_caching, passes.overlap, passes.manager.num_host_blocks,
        scheduler.num_unfinished, scheduler.num_running, counts.num_steps, counts.num_tokens,
        counts.num_errors, counts.num_cached_tokens, passes.manager.num_free_blocks,
    ))  # fmt: skip


def _repeat(engine: Engine, call: Call) -> None:
    """Makes a call of rank 0 on a follower. Its outputs are dropped."""
    name, *arguments = call
    if name == "_add":  # requests that were refused have taken ids on rank 0
        request_id, prompt, params, salt = arguments
        engine._next_id = count(request_id)
        engine._add(prompt, params, salt)
    else:
        getattr(engine, name)(*arguments)


def _first_difference(mine: list[Call], theirs: list[Call]) -> tuple[str, str]:
    """Returns the names of the first calls that differ. If they are equal, arguments differ."""
    at = next(
        (i for i, both in enumerate(zip(mine, theirs)) if both[0] != both[1]),
        min(len(mine), len(theirs)) - 1,
    )
    names = mine[at][0].strip("_"), theirs[at][0].strip("_")
    return names if names[0] != names[1] else (f"{names[0]} with other arguments", names[1])
