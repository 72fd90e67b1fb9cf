"""From the logits of a pass to its tokens: rows, processors, drafts and log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ... import spec_verify
from ...errors import InvalidArgument
from ..plan import Plan
from ..request import Request, Sequence
from ..upload import upload
from .logprobs import TokenLogprobs
from .pending_tokens import Extras, PendingTokens
from .sampler import Sampler

__all__ = ["StepLogits", "sample_step"]


@dataclass
class StepLogits:
    """What a pass computed. Rows are those of ``Plan.num_logits``, valid until the next pass."""

    logits: Tensor  # [rows, vocabulary]
    input_ids: Tensor  # int64 [rows]
    positions: Tensor  # int64 [rows]
    drawn: tuple[Tensor, Tensor] | None = None
    """What ``Sampler.draw`` returned within a CUDA graph, for the plan's sequences in order."""


@torch.inference_mode()
def sample_step(
    sampler: Sampler,
    plan: Plan,
    ready: list[Sequence],
    step: StepLogits,
    agree: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
) -> PendingTokens:
    """Draws the tokens of a pass. They are not fetched yet.

    Args:
        sampler: The sampler of the engine.
        plan: The plan of the pass.
        ready: The sequences that get tokens. Forked ones follow the first one of their request.
        step: The logits of the pass.
        agree: Maps the tokens and their logits to those that all ranks use. None: there is one.
    """
    rows = _Rows(plan, ready)
    errors: dict[Sequence, Exception] = {}
    tokens, highest = _draw(sampler, plan, rows, step, errors)
    if agree is not None:
        tokens, highest = agree(tokens, highest)
    extras = Extras(errors=errors)
    if plan.drafts:
        extras.drafted = plan.drafts
        extras.num_rows = rows.sizes
        extras.num_accepted = _num_accepted(plan, rows, tokens)
    extras.logprobs = _logprobs(rows, step, tokens)
    extras.prompts = _prompt_logprobs(plan, step)
    return PendingTokens(ready, tokens, highest, extras)


class _Rows:
    """The rows of logits that get a token."""

    def __init__(self, plan: Plan, ready: list[Sequence]) -> None:
        starts = list(accumulate(plan.num_logits, initial=0))
        place = {sequence: at for at, sequence in enumerate(plan.sequences)}
        self.sequences: list[Sequence] = []  # of each row
        self.rows: list[int] = []
        self.sizes: list[int] = []  # of each ready sequence
        self.starts: list[int] = []  # of each ready sequence, among the drawn tokens
        at = -1
        for sequence in ready:
            at = place.get(sequence, at)  # a forked sequence uses the rows of the first one
            size = 1 + len(plan.drafts.get(sequence, ()))
            self.starts.append(len(self.rows))
            self.sizes.append(size)
            self.sequences += [sequence] * size
            self.rows += range(starts[at + 1] - size, starts[at + 1])
        self.is_plain = self.rows == list(range(starts[-1]))  # a row of logits each, in order


def _draw(
    sampler: Sampler,
    plan: Plan,
    rows: _Rows,
    step: StepLogits,
    errors: dict[Sequence, Exception],
) -> tuple[Tensor, Tensor]:
    """Returns the step's token ids, int64 [rows], and the model's logits of these tokens."""
    with_processor = [
        (at, sequence)
        for at, sequence in enumerate(rows.sequences)
        if sequence.request.params.logits_processor is not None
    ]
    if step.drawn is not None and not with_processor and rows.sequences == plan.sequences:
        errors |= sampler.errors
        return step.drawn
    if not rows.rows:
        return step.input_ids[:0], step.logits[:0, 0]
    logits, input_ids, positions, index = step.logits, step.input_ids, step.positions, None
    if not rows.is_plain:
        index = upload(rows.rows, logits.device, torch.int32)
        input_ids, positions = input_ids[index.long()], positions[index.long()]
    if with_processor:
        logits = logits.float().clone() if index is None else logits[index.long()].float()
        index = None
        for at, sequence in with_processor:
            try:
                logits[at] = _processed(sequence, logits[at])
            except Exception as error:
                errors[sequence] = error
    sampler.prepare(rows.sequences)
    errors |= sampler.errors
    return sampler.draw(logits, input_ids, positions, index)


def _processed(sequence: Sequence, scores: Tensor) -> Tensor:
    """Returns the scores [vocabulary] of a request's ``logits_processor``."""
    processor = sequence.request.params.logits_processor
    assert processor is not None
    input_ids = upload([sequence.tokens], scores.device)
    result = processor(input_ids, scores[None].clone())
    if not isinstance(result, Tensor) or result.shape != (1, *scores.shape):
        got = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
        raise InvalidArgument(
            f"Engine: request {sequence.request.id}: logits_processor: expected scores of shape "
            f"{(1, *scores.shape)}, got {got}"
        )
    return result[0].float()


def _num_accepted(plan: Plan, rows: _Rows, tokens: Tensor) -> Tensor:
    """Returns int32 [drafted sequences]: how many drafted tokens are the drawn ones."""
    drafted = [at for at, size in enumerate(rows.sizes) if size > 1]
    longest = max(rows.sizes[at] for at in drafted) - 1
    drafts = [plan.drafts[rows.sequences[rows.starts[at]]] for at in drafted]
    padded = [draft + [-1] * (longest - len(draft)) for draft in drafts]
    # A place past the end of a sequence's rows is not compared.
    places = [
        [min(rows.starts[at] + i, len(rows.rows) - 1) for i in range(longest + 1)]
        for at in drafted
    ]  # fmt: skip
    target = tokens[upload(places, tokens.device)]
    return spec_verify(upload(padded, tokens.device), target)[1]


def _logprobs(rows: _Rows, step: StepLogits, tokens: Tensor) -> TokenLogprobs | None:
    asking = [
        at for at, one in enumerate(rows.sequences) if one.request.params.logprobs is not None
    ]
    if not asking:
        return None
    counts = [rows.sequences[at].request.params.logprobs for at in asking]
    num_top = -1 if -1 in counts else max(count for count in counts if count is not None)
    index = None
    if not (rows.is_plain and len(asking) == len(rows.rows)):
        index = upload([rows.rows[at] for at in asking], tokens.device, torch.int32)
        tokens = tokens[upload(asking, tokens.device)]
    return TokenLogprobs(step.logits, tokens, num_top, index)


def _prompt_logprobs(plan: Plan, step: StepLogits) -> list[tuple[Request, int, TokenLogprobs]]:
    """Returns log-probabilities of prompt tokens, for requests that ask for them."""
    found = []
    starts = list(accumulate(plan.num_logits, initial=0))
    for sequence, count, start in zip(plan.sequences, plan.counts, starts):
        request = sequence.request
        num_top = request.params.prompt_logprobs
        if num_top is None or sequence not in plan.with_prompt_logits:
            continue
        first = sequence.num_computed - count + 1  # position of the first predicted token
        tokens = request.prompt[first : first + count]
        if tokens:
            rows = upload(range(start, start + len(tokens)), step.logits.device, torch.int32)
            wanted = upload(tokens, step.logits.device)
            found.append((request, first, TokenLogprobs(step.logits, wanted, num_top, rows)))
    return found
