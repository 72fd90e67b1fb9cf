"""Index faults of the ops that rotate queries and keys on the GPU."""

from __future__ import annotations

import torch
from contained_cases_base import CHECK, CUDA, reported

import vllm_kernels as vk


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
