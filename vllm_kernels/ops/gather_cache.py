"""Readers of the paged KV cache: its tokens, put side by side."""

from __future__ import annotations

from torch import Tensor

from .._types import KVCacheDType, Layout
from ._common import calls

__all__ = ["cp_gather_cache", "gather_and_maybe_dequant_cache", "gather_cache", "gather_paged_kv"]

call = calls(
    __all__, gather_paged_kv="one element, [num_kv_heads] or [num_blocks, num_kv_heads, block_size]"
)


def cp_gather_cache(
    src_cache: Tensor,
    dst: Tensor,
    block_table: Tensor,
    cu_seq_lens: Tensor,
    batch_size: int,
    seq_starts: Tensor | None = None,
) -> None:
    """Gathers the entries of paged sequences into rows, one sequence after the other, bit for bit.

    Row ``cu_seq_lens[s] + i`` of dst gets token ``seq_starts[s] + i`` of sequence s; rows of no
    sequence are left alone.

    Args:
        src_cache: [num_blocks, block_size, ...], any dtype; the strides of blocks and tokens are
            free.
        dst: [num_rows, ...] in src_cache's dtype, entries of as many elements, written; the stride
            of rows is free.
        block_table: [>= batch_size, blocks_per_seq] int32; entries after the gathered blocks are
            ignored.
        cu_seq_lens: [batch_size + 1] int32, ascending, at most num_rows.
        batch_size: number of sequences.
        seq_starts: [batch_size] int32, a sequence's first token to gather, at any place in its
            block; None: 0.

    Source: vLLM's op of this name (its newest line).

    Raises:
        RuntimeError: for another dtype, shape, stride or device than above, or a written tensor
            that overlaps another. On the CPU also for a block out of range and for tokens past the
            block table, before anything is written. On CUDA the rows of such tokens are zeros, and
            bad values are reported with VLLM_KERNELS_CHECK=1 (but for a start and a length that are
            too long only together).

    Example:
        >>> cache = torch.arange(4.0).view(2, 2, 1)  # two blocks of two tokens
        >>> table = torch.tensor([[1, 0]], dtype=torch.int32)
        >>> rows, cu_seq_lens = torch.zeros(3, 1), torch.tensor([0, 3], dtype=torch.int32)
        >>> vllm_kernels.cp_gather_cache(cache, rows, table, cu_seq_lens, 1)
        >>> rows.flatten()
        tensor([2., 3., 0.])
    """
    call.cp_gather_cache(src_cache, dst, block_table, cu_seq_lens, batch_size, seq_starts)


def gather_cache(
    src_cache: Tensor,
    dst: Tensor,
    block_table: Tensor,
    cu_seq_lens: Tensor,
    batch_size: int,
    seq_starts: Tensor | None = None,
) -> None:
    """:func:`cp_gather_cache` under the name that vLLM 0.9 gave it.

    Args:
        src_cache, dst, block_table, cu_seq_lens, batch_size: as :func:`cp_gather_cache`.
        seq_starts: likewise, at any place in a block. (vLLM 0.9 rounded a start down to its block.)

    Raises:
        InvalidArgument, InvalidIndex: as :func:`cp_gather_cache`.

    Example:
        >>> cache = torch.arange(4.0).view(2, 2, 1)  # two blocks of two tokens
        >>> table = torch.tensor([[1, 0]], dtype=torch.int32)
        >>> rows = torch.zeros(3, 1)
        >>> cu_seq_lens = torch.tensor([0, 3], dtype=torch.int32)
        >>> vllm_kernels.gather_cache(cache, rows, table, cu_seq_lens, 1)
        >>> rows.flatten().tolist()
        [2.0, 3.0, 0.0]

    Source: vLLM 0.9's op of this name.
    """
    call.gather_cache(src_cache, dst, block_table, cu_seq_lens, batch_size, seq_starts)


def gather_and_maybe_dequant_cache(
    src_cache: Tensor,
    dst: Tensor,
    block_table: Tensor,
    cu_seq_lens: Tensor,
    token_to_seq: Tensor,
    num_tokens: int,
    kv_cache_dtype: KVCacheDType,
    scale: Tensor,
    seq_starts: Tensor | None = None,
) -> None:
    """:func:`cp_gather_cache` that converts an 8-bit cache to dst's dtype: element * scale.

    Args:
        src_cache, block_table, cu_seq_lens, seq_starts: as :func:`cp_gather_cache`.
        dst: [num_rows, ...] float32, float16 or bfloat16, entries of as many elements, written.
        token_to_seq: [>= num_tokens] int32, the sequence of each row, as in cu_seq_lens; it saves
            the search. A row that cu_seq_lens does not give
            to this sequence is left alone.
        num_tokens: rows of dst to process.
        kv_cache_dtype: "auto" (src_cache is in dst's dtype), "fp8" or "fp8_e4m3", "fp8_e5m2",
            "int8". (Entries of "fp8_ds_mla" are for :func:`cp_gather_and_upconvert_fp8_kv_cache`.)
        scale: one float32; for 8-bit caches.

    Source: vLLM's op of this name (its newest line), there for entries of 576 elements only.

    Raises:
        RuntimeError: as :func:`cp_gather_cache`. On CUDA the row of a sequence out of range is
            zeros.

    Example:
        >>> cache = torch.arange(4, dtype=torch.int8).view(2, 2, 1)  # two blocks of two tokens
        >>> table = torch.tensor([[1, 0]], dtype=torch.int32)
        >>> rows, cu_seq_lens = torch.zeros(3, 1), torch.tensor([0, 3], dtype=torch.int32)
        >>> sequences, scale = torch.zeros(3, dtype=torch.int32), torch.tensor([0.5])
        >>> vllm_kernels.gather_and_maybe_dequant_cache(
        ...     cache, rows, table, cu_seq_lens, sequences, 3, "int8", scale
        ... )
        >>> rows.flatten()
        tensor([1.0000, 1.5000, 0.0000])
    """
    call.gather_and_maybe_dequant_cache(
        src_cache, dst, block_table, cu_seq_lens, token_to_seq, num_tokens, kv_cache_dtype,
        scale, seq_starts,
    )  # fmt: skip


def gather_paged_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    cu_seq_lens: Tensor,
    *,
    seq_starts: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    layout: Layout = "vllm",
    k_zero: Tensor | None = None,
    v_zero: Tensor | None = None,
) -> None:
    """Gathers the K and V of paged sequences, of any layout, into rows, for attention kernels that
    read contiguous keys.

    Row ``cu_seq_lens[s] + i`` gets token ``seq_starts[s] + i`` of sequence s; rows of no sequence
    are left alone. Elements of 8-bit and int4 caches are multiplied by their scale and rounded to
    the dtype of the rows.

    Args:
        key, value: [num_rows, num_kv_heads, head_size], float32, float16 or bfloat16, written; the
            strides of rows and heads are free.
        key_cache, value_cache: of that dtype, float8_e4m3fn, float8_e5m2, int8, or uint8 for int4;
            shapes by layout as in :func:`vllm_kernels.paged_attention`.
        block_tables: [>= num_seqs, blocks_per_seq] int32; entries after the gathered blocks are
            ignored.
        cu_seq_lens: [num_seqs + 1] int32, ascending, at most num_rows.
        seq_starts: [num_seqs] int32, a sequence's first token to gather; None: 0.
        k_scale, v_scale: for 8-bit caches, float32, both of one element, or [num_kv_heads], or
            contiguous [num_blocks, num_kv_heads, block_size] (written by
            :func:`reshape_and_cache_per_token_quant`); None stands for 1.
        layout: "vllm", "NHD" or "HND".
        k_zero, v_zero: for int4 caches, which are uint8 of head_size / 2 elements a row:
            contiguous float32 [num_blocks, num_kv_heads, block_size], as the scales then are. An
            element is ``(n - 8) * scale + zero``.

    Raises:
        RuntimeError: as :func:`cp_gather_cache`.

    Example:
        >>> key_cache, value_cache = torch.randn(2, 4, 16, 1, 64)
        >>> key, value = torch.empty(2, 20, 1, 64)
        >>> tables = torch.tensor([[2, 0]], dtype=torch.int32)
        >>> cu_seq_lens = torch.tensor([0, 20], dtype=torch.int32)
        >>> vllm_kernels.gather_paged_kv(
        ...     key, value, key_cache, value_cache, tables, cu_seq_lens, layout="NHD"
        ... )
        >>> torch.equal(key, torch.cat([key_cache[2], key_cache[0, :4]]))
        True
    """
    call.gather_paged_kv(
        key, value, key_cache, value_cache, block_tables, cu_seq_lens, seq_starts, k_scale,
        v_scale, layout, k_zero, v_zero,
    )  # fmt: skip
