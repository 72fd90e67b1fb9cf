"""The paged KV cache: writing, copying, converting."""

from __future__ import annotations

from torch import Tensor

from vllm_kernels.ops._common import inference_only, library_ops

__all__ = [
    "convert_fp8",
    "copy_blocks",
    "reshape_and_cache",
    "reshape_and_cache_flash",
    "reshape_and_cache_per_token_quant",
    "swap_blocks",
]


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    """Writes new keys and values into a paged cache of layout "vllm".

    Token t goes to slot ``slot_mapping[t] = block * block_size + position in the block``. Slot -1
    leaves the token out. Where a slot comes up more than once, exactly the last token of the call
    is written, with whole rows, on CPU and CUDA alike.

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
            for 8-bit caches.

    Single tokens cost a 32-byte sector a value here, because a token's values lie block_size apart.
    On CUDA the tokens of a call are taken in groups of 16; a group whose slots are 16 neighbours
    from a multiple of 16 on is transposed and costs what it weighs. (Where block_size is a
    multiple of 8 only: 8 in place of 16.) For decoding large batches
    :func:`reshape_and_cache_flash` is cheaper by nature.

    Raises:
        RuntimeError: naming the argument, what was expected and what was given. On the CPU also for
            a slot below -1 or past the cache, before anything is written; on CUDA such a token is
            left out, and reported with VLLM_KERNELS_CHECK=1, as are repeated slots.
    """
    inference_only("reshape_and_cache", key, value, key_cache, value_cache, k_scale, v_scale)
    library_ops.reshape_and_cache.default(
        key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale
    )


def reshape_and_cache_flash(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    """:func:`reshape_and_cache` for the layout of flash attention.

    Args (where they differ):
        key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_size], written; the
            strides of blocks, tokens and heads are free. A cache of layout HND,
            [num_blocks, num_kv_heads, block_size, head_size], is written through its view
            ``cache.transpose(1, 2)``, at the same speed. (Nothing can tell that the view was
            forgotten where block_size = num_kv_heads.)
    """
    inference_only("reshape_and_cache_flash", key, value, key_cache, value_cache, k_scale, v_scale)
    library_ops.reshape_and_cache_flash.default(
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
    layout: str = "vllm",
) -> None:
    """Writes new keys and values into int8 caches, with one scale a token and head.

    A row x of head_size values is stored as ``x / scale``, to nearest even, with
    ``scale = max|x| / 127``: its error is at most scale / 2 an element, whatever the other tokens
    hold. A row of zeros has scale 0. A row with a NaN or an infinity gets a scale of that kind, so
    that it comes back as NaN and no other row does.

    The scales lie beside the pages, [num_blocks, num_kv_heads, block_size]: copy and swap them with
    their blocks. :func:`gather_paged_kv` reads such a cache; attention over it is later work
    (``paged_attention`` takes one scale, or one a KV head).

    Args (where they differ from :func:`reshape_and_cache`):
        key_cache, value_cache: int8, in ``layout``, written. "vllm", or "NHD" [num_blocks,
            block_size, num_kv_heads, head_size], or "HND" [num_blocks, num_kv_heads, block_size,
            head_size]; free strides as :func:`vllm_kernels.paged_attention` has them.
        key_scales, value_scales: [num_blocks, num_kv_heads, block_size] float32, last stride 1,
            written.

    Raises:
        RuntimeError: as :func:`reshape_and_cache`.
    """
    inference_only(
        "reshape_and_cache_per_token_quant",
        key, value, key_cache, value_cache, key_scales, value_scales,
    )  # fmt: skip
    library_ops.reshape_and_cache_per_token_quant.default(
        key, value, key_cache, value_cache, key_scales, value_scales, slot_mapping, layout
    )


def copy_blocks(
    key_caches: list[Tensor], value_caches: list[Tensor], block_mapping: Tensor
) -> None:
    """Copies blocks within every cache: what copy-on-write asks for after a fork.

    Args:
        key_caches, value_caches: one tensor a layer, [num_blocks, ...], of any layout and dtype,
            written. All blocks have one size in bytes, without gaps; the stride of blocks is free.
        block_mapping: [n, 2] int64, pairs (source, destination), on the caches' device or the CPU.
            No block may be a destination twice, or both a source and a destination: the order of
            the copies is not defined on CUDA (on the CPU it is that of the list).

    Needs no sync and no upload; safe in CUDA graphs (a mapping on the CPU is then baked in).

    Raises:
        RuntimeError: also for a block out of range where the mapping is on the CPU, before anything
            is copied; on CUDA such a pair is skipped.
    """
    inference_only("copy_blocks", *key_caches, *value_caches)
    library_ops.copy_blocks.default(key_caches, value_caches, block_mapping)


def swap_blocks(src: Tensor, dst: Tensor, block_mapping: Tensor) -> None:
    """Copies blocks between two caches, each on the CPU or on one GPU.

    Args:
        src: [num_src_blocks, ...], any dtype.
        dst: [num_dst_blocks, ...], dtype of src, blocks of the same shape and strides, written.
        block_mapping: [n, 2] int64 on the CPU, pairs (block of src, block of dst).

    Neighbouring pairs travel as one copy, on the current stream of the GPU. A copy from or to
    pageable memory may wait for its turn; pinned memory does not, and must then stay untouched
    until the stream gets there.

    Raises:
        RuntimeError: also for a block out of range, before anything is copied.
    """
    inference_only("swap_blocks", src, dst)
    library_ops.swap_blocks.default(src, dst, block_mapping)


def convert_fp8(output: Tensor, input: Tensor, scale: float = 1.0, kv_dtype: str = "fp8") -> None:
    """Converts a cache to or from 8 bits, element by element in memory; the shapes may differ.

    Args:
        output: contiguous, as many elements as input, written.
        input: contiguous. One of the two is float32, float16 or bfloat16, the other 8-bit (uint8,
            or the float8 dtype that kv_dtype names), which gives the direction:
            8-bit = x / scale, to nearest even, saturating; or x = 8-bit * scale.
        scale: of the 8-bit side.
        kv_dtype: "fp8" or "fp8_e4m3", "fp8_e5m2".

    Raises:
        RuntimeError: naming the argument, what was expected and what was given.
    """
    inference_only("convert_fp8", output, input)
    library_ops.convert_fp8.default(output, input, scale, kv_dtype)


# The op's __call__ only calls its `_op`, and costs 0.3 us: called directly, once a layer and token.
# torch.compile knows the op, not its `_op`.
