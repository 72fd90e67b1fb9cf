"""Whole blocks of a cache: copied, swapped between devices, converted."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .. import _library
from ..errors import Unsupported
from ._common import calls, inference_only, require_list

__all__ = ["convert_fp8", "copy_blocks", "copy_blocks_mla", "swap_blocks", "swap_blocks_batch"]

call = calls(__all__)


def copy_blocks(
    key_caches: list[Tensor], value_caches: list[Tensor], block_mapping: Tensor
) -> None:
    """Copies blocks within every cache, as copy-on-write requires after a fork.

    Args:
        key_caches, value_caches: one tensor a layer, [num_blocks, ...], of any layout and dtype,
            written; none shares memory with another. All blocks have one size in bytes, without
            gaps; the stride of blocks is free.
        block_mapping: [n, 2] int64, pairs (source, destination), on the caches' device or the CPU.
            No block may be a destination twice, and none may be a source that another pair
            writes: the copies have no order.

    Needs no sync and no upload; safe in CUDA graphs (a mapping on the CPU is then baked in).

    Raises:
        RuntimeError: also for a block out of range, a destination that occurs twice, or a source
            that another pair writes, before anything is copied, where the mapping is on the CPU. On
            CUDA a pair out of range is skipped. VLLM_KERNELS_CHECK=1 reports it there, and a
            destination that occurs twice.

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

    Args:
        kv_caches: one tensor a layer, as key_caches of :func:`copy_blocks`, written.
        block_mapping: as :func:`copy_blocks` has it.

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
