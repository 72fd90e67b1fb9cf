"""FlashAttention's functions over a cache, against an oracle in plain PyTorch."""

from __future__ import annotations

import oracle
import pytest
import torch
from flash_attn_cases import FA2, FA3, Paged, near, near_lse, random, starts_of, table_name
from helpers import ints
from torch import Tensor


@pytest.mark.parametrize("page", [1, 16, 256])
def test_decode_appends_in_place(fa, device, dtype, page):
    """transformers' continuous batching; padding rows of -1 read and write nothing."""
    lens = [5, 255, 256, 33, -1]
    cache = Paged(device, dtype, lens, page, slabs=3)
    cache.table[4] = -1
    before = cache.pool.clone()
    q = random(5, 1, 6, 64, device=device, dtype=dtype)
    k, v = random(2, 5, 1, 2, 64, device=device, dtype=dtype)
    for window in ((-1, -1), (9, 9), (9, 0)):
        cache.pool.copy_(before)
        out = fa.flash_attn_with_kvcache(
            q, cache.key, cache.value, k, v, causal=True, softmax_scale=0.15, window_size=window,
            cache_seqlens=cache.lens, **{table_name(fa): cache.table},
        )  # fmt: skip
        assert out.shape == q.shape and not out[4].any()
        for seq in range(4):
            keys, values = cache.gathered(seq, lens[seq] + 1)
            assert torch.equal(keys[-1], k[seq, 0]) and torch.equal(values[-1], v[seq, 0])
            assert torch.equal(keys[:-1], cache.rows[seq][0])
            near(out[seq], oracle.attention(q[seq], keys, values, True, window, scale=0.15)[0])
        after = cache.pool.nan_to_num(-7.0)
        changed = (after != before.nan_to_num(-7.0)).flatten(3).any(-1)  # [blocks, slabs, 2, page]
        assert changed.sum() == 8, "4 tokens of K and V, and nothing else"


@pytest.mark.parametrize("page", [1, 16])
def test_ragged_queries_through_kvcache(device, dtype, page):
    """mini-sglang, lightllm: prefill and decode by cu_seqlens_q, K and V halves of a buffer."""
    lens, queries = [30, 7, 50, 0], [5, 7, 1, 0]
    cache = Paged(device, dtype, lens, page)
    q = random(sum(queries), 4, 64, device=device, dtype=dtype)
    starts = starts_of(queries, device)
    shared = {
        "q": q, "k_cache": cache.key, "v_cache": cache.value, "page_table": cache.table,
        "cache_seqlens": cache.lens, "cu_seqlens_q": starts, "max_seqlen_q": 7,
        "cu_seqlens_k_new": starts_of([9, 9, 9, 9], device), "softmax_scale": 0.125,
        "causal": True, "window_size": (-1, -1), "softcap": 0.0,
    }  # fmt: skip
    out, lse = FA3.flash_attn_with_kvcache(**shared, return_softmax_lse=True)
    for seq, part in enumerate(q.split(queries)):
        rows = slice(int(starts[seq]), int(starts[seq + 1]))
        want = oracle.attention(part, *cache.rows[seq], True)
        near(out[rows], want[0])
        near_lse(lse[:, rows].contiguous(), want[1])
    sglang = {"sm_margin": 0, "num_splits": 0, "pack_gqa": None, "ver": 3}
    lightllm = {"k_descale": None, "v_descale": None, "return_softmax_lse": False}
    for more in (sglang, lightllm):
        assert torch.equal(FA3.flash_attn_with_kvcache(**shared, **more), out)
    sinks = torch.linspace(-1, 2, 4, device=device)
    with_sinks = FA3.flash_attn_with_kvcache(**shared, sinks=sinks)
    near(with_sinks[:5], oracle.attention(q[:5], *cache.rows[0], True, sinks=sinks)[0])


def test_ragged_tokens_are_appended(device, dtype):
    lens, new = [30, 0, 15], [2, 5, 1]
    cache = Paged(device, dtype, lens, 16)
    q = random(8, 4, 64, device=device, dtype=dtype)
    k, v = random(2, 8, 2, 64, device=device, dtype=dtype)
    starts = starts_of(new, device)
    out = FA3.flash_attn_with_kvcache(
        q, cache.key, cache.value, k, v, page_table=cache.table, cache_seqlens=cache.lens,
        cu_seqlens_q=starts, cu_seqlens_k_new=starts, max_seqlen_q=5, causal=True,
    )  # fmt: skip
    for seq, part in enumerate(q.split(new)):
        keys, values = cache.gathered(seq, lens[seq] + new[seq])
        assert torch.equal(keys[lens[seq] :], k.split(new)[seq])
        near(out.split(new)[seq], oracle.attention(part, keys, values, True)[0])


@pytest.mark.parametrize("page", [1, 16])
def test_rows_that_append_nothing(device, dtype, page):
    """At a border their table ends, or goes on with -1, behind the last token: no padding."""
    lens, new = [32, 48, 16, 0, -1, 17], [0, 0, 1, 0, 0, 0]
    cache = Paged(device, dtype, lens, page, room=0)
    width = 48 // page
    cache.table = cache.table[:, :width].clone()  # row 1 fills it
    unused = set(range(cache.pool.shape[0])) - set(cache.table.flatten().tolist())
    cache.table[2, 16 // page] = unused.pop()
    before = cache.pool.clone()
    q = random(6, 4, 64, device=device, dtype=dtype)
    k, v = random(2, 3, 2, 64, device=device, dtype=dtype)  # two of nobody: the padding of a graph
    out, lse = FA3.flash_attn_with_kvcache(
        q, cache.key, cache.value, k, v, page_table=cache.table, cache_seqlens=cache.lens,
        cu_seqlens_q=starts_of([1] * 6, device), cu_seqlens_k_new=starts_of(new, device),
        max_seqlen_q=1, causal=True, return_softmax_lse=True,
    )  # fmt: skip
    for seq, (length, count) in enumerate(zip(lens, new, strict=True)):
        rows = cache.gathered(seq, max(length, 0) + count)
        want = oracle.attention(q[seq : seq + 1], *rows, True)
        near(out[seq : seq + 1], want[0])
        near_lse(lse[:, seq : seq + 1].contiguous(), want[1])
    assert torch.equal(cache.gathered(2, 17)[0][16], k[0])
    changed = (cache.pool.nan_to_num(-7.0) != before.nan_to_num(-7.0)).flatten(4).any(-1)
    assert changed.sum() == 2, "one token of K and V, and nothing else"


def test_no_new_tokens_at_all(fa, device, dtype):
    """k and v of no tokens, behind a cache that may be full."""
    key, value = random(2, 3, 32, 2, 64, device=device, dtype=dtype)
    q = random(3, 1, 4, 64, device=device, dtype=dtype)
    none = q.new_empty(3, 0, 2, 64)
    for lens in (ints([32, 16, 5], device), 32):
        want = fa.flash_attn_with_kvcache(q, key, value, cache_seqlens=lens)
        got = fa.flash_attn_with_kvcache(q, key, value, none, none, cache_seqlens=lens)
        assert torch.equal(got, want) and got.any(-1).all()


def test_eight_bit_tokens_are_appended(device):
    """As they are: they are divided by their descales already."""
    rows = random(2, 2, 3, 2, 64, device=device, dtype=torch.float32).to(torch.float8_e4m3fn)
    cache = torch.zeros(2, 2, 16, 2, 64, device=device).to(torch.float8_e4m3fn)
    q = random(2, 3, 4, 64, device=device, dtype=torch.bfloat16)
    descales = [torch.tensor([[2.0, 0.5], [1.0, 3.0]], device=device)] * 2
    lens = ints([4, 9], device)
    FA3.flash_attn_with_kvcache(
        q, *cache, *rows, cache_seqlens=lens, k_descale=descales[0], v_descale=descales[1]
    )
    for seq, length in enumerate(lens.tolist()):
        assert torch.equal(cache[:, seq, length : length + 3].float(), rows[:, seq].float())
    assert cache.float().count_nonzero() == rows.float().count_nonzero()


@pytest.mark.parametrize("v_descale", [None, 4.0])
def test_descales_of_unlike_sizes(device, v_descale):
    """Tokens are divided by them on their way into an 8-bit cache."""
    rows = random(2, 1, 3, 2, 64, device=device, dtype=torch.bfloat16)
    cache = torch.zeros(2, 1, 16, 2, 64, device=device).to(torch.float8_e4m3fn)
    descale = torch.tensor([2.0, 0.5], device=device)
    one = None if v_descale is None else torch.full((1,), v_descale, device=device)
    out = FA3.flash_attn_with_kvcache(
        rows[:1, 0], *cache, *rows, cache_seqlens=0, k_descale=descale, v_descale=one, causal=True
    )
    v_descale = v_descale or 1.0
    want = torch.stack([rows[0].float() / descale[:, None], rows[1].float() / v_descale])
    assert torch.equal(cache[:, :, :3].float(), want.to(cache.dtype).float())
    key, value = cache[:, 0, :3].double()
    key, value = key * descale[:, None], value * v_descale
    near(out[0], oracle.attention(rows[0, 0], key, value, True)[0], 2.0)


@pytest.mark.parametrize("window", [(-1, -1), (6, 2), (0, -1)])
def test_not_causal_pages(fa, device, dtype, window):
    cache = Paged(device, dtype, [30, 5], 16)
    q = random(2, 9, 4, 64, device=device, dtype=dtype)
    out, lse = fa.flash_attn_with_kvcache(
        q, cache.key, cache.value, cache_seqlens=cache.lens, window_size=window,
        return_softmax_lse=True, **{table_name(fa): cache.table},
    )  # fmt: skip
    for seq in range(2):
        want = oracle.attention(q[seq], *cache.rows[seq], False, window)
        near(out[seq], want[0])
        near_lse(lse[seq].contiguous(), want[1])


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
def test_rotary(fa, device, dtype, interleaved, causal):
    """k is turned at its positions; q at its own, or where not causal at the first."""
    cache = Paged(device, dtype, [12, 0, 3], 16)
    q = random(3, 2, 4, 64, device=device, dtype=dtype)
    k, v = random(2, 3, 2, 2, 64, device=device, dtype=dtype)
    positions = torch.arange(16.0 * cache.table.shape[1])
    angle = torch.outer(positions, 10000.0 ** -torch.linspace(0, 1, 16))
    cos, sin = angle.cos().to(device, dtype), angle.sin().to(device, dtype)
    untouched = q.clone(), k.clone()
    out = fa.flash_attn_with_kvcache(
        q, cache.key, cache.value, k, v, rotary_cos=cos, rotary_sin=sin, causal=causal,
        rotary_interleaved=interleaved, cache_seqlens=cache.lens, **{table_name(fa): cache.table},
    )  # fmt: skip
    assert torch.equal(q, untouched[0]) and torch.equal(k, untouched[1])
    for seq, length in enumerate(cache.lens.tolist()):
        keys, values = cache.gathered(seq, length + 2)
        near(keys[length:], oracle.turned(k[seq], length, 1, cos, sin, interleaved), 2.0)
        turned = oracle.turned(q[seq], length, int(causal), cos, sin, interleaved)
        want, _ = oracle.attention(turned.to(dtype), keys, values, causal)
        near(out[seq], want, 2.0)
    with pytest.raises(RuntimeError, match="rotary_cos: expected k and v with it"):
        fa.flash_attn_with_kvcache(q, cache.key, cache.value, rotary_cos=cos, rotary_sin=sin)


@pytest.mark.parametrize("length", [64, 50])
def test_cache_without_pages(fa, device, dtype, length):
    """cache_seqlens an int, a tensor or None; rows chosen; heads before tokens; left padding."""
    whole = random(5, length, 2, 64, device=device, dtype=dtype)
    heads_first = random(5, 2, length, 64, device=device, dtype=dtype).transpose(1, 2)
    q = random(3, 2, 4, 64, device=device, dtype=dtype)
    index = ints([4, 0, 2], device)
    for caches in ((whole, whole.flip(0)), (heads_first, heads_first)):
        for lens in (37, ints([40, 3, 50], device), None):
            got = fa.flash_attn_with_kvcache(
                q, *caches, cache_seqlens=lens, cache_batch_idx=index, causal=True
            )
            for row in range(3):
                count = (
                    length if lens is None else lens if isinstance(lens, int) else int(lens[row])
                )
                key, value = (cache[index[row], :count] for cache in caches)
                near(got[row], oracle.attention(q[row], key, value, True)[0])
    pad = ints([5, 0, 30], device)
    lens = ints([40, 3, 50], device)
    got = fa.flash_attn_with_kvcache(
        q, whole[:3], whole[:3], cache_seqlens=lens, cache_leftpad=pad, causal=True
    )
    for row in range(3):
        rows = whole[row, int(pad[row]) : int(lens[row])]
        near(got[row], oracle.attention(q[row], rows, rows, True)[0])
    k = random(3, 2, 2, 64, device=device, dtype=dtype)
    for key, value in ((whole, whole.clone()), (heads_first, heads_first.clone())):
        got = fa.flash_attn_with_kvcache(
            q, key, value, k, k + 1, cache_seqlens=ints([7, -1, 20], device),
            cache_batch_idx=index, causal=True,
        )  # fmt: skip
        for row, first in ((0, 7), (2, 20)):
            rows = [cache[index[row], : first + 2] for cache in (key, value)]
            assert torch.equal(rows[0][first:], k[row]) and torch.equal(rows[1][first:], k[row] + 1)
            near(got[row], oracle.attention(q[row], *rows, True)[0])
        assert not got[1].any()
    table = ints([[0]] * 3, device)
    with pytest.raises(RuntimeError, match="cache_batch_idx: expected None with a block table"):
        fa.flash_attn_with_kvcache(
            q, whole, whole, cache_batch_idx=index, **{table_name(fa): table}
        )


@pytest.mark.parametrize("paged", [False, True], ids=["dense", "paged"])
def test_lengths_past_the_cache(fa, paged):
    """Refused on a CPU before a token is written; rows of nobody and a full cache are not."""
    key = torch.randn(2, 16, 2, 64)
    table = {table_name(fa): ints([[0], [1]], "cpu")} if paged else {}
    q, k = torch.randn(2, 1, 4, 64), torch.randn(2, 2, 2, 64)
    before = key.clone()
    for lens, new, row, got in (
        (20, 0, 0, 20), (ints([16, 17], "cpu"), 0, 1, 17), (20, 2, 0, 20), (16, 2, 0, 16),
        (ints([14, 15], "cpu"), 2, 1, 15), (ints([-1, 16], "cpu"), 2, 1, 16),
    ):  # fmt: skip
        message = (
            rf"^flash_attn_with_kvcache: cache_seqlens\[{row}\] = {got}: expected a length that "
            rf"fits a cache of 16 tokens with {new} new ones$"
        )
        tokens = (k, k) if new else ()
        with pytest.raises(RuntimeError, match=message):
            fa.flash_attn_with_kvcache(q, key, key, *tokens, cache_seqlens=lens, **table)
    assert torch.equal(key, before)
    value = key.clone()
    out = fa.flash_attn_with_kvcache(
        q, key, value, k, k, cache_seqlens=ints([14, -1], "cpu"), **table
    )
    near(out[0], oracle.attention(q[0], key[0], value[0])[0])
    assert torch.equal(key[0, 14:], k[0]) and not out[1].any()
    if paged:  # whatever the length of a row without pages is
        table[table_name(fa)][1] = -1
        lens = ints([3, 99], "cpu")
        out = fa.flash_attn_with_kvcache(q, key, value, k, k, cache_seqlens=lens, **table)
        assert out[0].any() and not out[1].any()


def test_more_query_tokens_than_keys(device, dtype):
    """Rows of the mask without a key are 0, with lse -inf (their sink)."""
    lens, queries = [3, 0, 20, 1], [5, 2, 4, 7]
    cache = Paged(device, dtype, lens, 16)
    q = random(sum(queries), 4, 64, device=device, dtype=dtype)
    starts, sinks = starts_of(queries, device), torch.linspace(-1, 2, 4, device=device)
    for options in ({}, {"window": (1, 0)}, {"sinks": sinks}):
        out, lse = FA3.flash_attn_with_kvcache(
            q, cache.key, cache.value, page_table=cache.table, cache_seqlens=cache.lens,
            cu_seqlens_q=starts, max_seqlen_q=7, causal=True, return_softmax_lse=True,
            window_size=options.get("window", (-1, -1)), sinks=options.get("sinks"),
        )  # fmt: skip
        want = [oracle.attention(part, *rows, True, **options)
                for part, rows in zip(q.split(queries), cache.rows, strict=True)]  # fmt: skip
        near(out, torch.cat([rows for rows, _ in want]))
        near_lse(lse, torch.cat([rows for _, rows in want], dim=1))
        assert not out[:2].any() and not out[5:7].any() and not out[11:17].any()
    out = FA2.flash_attn_varlen_func(
        q, cache.key, cache.value, starts, starts_of(lens, device), 7, 20, causal=True,
        block_table=cache.table,
    )  # fmt: skip
    near(out[:5], oracle.attention(q[:5], *cache.rows[0], True)[0])


def test_varlen_with_block_table(device, dtype):
    cache = Paged(device, dtype, [30, 7], 16)
    q = random(7, 4, 64, device=device, dtype=dtype)
    out = FA2.flash_attn_varlen_func(
        q, cache.key, cache.value, starts_of([5, 2], device), starts_of([30, 7], device), 5, 30,
        causal=True, block_table=cache.table,
    )  # fmt: skip
    for got, part, rows in zip(out.split([5, 2]), q.split([5, 2]), cache.rows, strict=True):
        near(got, oracle.attention(part, *rows, True)[0])


def test_defaults_in_force(fa, dtype):
    """torch.set_default_dtype and set_default_device: tensors are made with both named."""
    cache = Paged("cpu", dtype, [12, 3], 16)
    q = random(2, 3, 4, 64, device="cpu", dtype=dtype)
    arguments = {"cache_seqlens": cache.lens, "causal": True, table_name(fa): cache.table}
    want = fa.flash_attn_with_kvcache(
        q, cache.key, cache.value, q[:, :, :2], q[:, :, 2:], **arguments
    )
    dense = fa.flash_attn_func(q, q, q, causal=True)
    torch.set_default_dtype(torch.float16)
    torch.set_default_device("meta")
    try:
        got = fa.flash_attn_with_kvcache(
            q, cache.key, cache.value, q[:, :, :2], q[:, :, 2:], **arguments
        )
        assert torch.equal(got, want) and torch.equal(
            fa.flash_attn_func(q, q, q, causal=True), dense
        )
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


def test_compiled_over_a_cache_without_pages(device):
    """Caches of any length, without a graph break: how long their pages are follows the length."""

    def call(q, caches, lens, new):
        return FA2.flash_attn_with_kvcache(q, *caches, *new, cache_seqlens=lens, causal=True)

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch, length in ((2, 64), (3, 24)):
        q = random(batch, 1, 4, 64, device=device, dtype=torch.bfloat16)
        caches = random(2, batch, length, 2, 64, device=device, dtype=torch.bfloat16)
        new = random(2, batch, 1, 2, 64, device=device, dtype=torch.bfloat16)
        lens = ints([16, 7, 12][:batch], device)
        others = caches.clone()
        want = call(q, caches, lens, new)
        assert torch.equal(compiled(q, others, lens, new), want)
        assert torch.equal(others, caches) and want.any()


@pytest.mark.parametrize("page", [1, 256])
def test_replayed_graphs(fa, device, page):
    """Decodes as clients capture them, appended in place; other lengths, and rows of nobody."""
    if device != "cuda":
        pytest.skip("CUDA graphs")
    cache = Paged(device, torch.bfloat16, [30, 8, 100, 50], page)
    q = random(4, 1, 8, 64, device=device, dtype=torch.bfloat16)
    k, v = random(2, 4, 1, 2, 64, device=device, dtype=torch.bfloat16)
    before = cache.pool.clone()

    def call() -> Tensor:
        return fa.flash_attn_with_kvcache(
            q, cache.key, cache.value, k, v, causal=True, cache_seqlens=cache.lens,
            **{table_name(fa): cache.table},
        )  # fmt: skip

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for lens in ([30, 8, 100, 50], [12, -1, 70, 49], [3, 7, -1, -1]):
        cache.lens.copy_(ints(lens, device))
        cache.pool.copy_(before)
        graph.replay()
        for seq, length in enumerate(lens):
            if length < 0:
                assert not out[seq].any()
                continue
            keys, values = cache.gathered(seq, length + 1)
            assert torch.equal(keys[-1], k[seq, 0])
            near(out[seq], oracle.attention(q[seq], keys, values, True)[0])
