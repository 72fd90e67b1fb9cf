"""Bounds of pages, selections, moves of slots and sparse attention: one call per kernel."""

from __future__ import annotations

import torch

import vllm_kernels

from .common import CUDA, DTYPES, in_vllm_layout


def pages() -> None:
    """page_bounds_update, select_pages, copy_slots: accesses of 16 bytes and of elements."""
    eight_bits = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
    one = torch.ones(1, device=CUDA)
    few, many = (torch.randint(-1, 640, (count,), device=CUDA) for count in (9, 1100))
    moves = torch.randperm(640, device=CUDA)
    for dtype in DTYPES:
        for stored in (dtype, *eight_bits):
            for head_size in (64, 7):
                rows = torch.randn(40, 16, 2, head_size, device=CUDA).to(stored)
                by_layout = {"NHD": [rows], "HND": [rows.transpose(1, 2).contiguous()]}
                if head_size == 64:
                    by_layout["vllm"] = list(in_vllm_layout(rows))
                bounds = torch.zeros(40, 2, 2, head_size, device=CUDA, dtype=dtype)
                for layout, caches in by_layout.items():
                    for slots in (few, many):
                        vllm_kernels.page_bounds_update(
                            bounds, caches[0], slots, layout=layout,
                            k_scale=None if stored == dtype else one,
                        )  # fmt: skip
                    for count in (1, 300):
                        src, dst = moves[:count], moves[count : 2 * count]
                        vllm_kernels.copy_slots(
                            [*caches, one.new_zeros(40, 2, 16)], src, dst, layout
                        )
        selections(dtype)
        for stored in (dtype, *eight_bits):
            sparq(dtype, stored)


def sparq(dtype: torch.dtype, stored: torch.dtype) -> None:
    """sparq_attention, value_mean_update: rows within the budget and longer ones."""
    lens = torch.tensor([5000, 0, 17, 900, 16 * 400], dtype=torch.int32, device=CUDA)
    tables = torch.randint(0, 500, (5, 400), dtype=torch.int32, device=CUDA)
    query = torch.randn(5, 8, 64, device=CUDA, dtype=dtype)
    mean, counts = torch.zeros(5, 2, 64, device=CUDA), torch.zeros(5, device=CUDA).int()
    rows = torch.randint(-1, 5, (300,), device=CUDA)
    value = torch.randn(300, 2, 64, device=CUDA, dtype=dtype)
    vllm_kernels.value_mean_update(mean, counts, value, rows)
    for shift in (0, 1):
        memory = torch.randn(500 * 2048 + shift, device=CUDA).to(stored)[shift:]
        chunks = memory.view(500, 2, -1, 16, 16 // stored.itemsize)
        in_pages = {
            "vllm": (chunks, memory.view(500, 2, 64, 16)), "NHD": [memory.view(500, 16, 2, 64)] * 2,
            "HND": [memory.view(500, 2, 16, 64)] * 2,
        }  # fmt: skip
        for layout, (keys, values) in in_pages.items():
            for select in ("pages", "tokens")[: 1 if layout == "vllm" else 2]:
                for mean_value in (None, mean):
                    vllm_kernels.sparq_attention(
                        query, keys, values, tables, lens, k=512, select=select, layout=layout,
                        mean_value=mean_value,
                    )  # fmt: skip


def selections(dtype: torch.dtype) -> None:
    lens = torch.tensor([5000, 0, 17, 900, 16 * 400], dtype=torch.int32, device=CUDA)
    tables = torch.randint(0, 500, (5, 400), dtype=torch.int32, device=CUDA)
    for head_size, shift in ((64, 0), (7, 0), (64, 1)):
        memory = torch.randn(500, 4 * head_size + shift, device=CUDA, dtype=dtype)
        bounds = memory[:, shift:].unflatten(1, (2, 2, head_size))
        query = torch.randn(5, 8, head_size, device=CUDA, dtype=dtype)
        for per_kv_head in (False, True):
            for budget in (80, 2048):
                vllm_kernels.select_pages(
                    query, bounds, tables, lens, budget, block_size=16, per_kv_head=per_kv_head
                )
