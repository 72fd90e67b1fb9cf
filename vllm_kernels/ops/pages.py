"""Pages of the cache: bounds of their keys, the best ones for a query, copied tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from .._types import Layout
from ..errors import InvalidArgument, InvalidType
from ._common import ONE_OR_EACH_HEAD, calls, inference_only, require_list, shape_of

__all__ = ["copy_slots", "page_bounds_update", "select_pages"]

call = calls(__all__, page_bounds_update=ONE_OR_EACH_HEAD)


def page_bounds_update(
    bounds: Tensor,
    key_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None = None,
    layout: Layout = "vllm",
) -> None:
    """Brings up to date the minimum and maximum of K, by component, of each page that a call names.

    Call it with the slots of a step after the keys are written. The highest slot that a call names
    in a page says how far the page is filled: its bounds become those of its slots 0 to that one,
    and earlier bounds do not count. So the result is that of the cache alone, whatever the order of
    the slots. Bounds hold for every visible key if the last visible slot of a page is named after
    the page has changed:

    - New tokens, in a page begun before or not: their own slots are enough. A sequence that was cut
      and goes on gets exact bounds again.
    - A token overwritten in place: also name the last visible slot of its page.
    - A copy, swap or fork of pages: copy the bounds, too (``copy_blocks_mla([bounds], pairs)``,
      ``swap_blocks``), or name the last visible slot of each page.
    - :func:`copy_slots`: name the destinations and the last visible slot of their pages.

    Args:
        bounds: [num_blocks, num_kv_heads, 2, head_size] float32, float16 or bfloat16, the dtype of
            the query, written. Index 0 of dimension 2 is the minimum. The stride of blocks is free.
        key_cache: of that dtype, float8_e4m3fn, float8_e5m2 or int8; shapes by layout as in
            :func:`vllm_kernels.paged_attention`.
        slot_mapping: [n] int64, block * block_size + position in the block; -1 is skipped. A slot
            may occur more than once.
        k_scale: of an 8-bit cache, float32, one element or [num_kv_heads]; None stands for 1. A key
            is element * scale in float32; bounds of 16 bits are rounded outwards.
        layout: "vllm", "NHD" or "HND".

    A NaN of K makes both bounds of its component NaN.

    Raises:
        RuntimeError: for another dtype, shape, stride or device than above, or bounds that overlap
            another tensor. On the CPU also for a slot below -1 or past the cache, before anything
            is written; on CUDA such a slot is skipped, and reported with VLLM_KERNELS_CHECK=1.

    Example:
        >>> key_cache = torch.arange(8.0).view(1, 4, 1, 2)  # one page of four tokens, layout NHD
        >>> bounds = torch.zeros(1, 1, 2, 2)
        >>> vllm_kernels.page_bounds_update(
        ...     bounds, key_cache, torch.tensor([1, 2]), layout="NHD"
        ... )
        >>> bounds.flatten().tolist()  # of slots 0 to 2
        [0.0, 1.0, 4.0, 5.0]

    Source: Quest, arXiv:2406.10774.
    """
    call.page_bounds_update(bounds, key_cache, slot_mapping, k_scale, layout)


def select_pages(
    query: Tensor,
    bounds: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    budget: int,
    *,
    block_size: int,
    sink_pages: int = 1,
    recent_pages: int = 4,
    per_kv_head: bool = False,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Keeps the pages that may matter most to a query token, as block tables for paged_attention.

    The score of a page is the sum over query heads and components i of ``max(q_i min_i, q_i
    max_i)``, in float32: no q . k of the page is above it. The first ``sink_pages`` and the last
    ``recent_pages`` are always kept, then pages by falling score; of equal scores the first.
    ``reference.select_pages`` is the exact meaning.

    Kept pages stand in the order of the sequence. So the newest page is last, and ``lens`` counts
    its real tokens: ``paged_attention(query, ..., tables, lens)`` attends to them. A budget that
    covers a sequence gives its own table and length, so the result of attention is the dense one,
    bit for bit. Positions are lost otherwise: use neither a sliding window nor ALiBi.

    Args:
        query: [num_seqs, num_heads, head_size] float32, float16 or bfloat16, one token a sequence,
            after RoPE; the strides of sequences and heads are free. num_heads is a multiple of
            num_kv_heads, head_size at most 4096.
        bounds: [num_blocks, num_kv_heads, 2, head_size] in query's dtype, from
            :func:`page_bounds_update`; the stride of blocks is free.
        block_tables: [num_seqs, max_pages] int32; entries after a sequence's pages are ignored.
        seq_lens: [num_seqs] int32, tokens, the new one included.
        budget: tokens of a sequence that are kept, rounded down to whole pages. It has room for
            sink_pages + recent_pages, unless max_pages are fewer.
        block_size: tokens of a page.
        sink_pages: the first pages, always kept; >= 0.
        recent_pages: the last pages, always kept; >= 1. The newest page may be part full.
        per_kv_head: one table for each KV head, whose score has its own query heads alone.
        out: (tables, lens) to be written; made if None.

    Returns:
        (tables, lens). tables: [num_seqs, n] int32, or [num_seqs, num_kv_heads, n], with n =
        min(budget // block_size, max_pages); entries after the kept pages are 0. lens: [num_seqs]
        int32.

    One launch on CUDA, without a sync and safe in graphs. The calls of one stream share the
    workspace of :func:`vllm_kernels.paged_attention`, so graphs that were captured on one stream
    must not be replayed at once. A NaN of the query counts as 0. A score of NaN is above all
    others; an infinite bound may count as NaN.

    Raises:
        RuntimeError: for another dtype, shape, stride or device than above, or outputs that overlap
            another tensor. On the CPU also for a length or a block out of range. On CUDA a length
            is cut to the table, and a page of a bad block comes last; both are reported with
            VLLM_KERNELS_CHECK=1.

    Example:
        >>> query = torch.tensor([[[1.0, -1.0]]])
        >>> bounds = torch.zeros(4, 1, 2, 2)
        >>> bounds[2, 0, 1, 0] = 5.0  # block 2 has a key of up to (5, 0)
        >>> tables = torch.tensor([[3, 1, 2, 0]], dtype=torch.int32)
        >>> lens = torch.tensor([14], dtype=torch.int32)
        >>> vllm_kernels.select_pages(
        ...     query, bounds, tables, lens, 12, block_size=4, recent_pages=1
        ... )
        (tensor([[3, 2, 0]], dtype=torch.int32), tensor([10], dtype=torch.int32))

    Source: Quest, arXiv:2406.10774.
    """
    op = "select_pages"
    if out is None:
        num_seqs, max_pages = shape_of(op, "block_tables", block_tables, "num_seqs", "max_pages")
        heads = shape_of(op, "bounds", bounds, "num_blocks", "num_kv_heads", "2", "head_size")[1:2]
        for name, value in (("budget", budget), ("block_size", block_size)):
            if not isinstance(value, int) or value < 1:
                got = " ".join(f"{value!s:.40}".split())
                raise InvalidArgument(f"{op}: {name}: expected a number of tokens, got {got}")
        if not isinstance(per_kv_head, bool):
            raise InvalidType(
                f"{op}: per_kv_head: expected a bool, got {type(per_kv_head).__name__}"
            )
        pages = min(budget // block_size, max_pages)
        shape = (num_seqs, *heads, pages) if per_kv_head else (num_seqs, pages)
        made = torch.empty(shape, dtype=torch.int32, device=block_tables.device)
        out = made, torch.empty(num_seqs, dtype=torch.int32, device=block_tables.device)
    if not isinstance(out, tuple | list) or len(out) != 2:
        raise InvalidType(f"{op}: out: expected (tables, lens), got {type(out).__name__}")
    tables, lens = out
    call.select_pages(
        tables, lens, query, bounds, block_tables, seq_lens, block_size, sink_pages, recent_pages
    )
    return tables, lens


def copy_slots(caches: list[Tensor], src: Tensor, dst: Tensor, layout: Layout = "vllm") -> None:
    """Copies tokens between slots in every cache, as all layers need to pack the accepted tokens of
    a draft tree.

    The token at slot ``src[i]`` goes to slot ``dst[i]``, for all i as if all were read before any
    is written. So the moves of a call may overlap in any way.

    Args:
        caches: K and V of all layers, in any order and of any dtype of at most 4 bytes, written;
            none shares memory with another. Shapes by layout as in
            :func:`vllm_kernels.paged_attention`. A tensor [num_blocks, num_kv_heads, block_size]
            may be among them: scales of :func:`vllm_kernels.reshape_and_cache_per_token_quant`.
            Blocks have no gaps; their stride is free.
        src, dst: [n] int64 on the caches' device, n <= 16384; block * block_size + position in the
            block. A pair with a -1 is skipped. No slot may occur twice in dst: on CUDA it would
            hold parts of either token.
        layout: "vllm", "NHD" or "HND".

    One launch on CUDA (for up to 256 caches of up to 4 shapes), without a sync, safe in graphs.

    Raises:
        InvalidArgument, InvalidType: for another dtype, shape, stride or device than above, or
            caches that overlap.
        InvalidIndex: on the CPU for a slot below -1 or past the cache, or one that occurs twice in
            dst, before anything is copied. On CUDA a pair out of range is skipped, and both are
            reported with VLLM_KERNELS_CHECK=1.

    Example:
        >>> key_cache, value_cache = torch.arange(8.0).view(2, 1, 4, 1, 1)  # layout NHD, 4 slots
        >>> vllm_kernels.copy_slots(
        ...     [key_cache, value_cache], torch.tensor([2, 3]), torch.tensor([1, 2]), "NHD"
        ... )
        >>> key_cache.flatten(), value_cache.flatten()
        (tensor([0., 2., 3., 3.]), tensor([4., 6., 7., 7.]))
    """
    require_list("copy_slots", "caches", caches)
    inference_only("copy_slots", *caches)
    call.copy_slots(caches, src, dst, layout)
