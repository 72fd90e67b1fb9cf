"""Makes the drafter of an engine."""

from __future__ import annotations

from collections.abc import Sequence as Items
from contextlib import ExitStack

from transformers import PreTrainedModel

from ...errors import Unsupported
from ...hf.attention_interface import ENGINES
from ..config import EngineConfig
from .draft_model import DraftModelDrafter
from .options import Drafter, PromptLookup
from .prompt_lookup import PromptLookupDrafter

__all__ = ["drafter_of"]


def drafter_of(
    config: EngineConfig,
    model: PreTrainedModel,
    windows: Items[int],
    cuda_graphs: bool,
    cleanup: ExitStack,
) -> Drafter | None:
    """Returns the drafter of an engine, or None.

    Args:
        config: The options of the engine.
        model: The engine's model.
        windows: The windows of its layer groups. 0 means full attention.
        cuda_graphs: Whether a draft model replays CUDA graphs.
        cleanup: Takes the calls that undo this.

    Raises:
        NotImplementedError: A model has sliding windows, or the draft model cannot be served.
        ValueError: The draft model does not fit the engine's model.
    """
    options = config.speculative
    if options is None:
        return None
    if any(windows):  # blocks before a window are free at once, so rejected tokens need them
        raise Unsupported(
            "Engine: speculative: expected full attention in all layers, got windows of "
            f"{max(windows)} tokens"
        )
    if isinstance(options, PromptLookup):
        return PromptLookupDrafter(options)
    drafter = DraftModelDrafter(
        options, model, cleanup, block_size=config.block_size,
        max_batch_size=config.max_batch_size, max_batch_tokens=config.batch_tokens,
        max_length=config.wanted_length(model), cuda_graphs=cuda_graphs, fused=config.fused,
    )  # fmt: skip
    cleanup.callback(ENGINES.pop, options.model, None)
    return drafter
