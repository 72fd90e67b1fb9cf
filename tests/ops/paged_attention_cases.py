"""Calls of paged_attention, and how near the float64 reference they must come.

Queries and keys have unit variance. Pools are NaN outside the used slots (8-bit integers: large).
Tables are permuted and hold garbage past the used part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from helpers import EPSILON, to_layout
from torch import Tensor

import vllm_kernels
from vllm_kernels import reference

NAN = float("nan")
GARBAGE = (-1, 2**30, -(2**31), 2**31 - 1)
EIGHT_BITS = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]
IN_8_BITS = "multiplied in 8 bits"  # as explain has it


@dataclass
class Case:
    """The arguments of one call, in the op's own words."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    block_size: int
    options: dict[str, object] = field(default_factory=dict)
    max_query_len: int | None = None
    dtype: torch.dtype | None = None  # of out, where it is not the query's

    def tensors(self) -> tuple[Tensor, ...]:
        return self.query, self.key_cache, self.value_cache, self.block_tables, self.seq_lens

    def unset_out(self) -> Tensor:
        return torch.full_like(self.query, NAN, dtype=self.dtype)

    def run(self) -> Tensor:
        out = self.unset_out()
        got = vllm_kernels.paged_attention(
            *self.tensors(), **self.options, max_query_len=self.max_query_len, out=out
        )
        assert got is out
        return got

    def run_with_lse(self) -> tuple[Tensor, Tensor]:
        out = None if self.dtype is None else self.unset_out()
        return vllm_kernels.paged_attention(
            *self.tensors(), **{"out": out, **self.options}, max_query_len=self.max_query_len,
            return_lse=True,
        )  # fmt: skip

    def naive(self) -> tuple[Tensor, Tensor]:
        return reference.paged_attention(*self.tensors(), **self.options)

    def spread(self) -> Tensor:
        """sum w |v|; of int4 sum w (scale |n - 8| + |zero|)."""
        if "v_token_zeros" not in self.options:
            return replace(self, value_cache=self.value_cache.float().abs()).naive()[0]
        low, high = self.value_cache & 15, self.value_cache >> 4
        low, high = ((8 + (n.int() - 8).abs()).clamp_max(15).byte() for n in (low, high))
        absolute = {name: self.options[name].abs() for name in ("v_token_scales", "v_token_zeros")}
        return replace(self.with_options(**absolute), value_cache=low | high << 4).naive()[0]

    def naive_and_spread(self) -> tuple[Tensor, Tensor, Tensor]:
        """out of naive(), spread() and lse: v and |v| are the halves of a value, but for int4."""
        if "v_token_zeros" in self.options:
            out, lse = self.naive()
            return out, self.spread(), lse
        value, elements = self.value_cache.float(), 2 if self.options["layout"] == "vllm" else 3
        halves = replace(self, value_cache=torch.cat([value, value.abs()], elements))
        out, lse = halves.naive()
        return *out.chunk(2, -1), lse

    def lost(self) -> float:
        """What decode on CUDA loses of a sum w v where V has a scale a token: its weights are in
        float16, relative to the largest w times scale. Half of the smallest, for each token."""
        scales = self.options.get("v_token_scales")
        if scales is None or not scales.is_cuda:
            return 0.0
        largest = 8 if "v_token_zeros" in self.options else 127
        return 2.0**-25 * max(self.seq_lens.tolist()) * largest * scales.nan_to_num().max().item()

    def rounds_keys(self) -> bool:
        """A prompt's kernels on CUDA round K to 16 bits after scaling by tokens, as a cache of 16
        bits has it. So weights and the log-sum-exp are as inexact as such keys make them."""
        if "k_token_scales" not in self.options or not self.query.is_cuda:
            return False
        return "prefill" in self.explained().split("because")[0]

    def explained(self) -> str:
        options = {**self.options, "max_query_len": self.max_query_len}
        return vllm_kernels.explain(vllm_kernels.paged_attention, *self.tensors(), **options)

    def kv_heads(self) -> int:
        return self.key_cache.shape[2 if self.options["layout"] == "NHD" else 1]

    def multiplies_in_8_bits(self) -> bool:
        """Whether an e4m3 query, or a part of it, is multiplied as it is."""
        is_e4m3 = self.query.dtype == torch.float8_e4m3fn
        return is_e4m3 and self.query.is_cuda and IN_8_BITS in self.explained()

    def rounded(self) -> Case:
        """The case over K and V rounded to the query's dtype, which a gather makes of int4."""
        layout = self.options["layout"]
        caches = []
        for name, cache in (("k", self.key_cache), ("v", self.value_cache)):
            scales, zeros = (
                self.options[f"{name}_token_{kind}"].transpose(1, 2)[..., None]
                for kind in ("scales", "zeros")
            )
            rows = reference.int4_values(reference.token_rows(cache, layout)) * scales + zeros
            caches.append(to_layout(rows.to(self.query.dtype), layout, name == "k"))
        options = {name: x for name, x in self.options.items() if "_token_" not in name}
        return replace(self, key_cache=caches[0], value_cache=caches[1], options=options)

    def with_options(self, **options: object) -> Case:
        return replace(self, options={**self.options, **options})


def quantized(rows: Tensor, stored: torch.dtype, scale: Tensor | None) -> Tensor:
    """rows [.., num_kv_heads, head_size] as the cache stores them."""
    if scale is not None:
        rows = rows / scale.reshape(-1, 1)
    if stored == torch.int8:
        rows = rows.nan_to_num(127).round().clamp(-128, 127)
    return rows.to(stored)


def scales_of(stored: torch.dtype, kv_heads: int, per_head: bool) -> tuple[Tensor, Tensor]:
    """k_scale and v_scale of an 8-bit cache."""
    unit = 1 / 32 if stored == torch.int8 else 0.5
    if per_head:
        return unit * torch.linspace(1, 1.5, kv_heads), unit * torch.linspace(2, 1, kv_heads)
    return torch.tensor([unit]), torch.tensor(1.75 * unit)


def pages_of(lens: list[int], block_size: int) -> list[int]:
    """How many each sequence needs."""
    return [-(-length // block_size) for length in lens]


def page_tables(lens: list[int], block_size: int, num_blocks: int) -> tuple[Tensor, Tensor]:
    """block_tables of a pool; and bool [num_blocks, block_size]: the slots that hold a token."""
    pages = pages_of(lens, block_size)
    order = torch.randperm(num_blocks)
    width = max([1, *pages]) + 2
    tables = torch.tensor(GARBAGE * width)[:width].repeat(max(1, len(lens)), 1)[: len(lens)]
    used = torch.zeros(num_blocks, block_size, dtype=torch.bool)
    taken = 0
    for seq, length in enumerate(lens):
        mine = order[taken : taken + pages[seq]]
        taken += pages[seq]
        tables[seq, : pages[seq]] = mine
        used[mine] = torch.arange(pages[seq] * block_size).view(-1, block_size) < length
    return tables, used


def make_case(
    device: str,
    dtype: torch.dtype,
    lens: list[int],
    queries: list[int] | None = None,
    heads: int = 8,
    kv_heads: int = 2,
    head_size: int = 64,
    block_size: int = 16,
    stored: torch.dtype | None = None,
    layout: str = "vllm",
    scales_per_head: bool = False,
    spare_blocks: int = 3,
    rise: float = 0.0,
    **options: object,
) -> Case:
    """See the module's docstring. queries: the sequences' numbers of query tokens, or one each.

    rise: what a token's keys are more than those of the token before.
    """
    stored = stored or dtype
    num_blocks = sum(pages_of(lens, block_size)) + spare_blocks
    key = torch.randn(num_blocks, block_size, kv_heads, head_size)
    value = torch.randn(num_blocks, block_size, kv_heads, head_size)
    tables, used = page_tables(lens, block_size, num_blocks)
    for seq, pages in enumerate(pages_of(lens, block_size)):
        token = torch.arange(pages * block_size).view(-1, block_size, 1, 1)
        key[tables[seq, :pages]] += rise * token
    key[~used] = NAN
    value[~used] = NAN
    k_scale = v_scale = None
    if stored in EIGHT_BITS:
        k_scale, v_scale = scales_of(stored, kv_heads, scales_per_head)
        options |= {"k_scale": k_scale.to(device), "v_scale": v_scale.to(device)}
    key, value = quantized(key, stored, k_scale), quantized(value, stored, v_scale)
    num_tokens = len(lens)
    longest = None
    if queries is not None:
        num_tokens, longest = sum(queries), max([0, *queries])
        starts = torch.tensor([0, *queries]).cumsum(0)
        options["query_start_loc"] = starts.to(device, torch.int32)
    options = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in options.items()}
    return Case(
        query=torch.randn(num_tokens, heads, head_size).to(device, dtype),
        key_cache=to_layout(key, layout, True).to(device),
        value_cache=to_layout(value, layout, False).to(device),
        block_tables=tables.to(device, torch.int32),
        seq_lens=torch.tensor(lens, dtype=torch.int32, device=device),
        block_size=block_size,
        options={"layout": layout, **options},
        max_query_len=longest,
    )


def with_token_scales(case: Case, span: float = 4.0) -> Case:
    """The case of an int8 cache with a scale a token and KV head; NaN in slots without a token.

    span: what the largest scale of V is to the smallest, spread evenly in its logarithm.
    """
    options = {**case.options, "k_scale": None, "v_scale": None}
    device, block_size = case.query.device, case.block_size
    blocks = len(case.key_cache)
    heads = case.key_cache.shape[2 if case.options["layout"] == "NHD" else 1]
    used = torch.zeros(blocks, block_size, dtype=torch.bool)
    for row, length in zip(case.block_tables.cpu(), case.seq_lens.tolist()):
        pages = row[: -(-length // block_size)].long()
        used[pages] |= torch.arange(len(pages) * block_size).view(-1, block_size) < length
    sizes = torch.rand(2, blocks, heads, block_size)
    scales = torch.stack([(0.25 + sizes[0]) / 32, span ** (sizes[1] - 0.5) / 32])
    scales[:, ~used[:, None].expand(-1, heads, -1)] = NAN
    key_scales, value_scales = scales.to(device)
    options |= {"k_token_scales": key_scales, "v_token_scales": value_scales}
    return replace(case, options=options)


def with_token_zeros(case: Case) -> Case:
    """The case of an int8 cache with token scales, over int4: other elements, and scales times 6.
    So K and V have a variance of 1. Zeros of up to 8 scales, NaN in slots without a token."""
    layout = case.options["layout"]
    rows = reference.token_rows(case.value_cache, layout)
    shape = *rows.shape[:3], rows.shape[3] // 2
    key, value = (
        to_layout(torch.randint(256, shape).byte(), layout, is_key).to(rows.device)
        for is_key in (True, False)
    )
    options = {}
    for name in ("k", "v"):
        scales = 6 * case.options[f"{name}_token_scales"]
        zeros = scales * (16 * torch.rand_like(scales) - 8)
        options |= {f"{name}_token_scales": scales, f"{name}_token_zeros": zeros}
    return replace(case.with_options(**options), key_cache=key, value_cache=value)


def with_e4m3_query(case: Case, q_scale: Tensor | None = None) -> Case:
    """The case of an e4m3 cache with such a query, of q_scale [1] or [num_kv_heads]."""
    rows = case.query.float()
    if q_scale is not None:
        q_scale = q_scale.to(rows.device)
        group = rows.shape[1] // case.kv_heads()
        rows = rows / q_scale.expand(case.kv_heads()).repeat_interleave(group)[:, None]
    eight = replace(case, query=rows.to(torch.float8_e4m3fn), dtype=case.query.dtype)
    return eight.with_options(q_scale=q_scale)


def query_scales(size: int) -> Tensor:
    """Random ones of 4 bits: the product with an e4m3 element is exact in 16 bits."""
    return torch.randint(8, 16, (size,)) / 16


def alone(case: Case, seq: int) -> tuple[Case, slice]:
    """The call with one sequence of a batch that has query_start_loc, and its rows in the batch."""
    starts = case.options["query_start_loc"]
    first, end = starts[seq].item(), starts[seq + 1].item()
    only = slice(seq, seq + 1)
    one = replace(
        case,
        query=case.query[first:end],
        block_tables=case.block_tables[only],
        seq_lens=case.seq_lens[only],
    )
    return one.with_options(query_start_loc=starts.new_tensor([0, end - first])), slice(first, end)


def assert_right(case: Case, *results: Tensor | tuple[Tensor, Tensor]) -> None:
    """Each out or (out, lse) within what the dtype and the length explain: see assert_near()."""
    lost, rounds_keys = case.lost(), case.rounds_keys()
    in_8_bits = case.multiplies_in_8_bits()
    out, spread, out_lse = case.naive_and_spread()
    right = [(out, out_lse)]
    if rounds_keys and "k_token_zeros" in case.options:  # a concurrent launch may gather nothing
        right.append(case.rounded().naive())
    outs, out_lses = map(torch.stack, zip(*right))
    for result in results:
        got, lse = result if isinstance(result, tuple) else (result, None)
        nearest = (outs - got).norm(dim=-1).argmin(0, keepdim=True)
        want = outs.take_along_dim(nearest[..., None], 0)[0]
        lses = None if lse is None else (lse, out_lses.take_along_dim(nearest, 0)[0])
        assert_near_for(case, got, want, spread, lses, lost, rounds_keys, in_8_bits)


def assert_near_for(
    case: Case,
    got: Tensor,
    want: Tensor,
    spread: Tensor,
    lses: tuple[Tensor, Tensor] | None,
    lost: float = 0.0,
    rounds_keys: bool = False,
    in_8_bits: bool = False,
) -> None:
    """assert_near() or assert_near_in_8_bits(), as the case is computed."""
    assert got.dtype == (case.dtype or case.query.dtype)
    if in_8_bits:
        return assert_near_in_8_bits(got, want, spread, lses)
    query = case.query.float()
    if case.options.get("q_scale") is not None:
        query = query * case.options["q_scale"].max()
    scale = case.options.get("scale", query.shape[-1] ** -0.5)
    lens = case.seq_lens.tolist()
    assert_near(got, want, spread, query, scale, lens, lses, lost, rounds_keys)


def assert_near_in_8_bits(
    got: Tensor, want: Tensor, spread: Tensor, lses: tuple[Tensor, Tensor] | None
) -> None:
    """Weights are rounded to e4m3, each by 2^-4 of it at most. The sums of Q K^T are truncated."""
    assert got.shape == want.shape
    assert not got.isnan().any(), "NaN in the result"
    error = (got.double() - want).abs()
    worst = (error / (2.0**-4 * 1.15 * spread + 1e-3)).max().item()
    assert worst <= 1, f"off by {worst:.2f} times what is allowed, max |error| {error.max():.3e}"
    relative = (error.norm() / want.norm()).item()
    assert relative <= 3.5e-2, f"relative error {relative:.2e}"
    if lses is not None:
        torch.testing.assert_close(lses[0].double(), lses[1], rtol=2e-3, atol=2e-2)


def assert_near(
    got: Tensor,
    want: Tensor,
    spread: Tensor,
    query: Tensor,
    scale: float,
    lens: list[int],
    lses: tuple[Tensor, Tensor] | None,
    lost: float = 0.0,
    rounds_keys: bool = False,
) -> None:
    """|got - want| within what the dtype and the length explain.

    The result is a mean of values under weights w. It is rounded once to the dtype; a 16-bit kernel
    may also round the weights, and v2 its partial results, each worth one unit of sum w |v|. In
    float32 the errors of the logits (their size times epsilon) and of the sums (growing with the
    square root of the length) remain.

    spread: sum w |v|; lses: what was got and what was to be; lost, rounds_keys: see Case.
    """
    assert got.shape == want.shape
    assert not got.isnan().any(), "NaN in the result"
    if got.numel() == 0:
        return
    norm = query.double().norm(dim=-1).amax().item()
    logit = scale * norm * math.sqrt(query.shape[-1]) * 1.5
    unit32 = EPSILON[torch.float32] * (8 + 2 * logit + 0.25 * math.sqrt(max([1, *lens])))
    unit = EPSILON[got.dtype]
    rounded = 0.0 if got.dtype == torch.float32 else unit
    error = (got.double() - want).abs()
    allowed = 0.51 * unit * want.abs() + (unit32 + rounded) * spread + lost + 1e-30
    if got.dtype == torch.float16:
        allowed += 2.0**-25  # denormals
    worst = (error / allowed).max().item()
    assert worst <= 1, f"off by {worst:.2f} times what is allowed, max |error| {error.max():.3e}"
    relative = ((got.double() - want).norm() / want.norm().clamp_min(1e-30)).item()
    most = unit32 if got.dtype == torch.float32 else (0.7 if rounds_keys else 0.45) * unit
    assert relative <= most, f"relative error {relative:.2e}, allowed {most:.2e}"
    if lses is not None:
        assert lses[0].shape == lses[1].shape and lses[0].dtype == torch.float32
        atol = 1.3 * unit if rounds_keys else unit32
        torch.testing.assert_close(lses[0].double(), lses[1], rtol=2.0**-22, atol=atol)


def check(case: Case) -> None:
    """Without lse (on the CPU another kernel may run) and with it."""
    assert_right(case, case.run(), case.run_with_lse())


def per_head(heads: int, low: float, high: float) -> Tensor:
    return torch.linspace(low, high, heads)
