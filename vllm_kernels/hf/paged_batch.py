"""A padded batch of sequences over a paged KV cache: the manager, the tensors and the ops together.

One forward pass of a model is ``begin`` once, then ``write`` and ``attend`` in every layer
(``forward`` does all of it). Knows nothing of transformers' classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import Error, InvalidArgument
from ..kv_cache import BatchBuffers, KVCacheManager, OutOfBlocks
from ..kv_cache.tensors import KVCache, KVShape

if TYPE_CHECKING:
    from .attention_interface import AttentionOptions, LayerCall


_RESET = "reset() it between unrelated batches"


@dataclass
class _Pass:
    """The inputs of every layer in one forward pass."""

    tokens: Tensor | None  # int64 [num_tokens], places of the tokens in the columns; None: all
    slot_mapping: Tensor  # int64 [num_tokens]
    block_tables: Tensor  # int32 [rows, blocks]
    seq_lens: Tensor  # int32 [rows]
    query_start_loc: Tensor | None  # int32 [rows + 1]; None: a token a row
    max_query_len: int


class PagedBatch:
    """Rows of a padded batch, each a sequence of a :class:`~vllm_kernels.kv_cache.KVCacheManager`.

    Rows are as long as their real tokens: padding has no slot and is never stored. ``length``
    counts the padded columns, as the model does.

    Args:
        shape: of a block.
        num_blocks: blocks of the cache, shared by all rows.
        device: of the cache.
    """

    def __init__(self, shape: KVShape, num_blocks: int, device: torch.device) -> None:
        self.manager = KVCacheManager(num_blocks, shape.block_size)
        self.cache = KVCache(shape, num_blocks, device=device)
        self.block_size = shape.block_size
        self.shape = shape
        self.device = device

        self._rows: list[int] = []  # the sequence id of each row
        self._next_id = 0
        self._is_token = torch.empty(0, 0, dtype=torch.bool)  # [rows, length], False for padding
        self._buffers: BatchBuffers | None = None
        self._pass: _Pass | None = None
        self._written: set[int] | None = None  # layers of the pass; None: none has begun

    @property
    def length(self) -> int:
        """Columns so far: tokens and padding of every row."""
        return self._is_token.shape[1]

    def __len__(self) -> int:
        """Rows, 0 before the first pass."""
        return len(self._rows)

    # The forward pass.

    def forward(self, call: LayerCall) -> Tensor:
        """A layer of the pass, which begins with layer 0: as ``Pages.forward``."""
        if call.layer == 0:
            self.begin(call.query.shape[0], call.query.shape[2], call.mask)
        self.write(call.layer, call.key, call.value)
        return self.attend(call.layer, call.query, call.options)

    def begin(self, batch_size: int, num_columns: int, attention_mask: Tensor | None) -> None:
        """Makes room for ``num_columns`` more columns in each row, and plans the pass over them.

        Args:
            batch_size: rows; after the first pass always the same.
            num_columns: new columns, >= 1.
            attention_mask: [batch_size, length + num_columns], False or 0 for padding. None: none.

        Raises:
            RuntimeError: the last pass did not complete all layers: it failed, or a layer was
                called twice. Call :meth:`reset`.
            ValueError: another batch size, a mask of another shape, or one that differs from the
                stored columns.
            OutOfBlocks: the pool is too small for these sequences; nothing has changed.
        """
        if self.cache.is_freed:
            raise Error("PagedCache: it was freed: make a new one")
        layers = self.cache.shape.num_layers
        if self._written is not None and len(self._written) < layers:
            raise Error(
                f"PagedCache: the pass before came through {len(self._written)} of {layers} layers "
                "(it failed, or layer 0 attends twice in a pass, which is not served): reset() it"
            )
        new = self._new_columns(batch_size, num_columns, attention_mask)
        buffers = self._buffers_for(batch_size, num_columns)
        if self._rows:
            copies = self._step(self._rows, new, buffers)
            self._is_token = torch.cat([self._is_token, new], 1)
        else:
            rows = self._new_ids(batch_size)
            self.manager.allocate_batch(rows, 0)
            try:
                copies = self._step(rows, new, buffers)
            except BaseException:
                self.manager.free_batch(rows)
                raise
            self._rows, self._is_token = rows, new
        self._written = set()
        self.cache.copy(copies)
        self._plan(new, buffers)

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Stores the new keys and values, [rows, kv_heads, columns, head_size], of one layer.

        Raises:
            RuntimeError: the layer has stored its own in this pass already.
        """
        plan, written = self._pass, self._written
        assert plan is not None and written is not None
        if layer in written:
            raise Error(f"PagedCache: layer {layer} attends twice in a pass, which is not served")
        self.cache.write(
            layer, self._packed(key, plan), self._packed(value, plan), plan.slot_mapping
        )
        written.add(layer)

    def attend(self, layer: int, query: Tensor, options: AttentionOptions) -> Tensor:
        """Causal attention of the new tokens over all that is stored of their rows.

        Args:
            layer: whose caches.
            query: [rows, heads, columns, head_size].

        Returns:
            [rows, columns, heads, head_size]; zeros at padding.
        """
        plan = self._pass
        assert plan is not None
        rows, num_heads, num_columns, head_size = query.shape
        out = self.cache.attend(
            layer,
            self._packed(query, plan),
            plan.block_tables,
            plan.seq_lens,
            query_start_loc=plan.query_start_loc,
            max_query_len=plan.max_query_len,
            **options.arguments(),
        )
        if plan.tokens is not None:
            padded = out.new_zeros(rows * num_columns, num_heads, head_size)
            out = padded.index_copy_(0, plan.tokens, out)
        return out.view(rows, num_columns, num_heads, head_size)

    # What happens to whole sequences between passes.

    def crop(self, num_columns: int) -> None:
        """Forgets the last ``num_columns`` columns (all, if there are fewer)."""
        kept = max(self.length - num_columns, 0)
        self._is_token = self._is_token[:, :kept]
        self.manager.truncate_batch(self._rows, self._is_token.sum(1))

    def reorder(self, indices: Tensor) -> None:
        """Row i continues row ``indices[i]``; rows with the same origin share its blocks."""
        indices = indices.cpu()
        self.manager.reorder(self._rows, [self._rows[i] for i in indices.tolist()])
        self._is_token = self._is_token[indices]

    def select(self, indices: Tensor) -> None:
        """As :meth:`reorder`, and the number of rows becomes ``len(indices)``."""
        indices = indices.cpu()
        parents = [self._rows[i] for i in indices.tolist()]  # refuses a bad index before any fork
        chosen = self._new_ids(len(indices))
        for parent, child in zip(parents, chosen):
            self.manager.fork(parent, child)
        self.manager.free_batch(self._rows)
        self._rows = chosen
        self._is_token = self._is_token[indices]

    def reset(self) -> None:
        """Forgets every sequence; their blocks become free."""
        self.manager.free_batch(self._rows)
        self._rows = []
        self._is_token = torch.empty(0, 0, dtype=torch.bool)
        self._written = None

    def free(self) -> None:
        """Gives the caches' memory back. The batch cannot be used afterwards."""
        self.reset()
        self.cache.free()

    # Inner workings.

    def _new_columns(self, batch_size: int, num_columns: int, mask: Tensor | None) -> Tensor:
        """bool [batch_size, num_columns] on the CPU: which of the new columns are tokens."""
        if self._rows and batch_size != len(self._rows):
            raise InvalidArgument(
                f"PagedCache: it holds {len(self._rows)} sequences, got a batch of {batch_size}: "
                f"{_RESET}"
            )
        if mask is None:
            if not self._is_token.all():
                raise InvalidArgument(
                    "PagedCache: padding was stored before, got no attention_mask"
                )
            return torch.ones(batch_size, num_columns, dtype=torch.bool)
        expected = (batch_size, self.length + num_columns)
        if mask.shape != expected:
            raise InvalidArgument(
                f"PagedCache: attention_mask: expected shape {list(expected)} (batch size, columns "
                f"stored before + new), got {list(mask.shape)}{f': {_RESET}' * bool(self._rows)}"
            )
        mask = mask.to(device="cpu", dtype=torch.bool)
        if self._rows and not torch.equal(mask[:, : self.length], self._is_token):
            raise InvalidArgument(
                "PagedCache: attention_mask: differs from the one that columns stored before had: "
                f"{_RESET}"
            )
        return mask[:, self.length :]

    def _step(self, rows: list[int], new: Tensor, buffers: BatchBuffers) -> npt.NDArray[np.int64]:
        """The manager's step by the new columns' tokens; OutOfBlocks gets a hint."""
        try:
            return self.manager.step(rows, new.sum(1), buffers)
        except OutOfBlocks as error:
            error.args = (
                f"PagedCache: {error}: give more num_blocks than {self.manager.num_blocks} "
                "(PagedCache.blocks_needed), beams are sequences too",
            )
            raise

    def _new_ids(self, count: int) -> list[int]:
        first, self._next_id = self._next_id, self._next_id + count
        return list(range(first, self._next_id))

    def _buffers_for(self, batch_size: int, num_columns: int) -> BatchBuffers:
        """Buffers with room for this pass; kept for later passes, which are often longer."""
        blocks = -(-(self.length + num_columns) // self.block_size)
        tokens = batch_size * num_columns
        have = self._buffers
        if (
            have is None
            or len(have.seq_lens) < batch_size
            or have.block_tables.shape[1] < blocks
            or len(have.slot_mapping) < tokens
        ):
            have = self._buffers = BatchBuffers.zeros(batch_size, 2 * blocks, tokens)
        return have

    def _plan(self, new: Tensor, buffers: BatchBuffers) -> None:
        """Sets the inputs of ``write`` and ``attend`` for the tokens of the new columns."""
        rows, num_columns = new.shape
        num_tokens = int(new.sum())
        padded = num_tokens < new.numel()
        one_each = num_columns == 1 and not padded

        def upload(tensor: Tensor) -> Tensor:
            # A copy: the buffers are filled again while a GPU may not have read them.
            return tensor.to(self.device, copy=True)

        self._pass = _Pass(
            tokens=upload(new.flatten().nonzero().squeeze(1)) if padded else None,
            slot_mapping=upload(buffers.slot_mapping[:num_tokens]),
            block_tables=upload(buffers.block_tables[:rows]),
            seq_lens=upload(buffers.seq_lens[:rows]),
            query_start_loc=None if one_each else upload(buffers.query_start_loc[: rows + 1]),
            max_query_len=num_columns,
        )

    @staticmethod
    def _packed(heads: Tensor, plan: _Pass) -> Tensor:
        """[rows, heads, columns, head_size] as [tokens, heads, head_size], without padding."""
        tokens = token_major(heads)
        return tokens if plan.tokens is None else tokens.index_select(0, plan.tokens)


def token_major(heads: Tensor) -> Tensor:
    """[rows, heads, columns, head_size] as [rows * columns, heads, head_size], a token's heads
    contiguous. Models hold heads as a transposed view of mostly that, so it rarely copies."""
    tokens = heads.transpose(1, 2).flatten(0, 1)
    size = tokens.shape[-1]
    if tokens.stride(-1) == 1 and tokens.stride(1) == size:
        return tokens
    return tokens.contiguous()
