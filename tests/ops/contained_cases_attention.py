"""Index faults of attention on the GPU."""

from __future__ import annotations

from itertools import product

import torch
from contained_cases_base import CHECK, CUDA, reported

import vllm_kernels as vk


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
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        query = torch.randn(300, 32, 128, device=CUDA).to(dtype)
        key, value = torch.randn(2, 500, 4, 128, device=CUDA).to(dtype)

        def run(queries=(0, 100, 200, 300), keys=(0, 150, 300, 500), query=query, key=key,
                value=value) -> torch.Tensor:  # fmt: skip
            starts = [torch.tensor(x, device=CUDA, dtype=torch.int32) for x in (queries, keys)]
            result = torch.bfloat16 if query.dtype == torch.float8_e4m3fn else query.dtype
            out = torch.full_like(query, float("nan"), dtype=result)
            vk.varlen_attention(query, key, value, *starts, max_query_len=100, out=out)
            torch.cuda.synchronize()
            return out.view(3, 100, 32, 128)

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
