"""Index faults on the GPU, one op a process (test_contained.py runs this file).

Each case calls an op with good and bad rows: the good rows must come out right and nothing else may
change. Under VLLM_KERNELS_CHECK=1 the same call must be reported by vllm_kernels.check().
The calls are in contained_cases_<family>.py.
"""

from __future__ import annotations

import sys
from functools import partial

import torch
from contained_cases_attention import (
    fused_decode_attention,
    general_attention,
    paged_attention,
    varlen_attention,
)
from contained_cases_base import CHECK, CUDA, reported
from contained_cases_cache import (
    concat_and_cache_mla,
    copy_blocks,
    copy_slots,
    gather,
    per_token_quant,
    reshape_and_cache,
    upconvert,
)
from contained_cases_pages import (
    page_bounds_update,
    select_pages,
    sparq_attention,
    value_mean_update,
)
from contained_cases_rope import (
    batched_rotary_embedding,
    fused_qk_norm_rope,
    rope_and_cache,
    rotary_embedding,
)
from contained_cases_sampling import sample

import vllm_kernels as vk


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
    for total, expected in (
        (9, "at least its 20 query tokens"),
        (21, "a length that has the seq_lens tokens of this shard, in [23, 2147483648)"),
    ):
        totals = torch.tensor([total], device=CUDA, dtype=torch.int32)
        shard = {"total_seq_lens": totals, "shards": 2, "sliding_window": 5}
        vk.paged_attention(*call, lens + 9, **shard, **options)
        reported(f"paged_attention: total_seq_lens[0] = {total}: expected {expected}")
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
    "sample": sample,
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
