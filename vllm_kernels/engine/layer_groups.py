"""Pages behind a row of packed tokens: where keys and values of each layer go, and attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from vllm_kernels import CascadePlan, cascade_plan
from vllm_kernels.hf.attention_interface import AttentionOptions, LayerCall
from vllm_kernels.hf.paged_batch import token_major
from vllm_kernels.kv_cache.tensors import KVCache

__all__ = ["LayerGroups", "PackedPages", "StepInputs"]

_MOST_GROUPS = 8


@dataclass(frozen=True)
class LayerGroups:
    """Layers that share block tables: those of one window.

    Groups are of one size, so that a block of one group takes the place of a block of another in
    the same tensors: layer i of each group shares tensor i (as in vLLM's hybrid KV-cache manager).
    """

    windows: tuple[int, ...]  # of each group; 0: all tokens
    group_of_layer: tuple[int, ...]
    tensor_of_layer: tuple[int, ...]

    @classmethod
    def of(cls, windows: Sequence[int]) -> LayerGroups:
        """For layers with these windows (0: none)."""
        kinds = {window: list(windows).count(window) for window in windows}
        size = min(kinds.values())
        if sum(-(-layers // size) for layers in kinds.values()) > _MOST_GROUPS:
            size = max(kinds.values())
        groups: list[int] = []
        group_of_layer, tensor_of_layer = [], []
        filled: dict[int, tuple[int, int]] = {}  # by window: its last group, and layers in it
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
        """Layers of a group."""
        return max(self.tensor_of_layer) + 1


@dataclass
class StepInputs:
    """What attention needs in every layer of one pass. S sequences, T tokens."""

    slot_mappings: list[Tensor]  # a group: int64 [T]
    block_tables: list[Tensor]  # a group: int32 [S, blocks]
    seq_lens: Tensor  # int32 [S]
    num_single: int  # leading sequences with one token
    starts: Tensor | None  # int32 [S + 1]; None: one token a sequence
    max_query_len: int
    # int32 [], leading blocks that the single ones share where there is no window; None: they do
    # not attend to them together
    num_common_blocks: Tensor | None = None


class PackedPages:
    """What stores and attends, for one row of packed tokens.

    Args:
        cache, groups: of the layers.
        num_heads: of a query.
    """

    length = 0  # of what a mask would have to cover beside the new tokens

    def __init__(self, cache: KVCache, groups: LayerGroups, num_heads: int) -> None:
        self.cache = cache
        self.groups = groups
        self.shape = cache.shape
        self.step: StepInputs | None = None
        self._num_heads = num_heads
        self._cascades: dict[int, CascadePlan] = {}  # by group

    def begin(self, step: StepInputs) -> None:
        """Sets the pass. What it computes of lengths on the device belongs into the pass's CUDA
        graph."""
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
        """As ``Pages.forward``, of a batch of 1."""
        step = self.step
        assert step is not None
        slots = step.slot_mappings[self.groups.group_of_layer[call.layer]]
        self.cache.write(call.layer, token_major(call.key), token_major(call.value), slots)
        return self.attend(call.layer, token_major(call.query), call.options)[None]

    def cascade(self, layer: int, options: AttentionOptions) -> CascadePlan | None:
        """By which the single tokens attend to common blocks together. None: they do not."""
        if not options.can_cascade:
            return None
        return self._cascades.get(self.groups.group_of_layer[layer])

    def attend(self, layer: int, query: Tensor, options: AttentionOptions) -> Tensor:
        """Attention of all tokens: query and result are [T, heads, head_size]."""
        step = self.step
        assert step is not None
        tables, lens = step.block_tables[self.groups.group_of_layer[layer]], step.seq_lens
        plan, single = self.cascade(layer, options), step.num_single
        mixed = step.starts is not None
        # A GPU works on all tokens of a call side by side; a CPU is faster at single ones in a call
        # of their own.
        apart = mixed and single and self.cache.device.type == "cpu"
        if plan is None and not apart:
            return self.cache.attend(
                layer, query, tables, lens, query_start_loc=step.starts,
                max_query_len=step.max_query_len, **options.arguments(),
            )  # fmt: skip
        out = query.new_empty(query.shape)
        first = query[:single], tables[:single], lens[:single]
        if plan is not None:
            self.cache.attend_cascade(
                layer, *first, plan, scale=options.scale, softcap=options.softcap, out=out[:single]
            )
        else:
            self.cache.attend(layer, *first, out=out[:single], **options.arguments())
        if mixed:
            self.cache.attend(
                layer, query, tables[single:], lens[single:], query_start_loc=step.starts[single:],
                max_query_len=step.max_query_len, out=out, **options.arguments(),
            )  # fmt: skip
        return out
