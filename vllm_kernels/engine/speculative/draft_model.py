"""Drafts tokens by a smaller model, with a cache of its own."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from itertools import count

import numpy as np
import torch
from transformers import PreTrainedModel

from ...errors import InvalidArgument, Unsupported
from ...hf.attention_interface import ENGINES, kv_shape, stop_paged_attention, use_paged_attention
from ...kv_cache import KVCacheManager, OutOfBlocks
from ...kv_cache.tensors import KVCache, KVShape, free_memory
from ..fused_llama import refuse_changing_rotary
from ..layer_groups import LayerGroups
from ..model_runner import ModelRunner, layer_options
from ..plan import Plan
from ..refusals import num_logits
from ..request import Sequence
from ..sampling.pending_tokens import PendingTokens
from ..sampling.sampler import Sampler
from .options import DraftModel

__all__ = ["DraftModelDrafter"]


class DraftModelDrafter:
    """Drafts by :class:`DraftModel`.

    Each sequence has a shadow with the same tokens and seed. The shadow's keys are computed up to
    the last drafted token but one. Tokens that were rejected are dropped at the next call.

    Args:
        options: The options.
        target: The engine's model.
        cleanup: Takes the calls that give the draft model and its memory back.
        block_size, max_batch_size, max_batch_tokens, max_length, cuda_graphs, fused: Options of the
            engine.

    Raises:
        NotImplementedError: The draft model cannot be served.
        ValueError: It does not fit the engine's model.
    """

    def __init__(
        self,
        options: DraftModel,
        target: PreTrainedModel,
        cleanup: ExitStack,
        *,
        block_size: int,
        max_batch_size: int,
        max_batch_tokens: int,
        max_length: int,
        cuda_graphs: bool,
        fused: bool,
    ) -> None:
        model = options.model
        _refuse_misfit(model, target)
        refuse_changing_rotary(model)
        self.num_tokens = options.num_tokens
        shape = kv_shape(model, block_size, "vllm", "auto")
        use_paged_attention(model)
        cleanup.callback(stop_paged_attention, model)
        groups = LayerGroups.of([layer.sliding_window for layer in layer_options(model, shape)])
        if any(groups.windows):
            raise Unsupported(
                "Engine: speculative: expected a draft model with full attention in all layers, "
                f"got windows of {max(groups.windows)} tokens"
            )
        shape = replace(shape, num_layers=groups.num_tensors)
        limits = {
            "max_batch_size": max_batch_size,
            "max_batch_tokens": max_batch_tokens,
            "max_length": min(max_length, _positions(model) or max_length),
        }
        blocks = _num_blocks(options, shape, max_batch_size * limits["max_length"], model)
        self._manager = KVCacheManager(blocks, block_size, prefix_caching=False)
        cache = KVCache(shape, blocks, device=model.device, tensor_of_layer=groups.tensor_of_layer)
        cleanup.callback(cache.free)
        self._sampler = Sampler(max_batch_size, num_logits(model), model.device)
        self._packed = ModelRunner(
            model, cache, groups, **limits, cuda_graphs=cuda_graphs, cascade=False, backend=None,
            fused=fused, sampler=self._sampler, sparse=None,
        )  # fmt: skip
        cleanup.callback(self._packed.close)
        self._shadows: dict[Sequence, Sequence] = {}
        self._next_id = count()

    @torch.inference_mode()
    def propose(self, sequences: list[Sequence]) -> dict[Sequence, list[int]]:
        """Returns drafts of the sequences that fit into the cache."""
        for sequence in [one for one in self._shadows if one.finish_reason is not None]:
            self._manager.free(self._shadows.pop(sequence).id)
        longest = self._packed.max_length - self.num_tokens
        sequences = self._that_fit([one for one in sequences if len(one.tokens) <= longest])
        if not sequences:
            return {}
        try:
            shadows = [self._shadow(sequence) for sequence in sequences]
            return dict(zip(sequences, self._draft(shadows).values()))
        except OutOfBlocks:
            self.reset()
            return {}

    def reset(self) -> None:
        """Forgets all sequences."""
        self._manager.reset()
        self._sampler.invalidate()
        self._shadows.clear()

    # Inner workings.

    def _that_fit(self, sequences: list[Sequence]) -> list[Sequence]:
        """Returns the first sequences that fit into the free blocks, with their drafts."""
        free, block_size = self._manager.num_free_blocks, self._manager.block_size
        fit = []
        for sequence in sequences:
            shadow = self._shadows.get(sequence)
            has = 0 if shadow is None else -(-shadow.num_computed // block_size)
            needed = -(-(len(sequence.tokens) + self.num_tokens - 1) // block_size) - has
            if needed <= free:
                fit.append(sequence)
                free -= max(needed, 0)
        return fit

    def _shadow(self, sequence: Sequence) -> Sequence:
        """Returns the shadow of a sequence, without tokens that were rejected."""
        shadow = self._shadows.get(sequence)
        if shadow is None:
            shadow = Sequence(next(self._next_id), sequence.request, sequence.index, [])
            shadow.seed = sequence.seed
            self._manager.allocate(shadow.id, 0)
            self._shadows[sequence] = shadow
        tokens, drafted = sequence.tokens, shadow.tokens
        common = min(shadow.num_computed, len(tokens) - 1)
        first = max(common - self.num_tokens, 0)  # earlier tokens were verified before
        while first < common and tokens[first] == drafted[first]:
            first += 1
        if first < shadow.num_computed:
            self._manager.truncate(shadow.id, first)
            shadow.num_computed = first
        shadow.tokens = list(tokens)
        return shadow

    def _draft(self, shadows: list[Sequence]) -> dict[Sequence, list[int]]:
        """Computes the missing tokens of the shadows, then draws their drafts."""
        passes = [self._catch_up(shadows)]
        for _ in range(self.num_tokens - 1):
            for shadow in shadows:
                shadow.num_pending += 1
            passes.append(self._pass(shadows, [1] * len(shadows), passes[-1]))
        drafts: dict[Sequence, list[int]] = {shadow: [] for shadow in shadows}
        for pending in passes:
            for shadow, (new,) in zip(pending.sequences, pending.fetch()):
                drafts[shadow].append(max(new.token, 0))  # not finite: any token is right
        for shadow, draft in drafts.items():
            shadow.tokens += draft
            shadow.num_pending = 0
        return drafts

    def _catch_up(self, shadows: list[Sequence]) -> PendingTokens:
        """Computes all known tokens, and draws the first drafted one of each shadow."""
        limit = self._packed.max_batch_tokens
        while sum(shadow.num_to_compute for shadow in shadows) > limit:
            # The last pass draws, so it needs a token of each shadow.
            longest = max(shadows, key=lambda shadow: shadow.num_to_compute)
            self._pass([longest], [min(longest.num_to_compute - 1, limit)])
        order = sorted(shadows, key=lambda shadow: shadow.num_to_compute > 1)
        return self._pass(order, [shadow.num_to_compute for shadow in order])

    def _pass(
        self, shadows: list[Sequence], counts: list[int], before: PendingTokens | None = None
    ) -> PendingTokens:
        packed = self._packed
        packed.wait()
        ids = np.array([shadow.id for shadow in shadows], np.int64)
        self._manager.step(ids, np.array(counts, np.int64), packed.host_buffers)
        if before is None:
            tokens = [
                token
                for shadow, size in zip(shadows, counts)
                for token in shadow.tokens[shadow.num_computed : shadow.num_computed + size]
            ]
            plan = Plan(shadows, counts, np.array(tokens, np.int64), [])
            step = packed.run(plan)
        else:
            plan = Plan(shadows, counts, None, [])
            step = packed.run(plan, before.tokens_of(shadows))
        ready = [shadow for shadow, size in zip(shadows, plan.num_logits) if size]
        for shadow, size in zip(shadows, counts):
            shadow.num_computed += size
        if step.drawn is None and ready:
            self._sampler.prepare(ready)
            step.drawn = self._sampler.draw(step.logits, step.input_ids, step.positions)
        return PendingTokens(ready, *(step.drawn or (step.input_ids[:0], step.logits[:0, 0])))


def _refuse_misfit(model: PreTrainedModel, target: PreTrainedModel) -> None:
    if model is target:
        raise InvalidArgument("Engine: speculative: expected another model than the engine's")
    if model.training:
        raise InvalidArgument(
            "Engine: speculative: expected a model in eval mode: call model.eval()"
        )
    other = ENGINES.get(model)
    if other is not None and other() is not None:
        raise InvalidArgument(
            "Engine: speculative: another engine has the draft model: close() that one first"
        )
    if model.device != target.device:
        raise InvalidArgument(
            f"Engine: speculative: expected a model on {target.device}, got {model.device}"
        )
    sizes = [one.config.get_text_config(decoder=True).vocab_size for one in (target, model)]
    if sizes[0] != sizes[1]:
        raise InvalidArgument(
            f"Engine: speculative: expected a model with a vocabulary of {sizes[0]}, got {sizes[1]}"
        )


def _positions(model: PreTrainedModel) -> int:
    return getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or 0


def _num_blocks(options: DraftModel, shape: KVShape, tokens: int, model: PreTrainedModel) -> int:
    cache_bytes = options.cache_bytes
    if cache_bytes is None:
        wanted = (tokens // shape.block_size + 1) * shape.block_bytes
        cache_bytes = min(wanted, free_memory(model.device) // 10)
    blocks = cache_bytes // shape.block_bytes
    if blocks < 2:
        raise InvalidArgument(
            f"Engine: speculative: cache_bytes: expected at least 2 blocks of "
            f"{shape.block_bytes:,} bytes, got {blocks}"
        )
    return blocks
