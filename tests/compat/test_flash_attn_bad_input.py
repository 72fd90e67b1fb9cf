"""What FlashAttention's functions refuse, under the name that was called."""

from __future__ import annotations

import re
from types import ModuleType

import pytest
import torch
from flash_attn_cases import FA2, FA3, Paged, random, starts_of, table_name
from helpers import ints


def test_shapes_are_refused_by_name(fa, device):
    """By shapes, so on either device, and under the name that was called."""
    good = (2, 5, 8, 64)
    for q, k, v, message in (
        (good[1:], good, good,
         "q: expected shape [batch, seqlen_q, num_heads, head_size], got [5, 8, 64]"),
        ((1, 5, 8, 64), good, good,
         "k: expected shape [1, seqlen_k, num_kv_heads, 64], got [2, 5, 8, 64]"),
        (good, (1, 5, 8, 64), (1, 5, 8, 64),
         "k: expected shape [2, seqlen_k, num_kv_heads, 64], got [1, 5, 8, 64]"),
        (good, (2, 5, 8, 32), good,
         "k: expected shape [2, seqlen_k, num_kv_heads, 64], got [2, 5, 8, 32]"),
        (good, (2, 8, 5, 64), good,
         "v: expected shape [2, 8, 5, head_size_v], got [2, 5, 8, 64]"),
        (good, good, (2, 6, 8, 64), "v: expected shape [2, 5, 8, head_size_v], got [2, 6, 8, 64]"),
        (good, good, (1, 5, 8, 64), "v: expected shape [2, 5, 8, head_size_v], got [1, 5, 8, 64]"),
        (good, (2, 8, 5, 64), (2, 8, 5, 64),
         "q: expected num_heads to be a multiple of num_kv_heads = 5 (from k), got [2, 5, 8, 64]"),
        (good, good, (2, 5, 8, 264), "v: expected a head size up to 256, got [2, 5, 8, 264]"),
    ):  # fmt: skip
        rows = [random(*shape, device=device, dtype=torch.bfloat16) for shape in (q, k, v)]
        with pytest.raises(RuntimeError, match=f"^flash_attn_func: {re.escape(message)}$"):
            fa.flash_attn_func(*rows)


def test_ragged_shapes_are_refused_by_name(fa, device):
    """Keys of another head size than q's were padded with zeros, and gave a result."""
    good = (6, 8, 64)
    for q, k, v, message in (
        ((2, *good), good, good,
         "q: expected shape [total_q, num_heads, head_size], got [2, 6, 8, 64]"),
        (good, (6, 8, 32), good, "k: expected shape [total_k, num_kv_heads, 64], got [6, 8, 32]"),
        (good, (6, 8, 72), good, "k: expected shape [total_k, num_kv_heads, 64], got [6, 8, 72]"),
        (good, (1, *good), good,
         "k: expected shape [total_k, num_kv_heads, 64], got [1, 6, 8, 64]"),
        (good, good, (6, 64), "v: expected shape [6, 8, head_size_v], got [6, 64]"),
        (good, good, (7, 8, 64), "v: expected shape [6, 8, head_size_v], got [7, 8, 64]"),
        (good, good, (6, 2, 64), "v: expected shape [6, 8, head_size_v], got [6, 2, 64]"),
        (good, (6, 5, 64), (6, 5, 64),
         "q: expected num_heads to be a multiple of num_kv_heads = 5 (from k), got [6, 8, 64]"),
        (good, good, (6, 8, 264), "v: expected a head size up to 256, got [6, 8, 264]"),
    ):  # fmt: skip
        rows = [random(*shape, device=device, dtype=torch.bfloat16) for shape in (q, k, v)]
        starts = starts_of([2, 4], device)
        with pytest.raises(RuntimeError, match=f"^flash_attn_varlen_func: {re.escape(message)}$"):
            fa.flash_attn_varlen_func(*rows, starts, starts, 4, 4)


def test_cached_shapes_are_refused_by_name(fa, device):
    """New keys of another batch gave a result of old slots, and others torch's or an op's words."""
    name = table_name(fa)
    q, k = (2, 1, 4, 64), (2, 1, 2, 64)
    rows, pages = (2, 32, 2, 64), (5, 16, 2, 64)
    lens, table = ints([3, 5], device), ints([[0, 1], [2, 3]], device)
    for shapes, arguments, message in (
        ((q, rows, rows, (1, *k[1:]), (1, *k[1:])), {},
         "k: expected shape [2, seqlen_new, 2, 64] (from q and k_cache), got [1, 1, 2, 64]"),
        ((q, rows, rows, k[1:], k[1:]), {},
         "k: expected shape [2, seqlen_new, 2, 64] (from q and k_cache), got [1, 2, 64]"),
        ((q, rows, rows, (2, 1, 4, 64), (2, 1, 4, 64)), {},
         "k: expected shape [2, seqlen_new, 2, 64] (from q and k_cache), got [2, 1, 4, 64]"),
        ((q, rows, rows, k, (2, 2, 2, 64)), {},
         "v: expected shape [2, 1, 2, 64] (from k), got [2, 2, 2, 64]"),
        (((3, 1, 4, 64), rows, rows), {},
         "cache_seqlens: expected shape [3], an element for each sequence of q, got [2]"),
        (((3, 1, 4, 64), rows, rows), {"cache_seqlens": 3},
         "k_cache: expected 3 rows or more, one for each sequence of q, got [2, 32, 2, 64]"),
        ((q, rows, rows), {"cache_batch_idx": lens[:1]},
         "cache_batch_idx: expected shape [2], an element for each sequence of q, got [1]"),
        ((q, rows, rows), {"cache_leftpad": lens[None]},
         "cache_leftpad: expected shape [2], an element for each sequence of q, got [1, 2]"),
        ((q[1:], rows, rows), {},
         "q: expected shape [batch, seqlen_q, num_heads, head_size], got [1, 4, 64]"),
        ((q, rows[1:], rows[1:]), {},
         "k_cache: expected shape [batch_cache, seqlen_cache, num_kv_heads, 64], got [32, 2, 64]"),
        ((q, rows, (2, 16, 2, 64)), {},
         "v_cache: expected shape [2, 32, 2, 64], got [2, 16, 2, 64]"),
        (((2, 1, 3, 64), rows, rows), {},
         "q: expected num_heads to be a multiple of num_kv_heads = 2 (from k_cache), "
         "got [2, 1, 3, 64]"),
        (((2, 1, 4, 20), (2, 32, 2, 20), (2, 32, 2, 20)), {},
         "q: expected a head size of 32 to 256 in steps of 8 (that of caches), got [2, 1, 4, 20]"),
        ((q, (2, 0, 2, 64), (2, 0, 2, 64)), {},
         "k_cache: expected rows of at least one token, got [2, 0, 2, 64]"),
        ((q, pages, pages, k, k), {name: table[:, :0]},
         f"{name}: expected pages for k and v, got [2, 0]"),
        ((q, pages, pages), {name: table[:1]},
         f"{name}: expected shape [2, pages_per_seq], a row for each sequence of q, got [1, 2]"),
        ((q, pages, pages), {name: table[0]},
         f"{name}: expected shape [2, pages_per_seq], a row for each sequence of q, got [2]"),
        ((q, (5, 12, 2, 64), (5, 12, 2, 64)), {name: table},
         "k_cache: expected pages of 1, 2, 4, .. 256 tokens (dimension 1), got [5, 12, 2, 64]"),
        ((q, pages[1:], pages[1:]), {name: table},
         "k_cache: expected shape [num_blocks, page_size, num_kv_heads, 64], got [16, 2, 64]"),
    ):  # fmt: skip
        tensors = [random(*shape, device=device, dtype=torch.bfloat16) for shape in shapes]
        with pytest.raises(RuntimeError, match=f"^flash_attn_with_kvcache: {re.escape(message)}$"):
            fa.flash_attn_with_kvcache(*tensors, **{"cache_seqlens": lens, **arguments})


def test_ragged_shapes_of_caches_are_refused_by_name(device):
    lens, table = ints([3, 5], device), ints([[0, 1], [2, 3]], device)
    pages = random(5, 16, 2, 64, device=device, dtype=torch.bfloat16)
    q, k = random(3, 4, 64, device=device, dtype=torch.bfloat16), pages[0, :3]
    starts = starts_of([1, 2], device)
    good = {"q": q, "k_cache": pages, "v_cache": pages, "cache_seqlens": lens, "page_table": table,
            "cu_seqlens_q": starts, "max_seqlen_q": 2}  # fmt: skip
    for change, message in (
        ({"q": q[None]}, "q: expected shape [total_q, num_heads, head_size], got [1, 3, 4, 64]"),
        ({"cu_seqlens_q": starts[:2]},
         "cache_seqlens: expected shape [1], an element for each sequence of q, got [2]"),
        ({"cu_seqlens_q": starts[None]}, "cu_seqlens_q: expected shape [batch + 1], got [1, 3]"),
        ({"k": k, "v": k, "cu_seqlens_k_new": starts[:2]},
         "cu_seqlens_k_new: expected shape [3] (from cu_seqlens_q), got [2]"),
        ({"k": k[:, :1], "v": k[:, :1], "cu_seqlens_k_new": starts},
         "k: expected shape [total_new, 2, 64] (from q and k_cache), got [3, 1, 64]"),
        ({"k": k, "v": k},
         "k: expected shape [2, seqlen_new, 2, 64] (from q and k_cache), got [3, 2, 64]"),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=f"^flash_attn_with_kvcache: {re.escape(message)}$"):
            FA3.flash_attn_with_kvcache(**{**good, **change})
    for keys, values, more, message in (
        (pages[..., :32], pages[..., :32], {},
         "k: expected shape [num_blocks, page_size, num_kv_heads, 64], got [5, 16, 2, 32]"),
        (pages[0], pages[0], {},
         "k: expected shape [num_blocks, page_size, num_kv_heads, 64], got [16, 2, 64]"),
        (pages, pages[:, :8], {}, "v: expected shape [5, 16, 2, 64], got [5, 8, 2, 64]"),
        (pages, pages, {"block_table": table[:1]},
         "block_table: expected shape [2, pages_per_seq], a row for each sequence of q, "
         "got [1, 2]"),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=f"^flash_attn_varlen_func: {re.escape(message)}$"):
            FA2.flash_attn_varlen_func(
                q, keys, values, starts, starts, 2, 2, **{"block_table": table, **more}
            )
    with pytest.raises(NotImplementedError, match=r"^flash_attn_varlen_func: v: not supported wi"):
        FA2.flash_attn_varlen_func(
            q, pages, pages[..., :32], starts, starts, 2, 2, block_table=table
        )
    message = "seqused_k: expected shape [2], an element for each sequence of q, got [3]"
    with pytest.raises(RuntimeError, match=f"^flash_attn_varlen_func: {re.escape(message)}$"):
        FA3.flash_attn_varlen_func(q, k, k, starts, starts, 2, 2, seqused_k=starts)


def test_numbers_of_sequences_are_refused_by_name(device):
    """With slopes or descales a sequence, too, where each is a launch of its own."""
    q = random(5, 4, 64, device=device, dtype=torch.bfloat16)
    k = random(9, 2, 64, device=device, dtype=torch.bfloat16)
    starts, three = starts_of([2, 3], device), starts_of([3, 3, 3], device)
    slopes = torch.rand(3, 4, device=device)
    for starts_k, more, message in (
        (three, {}, "cu_seqlens_k: expected shape [3] (from cu_seqlens_q), got [4]"),
        (three, {"alibi_slopes": slopes[:2]},
         "cu_seqlens_k: expected shape [3] (from cu_seqlens_q), got [4]"),
        (starts, {"alibi_slopes": slopes},
         "alibi_slopes: expected shape [4] or [2, 4], a row for each sequence of q, got [3, 4]"),
        (starts, {"alibi_slopes": slopes[0, :2]},
         "alibi_slopes: expected shape [4] or [2, 4], a row for each sequence of q, got [2]"),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=f"^flash_attn_varlen_func: {re.escape(message)}$"):
            FA2.flash_attn_varlen_func(q, k, k, starts, starts_k, 3, 3, **more)
    eight = [x.to(torch.float8_e4m3fn) for x in (q, k, k)]
    for name in ("q_descale", "k_descale", "v_descale"):
        message = f"{name}: expected shape [2] or [2, 2], a row for each sequence of q, got [3, 2]"
        with pytest.raises(RuntimeError, match=f"^flash_attn_varlen_func: {re.escape(message)}$"):
            FA3.flash_attn_varlen_func(*eight, starts, starts, 3, 4, **{name: slopes[:, :2]})
        message = f"{name}: expected a tensor [batch, num_kv_heads], got 1.0"
        with pytest.raises(RuntimeError, match=f"^flash_attn_func: {re.escape(message)}$"):
            FA3.flash_attn_func(*(x[None] for x in eight), **{name: 1.0})
    with pytest.raises(RuntimeError, match=r"^flash_attn_func: alibi_slopes: expected a tensor \["):
        FA2.flash_attn_func(q[None], k[None], k[None], alibi_slopes=0.5)
    with pytest.raises(RuntimeError, match=r"^flash_attn_func: s_aux: expected a tensor \[num_he"):
        FA2.flash_attn_func(q[None], k[None], k[None], s_aux=0.5)


def test_rotary_tables(fa, device):
    """Shorter ones gave another position's angle, sines of another width another turn."""
    cache = Paged(device, torch.float32, [3, 5], 16)
    q = random(2, 1, 4, 64, device=device, dtype=torch.float32)
    k = random(2, 1, 2, 64, device=device, dtype=torch.float32)
    tokens = 16 * cache.table.shape[1]
    cos = random(tokens, 16, device=device, dtype=torch.float32)
    rows = rf"shape \[positions, rotary_dim / 2\], a row for each of {tokens} tokens of a cache"
    for tables, message in (
        ((cos[1:], cos[1:]), rf"rotary_cos: expected {rows}, rotary_dim at most 64, got"),
        ((cos[0], cos[0]), rf"rotary_cos: expected {rows}"),
        ((cos.repeat(1, 3), cos.repeat(1, 3)), rf"rotary_cos: expected {rows}"),
        ((cos, cos[:, :8]), rf"rotary_sin: expected shape \[{tokens}, 16\] \(from rotary_cos\)"),
        ((cos, None), "rotary_sin: expected a tensor, got None"),
        ((None, cos), "rotary_cos: expected a tensor, got None"),
    ):
        with pytest.raises(RuntimeError, match=rf"^flash_attn_with_kvcache: {message}"):
            fa.flash_attn_with_kvcache(
                q, cache.key, cache.value, k, k, rotary_cos=tables[0], rotary_sin=tables[1],
                cache_seqlens=cache.lens, **{table_name(fa): cache.table},
            )  # fmt: skip


def test_places_outside_the_cache(fa):
    q, rows = torch.randn(2, 1, 4, 64), torch.randn(2, 32, 2, 64)
    for arguments, message in (
        ({"cache_batch_idx": ints([0, -1], "cpu")}, r"cache_batch_idx\[1\] = -1: expected 0 to 1"),
        ({"cache_batch_idx": ints([2, 0], "cpu")}, r"cache_batch_idx\[0\] = 2: expected 0 to 1"),
        ({"cache_leftpad": ints([0, -5], "cpu")}, r"cache_leftpad\[1\] = -5: expected 0 to 32"),
    ):
        with pytest.raises(RuntimeError, match=rf"^flash_attn_with_kvcache: {message}"):
            fa.flash_attn_with_kvcache(q, rows, rows, cache_seqlens=9, **arguments)


def test_what_is_no_tensor(fa, device):
    q, k = (random(5, heads, 64, device=device, dtype=torch.float32) for heads in (4, 2))
    starts, cache = ints([0, 5], device), random(1, 8, 2, 64, device=device, dtype=torch.float32)
    varlen, cached = fa.flash_attn_varlen_func, fa.flash_attn_with_kvcache
    for call, message in (
        (lambda: fa.flash_attn_func([1.0], q, q), "func: q: expected a tensor, got list"),
        (lambda: fa.flash_attn_func(q[None], k[None], k[None], window_size=5),
         r"func: window_size: expected \(left, right\), got 5"),
        (lambda: varlen(q, k, k, [0, 5], starts, 5, 5),
         "varlen_func: cu_seqlens_q: expected a tensor, got list"),
        (lambda: varlen(q, k, k, starts, None, 5, 5),
         "varlen_func: cu_seqlens_k: expected a tensor, got None"),
        (lambda: varlen(q, k, k, starts, starts.float(), 5, 5),
         "varlen_func: cu_seqlens_k: expected int32 or int64, got torch.float32"),
        (lambda: varlen(q, k, k, starts, starts, None, 5),
         "varlen_func: max_seqlen_q: expected the longest sequence's tokens, got None"),
        (lambda: cached(q[None], cache, cache, cache_seqlens=[3]),
         "with_kvcache: cache_seqlens: expected a tensor, got list"),
        (lambda: cached(q[None], cache, cache, cache_seqlens=starts[1:].float()),
         "with_kvcache: cache_seqlens: expected int32 or int64, got torch.float32"),
        (lambda: cached(q[None], cache, cache, **{table_name(fa): [[0]]}),
         f"with_kvcache: {table_name(fa)}: expected a tensor, got list"),
        (lambda: cached(q[None, :1], cache, cache, k[None, :1], k[None, :1]),
         "with_kvcache: cache_seqlens: expected what the cache holds before k and v, got None"),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=f"^flash_attn_{message}"):
            call()


def test_packed_shapes(device):
    qkv = random(2, 5, 8, 64, device=device, dtype=torch.float32)
    starts = ints([0, 5], device)
    for call, message in (
        (lambda: FA2.flash_attn_qkvpacked_func(qkv),
         r"qkvpacked_func: qkv: expected shape \[batch, seqlen, 3, num_heads, head_size\], got"),
        (lambda: FA2.flash_attn_kvpacked_func(qkv, qkv),
         r"kvpacked_func: kv: expected shape \[batch, seqlen_k, 2, num_heads, head_size\], got"),
        (lambda: FA2.flash_attn_varlen_qkvpacked_func(qkv, starts, 5),
         r"varlen_qkvpacked_func: qkv: expected shape \[total, 3, num_heads, head_size\], got"),
        (lambda: FA2.flash_attn_varlen_kvpacked_func(qkv[0], qkv[0], starts, starts, 5, 5),
         r"varlen_kvpacked_func: kv: expected shape \[total_k, 2, num_heads, head_size\], got"),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=f"^flash_attn_{message}"):
            call()


def test_new_keys_of_another_dtype(device):
    cache = torch.zeros(2, 16, 2, 64, device=device).to(torch.float8_e4m3fn)
    q = random(2, 1, 4, 64, device=device, dtype=torch.bfloat16)
    rows = torch.ones(2, 2, device=device)
    call = FA3.flash_attn_with_kvcache
    with pytest.raises(NotImplementedError, match=r"k_descale: not supported with a row for each"):
        call(q, cache, cache, q[:, :, :2], q[:, :, :2], cache_seqlens=3, k_descale=rows)
    with pytest.raises(RuntimeError, match=r"k: expected torch.float32 \(from k_cache\), got"):
        other = cache.float()
        call(q, other, other, q[:, :, :2], q[:, :, :2], cache_seqlens=3)


def test_nothing_is_written_by_a_refused_call(fa, device):
    """A refused call of the general way had put k and v into the cache."""
    cache = torch.zeros(8, 16, 2, 64, device=device)
    q, k = torch.randn(2, 1, 8, 64, device=device), torch.randn(2, 1, 2, 64, device=device)
    table, lens = ints([[0, 1], [2, 3]], device), ints([21, 19], device)
    name = table_name(fa)
    bad_page = ints([[0, 1], [99, 3]], device)
    some = [
        ({"softcap": -1.0}, "softcap: expected a finite number >= 0, got -1.0"),
        ({"softmax_scale": "x"}, "softmax_scale: expected a finite number, got 'x'"),
        ({"window_size": (3.7, 0)}, r"window_size: expected \(left, right\), got \(3.7, 0\)"),
        ({"q": q.bfloat16()}, r"k_cache: expected torch.bfloat16 \(from q\), float8_e4m3fn, "),
        ({"q": q.clone().requires_grad_()}, "q: requires grad"),
        ({"k": k.to("meta")}, rf"k: expected a tensor on {device}\S* \(from q\), got meta"),
        ({"q": q.to("meta")}, rf"k_cache: expected a tensor on meta \(from q\), got {device}"),
        ({name: table.to("meta")}, rf"{name}: expected a tensor on {device}\S* \(from q\), got"),
        ({"cache_seqlens": -1}, "cache_seqlens: expected a length >= 0, got -1"),
        ({"q": q[:, 0]}, r"q: expected shape \[batch, seqlen_q, num_heads, head_size\]"),
    ]  # fmt: skip
    if fa is FA2:
        some.append(({"alibi_slopes": q[0, 0, :3, 0]}, r"alibi_slopes: expected shape \[8\] or"))
    if device == "cpu":
        some += [
            ({name: bad_page}, rf"{name}\[1, 0\] = 99: expected a page in \[0, 8\)"),
            ({name: bad_page.long() + 2**32}, rf"{name}\[0, 0\] = 2147483647: expected a page"),
            (
                {"cache_seqlens": lens.long() + 2**32},
                r"cache_seqlens\[0\] = 2147483647: expected a",
            ),
        ]
    for change, message in some:
        for more in ({}, {"return_softmax_lse": True}):
            given = {"q": q, "k": k, "v": k, "cache_seqlens": lens, name: table, **change, **more}
            with pytest.raises(RuntimeError, match=f"^flash_attn_with_kvcache: {message}"):
                fa.flash_attn_with_kvcache(given.pop("q"), cache, cache.clone(), **given)
            assert not cache.any(), message


def test_pages_before_the_window_may_be_missing():
    q, k = torch.randn(1, 1, 8, 64), torch.randn(1, 1, 2, 64)
    cache = torch.zeros(4, 16, 2, 64)
    out, lse = FA2.flash_attn_with_kvcache(
        q, cache, cache.clone(), k, k, cache_seqlens=ints([40], "cpu"), window_size=(5, 0),
        block_table=ints([[-1, 77, 3]], "cpu"), return_softmax_lse=True,
    )  # fmt: skip
    assert torch.equal(cache[3, 8], k[0, 0]) and lse.isfinite().all() and out.any()


def _varlen(starts: list[int], longest: int, **more: object) -> object:
    q, k, v = torch.randn(3, 7, 2, 64)
    one = torch.tensor([0, 3, 7], dtype=torch.int32)
    given = torch.tensor(starts, dtype=torch.int32)
    return FA2.flash_attn_varlen_func(q, k, v, given, one, longest, 4, **more)


def _pages(table: list[list[int]], starts: list[int]) -> object:
    caches = torch.randn(2, 4, 16, 2, 64)
    q, one = torch.randn(2, 2, 64), torch.tensor([0, 1, 2], dtype=torch.int32)
    ends = torch.tensor(starts, dtype=torch.int32)
    pages = torch.tensor(table, dtype=torch.int32)
    return FA2.flash_attn_varlen_func(q, *caches, one, ends, 1, 20, block_table=pages)


def _kvcache(fa: ModuleType, table: list[list[int]]) -> object:
    pages = torch.tensor(table, dtype=torch.int32)
    return fa.flash_attn_with_kvcache(
        torch.randn(2, 1, 2, 64), *torch.randn(2, 4, 16, 2, 64),
        cache_seqlens=torch.tensor([20, 20], dtype=torch.int32), **{table_name(fa): pages},
    )  # fmt: skip


def _packed(starts: list[int], longest: int = 4, **more: object) -> object:
    given = torch.tensor(starts, dtype=torch.int32)
    return FA2.flash_attn_varlen_qkvpacked_func(torch.randn(7, 3, 2, 64), given, longest, **more)


QKV = torch.randn(2, 5, 3, 2, 64)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: _varlen([0, 9, 7], 4), "flash_attn_varlen_func: cu_seqlens_q[1] = 9: expected a"),
        (
            lambda: _varlen([0, 3, 7], 2),
            "flash_attn_varlen_func: max_seqlen_q = 2: sequence 0 has 3 query tokens",
        ),
        (
            lambda: _varlen([0, 3, 7], 4, s_aux=torch.zeros(3), return_attn_probs=True),
            "flash_attn_varlen_func: s_aux: expected num_heads = 2 (from q) at dimension 0",
        ),
        (
            lambda: _pages([[0, 1], [2, 9]], [0, 20, 40]),
            "flash_attn_varlen_func: block_table[1, 1] = 9: expected a block in [0, 4)",
        ),
        (
            lambda: _pages([[0, 1], [2, 3]], [0, 20, 240]),
            "flash_attn_varlen_func: cu_seqlens_k.diff()[1] = 220: expected a length that fits "
            "block_table",
        ),
        (
            lambda: _kvcache(FA2, [[0, 1], [2, 9]]),
            "flash_attn_with_kvcache: block_table[1, 1] = 9: expected a block in [0, 4)",
        ),
        (
            lambda: _kvcache(FA3, [[0, 1], [2, 9]]),
            "flash_attn_with_kvcache: page_table[1, 1] = 9: expected a block in [0, 4)",
        ),
        (
            lambda: FA2.flash_attn_func(QKV[:, :, 0].half(), *QKV[:, :, 1:].unbind(2)),
            "flash_attn_func: k: expected float16 (from q), float8_e4m3fn",
        ),
        (
            lambda: FA2.flash_attn_qkvpacked_func(QKV.clone().requires_grad_()),
            "flash_attn_qkvpacked_func: qkv: requires grad",
        ),
        (
            lambda: FA2.flash_attn_kvpacked_func(QKV[:, :, 0].half(), QKV[:, :, 1:]),
            "flash_attn_kvpacked_func: kv: expected float16 (from q)",
        ),
        (
            lambda: FA2.flash_attn_kvpacked_func(QKV[:, :, 0], QKV[:, :, 1:], dropout_p=0.1),
            "flash_attn_kvpacked_func: dropout_p: not supported, got 0.1",
        ),
        (
            lambda: _packed([0, 9, 7]),
            "flash_attn_varlen_qkvpacked_func: cu_seqlens[1] = 9: expected a token of qkv, at most "
            "max_seqlen past",
        ),
        (
            lambda: _packed([0, 3, 7], softmax_scale=float("nan")),
            "flash_attn_varlen_qkvpacked_func: softmax_scale: expected a finite number",
        ),
    ],
)  # fmt: skip
def test_errors_of_ops_have_the_callers_names(call, message):
    """Those of a CPU, which reads lengths and pages."""
    with pytest.raises(RuntimeError, match="^" + re.escape(message)):
        call()
