"""Cases of paged_attention and varlen_attention with e4m3 queries."""

from __future__ import annotations

import torch
from helpers import ints
from paged_attention_cases import IN_8_BITS, Case, assert_near_for, make_case, with_e4m3_query
from torch import Tensor

import vllm_kernels
from vllm_kernels import reference

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16


def e4m3_case(
    device: str,
    lens: list[int],
    queries: list[int] | None = None,
    q_scale: Tensor | None = None,
    dtype: torch.dtype = BF16,
    **options: object,
) -> Case:
    case = make_case(device, dtype, lens, queries, stored=E4M3, **options)
    return with_e4m3_query(case, q_scale)


def moved(rows: Tensor, elements: int) -> Tensor:
    """A copy so far behind an aligned address."""
    memory = rows.new_empty(rows.numel() + elements)
    return memory[elements:].view(rows.shape).copy_(rows)


def rows_of(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """K and V of a case of layout NHD without pages, and where each sequence starts."""
    lens = case.seq_lens.tolist()
    key, value = (
        torch.cat([
            cache[table[: -(-length // 16)].long()].flatten(0, 1)[:length]
            for table, length in zip(case.block_tables, lens)
        ])
        for cache in (case.key_cache, case.value_cache)
    )  # fmt: skip
    return key, value, ints([0, *lens], case.query.device).cumsum(0).int()


def check_varlen(case: Case, max_key_len: int = 0, **options: object) -> bool:
    """The sequences of a case of layout NHD, with contiguous keys. Returns whether an e4m3 query is
    multiplied as it is."""
    device, (key, value, key_starts) = case.query.device, rows_of(case)
    starts = case.options["query_start_loc"], key_starts
    names = "k_scale", "v_scale", "q_scale"
    options |= {name: case.options[name] for name in names if name in case.options}
    call = {"max_query_len": case.max_query_len, "out": case.unset_out(), "return_lse": True}
    call["max_key_len"] = max_key_len
    arguments, op = (case.query, key, value, *starts), vllm_kernels.varlen_attention
    in_8_bits = device.type == "cuda" and IN_8_BITS in vllm_kernels.explain(
        op, *arguments, **call, **options
    )
    got = op(*arguments, **call, **options)
    want, lse = reference.varlen_attention(*arguments, **options)
    absolute = value.float().abs()
    spread, _ = reference.varlen_attention(case.query, key, absolute, *starts, **options)
    case = case.with_options(softcap=options.get("softcap", 0.0))
    assert_near_for(case, got[0], want, spread, (got[1], lse), in_8_bits=in_8_bits)
    return in_8_bits
