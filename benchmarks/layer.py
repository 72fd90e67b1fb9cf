"""What bench_layer.py measures: the buffers of a decoder layer at decode, and what belongs in them.

The non-GEMM part of a Llama layer that decodes one token a sequence, in this order:

    hidden, residual            add and RMS norm             (before the QKV product)
    qkv                         rotary, KV-cache write       (after it)
    query, pages                attention                    -> out
    out, residual               add and RMS norm             (for want of the output product)
    gate_up                     silu_and_mul                 -> activated

Products are left out: qkv and gate_up are given. Every layer of the graph has buffers of its own,
so that no cache serves them; block tables, lengths, positions and the rotary table are shared, as a
model shares them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.harness import copies_for
from vllm_kernels import reference

EPSILON = 1e-5
ROPE_BASE = 500000.0
CHECKED = 8  # sequences compared with the reference
WRONG = 2e-2  # relative error
SMALL = 0.03  # of the residual stream: as attention over 2048 random values is, so that it shows


@dataclass(frozen=True)
class Shape:
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_size: int
    page: int


LLAMA_3_8B = Shape(hidden=4096, ffn=14336, heads=32, kv_heads=8, head_size=128, page=16)
SMOKE = Shape(hidden=1024, ffn=3584, heads=8, kv_heads=2, head_size=128, page=16)


class Missing(Exception):
    """A candidate's library is not on this machine."""


@dataclass
class Candidate:
    """A layer by one library's ops; i is the copy of the buffers they work on."""

    norm: Callable[[Tensor, Tensor, Tensor], object]  # (input, residual, weight), in place
    attend: Callable[[int], object]  # rotary, cache write and attention of copy i, into out[i]
    activate: Callable[[Tensor, Tensor], object]  # (activated, gate_up)


def relative_error(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


class Layer:
    """Rotated buffers of a decode step: `batch` sequences of `context` tokens, the new included.

    Lists hold one tensor a copy. Caches exist in both layouts with the same values.
    """

    def __init__(
        self, shape: Shape, batch: int, context: int, device: str, copies: int | None = None
    ) -> None:
        self.shape, self.batch, self.context, self.device = shape, batch, context, device
        heads, kv_heads, head_size = shape.heads, shape.kv_heads, shape.head_size
        assert heads * head_size == shape.hidden, "out goes into the second norm"
        self.scale = head_size**-0.5
        self.pages = -(-context // shape.page)  # a sequence
        copies = self.copies = copies or max(2, copies_for(device, self.bytes))
        options = {"device": device, "dtype": torch.bfloat16}

        self._hidden, self._residual = SMALL * torch.randn(
            2, copies, batch, shape.hidden, **options
        )
        self._qkv = torch.randn(copies, batch, (heads + 2 * kv_heads) * head_size, **options)
        self._initial = [x.clone() for x in (self._hidden, self._residual, self._qkv)]
        # For libraries that want them contiguous; nobody's time pays for that copy.
        self._query = torch.empty(copies, batch, heads, head_size, **options)
        self._key = torch.empty(copies, batch, kv_heads, head_size, **options)
        self._value = torch.empty(copies, batch, kv_heads, head_size, **options)
        self._out = torch.empty(copies, batch, shape.hidden, **options)
        self._activated = torch.empty(copies, batch, shape.ffn, **options)
        gate_up = torch.randn(copies, batch, 2 * shape.ffn, **options)

        num_blocks = batch * self.pages
        cache = (copies, num_blocks, shape.page, kv_heads, head_size)
        self._nhd = [torch.randn(cache, **options) for _ in range(2)]
        x = 16 // torch.bfloat16.itemsize
        split = self._nhd[0].unflatten(-1, (head_size // x, x))
        self._vllm = [
            split.permute(0, 1, 3, 4, 2, 5).contiguous(),
            self._nhd[1].permute(0, 1, 3, 4, 2).contiguous(),
        ]

        # The same as lists, one tensor a copy.
        self.hidden = self._hidden.unbind()
        self.residual = self._residual.unbind()
        self.qkv = self._qkv.unbind()
        self.query, self.key, self.value = (
            t.unbind() for t in (self._query, self._key, self._value)
        )
        self.out = self._out.unbind()
        self.attended = [out.view(batch, heads, head_size) for out in self.out]
        self.gate_up, self.activated = gate_up.unbind(), self._activated.unbind()
        self.caches = {
            layout: list(zip(keys.unbind(), values.unbind(), strict=True))
            for layout, (keys, values) in (("NHD", self._nhd), ("vllm", self._vllm))
        }
        # [batch, heads, head_size] slices of the packed product, for libraries that take strides.
        self.packed = [
            qkv.view(batch, -1, head_size).split([heads, kv_heads, kv_heads], dim=1)
            for qkv in self.qkv
        ]
        weights = SMALL * (1 + 0.1 * torch.randn(2, copies, shape.hidden, device=device))
        self.weights = list(zip(*(w.to(torch.bfloat16).unbind() for w in weights), strict=True))

        order = torch.randperm(num_blocks, device=device)
        self.block_tables = order.view(batch, self.pages).int()
        self.seq_lens = torch.full((batch,), context, device=device, dtype=torch.int32)
        self.positions = torch.full((batch,), context - 1, device=device, dtype=torch.int64)
        self.blocks = self.block_tables[:, -1].long()  # of the new token
        self.in_block = (context - 1) % shape.page
        self.slots = self.blocks * shape.page + self.in_block
        inverse = ROPE_BASE ** -(torch.arange(0, head_size, 2, device=device) / head_size)
        angles = torch.arange(context, device=device)[:, None] * inverse
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1).to(torch.bfloat16)
        self.one = torch.ones(1, device=device)

    @property
    def bytes(self) -> int:
        """What the five ops (rotary with the cache write as one) must read and write once."""
        s, b = self.shape, self.batch
        norm = 4 * b * s.hidden
        rope = 2 * b * (s.heads + 2 * s.kv_heads) * s.head_size
        attention = 2 * b * s.hidden + 2 * b * self.context * s.kv_heads * s.head_size
        return 2 * (2 * norm + rope + attention + 3 * b * s.ffn)

    def restore(self) -> None:
        """Every copy as it was made; results and the new tokens' places in the caches are NaN."""
        s = self.shape
        for buffer, initial in zip(
            (self._hidden, self._residual, self._qkv), self._initial, strict=True
        ):
            buffer.copy_(initial)
        sizes = [s.heads * s.head_size, s.kv_heads * s.head_size, s.kv_heads * s.head_size]
        for buffer, part in zip(
            (self._query, self._key, self._value), self._qkv.split(sizes, dim=-1), strict=True
        ):
            buffer.copy_(part.view(buffer.shape))
        self._out.fill_(torch.nan)
        self._activated.fill_(torch.nan)
        for keys, values in self.caches["NHD"]:
            keys[self.blocks, self.in_block] = torch.nan
            values[self.blocks, self.in_block] = torch.nan
        for keys, values in self.caches["vllm"]:
            keys[self.blocks, :, :, self.in_block] = torch.nan
            values[self.blocks, :, :, self.in_block] = torch.nan

    def run(self, candidate: Candidate, i: int) -> None:
        """One layer on copy i."""
        first, second = self.weights[i]
        candidate.norm(self.hidden[i], self.residual[i], first)
        candidate.attend(i)
        candidate.norm(self.out[i], self.residual[i], second)
        candidate.activate(self.activated[i], self.gate_up[i])

    @functools.cached_property
    def chosen(self) -> Tensor:
        """The sequences that are compared with the reference."""
        count = min(CHECKED, self.batch)
        return torch.linspace(0, self.batch - 1, count, device=self.device).long()

    @functools.cached_property
    def expected(self) -> tuple[Tensor, list[Tensor]]:
        """Of the chosen sequences of copy 0: attention's result in float64, and what hidden,
        residual, out and activated hold after the layer."""
        s, chosen = self.shape, self.chosen
        hidden, residual, qkv = (x[0][chosen] for x in self._initial)
        query, key, value = qkv.view(len(chosen), -1, s.head_size).split(
            [s.heads, s.kv_heads, s.kv_heads], dim=1
        )
        pages = self.block_tables[chosen].flatten().long()
        tables = torch.arange(len(pages), device=self.device, dtype=torch.int32)
        tables = tables.view(len(chosen), self.pages)
        query, keys, values = reference.rope_and_cache(
            self.positions[chosen], query, key, value, self.cos_sin, True,
            *(cache[0][pages] for cache in self._nhd),
            tables[:, -1].long() * s.page + self.in_block, layout="NHD",
        )  # fmt: skip
        attended, _ = reference.paged_attention(
            query, keys, values, tables, self.seq_lens[chosen], scale=self.scale, layout="NHD"
        )
        first, second = self.weights[0]
        hidden, residual = reference.fused_add_rms_norm(hidden, residual, first, EPSILON)
        out, residual = reference.fused_add_rms_norm(
            attended.flatten(1).to(residual.dtype), residual, second, EPSILON
        )
        activated = reference.silu_and_mul(self.gate_up[0][chosen])
        return attended, [hidden, residual, out, activated]

    def errors(self, candidate: Candidate) -> tuple[float, float]:
        """Relative error of attention's result, and the largest one of the rest of the layer."""
        attended, rest = self.expected
        self.restore()
        candidate.attend(0)
        attention = relative_error(self.attended[0][self.chosen], attended)
        self.restore()
        self.run(candidate, 0)
        buffers = (self.hidden[0], self.residual[0], self.out[0], self.activated[0])
        found = [
            relative_error(got[self.chosen], want) for got, want in zip(buffers, rest, strict=True)
        ]
        return attention, max(found, key=lambda error: error if error == error else torch.inf)

    def results(self) -> list[Tensor]:
        """Copies of what layers leave behind."""
        return [x.clone() for x in (self._hidden, self._residual, self._out, self._activated)]
