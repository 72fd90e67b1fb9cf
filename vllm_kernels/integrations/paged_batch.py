"""A batch of sequences over paged key/value caches: the manager, the tensors and the ops together.

One forward pass of a model is ``begin`` once, then ``write`` and ``attend`` in every layer. Knows
nothing of transformers; :mod:`vllm_kernels.integrations.transformers` is the adapter.
"""

from __future__ import annotations

import torch
from torch import Tensor

import vllm_kernels
from vllm_kernels.kv_cache import BatchBuffers, KVCacheManager

HEAD_SIZES = range(32, 257, 8)
BLOCK_SIZES = (8, 16, 32)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class PagedBatch:
    """Rows of a padded batch, each a sequence of a :class:`~vllm_kernels.kv_cache.KVCacheManager`.

    Rows are as long as their real tokens: padding has no slot and is never stored. ``length``
    counts the padded columns, as the model does.

    Args:
        num_layers: of attention.
        num_kv_heads: key/value heads of every layer.
        head_size: a multiple of 8 from 32 to 256.
        num_blocks: blocks of each layer's cache, shared by all rows.
        block_size: 8, 16 or 32 tokens.
        dtype: of keys, values and queries: float32, float16 or bfloat16.
        device: of the caches.

    Raises:
        NotImplementedError: a head size, block size or dtype that the kernels do not serve.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_size: int,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        if head_size not in HEAD_SIZES:
            raise NotImplementedError(
                f"PagedCache: head size: expected a multiple of 8 from 32 to 256, got {head_size}"
            )
        if block_size not in BLOCK_SIZES:
            raise NotImplementedError(
                f"PagedCache: block_size: expected 8, 16 or 32, got {block_size}"
            )
        if dtype not in DTYPES:
            raise NotImplementedError(
                f"PagedCache: dtype: expected float32, float16 or bfloat16, got {dtype}"
            )
        self.manager = KVCacheManager(num_blocks, block_size)
        self.block_size = block_size
        self.dtype = dtype
        self.device = device
        pack = 16 // dtype.itemsize
        key_shape = (num_blocks, num_kv_heads, head_size // pack, block_size, pack)
        value_shape = (num_blocks, num_kv_heads, head_size, block_size)
        options = {"dtype": dtype, "device": device}
        self.key_caches = [torch.empty(key_shape, **options) for _ in range(num_layers)]
        self.value_caches = [torch.empty(value_shape, **options) for _ in range(num_layers)]
        self._one = torch.ones(1, device=device)  # k_scale and v_scale of caches that are not fp8

        self._rows: list[int] = []  # the sequence id of each row
        self._next_id = 0
        self._is_token = torch.empty(0, 0, dtype=torch.bool)  # [rows, length], False for padding
        self._buffers: BatchBuffers | None = None

    @property
    def length(self) -> int:
        """Columns so far: tokens and padding of every row."""
        return self._is_token.shape[1]

    def __len__(self) -> int:
        """Rows, 0 before the first pass."""
        return len(self._rows)

    # The forward pass.

    def begin(self, batch_size: int, num_columns: int, attention_mask: Tensor | None) -> None:
        """Makes room for ``num_columns`` more columns in each row, and plans the pass over them.

        Args:
            batch_size: rows; after the first pass always the same.
            num_columns: new columns, >= 1.
            attention_mask: [batch_size, length + num_columns], False or 0 for padding. None: none.

        Raises:
            ValueError: another batch size, a mask of another shape, or one that differs from what
                is stored in the columns before.
            OutOfBlocks: the pool is too small for these sequences; nothing has changed.
        """
        if not self.key_caches:
            raise RuntimeError("PagedCache: it was freed: make a new one")
        new = self._new_columns(batch_size, num_columns, attention_mask)
        buffers = self._buffers_for(batch_size, num_columns)
        if self._rows:
            copies = self.manager.step(self._rows, new.sum(1), buffers)
            self._is_token = torch.cat([self._is_token, new], 1)
        else:
            rows = self._new_ids(batch_size)
            self.manager.allocate_batch(rows, 0)
            try:
                copies = self.manager.step(rows, new.sum(1), buffers)
            except BaseException:
                self.manager.free_batch(rows)
                raise
            self._rows, self._is_token = rows, new
        if len(copies):
            self._copy_blocks(torch.from_numpy(copies))
        self._plan(new, buffers)

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Stores the new keys and values, [rows, kv_heads, columns, head_size], of one layer."""
        vllm_kernels.reshape_and_cache(
            _token_major(key),
            _token_major(value),
            self.key_caches[layer],
            self.value_caches[layer],
            self._slot_mapping,
            "auto",
            self._one,
            self._one,
        )

    def attend(self, layer: int, query: Tensor, scale: float) -> Tensor:
        """Causal attention of the new tokens over all that is stored of their rows.

        Every token is a row of the paged-attention op, with a length of its own over the block
        table of its sequence; so a prompt runs through the same kernel as a decode step. (A kernel
        for many query tokens would read each page once for all of them.)

        Args:
            layer: whose caches.
            query: [rows, heads, columns, head_size].
            scale: of the logits.

        Returns:
            [rows, columns, heads, head_size]; zeros at padding.
        """
        batch_size, num_heads, num_columns, head_size = query.shape
        out = vllm_kernels.paged_attention(
            _token_major(query),
            self.key_caches[layer],
            self.value_caches[layer],
            self._block_tables,
            self._seq_lens,
            scale=scale,
        )
        return out.view(batch_size, num_columns, num_heads, head_size)

    # What happens to whole sequences between passes.

    def crop(self, num_columns: int) -> None:
        """Forgets the last ``num_columns`` columns (all, if there are fewer)."""
        kept = max(self.length - num_columns, 0)
        self._is_token = self._is_token[:, :kept]
        self.manager.truncate_batch(self._rows, self._is_token.sum(1))

    def reorder(self, indices: Tensor) -> None:
        """Row i becomes what row ``indices[i]`` was; rows with one origin share its blocks."""
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

    def free(self) -> None:
        """Gives the caches' memory back. The batch cannot be used afterwards."""
        self.reset()
        self.key_caches = []
        self.value_caches = []

    # Inner workings.

    def _new_columns(self, batch_size: int, num_columns: int, mask: Tensor | None) -> Tensor:
        """bool [batch_size, num_columns] on the CPU: which of the new columns are tokens."""
        if self._rows and batch_size != len(self._rows):
            raise ValueError(
                f"PagedCache: it holds {len(self._rows)} sequences, got a batch of {batch_size}: "
                "reset() it between unrelated batches"
            )
        if mask is None:
            if not self._is_token.all():
                raise ValueError("PagedCache: padding was stored before, got no attention_mask")
            return torch.ones(batch_size, num_columns, dtype=torch.bool)
        expected = (batch_size, self.length + num_columns)
        if mask.shape != expected:
            raise ValueError(
                f"PagedCache: attention_mask: expected shape {list(expected)} (batch size, columns "
                f"stored before + new), got {list(mask.shape)}"
            )
        mask = mask.to(device="cpu", dtype=torch.bool)
        if self._rows and not torch.equal(mask[:, : self.length], self._is_token):
            raise ValueError(
                "PagedCache: attention_mask: differs from the one that columns stored before had"
            )
        return mask[:, self.length :]

    def _new_ids(self, count: int) -> list[int]:
        first, self._next_id = self._next_id, self._next_id + count
        return list(range(first, self._next_id))

    def _buffers_for(self, batch_size: int, num_columns: int) -> BatchBuffers:
        """Buffers with room for this pass; kept for the passes to come, which are often longer."""
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
        """Sets what ``write`` and ``attend`` of every layer need, for each of the new columns."""
        batch_size, num_columns = new.shape
        is_token = new.flatten()
        num_tokens = int(is_token.sum())
        block_tables = buffers.block_tables[:batch_size]
        if num_columns == 1 and num_tokens == batch_size:  # a decode step: the buffers as they are
            seq_lens = buffers.seq_lens[:batch_size]
            slot_mapping = buffers.slot_mapping[:batch_size]
        else:
            seq_lens = torch.zeros(len(is_token), dtype=torch.int32)
            seq_lens[is_token] = buffers.positions[:num_tokens].to(torch.int32) + 1
            slot_mapping = torch.full((len(is_token),), -1)
            slot_mapping[is_token] = buffers.slot_mapping[:num_tokens]
            block_tables = block_tables.repeat_interleave(num_columns, 0)
        self._seq_lens = seq_lens.to(self.device)
        self._slot_mapping = slot_mapping.to(self.device)
        self._block_tables = block_tables.to(self.device)

    def _copy_blocks(self, pairs: Tensor) -> None:
        vllm_kernels.copy_blocks(self.key_caches, self.value_caches, pairs.to(self.device))


def _token_major(heads: Tensor) -> Tensor:
    """[rows, heads, columns, head_size] as [rows * columns, heads, head_size], contiguous; models
    hold heads as a transposed view of just that, so this rarely copies."""
    return heads.transpose(1, 2).flatten(0, 1).contiguous()
