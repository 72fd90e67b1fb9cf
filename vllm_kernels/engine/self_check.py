"""Compares logits of a packed forward pass with those of the model's own attention.

No config says where positions come from or what state a layer keeps besides its keys. So an engine
compares logits before it serves a model.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..errors import Error, InvalidArgument, Unsupported
from ..hf.attention_interface import stop_paged_attention, use_paged_attention
from ..kv_cache import KVCacheManager, OutOfBlocks
from ..kv_cache.shape import KVShape
from .model_runner import ModelRunner, takes_positions
from .plan import Plan
from .request import Request, SamplingParams, Sequence

__all__ = ["verify"]

_LONGEST = 60
_SHORT = 5
_TOLERANCE = {torch.float32: 1e-2}
"""Bound on the relative error of a row of logits, by the model's dtype.

Wrong positions or a wrong mask give errors around 1.
"""
_TOLERANCE_OF_16_BITS = 0.15
_TOLERANCE_OF_8_BIT_CACHES = 0.3
# Tiny models have errors of 0.06 to 0.30. A wrong mask shows, but a missing softcap does not.
_TOLERANCE_OF_4_BIT_CACHES = 0.6


def verify(packed: ModelRunner, manager: KVCacheManager) -> None:
    """Runs two short sequences in one batch, and compares with the model on each alone.

    One of the sequences runs in two chunks.

    Args:
        packed: The model runner to check.
        manager: Its KV-cache manager, without sequences.

    Raises:
        NotImplementedError: The logits differ.
        ValueError: The logits differ with an 8-bit cache, so its scales are probably wrong, or
            with an int4 cache.
    """
    model = packed.model
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    long, short = (
        torch.randint(vocabulary, (length,), generator=torch.Generator().manual_seed(length))
        for length in (_long(packed, manager), _SHORT)
    )
    ours = _packed_logits(packed, manager, long.tolist(), short.tolist())
    stop_paged_attention(model)
    try:
        theirs = [_own_logits(model, tokens) for tokens in (short[:4], short, long)]
    finally:
        use_paged_attention(model)
    shape = packed.pages.cache.shape
    tolerance = _TOLERANCE.get(shape.dtype, _TOLERANCE_OF_16_BITS)
    if shape.cache_dtype != "auto":
        four = shape.has_token_zeros
        tolerance = _TOLERANCE_OF_4_BIT_CACHES if four else _TOLERANCE_OF_8_BIT_CACHES
    for got, expected in zip(ours, theirs):
        error = (got - expected).norm() / (expected - expected.mean()).norm().clamp_min(1e-12)
        if not error <= tolerance:  # NaN, too
            raise _refusal(model.config.model_type, shape, float(error))


def _refusal(model_type: str, shape: KVShape, error: float) -> Error:
    """The error of logits that differ."""
    name = f"Engine: cache_dtype: {shape.cache_dtype}"
    if shape.has_token_zeros:
        return InvalidArgument(
            f"{name}: 4 bits do not suit this model, or it is not served: its logits differ "
            f"(relative error {error:.2g}): give 'int8_per_token' or 'auto'"
        )
    if shape.cache_dtype != "auto" and not shape.has_token_scales:
        integral = not shape.stored_dtype.is_floating_point
        largest = (torch.iinfo if integral else torch.finfo)(shape.stored_dtype).max
        return InvalidArgument(
            f"{name}: with these k_scale and v_scale the logits are not those of the model "
            f"(relative error {error:.2g}): give about the largest |K| and |V| / {largest:g}, or "
            f"cache_dtype='auto'"
        )
    return Unsupported(
        f"Engine: model type: {model_type}: its logits differ from those of its own attention "
        f"(relative error {error:.2g}): it is not served"
    )


def _long(packed: ModelRunner, manager: KVCacheManager) -> int:
    """Returns the length of the longer sequence in tokens.

    If the cache has room, it exceeds two blocks and every small window.
    """
    windows = packed.pages.groups.windows
    edges = [edge for edge in (*windows, 2 * manager.block_size) if 0 < edge < _LONGEST]
    blocks = manager.num_free_blocks // manager.num_groups - -(-_SHORT // manager.block_size)
    room = min(packed.max_length, blocks * manager.block_size)
    return min(max(edges, default=4) + 3, max(room, 7))


def _packed_logits(
    packed: ModelRunner, manager: KVCacheManager, long: list[int], short: list[int]
) -> list[Tensor]:
    """Returns the logits after short[:4], short and long."""
    request = Request(-1, [], SamplingParams(), arrival=time.perf_counter())
    a = Sequence(0, request, 0, long)
    b = Sequence(1, request, 0, short[:4])
    rows: list[Tensor] = []
    try:
        for sequence in (a, b):
            manager.allocate(sequence.id, 0)
        rows += _step(packed, manager, {a: 3, b: 4})
        b.tokens = short
        rows += _step(packed, manager, {b: 1, a: len(long) - 3})
    except OutOfBlocks as error:
        raise InvalidArgument(
            f"Engine: cache: expected room for {len(long)} and {len(short)} tokens, got "
            f"{manager.num_blocks} blocks"
        ) from error
    finally:
        manager.reset()
    return rows


def _step(
    packed: ModelRunner, manager: KVCacheManager, counts: dict[Sequence, int]
) -> list[Tensor]:
    """Computes ``counts`` tokens of each sequence, in one pass if the limits allow."""
    if len(counts) <= packed.max_batch_size and sum(counts.values()) <= packed.max_batch_tokens:
        return _pass(packed, manager, list(counts), list(counts.values()))
    rows = []
    for sequence, count in counts.items():
        while count:
            part = min(count, packed.max_batch_tokens)
            rows += _pass(packed, manager, [sequence], [part])
            count -= part
    return rows


def _pass(
    packed: ModelRunner, manager: KVCacheManager, sequences: list[Sequence], counts: list[int]
) -> list[Tensor]:
    tokens = [
        token
        for sequence, count in zip(sequences, counts)
        for token in sequence.tokens[sequence.num_computed : sequence.num_computed + count]
    ]
    ids = np.array([sequence.id for sequence in sequences], np.int64)
    packed.wait()
    manager.step(ids, np.array(counts, np.int64), packed.host_buffers)
    logits = packed.run(Plan(sequences, counts, np.array(tokens, np.int64), [])).logits
    for sequence, count in zip(sequences, counts):
        sequence.num_computed += count
    return list(logits.float().clone())


@torch.inference_mode()
def _own_logits(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Returns logits [vocabulary] after the last of ``tokens``, by the model's own attention."""
    options: dict[str, bool | Tensor] = {"use_cache": False}
    if takes_positions(model):
        options["position_ids"] = torch.arange(len(tokens), device=model.device)[None]
    return model(input_ids=tokens[None].to(model.device), **options).logits[0, -1].float()
