"""Calls of fused_decode_attention, beside those of the ops it stands for and its reference.

The caches are those of paged_attention_cases.py, NaN in every slot that no sequence has
(8-bit integers: large), and NaN in the new token's slots too: what is not stored shows.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from helpers import EPSILON, assert_close, bits
from paged_attention_cases import NAN
from paged_attention_cases import make_case as make_pages
from torch import Tensor

import vllm_kernels
from vllm_kernels import reference


@dataclass
class Case:
    """The arguments of one call, in the op's own words."""

    qkv: Tensor
    positions: Tensor
    cos_sin_cache: Tensor
    key_cache: Tensor
    value_cache: Tensor
    slot_mapping: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    heads: tuple[int, int] = (8, 2)  # num_heads, num_kv_heads
    options: dict[str, object] = field(default_factory=dict)

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(list(self.__dict__.values())[:8])

    def copy(self) -> Case:
        """With tensors of its own for what the op writes; qkv keeps its strides."""
        qkv = self.qkv.new_empty_strided(self.qkv.shape, self.qkv.stride()).copy_(self.qkv)
        return replace(
            self, qkv=qkv, key_cache=self.key_cache.clone(), value_cache=self.value_cache.clone()
        )

    def with_options(self, **options: object) -> Case:
        return replace(self, options={**self.options, **options})

    def split(self, qkv: Tensor) -> tuple[Tensor, ...]:
        num_heads, kv_heads = self.heads
        heads = qkv.unflatten(1, (num_heads + 2 * kv_heads, -1))
        return heads.split([num_heads, kv_heads, kv_heads], dim=1)

    def run(self) -> Tensor:
        """In place, as the op is."""
        query, *before = (part.clone() for part in self.split(self.qkv))
        out = torch.full_like(query, NAN)
        got = vllm_kernels.fused_decode_attention(*self.tensors(), **self.options, out=out)
        assert got is out
        for part, old in zip(self.split(self.qkv)[1:], before):
            assert torch.equal(bits(part), bits(old)), "key and value are only read"
        return got

    def run_apart(self) -> Tensor:
        """By the ops it stands for. Where the norm's weights are, the bias comes before them."""
        options = dict(self.options)
        bias = options.pop("bias", None)
        if bias is not None:
            self.qkv += bias
        names = ("k_scale", "v_scale", "q_weight", "k_weight", "epsilon")
        query, key, value = self.split(self.qkv)
        layout = options["layout"]
        vllm_kernels.rope_and_cache(
            self.positions, query, key, value, self.cos_sin_cache, options.pop("is_neox", True),
            self.key_cache, self.value_cache, self.slot_mapping, layout,
            **{name: options[name] for name in names if name in options},
        )  # fmt: skip
        for name in names[2:]:
            options.pop(name, None)
        return vllm_kernels.paged_attention(
            query, self.key_cache, self.value_cache, self.block_tables, self.seq_lens, **options
        )


def make_case(
    device: str,
    dtype: torch.dtype,
    lens: list[int],
    heads: int = 8,
    kv_heads: int = 2,
    head_size: int = 64,
    block_size: int = 16,
    stored: torch.dtype | None = None,
    layout: str = "vllm",
    rotary: int | None = None,
    cosines: torch.dtype | None = None,
    bias: bool = False,
    norm: bool = False,
    scales_per_head: bool = False,
    **options: object,
) -> Case:
    """See the module's docstring; a sequence of length 0 is a padded row."""
    rotary = rotary or head_size
    pages = make_pages(
        device, dtype, lens, None, heads, kv_heads, head_size, block_size, stored, layout,
        scales_per_head, **options,
    )  # fmt: skip
    last = (pages.seq_lens.long() - 1).clamp_min(0)
    blocks = pages.block_tables.long().gather(1, last[:, None] // block_size).squeeze(1)
    slots = torch.where(pages.seq_lens > 0, blocks * block_size + last % block_size, -1)
    # Positions that are not the places: a prefix may have been dropped.
    positions = torch.where(pages.seq_lens > 0, last + 3, 0)
    angle = torch.arange(max([1, *lens]) + 3)[:, None] * 100.0 ** -(
        torch.arange(0, rotary, 2) / rotary
    )

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape).to(device, dtype)

    width = (heads + 2 * kv_heads) * head_size
    options = dict(pages.options)
    if bias:
        options["bias"] = randn(width)
    if norm:
        options |= {"q_weight": randn(head_size), "k_weight": randn(head_size), "epsilon": 1e-5}
    none = torch.full((len(lens), kv_heads, head_size), NAN, device=device)
    if stored == torch.int8:
        none = torch.full_like(none, 127)

    def emptied(cache: Tensor) -> Tensor:
        return reference.write_tokens(cache, none, slots, layout, None)

    return Case(
        qkv=randn(len(lens), width),
        positions=positions,
        cos_sin_cache=torch.cat([angle.cos(), angle.sin()], -1).to(device, cosines or dtype),
        key_cache=emptied(pages.key_cache),
        value_cache=emptied(pages.value_cache),
        slot_mapping=slots,
        block_tables=pages.block_tables,
        seq_lens=pages.seq_lens,
        heads=(heads, kv_heads),
        options=options,
    )


def assert_like_apart(got: Tensor, want: Tensor) -> None:
    """Bit for bit where the launches are the same. In one launch the new token is added last."""
    if got.is_cuda and got.dtype != torch.float32:
        assert torch.equal(got.isnan(), want.isnan())
        error = (got.double() - want.double()).norm(dim=-1)
        most = EPSILON[got.dtype] * want.double().norm(dim=-1)
        assert not (error > most).any(), "out differs from that of the ops apart"
    else:
        assert torch.equal(bits(got), bits(want)), "out is not that of the ops apart"


def check(case: Case) -> Tensor:
    """Against the ops apart (the caches bit for bit) and the reference; gives what it gave."""
    ours, apart = case.copy(), case.copy()
    got = ours.run()
    assert_like_apart(got, apart.run_apart())
    assert torch.equal(bits(ours.key_cache), bits(apart.key_cache)), "key_cache"
    assert torch.equal(bits(ours.value_cache), bits(apart.value_cache)), "value_cache"

    options = {name: value for name, value in case.options.items() if name != "fixed_split_size"}
    naive, keys, values = reference.fused_decode_attention(*case.tensors(), **options)
    assert torch.equal(bits(ours.value_cache), bits(values)), "value_cache of the reference"
    eight_bits = case.key_cache.dtype.itemsize == 1
    dtype = case.qkv.dtype
    if not eight_bits:
        largest = keys.nan_to_num(0).abs().max().item() if keys.numel() else 0
        floor = 2 * EPSILON[dtype] * largest  # the norm's sum has an order of its own
        assert_close(ours.key_cache.nan_to_num(7), keys.nan_to_num(7), 4, floor)
    assert got.dtype == dtype and got.shape == naive.shape and not got.isnan().any()
    nothing = naive.norm(dim=-1) == 0
    assert not got[nothing].any()
    error = (got.double() - naive).norm(dim=-1) / naive.norm(dim=-1).clamp_min(1e-30)
    # A rounding of the key may move it by a step of 8 bits.
    most = (2e-5 if dtype == torch.float32 else EPSILON[dtype]) + (4e-3 if eight_bits else 0)
    worst = error[~nothing].max().item() if not nothing.all() else 0.0
    assert worst <= most, f"relative error {worst:.2e} of a head, allowed {most:.2e}"
    return got
