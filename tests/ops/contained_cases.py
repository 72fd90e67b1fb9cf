"""Index faults on the GPU, one op a process (test_contained.py runs this file).

Each case calls an op with good and bad rows: the good rows must come out right and nothing else may
change. Under VLLM_KERNELS_CHECK=1 the same call must be reported by vllm_kernels.check().
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch

import vllm_kernels as vk

CHECK = os.environ.get("VLLM_KERNELS_CHECK") == "1"
CUDA = torch.device("cuda")


def reported(*fragments: str) -> None:
    """In check mode the fault is named; without it there is none."""
    torch.cuda.synchronize()
    try:
        vk.check()
        message = ""
    except RuntimeError as error:
        message = str(error)
    if CHECK:
        assert all(f in message for f in fragments), f"reported {message!r}, expected {fragments}"
    else:
        assert message == "", message


def attention(version: int, lengths: list[int], tables: torch.Tensor, max_seq_len: int,
              dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:  # fmt: skip
    torch.manual_seed(1)
    query = torch.randn(len(lengths), 4, 64, device=CUDA, dtype=dtype)
    x = 16 // dtype.itemsize
    keys = torch.randn(40, 2, 64 // x, 16, x, device=CUDA, dtype=dtype)
    values = torch.randn(40, 2, 64, 16, device=CUDA, dtype=dtype)
    out = torch.full_like(query, float("nan"))
    one = torch.ones(1, device=CUDA)
    lens = torch.tensor(lengths, device=CUDA, dtype=torch.int32)
    arguments = (
        query,
        keys,
        values,
        2,
        0.125,
        tables,
        lens,
        16,
        max_seq_len,
        None,
        "auto",
        one,
        one,
    )
    if version == 1:
        vk.paged_attention_v1(out, *arguments)
    else:
        sums = torch.zeros(len(lengths), 4, 2, device=CUDA)
        partial = torch.zeros(len(lengths), 4, 2, 64, device=CUDA, dtype=dtype)
        vk.paged_attention_v2(out, sums, torch.zeros_like(sums), partial, *arguments)
    torch.cuda.synchronize()
    return out


def paged_attention(version: int) -> None:
    tables = torch.randperm(40, device=CUDA)[:32].view(4, 8).int()
    for dtype in (torch.bfloat16, torch.float32):
        want = attention(version, [20, 128, 33, 50], tables, 128, dtype)
        got = attention(version, [20, 5000, 33, 50], tables, 128, dtype)  # past table and bound
        assert torch.equal(got, want)
        reported("seq_lens[1] = 5000")
        got = attention(version, [20, -3, 33, 50], tables, 128, dtype)  # negative: as 0
        assert torch.equal(got[[0, 2, 3]], want[[0, 2, 3]]) and not got[1].any()
        reported("seq_lens[1] = -3")
        # A bad block inside the used part is skipped, wherever it points: the rest of the sequence
        # is what is left.
        for bad in (-1, 40, 2**31 - 1, -(2**31)):
            broken = tables.clone()
            broken[2, 1] = bad
            shorter = tables.clone()
            shorter[2, 1] = tables[2, 2]
            left = attention(version, [20, 128, 17, 50], shorter, 128, dtype)
            got = attention(version, [20, 128, 33, 50], broken, 128, dtype)
            assert torch.equal(got[[0, 1, 3]], want[[0, 1, 3]])
            torch.testing.assert_close(got[2], left[2], rtol=2e-2, atol=2e-2)
            reported("block_tables[2, 1] =")
        # Garbage behind the used part is not looked at.
        garbage = tables.clone()
        garbage[2, 3:] = 2**31 - 1
        assert torch.equal(attention(version, [20, 128, 33, 50], garbage, 128, dtype), want)
        vk.check()


def general_attention() -> None:
    """paged_attention: 8 to 64 query rows a KV head, pages of 16 and 64 tokens, 16 and 8 bits."""
    caches = (torch.bfloat16, torch.float8_e4m3fn)
    for count, page, stored, layout in product((1, 2, 4, 8), (16, 64), caches, ("vllm", "NHD")):
        several_query_tokens(count, page, stored, layout)


def several_query_tokens(count: int, page: int, stored: torch.dtype, layout: str) -> None:
    """4 sequences of `count` query tokens. fixed_split_size: the others change no bit of one."""
    torch.manual_seed(1)
    num_blocks, x = 4 * 384 // page, 16 // stored.itemsize
    rows = torch.randn(2, num_blocks, page, 2, 128, device=CUDA)

    def cache(rows: torch.Tensor, is_key: bool) -> torch.Tensor:
        rows = rows.to(stored)
        if layout == "NHD":
            return rows
        if is_key:
            return rows.unflatten(-1, (-1, x)).permute(0, 2, 3, 1, 4).contiguous()
        return rows.permute(0, 2, 3, 1).contiguous()

    query = torch.randn(4 * count, 16, 128, device=CUDA, dtype=torch.bfloat16)
    keys, values, ones = cache(rows[0], True), cache(rows[1], False), cache(rows[1] * 0 + 1, False)
    tables = torch.randperm(num_blocks, device=CUDA).view(4, -1).int()
    lengths = [20, 300, 130, 50]
    starts = [seq * count for seq in range(5)]

    def run(lengths=lengths, tables=tables, starts=starts, values=values) -> torch.Tensor:
        ints = [torch.tensor(list_, device=CUDA, dtype=torch.int32) for list_ in (lengths, starts)]
        out = torch.full_like(query, float("nan"))
        vk.paged_attention(
            query, keys, values, tables, ints[0], query_start_loc=ints[1], max_query_len=count,
            layout=layout, fixed_split_size=256, out=out,
        )  # fmt: skip
        torch.cuda.synchronize()
        return out.view(4, count, 16, 128)

    want = run()
    assert want.isfinite().all()
    got = run([20, 5000, 130, 50])  # past the table
    reported("seq_lens[1] = 5000")
    assert torch.equal(got, run([20, 384, 130, 50]))
    got = run([20, -3, 130, 50])  # negative: as 0
    assert torch.equal(got[[0, 2, 3]], want[[0, 2, 3]]) and not got[1].any()
    reported("seq_lens[1] = -3")
    for bad in (-1, num_blocks, 2**31 - 1, -(2**31)):
        broken = tables.clone()
        broken[2, 1] = bad
        assert torch.equal(run(tables=broken)[[0, 1, 3]], want[[0, 1, 3]])
        reported("block_tables[2, 1] =")
        # Its tokens have no weight: those of the others still add up to 1.
        torch.testing.assert_close(run(tables=broken, values=ones), torch.ones_like(want))
        reported("block_tables[2, 1] =")
    # Sequence 3 begins behind all query tokens: it has none, and what was its output stays.
    got = run(starts=[*starts[:3], 10**6, starts[4]])
    assert torch.equal(got[:3], want[:3]) and got[3].isnan().all()
    reported("query_start_loc[3] = 1000000")
    # Sequence 0 ends before it begins, and 1 begins at the first query token.
    got = run(starts=[0, -5, *starts[2:]])
    assert torch.equal(got[2:], want[2:])
    reported("query_start_loc[1] = -5")


def varlen_attention() -> None:
    """Starts out of range of contiguous keys and queries: the other sequences come out right."""
    torch.manual_seed(1)
    for dtype in (torch.float32, torch.bfloat16):
        query = torch.randn(300, 16, 128, device=CUDA, dtype=dtype)
        key, value = torch.randn(2, 500, 2, 128, device=CUDA, dtype=dtype)

        def run(queries=(0, 100, 200, 300), keys=(0, 150, 300, 500), query=query, key=key,
                value=value) -> torch.Tensor:  # fmt: skip
            starts = [torch.tensor(x, device=CUDA, dtype=torch.int32) for x in (queries, keys)]
            out = torch.full_like(query, float("nan"))
            vk.varlen_attention(query, key, value, *starts, max_query_len=100, out=out)
            torch.cuda.synchronize()
            return out.view(3, 100, 16, 128)

        want = run()
        vk.check()
        assert want.isfinite().all()
        for bad in (501, 2**31 - 1):  # as the end of key
            assert torch.equal(run(keys=(0, 150, 300, bad)), want)
            reported(f"key_start_loc[3] = {bad}")
        for bad in (-1, -(2**31)):  # as its start
            assert torch.equal(run(keys=(bad, 150, 300, 500)), want)
            reported(f"key_start_loc[0] = {bad}")
        got = run(keys=(0, 310, 300, 500))  # sequence 1 has no keys
        assert torch.equal(got[2], want[2]) and not got[1].any()
        reported("key_start_loc[2] = 300")
        got = run(queries=(0, 100, 10**6, 300))
        assert torch.equal(got[:2], want[:2]) and got[2].isnan().all()
        reported("query_start_loc[2] = 1000000")


def fused_decode_attention(layout: str, stored: torch.dtype) -> None:
    """Rows with bad positions, slots, lengths and blocks; the others come out as without them."""
    torch.manual_seed(1)
    shapes = {
        "vllm": [(40, 2, 8, 16, 8), (40, 2, 64, 16)],
        "NHD": [(40, 16, 2, 64)] * 2,
        "HND": [(40, 2, 16, 64)] * 2,
    }[layout]
    if stored.itemsize == 1 and layout == "vllm":
        shapes = [(40, 2, 4, 16, 16), (40, 2, 64, 16)]
    caches = [torch.randn(shape, device=CUDA).to(stored) for shape in shapes]
    packed = torch.randn(4, 12 * 64, device=CUDA, dtype=torch.bfloat16)
    bias = torch.randn(12 * 64, device=CUDA, dtype=torch.bfloat16)
    cos_sin = torch.randn(200, 64, device=CUDA, dtype=torch.bfloat16)
    tables = torch.randperm(40, device=CUDA)[:32].view(4, 8).int()
    lengths, positions = [20, 128, 33, 50], [19, 127, 32, 49]
    slots = [tables[seq, at // 16].item() * 16 + at % 16 for seq, at in enumerate(positions)]

    def run(
        slots=slots, positions=positions, lengths=lengths, tables=tables
    ) -> tuple[torch.Tensor, ...]:
        keys, values = (cache.clone() for cache in caches)
        ints = [torch.tensor(list_, device=CUDA) for list_ in (positions, slots, lengths)]
        # fixed_split_size: the other rows change no bit of one.
        out = vk.fused_decode_attention(
            packed.clone(), ints[0], cos_sin, keys, values, ints[1], tables, ints[2].int(),
            bias=bias, layout=layout, fixed_split_size=256,
        )  # fmt: skip
        torch.cuda.synchronize()
        return out, keys.view(torch.uint8), values.view(torch.uint8)

    def bad(*fragments: str, **changes: object) -> tuple[torch.Tensor, ...] | None:
        """What the op gives, or None where check mode spoke up before its first launch."""
        try:
            got = run(**changes)
        except RuntimeError as error:
            assert CHECK and all(f in str(error) for f in fragments), error
            return None
        reported(*fragments)
        return got

    def same(got: tuple[torch.Tensor, ...] | None, want: tuple[torch.Tensor, ...], rows) -> None:
        if got is not None:
            assert torch.equal(got[0][rows], want[0][rows])
            assert all(torch.equal(a, b) for a, b in zip(got[1:], want[1:]))

    want = run()
    vk.check()
    assert want[0].isfinite().all()
    left_out = run(slots=[slots[0], -1, *slots[2:]])
    for slot in (40 * 16, -2, 2**40, -(2**40)):  # the token is not stored
        got = bad(f"slot_mapping[1] = {slot}", slots=[slots[0], slot, *slots[2:]])
        same(got, left_out, slice(None))
    for position in (200, -1, 2**40):
        got = bad(f"positions[1] = {position}", positions=[19, position, *positions[2:]])
        if got is not None:
            assert torch.equal(got[0][[0, 2, 3]], want[0][[0, 2, 3]])
            assert torch.equal(got[1], left_out[1])  # the key is not stored; its value may be
            assert any(torch.equal(got[2], values) for values in (left_out[2], want[2]))
    got = bad("seq_lens[1] = 5000", lengths=[20, 5000, 33, 50])  # past the table: as all of it
    same(got, want, slice(None))
    got = bad("seq_lens[1] = -3", lengths=[20, -3, 33, 50])  # negative: as 0
    same(got, want, [0, 2, 3])
    assert got is None or not got[0][1].any()
    for block in (-1, 40, 2**31 - 1, -(2**31)):
        broken = tables.clone()
        broken[2, 1] = block
        same(bad(f"block_tables[2, 1] = {block}", tables=broken), want, [0, 1, 3])


def rope_and_cache(layout: str, tokens: int) -> None:
    """Token 1 has a bad slot or position; the others come out as without it."""
    torch.manual_seed(1)
    vllm_shapes = [(40, 2, 8, 16, 8), (40, 2, 64, 16)]
    shapes = {"vllm": vllm_shapes, "NHD": [(40, 16, 2, 64)] * 2}[layout]
    packed = torch.randn(tokens, 8, 64, device=CUDA, dtype=torch.bfloat16)
    cos_sin = torch.randn(200, 64, device=CUDA, dtype=torch.bfloat16)
    positions = torch.randint(0, 200, (tokens,), device=CUDA)
    slots = torch.randperm(640, device=CUDA)[:tokens]

    def run(slot: int, position: int) -> list[torch.Tensor]:
        caches = [torch.full(shape, 7.0, device=CUDA, dtype=torch.bfloat16) for shape in shapes]
        slots[1], positions[1] = slot, position
        query, key, value = packed.clone().split([4, 2, 2], 1)
        vk.rope_and_cache(positions, query, key, value, cos_sin, True, *caches, slots, layout)
        torch.cuda.synchronize()
        return [query, *caches]

    def bad(fragment: str, slot: int, position: int) -> list[torch.Tensor] | None:
        """What the op gives, or None where check mode spoke up before its launch."""
        try:
            got = run(slot, position)
        except RuntimeError as error:
            assert CHECK and fragment in str(error), error
            return None
        reported("rope_and_cache: " + fragment)
        return got

    left_out = run(-1, 5)
    vk.check()
    for slot in (640, -2, 2**40, 2**32 + slots[0].item()):
        got = bad(f"slot_mapping[1] = {slot}", slot, 5)
        assert got is None or all(torch.equal(a, b) for a, b in zip(got, left_out))
    for position in (200, -1, 2**40):
        got = bad(f"positions[1] = {position}", -1, position)
        if got is not None:
            assert torch.equal(got[0][1], packed[1, :4])  # stays as it is
            got[0][1] = left_out[0][1]
            assert all(torch.equal(a, b) for a, b in zip(got, left_out))


def fused_qk_norm_rope() -> None:
    packed = torch.randn(6, 8 * 64, device=CUDA)
    weight, cos_sin = torch.randn(64, device=CUDA), torch.randn(32, 64, device=CUDA)
    positions = torch.tensor([0, 5, -1, 32, 31, 2**40], device=CUDA)

    def run(rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        arguments = (4, 2, 2, 64, 1e-6, weight, weight, cos_sin, True)
        vk.fused_qk_norm_rope(rows, *arguments, positions)
        torch.cuda.synchronize()
        return rows

    good = [0, 1, 4]
    want = packed.clone()
    want[good] = run(packed[good], positions[good])
    assert torch.equal(run(packed.clone(), positions), want)
    reported("fused_qk_norm_rope: position_ids[2] = -1")


def rotary_embedding() -> None:
    query = torch.randn(6, 4, 64, device=CUDA)
    key = torch.randn(6, 2, 64, device=CUDA)
    cache = torch.randn(32, 64, device=CUDA)
    positions = torch.tensor([0, 5, -1, 32, 31, 2**40], device=CUDA)
    good = [0, 1, 4]
    want_query, want_key = query.clone(), key.clone()
    rows_query, rows_key = query[good].clone(), key[good].clone()
    vk.rotary_embedding(positions[good].contiguous(), rows_query, rows_key, 64, cache, True)
    want_query[good], want_key[good] = rows_query, rows_key
    vk.rotary_embedding(positions, query, key, 64, cache, True)
    torch.cuda.synchronize()
    assert torch.equal(query, want_query) and torch.equal(key, want_key)
    reported("positions[2] = -1")


def batched_rotary_embedding() -> None:
    """Bad offsets; a sum of good summands is contained, and no check reports it."""
    tables = torch.randn(32, 64, device=CUDA)
    positions = torch.tensor([0, 5, 7, 20], device=CUDA)
    for offsets, report in (
        ([8, -1, 2**40, 0], ("cos_sin_cache_offsets[1] = -1",)),
        ([8, 0, 0, 12], ()),
    ):
        query = torch.randn(4, 64, device=CUDA)
        good = [row for row, offset in enumerate(offsets) if 0 <= positions[row] + offset < 32
                and offset >= 0]  # fmt: skip
        given = torch.tensor(offsets, device=CUDA)
        want, rows = query.clone(), query[good].clone()
        vk.batched_rotary_embedding(
            positions[good].contiguous(), rows, None, 64, tables, True, 64, given[good].contiguous()
        )
        want[good] = rows
        vk.batched_rotary_embedding(positions, query, None, 64, tables, True, 64, given)
        torch.cuda.synchronize()
        assert torch.equal(query, want)
        reported(*report) if report else vk.check()


def reshape_and_cache(flash: bool) -> None:
    key, value = torch.randn(2, 6, 2, 64, device=CUDA, dtype=torch.bfloat16)
    one = torch.ones(1, device=CUDA)
    slots = torch.tensor([3, -1, 8 * 16, -9, 127, 2**40], device=CUDA)
    good = [0, 4]
    op = vk.reshape_and_cache_flash if flash else vk.reshape_and_cache
    shapes = [(8, 16, 2, 64)] * 2 if flash else [(8, 2, 8, 16, 8), (8, 2, 64, 16)]
    caches = [torch.full(shape, 7.0, device=CUDA, dtype=torch.bfloat16) for shape in shapes]
    want = [cache.clone() for cache in caches]
    op(key[good], value[good], *want, slots[good].contiguous(), "auto", one, one)
    op(key, value, *caches, slots, "auto", one, one)
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(caches, want))
    reported("slot_mapping[2] = 128")


def copy_blocks() -> None:
    caches = [torch.randn(8, 2, 8, 16, 8, device=CUDA), torch.randn(8, 2, 64, 16, device=CUDA)]
    want = [cache.clone() for cache in caches]
    for cache in want:
        cache[5] = cache[1]
    pairs = torch.tensor([[1, 5], [8, 2], [3, -1], [2**40, 4]], device=CUDA)
    try:  # one launch a group of caches, so check mode may report before the call is over
        vk.copy_blocks(caches[:1], caches[1:], pairs)
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(caches, want))
        reported("block_mapping[1, 0] = 8")
    except RuntimeError as error:
        assert CHECK and "block_mapping[1, 0] = 8" in str(error)


def contained(call: Callable[[], Any], *fragments: str) -> Any:
    """What a call with a bad value returns. None: in check mode a scan ended before the launch."""
    try:
        result = call()
    except RuntimeError as error:
        assert CHECK and all(f in str(error) for f in fragments)
        return None
    reported(*fragments)
    return result


def page_bounds_update() -> None:
    keys = torch.randn(8, 16, 2, 64, device=CUDA)
    want, bounds = torch.zeros(2, 8, 2, 2, 64, device=CUDA)
    vk.page_bounds_update(want, keys, torch.tensor([20, -1, 40], device=CUDA), layout="NHD")
    for bad in (128, -5, 2**40):
        slots = torch.tensor([20, bad, 40], device=CUDA)
        vk.page_bounds_update(bounds, keys, slots, layout="NHD")
        reported("page_bounds_update: slot_mapping[1] = ", "expected -1 (skipped) or a slot in [0")
        assert torch.equal(bounds, want)


def select_pages() -> None:
    bounds = torch.randn(40, 2, 2, 64, device=CUDA).sort(2).values
    query = torch.randn(3, 4, 64, device=CUDA)
    tables = torch.randperm(40, device=CUDA)[:39].view(3, 13).int()
    lens = torch.tensor([200, 208, 150], dtype=torch.int32, device=CUDA)
    call = lambda: vk.select_pages(query, bounds, tables, lens, 96, block_size=16)  # noqa: E731
    want = call()
    reported()
    for tensor, index, bad in ((tables, (1, 5), 40), (tables, (1, 5), -1), (lens, 1, 10**6),
                               (lens, 1, -1)):  # fmt: skip
        good = tensor[index].clone()
        tensor[index] = bad
        got = contained(call, "select_pages: ", f" = {bad}: expected ")
        tensor[index] = good
        assert got is None or all(torch.equal(x[::2], y[::2]) for x, y in zip(got, want))
    assert all(torch.equal(x, y) for x, y in zip(call(), want))


def sparq_attention() -> None:
    keys, values = torch.randn(2, 40, 16, 2, 64, device=CUDA)
    query = torch.randn(3, 4, 64, device=CUDA)
    tables = torch.randperm(40, device=CUDA)[:39].view(3, 13).int()
    lens = torch.tensor([200, 208, 150], dtype=torch.int32, device=CUDA)
    mean = torch.randn(3, 2, 64, device=CUDA)
    call = lambda: vk.sparq_attention(  # noqa: E731
        query, keys, values, tables, lens, k=96, mean_value=mean, layout="NHD"
    )
    want = call()
    reported()
    for tensor, index, bad in ((tables, (1, 5), 40), (tables, (1, 5), -1), (lens, 1, 10**6),
                               (lens, 1, -1)):  # fmt: skip
        good = tensor[index].clone()
        tensor[index] = bad
        got = contained(call, "sparq_attention: ", f" = {bad}: expected ")
        tensor[index] = good
        assert got is None or torch.equal(got[::2], want[::2])
    assert torch.equal(call(), want)


def value_mean_update() -> None:
    value = torch.randn(3, 2, 8, device=CUDA)
    for bad in (4, -5, 2**40):
        mean, counts = torch.zeros(4, 2, 8, device=CUDA), torch.zeros(4, device=CUDA).int()
        vk.value_mean_update(mean, counts, value, torch.tensor([1, bad, -1], device=CUDA))
        reported("value_mean_update: rows[1] = ", "expected -1 (skipped) or a row in [0, 4)")
        assert torch.equal(mean[1], value[0]) and counts.tolist() == [0, 1, 0, 0]


def copy_slots() -> None:
    for index, bad in product((0, 1), (128, -5, 2**40)):
        cache = torch.randn(8, 16, 2, 64, device=CUDA)
        want = cache.clone()
        want[2, 3] = cache[0, 1]
        moves = torch.tensor([[1, 9], [35, 36]], device=CUDA)
        moves[index, 1] = bad
        call = partial(vk.copy_slots, [cache], moves[0], moves[1], "NHD")
        text = f"[1] = {bad}: expected -1 (skipped) or a slot in [0, 128)"
        before = cache.clone()
        contained(call, "copy_slots: ", text)
        assert torch.equal(cache, want) or (CHECK and torch.equal(cache, before))


def per_token_quant(bits: int) -> None:
    key, value = torch.randn(2, 6, 2, 64, device=CUDA, dtype=torch.bfloat16)
    slots = torch.tensor([3, -1, 8 * 16, -9, 127, 2**40], device=CUDA)
    good = [0, 4]
    stored = torch.int8 if bits == 8 else torch.uint8
    out = [torch.full((8, 16, 2, 8 * bits), 7, device=CUDA, dtype=stored) for _ in range(2)]
    out += [torch.full((8, 2, 16), 7.0, device=CUDA) for _ in range(2 if bits == 8 else 4)]
    want = [t.clone() for t in out]
    write = vk.reshape_and_cache_per_token_quant
    write(key[good], value[good], *want[:4], slots[good], "NHD", *want[4:])
    write(key, value, *out[:4], slots, "NHD", *out[4:])
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(out, want))
    reported("reshape_and_cache_per_token_quant: slot_mapping[2] = 128")


def concat_and_cache_mla(name: str) -> None:
    kv_c, k_pe = torch.randn(6, 512, device=CUDA), torch.randn(6, 64, device=CUDA)
    slots = torch.tensor([3, -1, 8 * 16, -9, 127, 2**40], device=CUDA)
    good, one = [0, 4], torch.ones(1, device=CUDA)
    cache = torch.full((8, 16, 656 if name == "fp8_ds_mla" else 576), 7, device=CUDA)
    cache = cache.float() if name == "auto" else cache.to(torch.uint8)
    want = cache.clone()
    vk.concat_and_cache_mla(kv_c[good], k_pe[good], want, slots[good], name, one)
    vk.concat_and_cache_mla(kv_c, k_pe, cache, slots, name, one)
    torch.cuda.synchronize()
    assert torch.equal(cache, want)
    reported("slot_mapping[2] = 128")


def gather(op: str) -> None:
    """Rows of bad blocks are zeros, and the others as before."""
    source = torch.randn(12, 16, 2, 64, device=CUDA)
    table = torch.randperm(12, device=CUDA).view(3, 4).int()
    one = torch.ones(1, device=CUDA)
    seqs = torch.arange(3, device=CUDA).repeat_interleave(30).int()

    def run(table=table, ends=(0, 30, 60, 90), starts=(0, 2, 16)) -> torch.Tensor:
        cu, first = (torch.tensor(x, dtype=torch.int32, device=CUDA) for x in (ends, starts))
        rows = torch.full((95, 2, 64), -1.0, device=CUDA)
        if op in ("cp_gather_cache", "gather_cache"):
            getattr(vk, op)(source, rows, table, cu, 3, first)
        elif op == "gather_and_maybe_dequant_cache":
            vk.gather_and_maybe_dequant_cache(source, rows, table, cu, seqs, 90, "auto", one, first)
        else:
            vk.gather_paged_kv(
                rows.clone(), rows, source, source, table, cu, seq_starts=first, layout="NHD"
            )
        torch.cuda.synchronize()
        return rows

    want = run()
    vk.check()
    for bad in (-1, 12, 2**31 - 1, -(2**31)):
        broken = table.clone()
        broken[1, 1] = bad
        got = run(broken)
        zeros = slice(30 + 14, 30 + 30)
        expected = want.clone()
        expected[zeros] = 0
        assert torch.equal(got, expected)
        reported(f"{op}: block_table", "[1, 1] =")
    garbage = table.clone()
    garbage[0, 2:] = 2**31 - 1
    assert torch.equal(run(garbage), want)
    vk.check()
    got = run(starts=(0, 2**31 - 1, 16))  # behind the table
    assert torch.equal(got[:30], want[:30]) and not got[30:60].any()
    assert torch.equal(got[60:], want[60:])
    reported("seq_starts[1] = 2147483647")
    assert torch.equal(run(ends=(0, 30, 60, 10**9))[:60], want[:60])
    reported("cu_seq_lens[3] = 1000000000")
    assert torch.equal(run(ends=(0, 30, -5, 90))[:30], want[:30])
    reported("cu_seq_lens[2] = -5")


def upconvert() -> None:
    source = torch.randint(0, 100, (12, 16, 656), device=CUDA, dtype=torch.uint8)
    source[..., 512:528] = torch.ones(4, device=CUDA).view(torch.uint8)
    table = torch.randperm(12, device=CUDA).view(3, 4).int()

    def run(table=table, lengths=(30, 20, 9), starts=(0, 40, 70)) -> torch.Tensor:
        ints = [torch.tensor(x, dtype=torch.int32, device=CUDA) for x in (lengths, starts)]
        rows = torch.full((80, 576), -1.0, device=CUDA, dtype=torch.bfloat16)
        vk.cp_gather_and_upconvert_fp8_kv_cache(source, rows, table, *ints, 3)
        torch.cuda.synchronize()
        return rows

    want = run()
    vk.check()
    for bad in (-1, 12, 2**31 - 1):
        broken = table.clone()
        broken[1, 0] = bad
        expected = want.clone()
        expected[40:56] = 0
        assert torch.equal(run(broken), expected)
        reported("block_table[1, 0] =")
    got = run(lengths=(30, 10**9, 9), starts=(0, 75, 45))  # left out past the end
    assert torch.equal(got[:30], want[:30]) and torch.equal(got[45:54], want[70:79])
    reported("seq_lens[1] = 1000000000")
    got = run(starts=(0, -7, 70))
    assert torch.equal(got[13:30], want[13:30]) and torch.equal(got[70:], want[70:])
    reported("workspace_starts[1] = -7")


def values_of_check_mode() -> None:
    """Lengths below the query tokens, scales and repeated destinations: only check mode looks."""
    cache = torch.randn(8, 16, 2, 64, device=CUDA).to(torch.float8_e4m3fn)
    query = torch.randn(20, 4, 64, device=CUDA, dtype=torch.bfloat16)
    tables = torch.arange(8, device=CUDA).view(1, 8).int()
    lens, starts = (torch.tensor(x, device=CUDA, dtype=torch.int32) for x in ([3], [0, 20]))
    call = (query, cache, cache, tables)
    options = {"query_start_loc": starts, "layout": "NHD"}
    out = vk.paged_attention(*call, lens, **options)
    assert not out[:17].any()
    reported("paged_attention: seq_lens[0] = 3: expected at least its 20 query tokens")
    vk.paged_attention(*call, lens, causal=False, **options)
    torch.cuda.synchronize()
    vk.check()
    for value, text in ((float("nan"), "nan"), (float("inf"), "inf"), (0.0, "0"), (-1.0, "-1")):
        good, bad = torch.ones(2, device=CUDA), torch.tensor([1.0, value], device=CUDA)
        vk.paged_attention(*call, lens + 20, k_scale=good, v_scale=bad, **options)
        reported(f"paged_attention: v_scale[1] = {text}: expected a finite number > 0")
        slots, key = torch.arange(20, device=CUDA), query[:, :2].contiguous()
        pages = torch.empty_like(cache), torch.empty_like(cache)
        vk.reshape_and_cache_flash(key, key, *pages, slots, "fp8", bad, good)
        reported(f"reshape_and_cache_flash: k_scale[1] = {text}: expected a finite number > 0")
    memory = torch.randn(2, 8, 64, device=CUDA)
    pairs = torch.tensor([[0, 2], [1, 2]], device=CUDA)
    try:  # as in copy_blocks()
        vk.copy_blocks([memory[0]], [memory[1]], pairs)
        reported("copy_blocks: block_mapping[1, 1] = 2: expected a block that no earlier element")
    except RuntimeError as error:
        assert CHECK and "block_mapping[1, 1] = 2" in str(error)


CASES = {
    "values of check mode": values_of_check_mode,
    "paged_attention_v1": lambda: paged_attention(1),
    "paged_attention_v2": lambda: paged_attention(2),
    "paged_attention": general_attention,
    "varlen_attention": varlen_attention,
    "fused_decode_attention": lambda: [
        fused_decode_attention(layout, stored)
        for layout in ("vllm", "NHD", "HND")
        for stored in (torch.bfloat16, torch.float8_e4m3fn)
    ],
    "rotary_embedding": rotary_embedding,
    "batched_rotary_embedding": batched_rotary_embedding,
    "rope_and_cache": lambda: [
        rope_and_cache(layout, tokens) for layout in ("vllm", "NHD") for tokens in (5, 100)
    ],
    "fused_qk_norm_rope": fused_qk_norm_rope,
    "reshape_and_cache": lambda: reshape_and_cache(False),
    "reshape_and_cache_flash": lambda: reshape_and_cache(True),
    "copy_blocks": copy_blocks,
    "page_bounds_update": page_bounds_update,
    "select_pages": select_pages,
    "sparq_attention": sparq_attention,
    "value_mean_update": value_mean_update,
    "copy_slots": copy_slots,
    "reshape_and_cache_per_token_quant": partial(per_token_quant, 8),
    "reshape_and_cache_per_token_quant, int4": partial(per_token_quant, 4),
    "concat_and_cache_mla": lambda: concat_and_cache_mla("auto"),
    "concat_and_cache_mla fp8_ds_mla": lambda: concat_and_cache_mla("fp8_ds_mla"),
    "cp_gather_cache": lambda: gather("cp_gather_cache"),
    "gather_cache": lambda: gather("gather_cache"),
    "gather_and_maybe_dequant_cache": lambda: gather("gather_and_maybe_dequant_cache"),
    "gather_paged_kv": lambda: gather("gather_paged_kv"),
    "cp_gather_and_upconvert_fp8_kv_cache": upconvert,
}

if __name__ == "__main__":
    CASES[sys.argv[1]]()
    torch.cuda.synchronize()
    print("contained")
