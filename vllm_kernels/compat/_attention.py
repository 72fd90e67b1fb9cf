"""What the spellings of FlashAttention's functions have in common."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vllm_kernels.ops import reshape_and_cache_flash, rotary_embedding
from vllm_kernels.ops._common import inference_only, library_ops


def refuse(function: str, **unsupported: object) -> None:
    """Raises NotImplementedError for the first argument that is neither None, 0 nor False."""
    for name, value in unsupported.items():
        if value is not None and not (isinstance(value, (int, float)) and not value):
            raise NotImplementedError(f"{function}: {name}: not supported, got {value!r:.60}")


@dataclass
class Options:
    """Scores and what becomes of them, in FlashAttention's words."""

    function: str
    scale: float | None = None
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None  # [num_heads] or [batch, num_heads]
    sinks: Tensor | None = None  # [num_heads]
    q_descale: Tensor | None = None  # [batch, num_kv_heads], of 8-bit queries
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None

    def __post_init__(self) -> None:
        for name, shape in (
            ("alibi_slopes", "[num_heads] or [batch, num_heads]"), ("s_aux", "[num_heads]"),
            ("q_descale", "[batch, num_kv_heads]"), ("k_descale", "[batch, num_kv_heads]"),
            ("v_descale", "[batch, num_kv_heads]"),
        ):  # fmt: skip
            value = self.sinks if name == "s_aux" else getattr(self, name)
            if value is not None and not isinstance(value, Tensor):
                raise RuntimeError(
                    f"{self.function}: {name}: expected a tensor {shape}, got {value!r:.40}"
                )

    def check(self, batch: int, num_heads: int, num_kv_heads: int) -> None:
        """Slopes and descales are for so many sequences and heads."""
        for name, heads in (
            ("alibi_slopes", num_heads), ("q_descale", num_kv_heads), ("k_descale", num_kv_heads),
            ("v_descale", num_kv_heads),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is None or value.shape == (batch, heads) or value.shape == (heads,):
                continue
            # One descale, or one row of slopes or descales, for all.
            one = name != "alibi_slopes" and value.numel() == 1 and value.dim() <= 2
            if not one and value.shape != (1, heads):
                want = f"shape [{heads}] or [{batch}, {heads}], a row for each sequence of q"
                raise _wrong(self.function, name, want, value)

    def score_scale(self, query: Tensor) -> float:
        """Of query . key."""
        return query.shape[-1] ** -0.5 if self.scale is None else self.scale

    def sides(self) -> tuple[int, int]:
        """Tokens before and after a query token's position that it sees; -1: all."""
        left, right = (-1 if side is None or side < 0 else int(side) for side in self.window)
        return left, 0 if self.causal else right

    def shared(self) -> dict[str, object]:
        """The arguments that are the same for every sequence."""
        sinks = None if self.sinks is None else self.sinks.float().contiguous()
        return {"softcap": self.softcap, "sinks": sinks}

    def rows(self, batch: int) -> Iterator[tuple[slice, dict[str, object]]]:
        """Sequences whose slopes and scales are one argument: all at once, or one by one."""
        values = {
            "alibi_slopes": self.alibi_slopes,
            "k_scale": self.k_descale,
            "v_scale": self.v_descale,
        }
        per_row = {
            name: value
            for name, value in values.items()
            if value is not None
            and value.dim() == 2
            and value.shape[0] > 1
            and value.stride(0) != 0
        }
        whole = {
            name: None if value is None or not batch else value[0] if value.dim() == 2 else value
            for name, value in values.items()
            if name not in per_row
        }
        shared = {name: _floats(value) for name, value in whole.items()}
        if not per_row:
            yield slice(0, batch), shared
            return
        for row in range(batch):
            mine = {name: _floats(value[row]) for name, value in per_row.items()}
            yield slice(row, row + 1), {**shared, **mine}


def _floats(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.float().contiguous()


def _int32(values: Tensor) -> Tensor:
    return values.int().contiguous()


def _int32_table(table: Tensor) -> Tensor:
    return _rows_contiguous(table).int()


def _dequantized(query: Tensor, descale: Tensor | None, seqs: Tensor | None) -> Tensor:
    """An 8-bit query [tokens, heads, head_size] as bfloat16; seqs: the sequence of each token."""
    if query.dtype.itemsize != 1:
        return query
    rows = query.float()
    if descale is not None:
        descale = torch.atleast_2d(descale)
        whole = descale.shape[0] == 1 or descale.stride(0) == 0 or seqs is None
        per_token = descale[:1] if whole else descale[seqs]
        group = query.shape[1] // descale.shape[1]
        rows = rows * per_token.float().repeat_interleave(group, dim=1)[..., None]
    return rows.bfloat16()


def _contiguous_heads(query: Tensor) -> Tensor:
    heads = query.shape[1] == 1 or query.stride(1) == query.shape[2]
    return query if query.stride(2) == 1 and heads else query.contiguous()


def _rows_contiguous(rows: Tensor) -> Tensor:
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _token_seqs(starts: Tensor, num_tokens: int) -> Tensor:
    """The sequence of every token."""
    tokens = torch.arange(num_tokens, dtype=starts.dtype, device=starts.device)
    seqs = torch.searchsorted(starts, tokens, right=True) - 1
    return seqs.clamp(0, max(0, starts.numel() - 2))


def _wrong(function: str, name: str, want: str, got: Tensor) -> RuntimeError:
    return RuntimeError(f"{function}: {name}: expected {want}, got {list(got.shape)}")


def check_shapes(
    function: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rank: int,
    cache: str = "",
    names: tuple[str, str] = ("k", "v"),
) -> None:
    """Of dense (rank 4) or ragged (3) q, and of keys that lie like it, or in a cache, whose first
    dimensions the caller calls ``cache``. Texts are made only where they are raised."""
    # Plain tuples: slices of a torch.Size cost several times as much.
    q_shape, k_shape, v_shape = tuple(q.shape), tuple(k.shape), tuple(v.shape)
    key, value = names
    name, got = key, k
    size = q_shape[-1] if q_shape else 0
    k_rank = 4 if cache else rank
    if len(q_shape) != rank:
        lead = "batch, seqlen_q" if rank == 4 else "total_q"
        name, want, got = "q", f"shape [{lead}, num_heads, head_size]", q
    elif (
        len(k_shape) != k_rank
        or k_shape[-1] != size
        or (not cache and rank == 4 and k_shape[0] != q_shape[0])
    ):
        lead = cache or (f"{q_shape[0]}, seqlen_k" if rank == 4 else "total_k")
        want = f"shape [{lead}, num_kv_heads, {size}]"
    elif len(v_shape) != k_rank or v_shape[:-1] != k_shape[:-1]:
        name, got = value, v
        last = size if cache else "head_size_v"
        want = f"shape [{', '.join(map(str, k_shape[:-1]))}, {last}]"
    elif cache and v_shape[-1] != size:
        raise NotImplementedError(
            f"{function}: {value}: not supported with a head size of its own, {v_shape[-1]} beside "
            f"{size}"
        )
    elif k_shape[-2] == 0 or q_shape[-2] % k_shape[-2] != 0:
        name, got = "q", q
        want = f"num_heads to be a multiple of num_kv_heads = {k_shape[-2]} (from {key})"
    elif cache and (not 32 <= size <= 256 or size % _size_step(k) != 0):
        name, got = "q", q
        want = f"a head size of 32 to 256 in steps of {_size_step(k)} (that of caches)"
    elif size > 256 or v_shape[-1] > 256:
        name, got = ("q", q) if size > 256 else (value, v)
        want = "a head size up to 256"
    else:
        return
    raise _wrong(function, name, want, got)


def _size_step(keys: Tensor) -> int:
    """Head sizes that the kernels have are multiples of it."""
    return 16 if keys.dtype.itemsize == 1 else 8


def check_pages(
    function: str, k: Tensor, name: str, table: Tensor, table_name: str, batch: int
) -> None:
    """Of pages of checked shapes, and of their table."""
    page = k.shape[1]
    if not 1 <= page <= 256 or page & (page - 1):
        raise _wrong(function, name, "pages of 1, 2, 4, .. 256 tokens (dimension 1)", k)
    if table.dim() != 2 or table.shape[0] != batch:
        want = f"shape [{batch}, pages_per_seq], a row for each sequence of q"
        raise _wrong(function, table_name, want, table)


def check_rows(function: str, batch: int, **values: object) -> None:
    """Of arguments with one element for each sequence."""
    for name, value in values.items():
        if isinstance(value, Tensor) and value.shape != (batch,):
            want = f"shape [{batch}], an element for each sequence of q"
            raise _wrong(function, name, want, value)


def sequences(function: str, cu_seqlens_q: Tensor, **others: Tensor | None) -> int:
    """How many cu_seqlens_q has; the others are to have as many."""
    if cu_seqlens_q.dim() != 1 or cu_seqlens_q.shape[0] == 0:
        raise _wrong(function, "cu_seqlens_q", "shape [batch + 1]", cu_seqlens_q)
    for name, starts in others.items():
        if starts is not None and starts.shape != cu_seqlens_q.shape:
            want = f"shape {list(cu_seqlens_q.shape)} (from cu_seqlens_q)"
            raise _wrong(function, name, want, starts)
    return cu_seqlens_q.shape[0] - 1


def varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    options: Options,
    seqused_k: Tensor | None = None,
    max_seqlen_k: int | None = None,
    block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """q [T, H, D], k [Tk, Hk, D], v [Tk, Hk, Dv] -> (out [T, H, Dv], lse [T, H]); with a
    block_table [B, width] k and v are pages [blocks, page, Hk, D]."""
    name = options.function
    pages = "" if block_table is None else "num_blocks, page_size"
    check_shapes(name, q, k, v, 3, pages)
    batch = sequences(name, cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    cu_seqlens_q, cu_seqlens_k = _int32(cu_seqlens_q), _int32(cu_seqlens_k)
    if block_table is not None:
        check_pages(name, k, "k", block_table, "block_table", batch)
        table, lens = _int32_table(block_table), cu_seqlens_k.diff()
        return paged(q, k, v, table, lens, cu_seqlens_q, max_seqlen_q, options)
    if seqused_k is None:
        return ragged(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, options)
    check_rows(name, batch, seqused_k=seqused_k)
    # Of each sequence's keys only the first: pages of one token.
    first = cu_seqlens_k[:-1, None]
    table = first + torch.arange(max_seqlen_k, dtype=torch.int32, device=q.device)
    value_size = v.shape[-1]
    options = replace(options, scale=options.score_scale(q))  # before it is padded
    q, k, v = (_rows_contiguous(rows) for rows in _of_one_size(q, k, v))
    out, lse = paged(
        q, k[:, None], v[:, None], table, _int32(seqused_k), cu_seqlens_q, max_seqlen_q, options
    )
    return out[..., :value_size], lse


def ragged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """:func:`varlen` of shapes that were checked, and int32 starts."""
    inference_only(options.function, q, k, v)
    options.check(cu_seqlens_q.numel() - 1, q.shape[1], k.shape[1])
    seqs = None
    if q.dtype.itemsize == 1:
        seqs = _token_seqs(cu_seqlens_q, q.shape[0])
    q = _dequantized(q, options.q_descale, seqs)
    scale = options.score_scale(q)  # before it is padded
    value_size = v.shape[-1]
    q, k, v = _of_one_size(q, k, v)
    q, k, v = _contiguous_heads(q), _rows_contiguous(k), _rows_contiguous(v)
    out = q.new_empty(q.shape)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    shared = options.shared()
    left, right = options.sides()
    for seqs, mine in options.rows(cu_seqlens_q.numel() - 1):
        ends = slice(seqs.start, seqs.stop + 1)
        library_ops.varlen_attention(
            out, lse, q, k, v, cu_seqlens_q[ends], cu_seqlens_k[ends], scale,
            mine["alibi_slopes"], left, right, shared["softcap"], shared["sinks"],
            _scale_of(k, mine["k_scale"]), _scale_of(k, mine["v_scale"]), int(max_seqlen_q), None,
        )  # fmt: skip
    return out[..., :value_size], lse


def _of_one_size(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """With a head size that the kernels have, one for K and V: zeros change no product."""
    step = _size_step(k)
    padded = max(32, -(-max(q.shape[-1], v.shape[-1]) // step) * step)
    return tuple(_padded(rows, padded) for rows in (q, k, v))


def _padded(rows: Tensor, head_size: int) -> Tensor:
    missing = head_size - rows.shape[-1]
    if missing == 0:
        return rows
    if rows.dtype.itemsize == 1:  # torch pads no float8
        return torch.nn.functional.pad(rows.view(torch.uint8), (0, missing)).view(rows.dtype)
    return torch.nn.functional.pad(rows, (0, missing))


def _scale_of(keys: Tensor, scale: Tensor | None) -> Tensor | None:
    return scale if keys.dtype.itemsize == 1 else None


def paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor | None,
    max_seqlen_q: int,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """q [T, H, D], pages [blocks, page, Hk, D] -> (out [T, H, D], lse [T, H])."""
    inference_only(options.function, q, k_cache, v_cache)
    batch = seq_lens.numel()
    options.check(batch, q.shape[1], k_cache.shape[2])
    seqs = None
    if q.dtype.itemsize == 1 and cu_seqlens_q is not None:
        seqs = _token_seqs(cu_seqlens_q, q.shape[0])
    elif q.dtype.itemsize == 1:
        seqs = torch.arange(batch, device=q.device)
    q = _contiguous_heads(_dequantized(q, options.q_descale, seqs))
    out = q.new_empty(q.shape)
    lses = q.new_empty(q.shape[:2], dtype=torch.float32)
    shared = options.shared()
    left, right = options.sides()
    for rows, mine in options.rows(batch):
        starts, query, target, lse = cu_seqlens_q, q, out, lses
        if cu_seqlens_q is not None:
            starts = cu_seqlens_q[rows.start : rows.stop + 1]
        elif rows != slice(0, batch):
            query, target, lse = q[rows], out[rows], lses[rows]
        library_ops.paged_attention(
            target, lse, query, k_cache, v_cache, table[rows], seq_lens[rows], starts,
            options.score_scale(q), mine["alibi_slopes"], left + 1, shared["softcap"],
            shared["sinks"], _scale_of(k_cache, mine["k_scale"]),
            _scale_of(k_cache, mine["v_scale"]), "NHD", int(max_seqlen_q), None, 0, False, right,
        )  # fmt: skip
    return out, lses


@dataclass
class Pages:
    key: Tensor  # [blocks, page, Hk, D]
    value: Tensor
    table: Tensor  # [batch, width] int32


def pages_of(
    function: str,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    batch: int,
    table_name: str,
) -> tuple[Pages, Pages]:
    """As it is written, and as it is read.

    A cache [batch_cache, length, Hk, D] is written as pages of ``length`` tokens, and read, from
    the padding on, as pages of as many tokens as the kernels have and its strides let.
    """
    if block_table is not None:
        for name, value in (
            ("cache_batch_idx", cache_batch_idx), ("cache_leftpad", cache_leftpad),
        ):  # fmt: skip
            if value is not None:
                raise RuntimeError(f"{function}: {name}: expected None with a block table")
        check_pages(function, k_cache, "k_cache", block_table, table_name, batch)
        pages = Pages(k_cache, v_cache, _int32_table(block_table))
        return pages, pages
    rows, length = k_cache.shape[:2]
    if cache_batch_idx is None and rows < batch:
        want = f"{batch} rows or more, one for each sequence of q"
        raise _wrong(function, "k_cache", want, k_cache)
    if length == 0:
        raise _wrong(function, "k_cache", "rows of at least one token", k_cache)
    page = 1 if cache_leftpad is not None else 256
    steps = []
    for cache in (k_cache, v_cache):
        row, token = cache.stride()[:2]
        if rows > 1 and row % token != 0:
            raise RuntimeError(
                f"{function}: expected caches whose rows are whole numbers of tokens apart, got "
                f"strides {list(cache.stride())}"
            )
        steps.append(row // token if rows > 1 else length)
    if steps[0] != steps[1]:
        raise RuntimeError(f"{function}: expected k_cache and v_cache with like strides")
    page = math.gcd(page, length, steps[0])
    blocks = ((rows - 1) * steps[0] + length) // page if rows else 0
    views = [
        cache.as_strided(
            (blocks, page, *cache.shape[2:]), (page * cache.stride(1), *cache.stride()[1:])
        )
        for cache in (k_cache, v_cache)
    ]  # fmt: skip
    device = k_cache.device
    index = cache_batch_idx
    if index is None:
        index = torch.arange(batch, dtype=torch.int32, device=device)
    first = index.int() * (steps[0] // page)
    if cache_leftpad is not None:
        first = first + cache_leftpad.int()
    columns = torch.arange(length // page, dtype=torch.int32, device=device)
    target = Pages(k_cache, v_cache, index.int()[:, None])
    return target, Pages(*views, first[:, None] + columns)


def lengths_of(
    cache_seqlens: int | Tensor | None, length: int, batch: int, device: torch.device
) -> Tensor:
    """[batch] int32."""
    if cache_seqlens is None:
        cache_seqlens = length
    if isinstance(cache_seqlens, int):
        return torch.full((batch,), cache_seqlens, dtype=torch.int32, device=device)
    return _int32(cache_seqlens)


@dataclass
class NewTokens:
    """Tokens that a call puts behind what the cache holds."""

    key: Tensor  # [tokens, Hk, D]
    value: Tensor
    seqs: Tensor  # [tokens] int64, the sequence of each
    index: Tensor  # [tokens] int64, its number among the sequence's new ones
    counts: Tensor  # [batch] int32


def new_tokens(k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> NewTokens:
    """k, v [batch, tokens, Hk, D], or with cu_seqlens [tokens, Hk, D]."""
    device = k.device
    if cu_seqlens is None:
        batch, count = k.shape[:2]
        seqs = torch.arange(batch, dtype=torch.int64, device=device).repeat_interleave(
            count, output_size=batch * count
        )
        index = torch.arange(count, dtype=torch.int64, device=device).repeat(batch)
        counts = torch.full((batch,), count, dtype=torch.int32, device=device)
        return NewTokens(k.flatten(0, 1), v.flatten(0, 1), seqs, index, counts)
    starts = _int32(cu_seqlens)
    seqs = _token_seqs(starts, k.shape[0])
    tokens = torch.arange(k.shape[0], dtype=torch.int64, device=device)
    return NewTokens(k, v, seqs, tokens - starts[seqs], starts.diff())


def check_new(
    function: str, k: Tensor, v: Tensor, batch: int, packed: bool, k_cache: Tensor
) -> None:
    """Of tokens that are put into a cache."""
    rank = 3 if packed else 4
    lead = k.shape[: rank - 2] if packed else (batch, *k.shape[1:2])
    if k.dim() != rank or k.shape != (*lead, *k_cache.shape[2:]):
        first = "total_new" if packed else f"{batch}, seqlen_new"
        want = f"shape [{first}, {k_cache.shape[2]}, {k_cache.shape[3]}] (from q and k_cache)"
        raise _wrong(function, "k", want, k)
    if v.shape != k.shape:
        raise _wrong(function, "v", f"shape {list(k.shape)} (from k)", v)


def check_lengths(
    function: str, lengths: Tensor, new: NewTokens | None, table: Tensor, capacity: int
) -> None:
    """Refuses lengths past the cache where they are on a CPU: elsewhere looking would wait."""
    if lengths.device.type != "cpu" or torch.compiler.is_compiling():
        return
    counts = torch.zeros_like(lengths) if new is None else new.counts
    past = (lengths > capacity - counts) & (lengths >= 0)  # below 0: rows of nobody
    if capacity:
        past &= table[:, 0] >= 0
    if past.any():
        row = int(past.nonzero()[0])
        raise RuntimeError(
            f"{function}: cache_seqlens[{row}] = {int(lengths[row])}: expected a length that fits "
            f"a cache of {capacity} tokens with {int(counts[row])} new ones"
        )


def append(new: NewTokens, pages: Pages, lengths: Tensor, options: Options) -> Tensor:
    """Writes the tokens to their pages; the sequences' lengths with them, 0 where a row is padded.

    A row is padded where its length is negative or its table has no page for the first new token,
    or where none is new for the last one: behind that the table may end.
    """
    page, width = pages.key.shape[1], pages.table.shape[1]
    lengths = lengths.long()
    ends = lengths.add(new.counts < 1, alpha=-1).clamp_min(0) // page
    first = pages.table.gather(1, ends.clamp_max(width - 1)[:, None])[:, 0]
    real = (lengths >= 0) & (first >= 0) & (ends < width)
    position = lengths[new.seqs] + new.index
    column = (position // page).clamp(0, width - 1)
    block = pages.table[new.seqs, column].long()
    good = real[new.seqs] & (block >= 0) & (position // page < width)
    good &= new.index < new.counts[new.seqs]
    slots = torch.where(good, block * page + position % page, -1)
    scales = [
        torch.ones(1, dtype=torch.float32, device=new.key.device)
        if scale is None
        else scale.float().reshape(-1)[: pages.key.shape[2]].contiguous()
        for scale in (options.k_descale, options.v_descale)
    ]
    name = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2", torch.int8: "int8"}
    reshape_and_cache_flash(
        _rows_contiguous(new.key), _rows_contiguous(new.value), pages.key, pages.value, slots,
        name.get(pages.key.dtype, "auto"), *scales,
    )  # fmt: skip
    return torch.where(real, lengths + new.counts, 0).int()


def rotated(rows: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """A copy of rows [tokens, heads, D], turned; cos, sin [positions, rotary_dim / 2]."""
    rows = rows.clone(memory_format=torch.contiguous_format)
    table = torch.cat([cos, sin], dim=-1).to(rows.dtype)
    rotary_embedding(
        positions.clamp(0, cos.shape[0] - 1), rows.flatten(1), None, rows.shape[-1], table,
        not interleaved,
    )  # fmt: skip
    return rows


def with_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    rotary: tuple[Tensor, Tensor] | None,
    rotary_interleaved: bool,
    cache_seqlens: int | Tensor | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    block_table: Tensor | None,
    options: Options,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    table_name: str = "block_table",
) -> tuple[Tensor, Tensor]:
    """q [B, S, H, D] -> (out like q, lse [B, H, S]); with cu_seqlens_q q [T, H, D], lse [H, T]."""
    name = options.function
    if (k is None) != (v is None):
        raise RuntimeError(f"{name}: expected k and v together, got one of them")
    if rotary is not None and k is None:
        raise RuntimeError(f"{name}: rotary_cos: expected k and v with it, got None")
    packed = cu_seqlens_q is not None
    lead = "batch_cache, seqlen_cache" if block_table is None else "num_blocks, page_size"
    check_shapes(name, q, k_cache, v_cache, 3 if packed else 4, lead, ("k_cache", "v_cache"))
    tokens = q if packed else q.flatten(0, 1)
    starts_new = cu_seqlens_k_new if packed and k is not None else None
    if packed:
        batch = sequences(name, cu_seqlens_q, cu_seqlens_k_new=starts_new)
        starts = _int32(cu_seqlens_q)
        longest = max_seqlen_q or q.shape[0]
    else:
        batch, longest = q.shape[:2]
        starts = None
        if longest != 1:
            starts = torch.arange(
                0, (batch + 1) * longest, max(1, longest), dtype=torch.int32, device=q.device
            )
            if longest == 0:
                starts = torch.zeros(batch + 1, dtype=torch.int32, device=q.device)
    check_rows(
        name, batch, cache_seqlens=cache_seqlens, cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
    )  # fmt: skip
    target, pages = pages_of(
        name, k_cache, v_cache, block_table, cache_batch_idx, cache_leftpad, batch, table_name
    )
    if k is not None:
        check_new(name, k, v, batch, starts_new is not None, k_cache)
        if block_table is not None and block_table.shape[1] == 0:
            raise _wrong(name, table_name, "pages for k and v", block_table)
    capacity = pages.table.shape[1] * pages.key.shape[1]
    lengths = lengths_of(cache_seqlens, capacity, batch, q.device)
    new = None if k is None else new_tokens(k, v, starts_new)
    check_lengths(name, lengths, new, pages.table, capacity)
    if new is not None:
        if rotary is not None:
            before = lengths.long().clamp_min(0)
            new.key = rotated(new.key, before[new.seqs] + new.index, *rotary, rotary_interleaved)
            seqs = (
                _token_seqs(starts, tokens.shape[0])
                if starts is not None
                else torch.arange(batch, dtype=torch.int64, device=q.device)
            )
            position = before[seqs]
            if starts is not None and (options.causal or options.sides() != (-1, -1)):
                index = torch.arange(tokens.shape[0], dtype=torch.int64, device=q.device)
                position = position + index - starts[seqs]
            tokens = rotated(tokens, position, *rotary, rotary_interleaved)
        lengths = append(new, target, lengths, options)
    else:
        lengths = lengths.clamp_min(0)
    if cache_leftpad is not None:
        lengths = (lengths - cache_leftpad).clamp_min(0).int()
    out, lse = paged(tokens, pages.key, pages.value, pages.table, lengths, starts, longest, options)
    if packed:
        return out, lse.t().contiguous()
    shape = (batch, longest)
    return out.unflatten(0, shape), lse.unflatten(0, shape).transpose(1, 2).contiguous()


def dense(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """q [B, S, H, D], k, v [B, Sk, Hk, D] -> (out [B, S, H, Dv], lse [B, H, S])."""
    check_shapes(options.function, q, k, v, rank=4)
    (batch, length), keys = q.shape[:2], k.shape[1]
    starts = [
        torch.arange(batch + 1, dtype=torch.int32, device=q.device) * count
        for count in (length, keys)
    ]
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    out, lse = ragged(*rows, *starts, length, options)
    shape = (batch, length)
    return out.unflatten(0, shape), lse.unflatten(0, shape).transpose(1, 2).contiguous()
