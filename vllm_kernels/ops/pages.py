"""Pages of the cache: bounds of their keys, the best ones for a query, copied tokens, and
paged_attention with a block table for each KV head."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .._types import Layout
from ..errors import InvalidArgument, InvalidIndex, InvalidType, Unsupported
from ._common import ONE_OR_EACH_HEAD, calls, check_tensors, inference_only, require_list, shape_of

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
            :func:`vllm_kernels.paged_attention` takes these tables, too.
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


# --- paged_attention with a block table for each KV head, on the kernels for one table a sequence.
# A view of the cache has the pages of all KV heads as pages of one head. Each KV head of a sequence
# is then a sequence of its own, with the query heads of its group.

_ATTN = "paged_attention"
_WITH = "with a block table for each KV head"

_REFUSED = ("query_start_loc", "alibi_slopes", "sinks", "tree_mask", "total_seq_lens")
_PASSED = (
    "scale", "softcap", "k_scale", "v_scale", "layout", "return_lse", "workspace",
    "fixed_split_size", "causal", "window_right", "shards", "q_scale",
)  # fmt: skip
_OF_TOKENS = ("k_token_scales", "v_token_scales", "k_token_zeros", "v_token_zeros")
_PLACE = re.compile(rf"{_ATTN}: (block_tables|seq_lens)\[(\d+)(?:, (\d+))?\]")


def attend_by_kv_head(attend: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    """Calls ``attend``, which is paged_attention, with its arguments for views of one KV head."""
    for name in _REFUSED:
        if given[name] is not None:
            raise Unsupported(f"{_ATTN}: {name}: expected None {_WITH}")
    if given["sliding_window"] != 0:
        raise Unsupported(f"{_ATTN}: sliding_window: expected 0 {_WITH}")
    for name in ("k_scale", "v_scale", "q_scale"):
        if isinstance(given[name], Tensor) and given[name].numel() > 1:
            raise Unsupported(
                f"{_ATTN}: {name}: expected one element {_WITH}, got {list(given[name].shape)}"
            )
    tensors = {name: given[name] for name in ("query", "key_cache", "value_cache", "seq_lens")}
    tensors |= {name: given[name] for name in ("out", *_OF_TOKENS) if given[name] is not None}
    check_tensors(_ATTN, **tensors)
    try:
        return _attend(attend, given)
    except (RuntimeError, TypeError, IndexError) as error:
        _refuse_as_usual(attend, given)
        raise _at_its_place(error, given) from None


def _attend(attend: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    query, tables, lens, out = (given[x] for x in ("query", "block_tables", "seq_lens", "out"))
    head_dim = 2 if given["layout"] == "NHD" else 1
    seqs, num_heads, size = shape_of(_ATTN, "query", query, "num_tokens", "num_heads", "head_size")
    blocks, heads = given["key_cache"].shape[0], given["key_cache"].shape[head_dim]
    _require_shapes(given, seqs, heads)
    key, steps = _merge_heads(given["key_cache"], head_dim)
    options = {name: given[name] for name in _PASSED}
    for name, dim in (("value_cache", head_dim), *((name, 1) for name in _OF_TOKENS)):
        if given[name] is None:
            continue
        options[name], others = _merge_heads(given[name], dim)
        if others != steps:
            raise Unsupported(
                f"{_ATTN}: {name}: expected blocks and KV heads {steps} pages apart {_WITH}, as "
                f'key_cache has them, got {others}; layouts "HND" and "vllm" without gaps have that'
            )
    block_step, head_step = steps
    last = blocks * block_step + (heads - 1) * head_step
    if block_step <= (heads - 1) * head_step or last >= 2**31:
        raise Unsupported(
            f"{_ATTN}: key_cache: expected less than 2^31 pages of one KV head, those of a block "
            f"next to each other, {_WITH}, got shape {list(given['key_cache'].shape)}, strides "
            f"{list(given['key_cache'].stride())}"
        )
    # Bad ids stay bad: -1 and num_blocks are out of range for every KV head.
    first = torch.arange(heads, dtype=tables.dtype, device=tables.device)[:, None] * head_step
    pages = torch.add(first, tables.clamp(-1, blocks), alpha=block_step)
    lens = lens if lens.dim() == 2 else lens[:, None].expand(-1, heads)
    shape = (seqs * heads, num_heads // heads, size)
    result = attend(
        query.reshape(shape), key, block_tables=pages.flatten(0, 1).contiguous(),
        seq_lens=lens.reshape(-1).contiguous(), out=None if out is None else out.view(shape),
        **options,
    )  # fmt: skip
    if not given["return_lse"]:
        return result.view(query.shape) if out is None else out
    result, lse = result
    return result.view(query.shape) if out is None else out, lse.view(seqs, num_heads)


def _require_shapes(given: Mapping[str, Any], seqs: int, heads: int) -> None:
    query, tables, lens, out = (given[x] for x in ("query", "block_tables", "seq_lens", "out"))
    if heads < 1 or query.shape[1] % heads:
        raise InvalidArgument(
            f"{_ATTN}: query: expected num_heads to be a multiple of num_kv_heads = {heads} (from "
            f"key_cache), got {query.shape[1]}"
        )
    if tables.shape[:2] != (seqs, heads):
        raise InvalidArgument(
            f"{_ATTN}: block_tables: expected shape [{seqs}, {heads}, max_blocks_per_seq] (from "
            f"query and key_cache), got shape {list(tables.shape)}"
        )
    if lens.shape not in ((seqs,), (seqs, heads)):
        raise InvalidArgument(
            f"{_ATTN}: seq_lens: expected shape [{seqs}] or [{seqs}, {heads}] (from query and "
            f"key_cache), got shape {list(lens.shape)}"
        )
    if out is not None and (out.shape != query.shape or not out.is_contiguous()):
        raise InvalidArgument(
            f"{_ATTN}: out: expected shape {list(query.shape)}, contiguous, {_WITH}, got shape "
            f"{list(out.shape)}, strides {list(out.stride())}"
        )


def _merge_heads(cache: Tensor, head_dim: int) -> tuple[Tensor, tuple[int, int]]:
    """The cache with the pages of all KV heads as pages of one. Also how many pages it is from a
    block to the next, and from a KV head to the next."""
    blocks, heads = cache.shape[0], cache.shape[head_dim]
    head = cache.stride(head_dim)
    block = cache.stride(0) if blocks > 1 else heads * head
    head = head if heads > 1 else block
    page, rest = block, head
    while rest:  # the greatest common divisor, as torch.compile traces it
        page, rest = rest, page % rest
    page = page or 1
    steps = block // page, head // page
    sizes, strides = list(cache.shape), list(cache.stride())
    sizes[0] = (blocks - 1) * steps[0] + (heads - 1) * steps[1] + 1 if blocks else 0
    sizes[head_dim] = 1
    strides[0] = strides[head_dim] = page
    return cache.as_strided(sizes, strides), steps


def _refuse_as_usual(attend: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Raises what the call raises without a table for each KV head, if anything: its text has the
    caller's shapes."""
    usual = {name: given[name] for name in (*_PASSED, *_OF_TOKENS)}
    query, tables, lens = given["query"], given["block_tables"], given["seq_lens"]
    seqs = query.shape[0] if query.dim() else 0
    attend(
        query, given["key_cache"], given["value_cache"], tables.new_zeros(seqs, 1),
        lens.new_zeros(seqs), **usual,
    )  # fmt: skip


def _at_its_place(error: Exception, given: Mapping[str, Any]) -> Exception:
    """An error about an index, which names the element of the caller's tensor."""
    found = _PLACE.match(str(error))
    if not isinstance(error, InvalidIndex) or found is None:
        return error
    name, row, column = found.groups()
    tensor, heads = given[name], given["block_tables"].shape[1]
    place = [*divmod(int(row), heads), *([] if column is None else [int(column)])][: tensor.dim()]
    expected = str(error).partition(": expected ")[2]
    if column is not None:
        expected = f"a block in [0, {given['key_cache'].shape[0]})"
    return InvalidIndex(f"{_ATTN}: {name}{place} = {tensor[tuple(place)]}: expected {expected}")
