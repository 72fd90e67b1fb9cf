"""What is refused before anything is computed, under the names of the function that was called and
of its argument. Texts are made only where they are raised."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import InvalidArgument, InvalidIndex, Unsupported
from ..ops._common import check_tensors as check_tensors

if TYPE_CHECKING:
    from ._options import Options


def refuse(function: str, **unsupported: object) -> None:
    """Raises NotImplementedError for the first argument that is neither None, 0 nor False."""
    for name, value in unsupported.items():
        if value is not None and not (isinstance(value, (int, float)) and not value):
            got = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.60}"
            raise Unsupported(f"{function}: {name}: not supported, got {got}")


def wrong(function: str, name: str, want: str, got: Tensor) -> InvalidArgument:
    return InvalidArgument(f"{function}: {name}: expected {want}, got {list(got.shape)}")


def check_integers(function: str, **values: object) -> None:
    """Of lengths, starts, indices and tables."""
    for name, value in values.items():
        if not isinstance(value, Tensor):
            check_tensors(function, **{name: value})
        elif value.dtype != torch.int32 and value.dtype != torch.int64:
            raise InvalidArgument(f"{function}: {name}: expected int32 or int64, got {value.dtype}")


def check_given_integers(function: str, **values: object) -> None:
    """:func:`check_integers` of those that are not None."""
    check_integers(function, **{name: x for name, x in values.items() if x is not None})


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
    dimensions the caller calls ``cache``."""
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
        raise Unsupported(
            f"{function}: {value}: not supported with a head size of its own, {v_shape[-1]} beside "
            f"{size}"
        )
    elif k_shape[-2] == 0 or q_shape[-2] % k_shape[-2] != 0:
        name, got = "q", q
        want = f"num_heads to be a multiple of num_kv_heads = {k_shape[-2]} (from {key})"
    elif cache and (not 32 <= size <= 256 or size % size_step(k) != 0):
        name, got = "q", q
        want = f"a head size of 32 to 256 in steps of {size_step(k)} (that of caches)"
    elif size > 256 or v_shape[-1] > 256:
        name, got = ("q", q) if size > 256 else (value, v)
        want = "a head size up to 256"
    else:
        return
    raise wrong(function, name, want, got)


def size_step(keys: Tensor) -> int:
    """Head sizes that the kernels have are multiples of it."""
    return 16 if keys.dtype.itemsize == 1 else 8


def check_pages(
    function: str, k: Tensor, name: str, table: Tensor, table_name: str, batch: int
) -> None:
    """Of pages of checked shapes, and of their table."""
    page = k.shape[1]
    if not 1 <= page <= 256 or page & (page - 1):
        raise wrong(function, name, "pages of 1, 2, 4, .. 256 tokens (dimension 1)", k)
    if table.dim() != 2 or table.shape[0] != batch:
        want = f"shape [{batch}, pages_per_seq], a row for each sequence of q"
        raise wrong(function, table_name, want, table)


def check_rows(function: str, batch: int, **values: object) -> None:
    """Of arguments with one element for each sequence."""
    for name, value in values.items():
        if isinstance(value, Tensor) and value.shape != (batch,):
            want = f"shape [{batch}], an element for each sequence of q"
            raise wrong(function, name, want, value)


def sequences(function: str, cu_seqlens_q: Tensor, **others: Tensor | None) -> int:
    """How many cu_seqlens_q has; the others are to have as many."""
    if cu_seqlens_q.dim() != 1 or cu_seqlens_q.shape[0] == 0:
        raise wrong(function, "cu_seqlens_q", "shape [batch + 1]", cu_seqlens_q)
    for name, starts in others.items():
        if starts is not None and starts.shape != cu_seqlens_q.shape:
            want = f"shape {list(cu_seqlens_q.shape)} (from cu_seqlens_q)"
            raise wrong(function, name, want, starts)
    return cu_seqlens_q.shape[0] - 1


def check_new(
    function: str,
    k: Tensor,
    v: Tensor,
    batch: int,
    packed: bool,
    k_cache: Tensor,
    options: Options,
) -> None:
    """Of tokens that are put into a cache."""
    rank = 3 if packed else 4
    lead = k.shape[: rank - 2] if packed else (batch, *k.shape[1:2])
    if k.dim() != rank or k.shape != (*lead, *k_cache.shape[2:]):
        first = "total_new" if packed else f"{batch}, seqlen_new"
        want = f"shape [{first}, {k_cache.shape[2]}, {k_cache.shape[3]}] (from q and k_cache)"
        raise wrong(function, "k", want, k)
    if v.shape != k.shape:
        raise wrong(function, "v", f"shape {list(k.shape)} (from k)", v)
    for name, rows, descale in (("k", k, options.k_descale), ("v", v, options.v_descale)):
        if rows.dtype == k_cache.dtype:
            continue
        if rows.dtype.itemsize == 1 or k_cache.dtype.itemsize != 1:
            raise InvalidArgument(
                f"{function}: {name}: expected {k_cache.dtype} (from k_cache), got {rows.dtype}"
            )
        if descale is not None and descale.dim() == 2 and len(descale) > 1 and descale.stride(0):
            raise Unsupported(
                f"{function}: {name}_descale: not supported with a row for each sequence where "
                f"{name} of {rows.dtype} is put into a cache of {k_cache.dtype}"
            )


def check_alike(
    function: str, q: Tensor, k_cache: Tensor, v_cache: Tensor, **others: object
) -> None:
    """Dtypes and devices, before a token is written: the attention behind it would refuse them."""
    if v_cache.dtype != k_cache.dtype:
        raise InvalidArgument(
            f"{function}: v_cache: expected {k_cache.dtype} (from k_cache), got {v_cache.dtype}"
        )
    computed = torch.bfloat16 if q.dtype.itemsize == 1 else q.dtype
    if k_cache.dtype.itemsize != 1 and k_cache.dtype != computed:
        raise InvalidArgument(
            f"{function}: k_cache: expected {computed} (from q), float8_e4m3fn, float8_e5m2 or "
            f"int8, got {k_cache.dtype}"
        )
    for name, tensor in {"k_cache": k_cache, "v_cache": v_cache, **others}.items():
        if isinstance(tensor, Tensor) and tensor.device != q.device:
            raise InvalidArgument(
                f"{function}: {name}: expected a tensor on {q.device} (from q), got {tensor.device}"
            )


def check_rotary(
    function: str,
    rotary: tuple[Tensor | None, Tensor | None],
    k: Tensor | None,
    head_size: int,
    capacity: int,
) -> list[Tensor]:
    """The cosines and sines of a cache of so many tokens, checked; none if nothing is rotated."""
    given = [table for table in rotary if table is not None]
    if not given:
        return []
    if k is None:
        raise InvalidArgument(f"{function}: rotary_cos: expected k and v with it, got None")
    check_tensors(function, rotary_cos=rotary[0], rotary_sin=rotary[1])
    cos, sin = given
    if cos.dim() != 2 or cos.shape[0] < capacity or not 0 < 2 * cos.shape[1] <= head_size:
        want = f"shape [positions, rotary_dim / 2], a row for each of {capacity} tokens of a cache"
        raise wrong(function, "rotary_cos", f"{want}, rotary_dim at most {head_size}", cos)
    if sin.shape != cos.shape:
        raise wrong(function, "rotary_sin", f"shape {list(cos.shape)} (from rotary_cos)", sin)
    return given


def check_places(
    function: str, batch_idx: Tensor | None, leftpad: Tensor | None, k_cache: Tensor
) -> None:
    """Refuses rows and paddings outside the cache where they are on a CPU."""
    if torch.compiler.is_compiling():
        return
    for name, values, most in (
        ("cache_batch_idx", batch_idx, k_cache.shape[0] - 1),
        ("cache_leftpad", leftpad, k_cache.shape[1]),
    ):
        if values is None or values.device.type != "cpu":
            continue
        outside = (values < 0) | (values > most)
        if outside.any():
            row = int(outside.nonzero()[0])
            raise InvalidArgument(
                f"{function}: {name}[{row}] = {int(values[row])}: expected 0 to {most}"
            )


def check_page_ids(
    function: str,
    name: str,
    table: Tensor,
    lengths: Tensor,
    visible: int | None,
    page: int,
    blocks: int,
) -> None:
    """Refuses pages outside the cache where they are on a CPU: those of the last ``visible`` tokens
    of each sequence, or of all."""
    if table.device.type != "cpu" or torch.compiler.is_compiling() or not table.numel():
        return
    low, high = torch.aminmax(table)
    if low.item() >= 0 and high.item() < blocks:
        return
    column = torch.arange(table.shape[1], device=table.device)
    used = column * page < lengths[:, None]
    if visible is not None:
        used &= (column + 1) * page > lengths[:, None] - visible
    bad = used & ((table < 0) | (table >= blocks))
    if bad.any():
        row, at = bad.nonzero()[0].tolist()
        raise InvalidIndex(
            f"{function}: {name}[{row}, {at}] = {int(table[row, at])}: expected a page in "
            f"[0, {blocks})"
        )


def check_lengths(
    function: str, lengths: Tensor, counts: Tensor | None, table: Tensor, capacity: int
) -> None:
    """Refuses lengths that leave no room for so many new tokens where they are on a CPU: elsewhere
    looking would wait."""
    if lengths.device.type != "cpu" or torch.compiler.is_compiling():
        return
    past = lengths > (capacity if counts is None else capacity - counts)
    if not past.any():
        return
    past &= lengths >= 0  # below 0: rows of nobody
    if capacity:
        past &= table[:, 0] >= 0
    if past.any():
        row = int(past.nonzero()[0])
        count = 0 if counts is None else int(counts[row])
        raise InvalidArgument(
            f"{function}: cache_seqlens[{row}] = {int(lengths[row])}: expected a length that fits "
            f"a cache of {capacity} tokens with {count} new ones"
        )
