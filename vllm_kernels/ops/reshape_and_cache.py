"""Writers of the paged KV cache."""

from __future__ import annotations

from torch import Tensor

from .._types import KVCacheDType, Layout
from ._common import ONE_OR_EACH_HEAD, calls

__all__ = ["reshape_and_cache", "reshape_and_cache_flash", "reshape_and_cache_per_token_quant"]

call = calls(__all__, reshape_and_cache=ONE_OR_EACH_HEAD, reshape_and_cache_flash=ONE_OR_EACH_HEAD)


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
    key_zeros: Tensor | None = None,
    value_zeros: Tensor | None = None,
) -> None:
    """Writes new keys and values into int8 or int4 caches, with one scale a token and head.

    int8: a row x of head_size values is stored as ``x / scale``, to nearest even, with
    ``scale = max|x| / 127``: its error is at most scale / 2 an element, regardless of the other
    tokens. A row of zeros has scale 0. A row with a NaN or an infinity gets such a scale, so that
    it reads as NaN, and no other row does.

    int4, where zeros are given: a row has a zero, too, and ``(n - 8) * scale + zero`` for n from 0
    to 15 are 16 evenly spaced values from min x to max x. Each x becomes the nearest of them, again
    with an error of at most about scale / 2. A constant row is exact, with scale 0. A row with a
    NaN or an infinity, or with a difference that float32 does not hold, gets scale and zero NaN.
    (The convention is that of ``torch._weight_int4pack_mm``; here the zero is in float32.)

    Scales and zeros are separate from the pages: copy and swap them with their blocks.
    :func:`paged_attention` and :func:`gather_paged_kv` read such a cache.

    Args:
        key, value, slot_mapping: as :func:`reshape_and_cache`. int4: head_size is 32 to 256, in
            steps of 32.
        key_cache, value_cache: int8, in ``layout``, written. "vllm", or "NHD" [num_blocks,
            block_size, num_kv_heads, head_size], or "HND" [num_blocks, num_kv_heads, block_size,
            head_size]; free strides as :func:`vllm_kernels.paged_attention` has them. int4: uint8
            of head_size / 2 elements in place of head_size. Byte d of a row has n of value d in its
            low 4 bits, and n of value d + head_size / 2 in its high 4 bits.
        key_scales, value_scales: [num_blocks, num_kv_heads, block_size] float32, last stride 1,
            written.
        key_zeros, value_zeros: None for int8. For int4 as the scales, with their strides.

    Raises:
        RuntimeError: as :func:`reshape_and_cache`; for zeros with other strides than their scales,
            and for one of the two without the other.

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
        >>> key_cache, value_cache = torch.zeros(2, 4, 16, 1, 32, dtype=torch.uint8)  # int4
        >>> key_zeros, value_zeros = torch.zeros(2, 4, 1, 16)
        >>> key[..., 0] = 112.0
        >>> vllm_kernels.reshape_and_cache_per_token_quant(
        ...     key, value, key_cache, value_cache, key_scales, value_scales,
        ...     torch.tensor([17]), "NHD", key_zeros, value_zeros,
        ... )
        >>> key_scales[1, 0, 1].item(), key_zeros[1, 0, 1].item()
        (1.0, 120.0)
    """
    call.reshape_and_cache_per_token_quant(
        key, value, key_cache, value_cache, key_scales, value_scales, slot_mapping, layout,
        key_zeros, value_zeros,
    )  # fmt: skip
