"""Appends sampled tokens to their sequences, decodes them, and applies the stop conditions."""

from __future__ import annotations

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import InvalidArgument, NonFiniteLogits
from .detokenizer import Detokenizer
from .outputs import TokenOutput
from .request import FinishReason, Request, Sequence
from .sampling.pending_tokens import SampledToken
from .scheduler import Scheduler

__all__ = ["OutputProcessor", "end_tokens"]


class OutputProcessor:
    """Turns sampled tokens into outputs, and ends sequences.

    Args:
        model: The model. Its generation config has the end-of-sequence tokens.
        tokenizer: The model's tokenizer. None means no text.
        scheduler: It frees the blocks of ended sequences.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        scheduler: Scheduler,
    ) -> None:
        self._tokenizer = tokenizer
        self._scheduler = scheduler
        self._end_tokens = end_tokens(model)
        self._texts: dict[int, Detokenizer] = {}  # by sequence id

    def add_token(self, sequence: Sequence, sampled: SampledToken, now: float) -> TokenOutput:
        """Appends a token to its sequence, and ends the sequence if a stop condition holds.

        Args:
            sequence: The sequence.
            sampled: The token.
            now: The time in seconds.

        Raises:
            NonFiniteLogits: The logits are NaN or infinite.
            InvalidArgument: No token is allowed, or the mask refuses this one.
            Exception: The tokenizer or the mask failed.
        """
        request, token = sequence.request, sampled.token
        if token < 0:
            self._scheduler.statistics.num_non_finite += 1
            raise NonFiniteLogits(
                f"Engine: request {request.id}: expected finite logits for output token "
                f"{sequence.num_output} of sequence {sequence.index}, got NaN or infinity"
            )
        constraints = request.constraints
        if constraints is not None and not constraints.allows(sequence, token):
            raise InvalidArgument(
                f"Engine: request {request.id}: expected an allowed token for output token "
                f"{sequence.num_output} of sequence {sequence.index}, got none: allowed_token_ids, "
                "bad_words, min_tokens and logits_mask together forbid all"
            )
        if request.first_token_time is None:
            request.first_token_time = now
        sequence.tokens.append(token)
        if sampled.logprobs is not None:
            sequence.logprobs.append(sampled.logprobs)
        request.num_failures = request.num_failures_alone = 0
        if sequence.mask is not None and not sequence.mask.accept_token(token):
            raise InvalidArgument(
                f"Engine: request {request.id}: logits_mask: expected to accept token {token}, "
                "which was drawn, got False"
            )
        reason = self._finish_reason(sequence, token)
        text = ""
        if self._tokenizer is not None:
            text, reason = self._add_text(sequence, token, reason)
        if reason is not None:
            self._scheduler.finish(sequence, reason)
            self._texts.pop(sequence.id, None)
            if request.is_finished:
                request.finish_time = now
        return TokenOutput(
            request.id, sequence.index, token, text, reason, logprobs=sampled.logprobs
        )

    def end(
        self, request: Request, now: float, error: Exception | None = None
    ) -> list[TokenOutput]:
        """Ends the unfinished sequences of a request, by ABORT or with an error.

        Returns:
            An output without a token for each ended sequence.
        """
        reason = FinishReason.ABORT if error is None else FinishReason.ERROR
        outputs = []
        for sequence in request.sequences:
            if sequence.finish_reason is None:
                self._scheduler.finish(sequence, reason)
                self._texts.pop(sequence.id, None)
                outputs.append(TokenOutput(request.id, sequence.index, -1, "", reason, error))
        request.error, request.finish_time = error, now
        self._scheduler.statistics.num_errors += error is not None
        return outputs

    def _finish_reason(self, sequence: Sequence, token: int) -> FinishReason | None:
        """Returns why a sequence ends with this token, or None. Its text is not looked at."""
        params = sequence.request.params
        if (token in self._end_tokens and not params.ignore_eos) or token in params.stop_token_ids:
            return FinishReason.STOP
        if sequence.mask is not None and sequence.mask.is_terminated():
            return FinishReason.STOP
        if (
            sequence.num_output >= params.max_tokens
            or len(sequence.tokens) >= self._scheduler.max_length
        ):
            return FinishReason.LENGTH
        return None

    def _add_text(
        self, sequence: Sequence, token: int, reason: FinishReason | None
    ) -> tuple[str, FinishReason | None]:
        """Returns the text that a token makes final, and the finish reason if the sequence ends."""
        assert self._tokenizer is not None
        detokenizer = self._texts.get(sequence.id)
        if detokenizer is None:
            request = sequence.request
            detokenizer = Detokenizer(self._tokenizer, request.prompt, request.params.stop)
            self._texts[sequence.id] = detokenizer
        may_stop = sequence.num_output >= sequence.request.params.min_tokens
        text = detokenizer.add(token, may_stop)
        if reason is not None:
            text += detokenizer.finish()
        sequence.text = detokenizer.text
        return text, FinishReason.STOP if detokenizer.is_stopped else reason


def end_tokens(model: PreTrainedModel) -> frozenset[int]:
    """Returns the model's end-of-sequence tokens."""
    end = getattr(model.generation_config, "eos_token_id", None)
    if end is None:
        return frozenset()
    return frozenset([end] if isinstance(end, int) else end)
