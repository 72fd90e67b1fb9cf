"""The cache of multi-head latent attention (MLA)."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from .._types import KVCacheDType
from ._common import calls

__all__ = ["concat_and_cache_mla", "concat_mla_q", "cp_gather_and_upconvert_fp8_kv_cache"]

call = calls(__all__)


def concat_and_cache_mla(
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: KVCacheDType | Literal["fp8_ds_mla"],
    scale: Tensor,
) -> None:
    """Writes tokens into the cache of multi-head latent attention (DeepSeek-V2 and on): one entry a
    token, its latent followed by the rotated key part that all heads share.

    Slots are as in :func:`reshape_and_cache`: -1 leaves a token out, the last token of a slot wins.

    Args:
        kv_c: [num_tokens, kv_lora_rank], float32, float16 or bfloat16; the stride of tokens is
            free.
        k_pe: [num_tokens, pe_dim], likewise.
        kv_cache: [num_blocks, block_size, kv_lora_rank + pe_dim], written; the strides of blocks
            and tokens are free. For "fp8_ds_mla" uint8 [num_blocks, block_size, 656], entries at
            multiples of 16 bytes.
        slot_mapping: [n] int64, n <= num_tokens.
        kv_cache_dtype: "auto", "fp8" or "fp8_e4m3", "fp8_e5m2" (x / scale), or "fp8_ds_mla": 512
            e4m3 values of kv_c, then one float32 scale for each 128 of them,
            max(max|x| / 448, 2^-126), then k_pe [64] as bfloat16.
        scale: one float32; for "fp8", "fp8_e4m3", "fp8_e5m2".

    Source: DeepSeek-V2 (arXiv 2405.04434); vLLM's op of this name; the entry of "fp8_ds_mla" is
    FlashMLA's. Attention over these caches is later work.

    Raises:
        RuntimeError: as :func:`reshape_and_cache`.

    Example:
        >>> cache = torch.zeros(4, 16, 6)
        >>> kv_c, k_pe = torch.ones(1, 4), torch.full((1, 2), 2.0)
        >>> slots, one = torch.tensor([17]), torch.ones(1)
        >>> vllm_kernels.concat_and_cache_mla(kv_c, k_pe, cache, slots, "auto", one)
        >>> cache[1, 1]  # slot 17: block 1, token 1
        tensor([1., 1., 1., 1., 2., 2.])
    """
    call.concat_and_cache_mla(kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype, scale)


def cp_gather_and_upconvert_fp8_kv_cache(
    src_cache: Tensor,
    dst: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    workspace_starts: Tensor,
    batch_size: int,
) -> None:
    """Gathers entries of "fp8_ds_mla" (see :func:`concat_and_cache_mla`) into rows of a model's
    dtype: the latent times its scales, then the rope part.

    Token i of sequence s goes to row ``workspace_starts[s] + i``; the other rows are left alone.

    Args:
        src_cache: [num_blocks, block_size, 656] uint8, entries at multiples of 16 bytes.
        dst: [num_rows, 576], bfloat16 (or float16, float32), rows at multiples of 16 bytes,
            written.
        block_table: [>= batch_size, blocks_per_seq] int32; entries past the lengths are ignored.
        seq_lens: [batch_size] int32.
        workspace_starts: [batch_size] int32. Sequences must not share rows.
        batch_size: number of sequences.

    Source: vLLM's op of this name.

    Raises:
        RuntimeError: for another dtype, shape, stride or device than above, or a written tensor
            that overlaps another. On the CPU also for a block, a length or a row out of range,
            before anything is written. On CUDA the row of a bad block is zeros, and tokens that
            would go past dst are left out.

    Example:
        >>> cache = torch.zeros(1, 16, 656, dtype=torch.uint8)
        >>> kv_c, k_pe = torch.ones(1, 512), torch.full((1, 64), 2.0)
        >>> vllm_kernels.concat_and_cache_mla(
        ...     kv_c, k_pe, cache, torch.tensor([0]), "fp8_ds_mla", torch.ones(1)
        ... )
        >>> rows, one = torch.empty(1, 576), torch.ones(1, dtype=torch.int32)
        >>> table = start = torch.zeros(1, dtype=torch.int32)
        >>> vllm_kernels.cp_gather_and_upconvert_fp8_kv_cache(
        ...     cache, rows, table[None], one, start, 1
        ... )
        >>> rows[0, 0].item(), rows[0, 575].item()
        (1.0, 2.0)
    """
    call.cp_gather_and_upconvert_fp8_kv_cache(
        src_cache, dst, block_table, seq_lens, workspace_starts, batch_size
    )


def concat_mla_q(ql_nope: Tensor, q_pe: Tensor, q_out: Tensor) -> None:
    """q_out[..., :nope_dim] = ql_nope and q_out[..., nope_dim:] = q_pe: the query that attention
    over an MLA cache takes.

    Args:
        ql_nope: [num_tokens, num_heads, nope_dim], float32, float16 or bfloat16; the strides of
            tokens and heads are free.
        q_pe: [num_tokens, num_heads, pe_dim], likewise.
        q_out: [num_tokens, num_heads, nope_dim + pe_dim], likewise, written.

    Source: vLLM's op of this name, there for 512 + 64 only.

    Raises:
        RuntimeError: for another dtype, shape, stride or device than above, or a written tensor
            that overlaps another.

    Example:
        >>> nope, rope, out = torch.ones(1, 1, 2), torch.zeros(1, 1, 1), torch.empty(1, 1, 3)
        >>> vllm_kernels.concat_mla_q(nope, rope, out)
        >>> out
        tensor([[[1., 1., 0.]]])
    """
    call.concat_mla_q(ql_nope, q_pe, q_out)
