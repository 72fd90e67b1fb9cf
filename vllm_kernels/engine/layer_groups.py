"""Cache writes and attention over packed tokens, and the layer groups that share block tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from .. import CascadePlan, cascade_plan
from ..hf.attention_interface import AttentionOptions, LayerCall
from ..hf.paged_batch import token_major
from ..kv_cache.tensors import KVCache
from .sparse import Sparse

__all__ = ["LayerGroups", "PackedPages", "StepInputs"]

_MOST_GROUPS = 8


@dataclass(frozen=True)
class LayerGroups:
    """Layers with the same window share block tables.

    All groups have the same number of layers. So a block fits any group: layer i of every group
    uses cache tensor i, as in vLLM's hybrid KV-cache manager.
    """

    windows: tuple[int, ...]  # window of each group in tokens; 0: full attention
    group_of_layer: tuple[int, ...]
    tensor_of_layer: tuple[int, ...]

    @classmethod
    def of(cls, windows: Sequence[int]) -> LayerGroups:
        """Groups layers by window. ``windows`` has one per layer, and 0 means full attention."""
        kinds = {window: list(windows).count(window) for window in windows}
        size = min(kinds.values())
        if sum(-(-layers // size) for layers in kinds.values()) > _MOST_GROUPS:
            size = max(kinds.values())
        groups: list[int] = []
        group_of_layer, tensor_of_layer = [], []
        filled: dict[int, tuple[int, int]] = {}  # window: (its last group, layers in that group)
        for window in windows:
            group, layers = filled.get(window, (0, size))
            if layers == size:
                group, layers = len(groups), 0
                groups.append(window)
            group_of_layer.append(group)
            tensor_of_layer.append(layers)
            filled[window] = group, layers + 1
        return cls(tuple(groups), tuple(group_of_layer), tuple(tensor_of_layer))

    @property
    def num_tensors(self) -> int:
        """The number of layers per group."""
        return max(self.tensor_of_layer) + 1


@dataclass
class StepInputs:
    """Attention inputs of one pass, for S sequences and T tokens."""

    slot_mappings: list[Tensor]  # per group: int64 [T]
    block_tables: list[Tensor]  # per group: int32 [S, blocks]
    seq_lens: Tensor  # int32 [S]
    num_single: int  # number of leading sequences with one token
    starts: Tensor | None  # query_start_loc, int32 [S + 1]; None: one token per sequence
    max_query_len: int
    # int32 []: leading blocks that the one-token sequences share. None: no cascade attention.
    num_common_blocks: Tensor | None = None


class PackedPages:
    """Writes keys and values and computes attention, for one row of packed tokens.

    Args:
        cache: Cache tensors of all layers.
        groups: Layer groups.
        num_heads: Number of query heads.
        sparse: What the one-token sequences attend to. None is everything.
    """

    length = 0  # number of earlier tokens that an attention mask must cover

    def __init__(
        self,
        cache: KVCache,
        groups: LayerGroups,
        num_heads: int,
        sparse: Sparse | None = None,
    ) -> None:
        self.cache = cache
        self.groups = groups
        self.shape = cache.shape
        self.step: StepInputs | None = None
        self._num_heads = num_heads
        self._sparse = sparse
        self._cascades: dict[int, CascadePlan] = {}  # by group

    def begin(self, step: StepInputs) -> None:
        """Sets the inputs of the next pass.

        A CUDA graph of the pass must include this call, because it plans cascades on the device.
        """
        self.step = step
        self._cascades = {}
        if step.num_common_blocks is None:
            return
        for group, window in enumerate(self.groups.windows):
            if not window:
                self._cascades[group] = cascade_plan(
                    step.block_tables[group][: step.num_single],
                    step.seq_lens[: step.num_single],
                    step.num_common_blocks,
                    block_size=self.shape.block_size,
                    num_heads=self._num_heads,
                    num_kv_heads=self.shape.num_kv_heads,
                )

    def forward(self, call: LayerCall) -> Tensor:
        """Does the same as ``Pages.forward``, for a batch of 1."""
        step = self.step
        assert step is not None
        slots = step.slot_mappings[self.groups.group_of_layer[call.layer]]
        self.cache.write(call.layer, token_major(call.key), token_major(call.value), slots)
        return self.attend(call.layer, token_major(call.query), call.options)[None]

    def cascade(self, layer: int, options: AttentionOptions) -> CascadePlan | None:
        """Returns the cascade plan of the one-token sequences, or None without a cascade."""
        if not options.can_cascade or self.is_sparse(layer, options):
            return None
        return self._cascades.get(self.groups.group_of_layer[layer])

    def is_sparse(self, layer: int, options: AttentionOptions) -> bool:
        """Whether the one-token sequences attend to a part of their tokens."""
        return self._sparse is not None and self._sparse.serves(layer, options)

    def attend(self, layer: int, query: Tensor, options: AttentionOptions) -> Tensor:
        """Computes attention for all tokens. Query and result are [T, heads, head_size]."""
        step = self.step
        assert step is not None
        tables, lens = step.block_tables[self.groups.group_of_layer[layer]], step.seq_lens
        plan, single, starts = self.cascade(layer, options), step.num_single, step.starts
        sparse = self._sparse if self.is_sparse(layer, options) else None
        # A GPU runs all tokens of a call in parallel. A CPU is faster if one-token sequences have
        # a call of their own.
        may_split = self.cache.device.type == "cpu" or sparse is not None
        apart = starts is not None and single and may_split
        first = query[:single], tables[:single], lens[:single]
        if sparse is not None and starts is None:
            return sparse.attend(self.cache, layer, *first, options)
        if plan is None and not apart:
            return self.cache.attend(
                layer, query, tables, lens, query_start_loc=starts,
                max_query_len=step.max_query_len, **options.arguments(),
            )  # fmt: skip
        out = query.new_empty(query.shape)
        if sparse is not None:
            sparse.attend(self.cache, layer, *first, options, out[:single])
        elif plan is not None:
            self.cache.attend_cascade(
                layer, *first, plan, scale=options.scale, softcap=options.softcap, out=out[:single]
            )
        else:
            self.cache.attend(layer, *first, out=out[:single], **options.arguments())
        if starts is not None:
            self.cache.attend(
                layer, query, tables[single:], lens[single:], query_start_loc=starts[single:],
                max_query_len=step.max_query_len, out=out, **options.arguments(),
            )  # fmt: skip
        return out
