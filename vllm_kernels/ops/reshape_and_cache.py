"""The paged KV cache: writing, copying, converting."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .. import _library
from .._types import KVCacheDType, Layout
from ..errors import Unsupported
from ._common import ONE_OR_EACH_HEAD, calls, inference_only, require_list

__all__ = [
    "concat_and_cache_mla",
    "concat_mla_q",
    "convert_fp8",
    "copy_blocks",
    "copy_blocks_mla",
    "cp_gather_and_upconvert_fp8_kv_cache",
    "cp_gather_cache",
    "gather_and_maybe_dequant_cache",
    "gather_cache",
    "gather_paged_kv",
    "reshape_and_cache",
    "reshape_and_cache_flash",
    "reshape_and_cache_per_token_quant",
    "swap_blocks",
    "swap_blocks_batch",
]

call = calls(
    __all__,
    reshape_and_cache=ONE_OR_EACH_HEAD,
    reshape_and_cache_flash=ONE_OR_EACH_HEAD,
    gather_paged_kv="one element, [num_kv_heads] or [num_blocks, num_kv_heads, block_size]",
)


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: KVCacheDType,
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    """Writes new keys and values into a paged cache of layout "vllm".

    Token t goes to slot ``slot_mapping[t] = block * block_size + position in the block``. Slot -1
    leaves the token out. If a slot occurs more than once, exactly the last token of the call
    is written, with whole rows, on both CPU and CUDA.

    Args:
        key, value: [num_tokens, num_kv_heads, head_size], float32, float16 or bfloat16; the strides
            of tokens and heads are free.
        key_cache: [num_blocks, num_kv_heads, head_size / x, block_size, x], written; x = 16
            bytes of elements; the strides of blocks and heads are free.
        value_cache: [num_blocks, num_kv_heads, head_size, block_size], written; likewise.
        slot_mapping: [n] int64, n <= num_tokens; tokens past n are ignored (CUDA-graph padding).
        kv_cache_dtype: "auto" (dtype of key), "fp8" or "fp8_e4m3", "fp8_e5m2" (uint8 or float8
            tensors), "int8" (uint8 or int8): x / scale to nearest even, saturating. A NaN is stored
            as NaN in fp8 and as 0 in int8.
        k_scale, v_scale: float32 on the same device, both of one element or both [num_kv_heads];
            for 8-bit caches, where they are finite and > 0. (The CPU refuses others, CUDA reports
            them with VLLM_KERNELS_CHECK=1.)

    Single tokens cost a 32-byte sector per value, because a token's values are block_size apart.
    On CUDA the tokens of a call are taken in groups of 16; a group whose slots are 16 neighbours
    from a multiple of 16 on is transposed and costs only its own bytes. (Where block_size is a
    multiple of 8 only: 8 in place of 16.) For decoding large batches
    :func:`reshape_and_cache_flash` is cheaper.

    Raises:
        RuntimeError: for another dtype, shape, stride or device than above, or a written tensor
            that overlaps another. On the CPU also for a slot below -1 or past the cache, before
            anything is written; on CUDA such a token is left out, and reported with
            VLLM_KERNELS_CHECK=1, as are repeated slots.

    Example:
        >>> key_cache, value_cache = torch.zeros(4, 1, 16, 16, 4), torch.zeros(4, 1, 64, 16)
        >>> key, value = torch.ones(2, 1, 1, 64)  # one token, one head
        >>> slots, one = torch.tensor([17]), torch.ones(1)
        >>> vllm_kernels.reshape_and_cache(
        ...     key, value, key_cache, value_cache, slots, "auto", one, one
        ... )
        >>> value_cache[1, :, :, 1].sum().item()  # slot 17: block 1, token 1
        64.0
    """
    call.reshape_and_cache(
        key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale
    )


def reshape_and_cache_flash(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: KVCacheDType,
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    """:func:`reshape_and_cache` for the layout of flash attention.

    Args:
        key, value, slot_mapping, kv_cache_dtype, k_scale, v_scale: as :func:`reshape_and_cache`.
        key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_size], written; the
            strides of blocks, tokens and heads are free. A cache of layout HND,
            [num_blocks, num_kv_heads, block_size, head_size], is written through its view
            ``cache.transpose(1, 2)``, at the same speed. (Nothing can tell that the view was
            forgotten where block_size = num_kv_heads.)

    Raises:
        RuntimeError: as :func:`reshape_and_cache`.

    Example:
        >>> key_cache, value_cache = torch.zeros(2, 4, 16, 1, 64)
        >>> key, value = torch.ones(2, 1, 1, 64)  # one token, one head
        >>> slots, one = torch.tensor([17]), torch.ones(1)
        >>> vllm_kernels.reshape_and_cache_flash(
        ...     key, value, key_cache, value_cache, slots, "auto", one, one
        ... )
        >>> value_cache[1, 1].sum().item()  # slot 17: block 1, token 1
        64.0
    """
    call.reshape_and_cache_flash(
        key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale
    )


def reshape_and_cache_per_token_quant(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    key_scales: Tensor,
    value_scales: Tensor,
    slot_mapping: Tensor,
    layout: Layout = "vllm",
) -> None:
    """Writes new keys and values into int8 caches, with one scale a token and head.

    A row x of head_size values is stored as ``x / scale``, to nearest even, with
    ``scale = max|x| / 127``: its error is at most scale / 2 an element, regardless of the other
    tokens. A row of zeros has scale 0. A row with a NaN or an infinity gets such a scale, so that
    it reads as NaN, and no other row does.

    The scales are separate from the pages, [num_blocks, num_kv_heads, block_size]: copy and swap
    them with their blocks. :func:`gather_paged_kv` reads such a cache; attention over it is later
    work (``paged_attention`` takes one scale, or one a KV head).

    Args:
        key, value, slot_mapping: as :func:`reshape_and_cache`.
        key_cache, value_cache: int8, in ``layout``, written. "vllm", or "NHD" [num_blocks,
            block_size, num_kv_heads, head_size], or "HND" [num_blocks, num_kv_heads, block_size,
            head_size]; free strides as :func:`vllm_kernels.paged_attention` has them.
        key_scales, value_scales: [num_blocks, num_kv_heads, block_size] float32, last stride 1,
            written.

    Raises:
        RuntimeError: as :func:`reshape_and_cache`.

    Example:
        >>> key_cache, value_cache = torch.zeros(2, 4, 16, 1, 64, dtype=torch.int8)
        >>> key_scales, value_scales = torch.zeros(2, 4, 1, 16)
        >>> key, value = torch.full((2, 1, 1, 64), 127.0)
        >>> vllm_kernels.reshape_and_cache_per_token_quant(
        ...     key, value, key_cache, value_cache, key_scales, value_scales,
        ...     torch.tensor([17]), "NHD",
        ... )
        >>> key_cache[1, 1, 0, 0].item(), key_scales[1, 0, 1].item()
        (127, 1.0)
    """
    call.reshape_and_cache_per_token_quant(
        key, value, key_cache, value_cache, key_scales, value_scales, slot_mapping, layout
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
) -> None:
    """Gathers the K and V of paged sequences, of any layout, into rows, for attention kernels that
    read contiguous keys.

    Row ``cu_seq_lens[s] + i`` gets token ``seq_starts[s] + i`` of sequence s; rows of no sequence
    are left alone. Elements of 8-bit caches are multiplied by their scale and rounded to the dtype
    of the rows.

    Args:
        key, value: [num_rows, num_kv_heads, head_size], float32, float16 or bfloat16, written; the
            strides of rows and heads are free.
        key_cache, value_cache: of that dtype, float8_e4m3fn, float8_e5m2 or int8; shapes by layout
            as in :func:`vllm_kernels.paged_attention`.
        block_tables: [>= num_seqs, blocks_per_seq] int32; entries after the gathered blocks are
            ignored.
        cu_seq_lens: [num_seqs + 1] int32, ascending, at most num_rows.
        seq_starts: [num_seqs] int32, a sequence's first token to gather; None: 0.
        k_scale, v_scale: for 8-bit caches, float32, both of one element, or [num_kv_heads], or
            [num_blocks, num_kv_heads, block_size] (written by
            :func:`reshape_and_cache_per_token_quant`); None stands for 1.
        layout: "vllm", "NHD" or "HND".

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
        v_scale, layout,
    )  # fmt: skip


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


def copy_blocks(
    key_caches: list[Tensor], value_caches: list[Tensor], block_mapping: Tensor
) -> None:
    """Copies blocks within every cache, as copy-on-write requires after a fork.

    Args:
        key_caches, value_caches: one tensor a layer, [num_blocks, ...], of any layout and dtype,
            written; none shares memory with another. All blocks have one size in bytes, without
            gaps; the stride of blocks is free.
        block_mapping: [n, 2] int64, pairs (source, destination), on the caches' device or the CPU.
            No block may be a destination twice, or both a source and a destination: the order of
            the copies is not defined on CUDA (on the CPU it is that of the list).

    Needs no sync and no upload; safe in CUDA graphs (a mapping on the CPU is then baked in).

    Raises:
        RuntimeError: also for a block out of range or a destination that occurs twice, before
            anything is copied, where the mapping is on the CPU. On CUDA a pair out of range is
            skipped, and both are reported with VLLM_KERNELS_CHECK=1.

    Example:
        >>> key_cache, value_cache = torch.arange(8.0).view(2, 4, 1)  # four blocks each
        >>> vllm_kernels.copy_blocks([key_cache], [value_cache], torch.tensor([[0, 3]]))
        >>> key_cache.flatten(), value_cache.flatten()
        (tensor([0., 1., 2., 0.]), tensor([4., 5., 6., 4.]))
    """
    for name, caches in (("key_caches", key_caches), ("value_caches", value_caches)):
        require_list("copy_blocks", name, caches)
    inference_only("copy_blocks", *key_caches, *value_caches)
    call.copy_blocks(key_caches, value_caches, block_mapping)


def copy_blocks_mla(kv_caches: list[Tensor], block_mapping: Tensor) -> None:
    """:func:`copy_blocks` for caches that hold keys and values together, one a layer.

    Raises:
        RuntimeError: as :func:`copy_blocks`.

    Example:
        >>> cache = torch.arange(4.0).view(4, 1)  # four blocks
        >>> vllm_kernels.copy_blocks_mla([cache], torch.tensor([[0, 3]]))
        >>> cache.flatten()
        tensor([0., 1., 2., 0.])
    """
    require_list("copy_blocks_mla", "kv_caches", kv_caches)
    inference_only("copy_blocks_mla", *kv_caches)
    call.copy_blocks_mla(kv_caches, block_mapping)


def swap_blocks(src: Tensor, dst: Tensor, block_mapping: Tensor) -> None:
    """Copies blocks between two caches, each on the CPU or on one GPU.

    Args:
        src: [num_src_blocks, ...], any dtype.
        dst: [num_dst_blocks, ...], dtype of src, blocks of the same shape and strides, written. In
            memory that it shares with src, blocks must coincide or be apart.
        block_mapping: [n, 2] int64 on the CPU, pairs (block of src, block of dst). No block of dst
            may occur twice: the copies have no order on CUDA (within one tensor they have).

    Neighbouring pairs travel as one stretch. Several stretches are one batched copy
    (cudaMemcpyBatchAsync, CUDA 12.8 and on) where the memory on the CPU is pinned and the current
    stream is neither the default stream, which takes none, nor captured; else they are copied one
    by one, which costs about a microsecond of the CPU's time each. All of it is asynchronous,
    except that a copy from or to pageable memory may wait for earlier work. Pinned memory must stay
    untouched until the stream gets there.

    To overlap with computing, give the copies a stream of their own and let the two wait for each
    other where one needs the other's results::

        copies = torch.cuda.Stream()
        host = torch.empty_like(key_cache, device="cpu").pin_memory()
        copies.wait_stream(torch.cuda.current_stream())  # the blocks are written
        with torch.cuda.stream(copies):
            swap_blocks(key_cache, host, block_mapping)  # while the model goes on elsewhere
        ...
        torch.cuda.current_stream().wait_stream(copies)  # before the blocks are written again

    Raises:
        RuntimeError: also for a block out of range or, between two tensors, one of dst that occurs
            twice, before anything is copied.

    Example:
        >>> src, dst = torch.arange(4.0).view(4, 1), torch.zeros(2, 1)
        >>> vllm_kernels.swap_blocks(src, dst, torch.tensor([[3, 0], [1, 1]]))
        >>> dst.flatten()
        tensor([3., 1.])
    """
    call.swap_blocks(src, dst, block_mapping)


def convert_fp8(
    output: Tensor,
    input: Tensor,
    scale: float = 1.0,
    kv_dtype: Literal["fp8", "fp8_e4m3", "fp8_e5m2"] = "fp8",
) -> None:
    """Converts a cache to or from 8 bits, element by element in the order of memory.

    The shapes may differ, as those of a K cache in layout "vllm" do. Dimensions may have any order
    in memory: permuted views need no copy.

    Args:
        output: without gaps in memory, as many elements as input, written. If it has input's
            shape, it must have its strides, too.
        input: without gaps in memory. One of the two is float32, float16 or bfloat16, the other
            8-bit (uint8, or the float8 dtype that kv_dtype names), which gives the direction:
            8-bit = x / scale, to nearest even, saturating; or x = 8-bit * scale.
        scale: of the 8-bit side, finite and > 0.
        kv_dtype: "fp8" or "fp8_e4m3", "fp8_e5m2".

    Raises:
        RuntimeError: for another dtype, shape, stride or device than above, or a written tensor
            that overlaps another.

    Example:
        >>> cache, eight = torch.tensor([1.0, -2.0]), torch.zeros(2, dtype=torch.uint8)
        >>> vllm_kernels.convert_fp8(eight, cache, 0.5)
        >>> eight.view(torch.float8_e4m3fn).float()
        tensor([ 2., -4.])
    """
    call.convert_fp8(output, input, scale, kv_dtype)


def swap_blocks_batch(
    src_ptrs: Tensor,
    dst_ptrs: Tensor,
    sizes: Tensor,
    is_src_access_order_any: bool = False,
) -> None:
    """Copies between addresses, of the CPU or of the current GPU.

    On CUDA the copies go to the current stream, in one batch where :func:`swap_blocks` would.
    Sources are all of one kind (a GPU's, pinned or pageable memory), and so are destinations: the
    first copy stands for all.

    Args:
        src_ptrs, dst_ptrs: [num_copies] int64 on the CPU: addresses, as ``data_ptr()`` gives them.
        sizes: [num_copies] int64 on the CPU: bytes of each copy.
        is_src_access_order_any: whether sources may be read at once, before earlier work of the
            stream has finished.

    Warning:
        Nothing can check an address. A wrong one ends the process or overwrites other data. No
        destination may overlap another, or a source: the copies have no order. Keep the memory
        alive until the stream has passed the copies.

    ``torch.ops.vllm_kernels.swap_blocks_batch`` copies on the CPU unless ``on`` is a CUDA tensor.

    Raises:
        InvalidArgument: for lists of other dtypes, shapes or devices.
        InvalidIndex: for a size below 0, or an address 0 of a copy that is not empty.
        Unsupported: under torch.compile, which cannot see what the call reads and writes.

    Example:
        >>> src, dst = torch.arange(4), torch.zeros(4, dtype=torch.int64)
        >>> from_, to = torch.tensor([src[2:].data_ptr()]), torch.tensor([dst.data_ptr()])
        >>> vllm_kernels.swap_blocks_batch(from_, to, torch.tensor([16]))
        >>> dst.tolist()
        [2, 3, 0, 0]

    Source: ``vllm._custom_ops.swap_blocks_batch``.
    """
    if is_dynamo_compiling():
        raise Unsupported("swap_blocks_batch: expected a call outside of torch.compile")
    in_use = _library.cuda_loaded and torch.cuda.is_initialized()
    on = torch.empty(0, device="cuda") if in_use else None
    call.swap_blocks_batch(src_ptrs, dst_ptrs, sizes, is_src_access_order_any, on)
