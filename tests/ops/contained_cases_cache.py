"""Index faults of the ops that write, read and move a cache on the GPU."""

from __future__ import annotations

from functools import partial
from itertools import product

import torch
from contained_cases_base import CHECK, CUDA, contained, reported

import vllm_kernels as vk


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
