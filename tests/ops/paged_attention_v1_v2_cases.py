"""Calls of paged_attention_v1 and _v2, and how near the float64 reference they must come.

Queries and keys have unit variance, so the softmax is peaked and K matters. Pools are NaN outside
the used slots, tables are permuted and hold garbage past the used part.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from paged_attention_cases import NAN, assert_near, page_tables, pages_of
from torch import Tensor

import vllm_kernels
from vllm_kernels import reference

STORED = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
PARTITION = 512


@dataclass
class Case:
    """The arguments of one call, in the op's own words."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    num_kv_heads: int
    scale: float
    block_tables: Tensor
    seq_lens: Tensor
    block_size: int
    max_seq_len: int
    alibi_slopes: Tensor | None = None
    kv_cache_dtype: str = "auto"
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    sparse: dict[str, int] = field(default_factory=dict)

    def arguments(self) -> tuple:
        return (
            self.query, self.key_cache, self.value_cache, self.num_kv_heads, self.scale,
            self.block_tables, self.seq_lens, self.block_size, self.max_seq_len, self.alibi_slopes,
            self.kv_cache_dtype, self.k_scale, self.v_scale,
        )  # fmt: skip

    def out(self) -> Tensor:
        return torch.full(self.query.shape, NAN, dtype=self.query.dtype, device=self.query.device)

    def scratch(self, partitions: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """exp_sums, max_logits, tmp_out, poisoned."""
        partitions = partitions or max(1, -(-self.max_seq_len // PARTITION))
        shape = (*self.query.shape[:2], partitions)
        sums = torch.full(shape, NAN, device=self.query.device)
        tmp = self.query.new_full((*shape, self.query.shape[2]), NAN)
        return sums, sums.clone(), tmp

    def v1(self) -> Tensor:
        out = self.out()
        vllm_kernels.paged_attention_v1(out, *self.arguments(), **self.sparse)
        return out

    def v2(self) -> Tensor:
        out = self.out()
        vllm_kernels.paged_attention_v2(out, *self.scratch(), *self.arguments(), **self.sparse)
        return out

    def run(self, version: int) -> Tensor:
        return self.v1() if version == 1 else self.v2()

    def naive(self, value_cache: Tensor | None = None) -> Tensor:
        value_cache = self.value_cache if value_cache is None else value_cache
        return reference.naive_paged_attention(
            self.query, self.key_cache, value_cache, self.num_kv_heads, self.scale,
            self.block_tables, self.seq_lens, self.block_size, self.alibi_slopes, self.k_scale,
            self.v_scale, self.kv_cache_dtype, **self.sparse,
        )  # fmt: skip

    def naive_and_spread(self) -> tuple[Tensor, Tensor]:
        """naive(), and sum w |v|: v and |v| are the halves of a value."""
        value = self.value_cache
        absolute = value.abs() if self.kv_cache_dtype == "auto" else value & 0x7F  # the sign bit
        return self.naive(torch.cat([value, absolute], 2)).chunk(2, -1)


def make_case(
    device: str,
    dtype: torch.dtype,
    lens: list[int],
    heads: int = 8,
    kv_heads: int = 2,
    head_size: int = 64,
    block_size: int = 16,
    kv_cache_dtype: str = "auto",
    spare_blocks: int = 3,
    **more: object,
) -> Case:
    """Random query and cache of unit variance; see the module's docstring for the rest."""
    stored = STORED.get(kv_cache_dtype, dtype)
    x = 16 // stored.itemsize
    num_blocks = sum(pages_of(lens, block_size)) + spare_blocks
    key = torch.randn(num_blocks, kv_heads, head_size // x, block_size, x)
    value = torch.randn(num_blocks, kv_heads, head_size, block_size)
    tables, used = page_tables(lens, block_size, num_blocks)
    scales = [torch.ones(1), torch.ones(())]
    if kv_cache_dtype != "auto":
        scales = [torch.tensor([0.5]), torch.tensor(1.75)]
        key, value = key / scales[0], value / scales[1]
    key[~used[:, None, None, :, None].expand_as(key)] = NAN
    value[~used[:, None, None, :].expand_as(value)] = NAN
    key, value = key.to(stored), value.to(stored)
    if kv_cache_dtype != "auto":
        key, value = key.view(torch.uint8), value.view(torch.uint8)
    return Case(
        query=torch.randn(len(lens), heads, head_size).to(device, dtype),
        key_cache=key.to(device),
        value_cache=value.to(device),
        num_kv_heads=kv_heads,
        scale=head_size**-0.5,
        block_tables=tables.to(device, torch.int32),
        seq_lens=torch.tensor(lens, dtype=torch.int32, device=device),
        block_size=block_size,
        max_seq_len=max([1, *lens]),
        kv_cache_dtype=kv_cache_dtype,
        k_scale=scales[0].to(device),
        v_scale=scales[1].to(device),
        **more,
    )


def assert_right(case: Case, got: Tensor, want: Tensor | None = None) -> None:
    """Within what the dtype and the length explain: see assert_near()."""
    right, spread = case.naive_and_spread()
    want = right if want is None else want
    assert_near(got, want, spread, case.query, case.scale, case.seq_lens.tolist(), None)
