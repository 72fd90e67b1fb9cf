"""The tensors of a paged KV cache: of all layers, on the device and on the host.

:class:`~vllm_kernels.kv_cache.KVCacheManager` says which block is whose; :class:`KVCache` holds the
blocks, and runs the copies that the manager asks for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

import vllm_kernels

from ..errors import Error, InvalidArgument, InvalidIndex, Unsupported
from .memory import Pairs, flat, free_memory, mapping_of, new_pool
from .scales import has_layer_scales, layer_scales
from .shape import CACHE_DTYPES, LAYOUTS, KVShape, check_ints

__all__ = ["CACHE_DTYPES", "LAYOUTS", "KVCache", "KVShape", "Pairs", "free_memory"]


class KVCache:
    """Keys and values of all layers, in blocks.

    Args:
        shape: of a block.
        num_blocks: of the device, as many as the manager has.
        num_host_blocks: of a second pool on the host, for sequences that are swapped out; pinned
            if the device is a GPU.
        tensor_of_layer: for groups of layers with tables of their own over one pool of blocks:
            which of shape.num_layers tensors each layer uses. Layers of different groups may share
            one, since their blocks differ. None: a tensor a layer.
        k_scale, v_scale: for an 8-bit cache: the factor of its elements, more than 0. A
            number for all layers, or a float32 tensor [layers] or [layers, num_kv_heads]. Tokens
            with scales of their own have no other.

    Attributes:
        key_caches, value_caches: a tensor a layer; their contents are not initialised.
        key_scales, value_scales: a tensor a layer, float32 [num_blocks, num_kv_heads, block_size];
            empty unless shape.has_token_scales.
        key_zeros, value_zeros: as the scales; empty unless shape.has_token_zeros.
        page_bounds: a tensor a layer, as :func:`vllm_kernels.page_bounds_update` has it; empty
            without shape.page_bounds. Every write keeps the bounds right.

    Raises:
        InvalidArgument: an argument that does not fit, by name.
        InvalidType: a number that is no int.

    Example:
        >>> from vllm_kernels.kv_cache.tensors import KVCache, KVShape
        >>> shape = KVShape(num_layers=1, num_kv_heads=2, head_size=64, dtype=torch.float32)
        >>> cache = KVCache(shape, num_blocks=8)
        >>> key = value = torch.randn(3, 2, 64)  # three tokens, for block 5
        >>> cache.write(0, key, value, torch.tensor([80, 81, 82]))
        >>> table, length = torch.tensor([[5]]).int(), torch.tensor([3]).int()
        >>> cache.attend(0, torch.randn(1, 8, 64), table, length).shape
        torch.Size([1, 8, 64])
    """

    def __init__(
        self,
        shape: KVShape,
        num_blocks: int,
        *,
        device: torch.device | str = "cpu",
        num_host_blocks: int = 0,
        tensor_of_layer: Sequence[int] | None = None,
        k_scale: Tensor | float = 1.0,
        v_scale: Tensor | float = 1.0,
    ) -> None:
        check_ints("KVCache", num_blocks=num_blocks, num_host_blocks=num_host_blocks)
        if num_blocks < 1:
            raise InvalidArgument(f"KVCache: num_blocks: expected at least 1, got {num_blocks}")
        if num_host_blocks < 0:
            raise InvalidArgument(f"KVCache: num_host_blocks: expected >= 0, got {num_host_blocks}")
        self.shape = shape
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.device = torch.device(device)
        self._is_quantized = has_layer_scales(shape)
        tensors = range(shape.num_layers)
        of_layer = list(tensors if tensor_of_layer is None else tensor_of_layer)
        if set(of_layer) != set(tensors):
            raise InvalidArgument(
                f"KVCache: tensor_of_layer: expected all of 0 to {shape.num_layers - 1} (from "
                f"shape.num_layers), got {of_layer}"
            )
        self._k_scales = layer_scales(shape, "k_scale", k_scale, len(of_layer), self.device)
        self._v_scales = layer_scales(shape, "v_scale", v_scale, len(of_layer), self.device)
        self._has_head_scales = any(torch.as_tensor(x).ndim > 1 for x in (k_scale, v_scale))
        pool = new_pool(shape, num_blocks, self.device, pinned=False)
        self._keys, self._values, self._bounds, self._scales_of_tokens = pool
        self.key_caches = [self._keys[tensor] for tensor in of_layer]
        self.value_caches = [self._values[tensor] for tensor in of_layer]
        of_tokens = [self._scales_of_tokens[tensor] for tensor in of_layer]
        scaled = [tensors for tensors in of_tokens if shape.has_token_scales]
        shifted = [tensors for tensors in of_tokens if shape.has_token_zeros]
        self.key_scales, self.value_scales = [x[0] for x in scaled], [x[1] for x in scaled]
        self.key_zeros, self.value_zeros = [x[2] for x in shifted], [x[3] for x in shifted]
        self.page_bounds = [self._bounds[tensor] for tensor in of_layer if shape.page_bounds]
        self._host_pool: list[Tensor] = []
        if num_host_blocks:
            pool = new_pool(
                shape, num_host_blocks, torch.device("cpu"), pinned=self.device.type == "cuda"
            )
            self._host_pool = flat(pool)

    @classmethod
    def from_bytes(
        cls, shape: KVShape, num_bytes: int, *, host_bytes: int = 0, **options: Any
    ) -> KVCache:
        """As many blocks as fit into ``num_bytes`` (and ``host_bytes`` on the host).

        Raises:
            InvalidArgument: not even one block fits.
            InvalidType: a number of bytes that is no int.
        """
        check_ints("KVCache", num_bytes=num_bytes, host_bytes=host_bytes)
        if num_bytes < shape.block_bytes:
            raise InvalidArgument(
                f"KVCache: a block takes {shape.block_bytes:,} bytes, got {num_bytes:,}"
            )
        return cls(
            shape,
            num_bytes // shape.block_bytes,
            num_host_blocks=host_bytes // shape.block_bytes,
            **options,
        )

    @classmethod
    def from_free_memory(
        cls, shape: KVShape, fraction: float, *, device: torch.device | str, **options: Any
    ) -> KVCache:
        """As many blocks as fit into ``fraction`` of the memory that is free on ``device`` now."""
        if not 0 < fraction <= 1:
            raise InvalidArgument(
                f"KVCache: fraction: expected more than 0, up to 1, got {fraction}"
            )
        num_bytes = int(free_memory(torch.device(device)) * fraction)
        return cls.from_bytes(shape, num_bytes, device=device, **options)

    @property
    def is_freed(self) -> bool:
        """Whether :meth:`free` was called."""
        return not self.key_caches

    def free(self) -> None:
        """Gives the memory back. The cache cannot be used afterwards."""
        self.key_caches, self.value_caches, self.page_bounds = [], [], []
        self.key_scales, self.value_scales, self._scales_of_tokens = [], [], []
        self.key_zeros, self.value_zeros = [], []
        self._keys, self._values, self._bounds, self._host_pool = [], [], [], []

    # One layer of a forward pass.

    def write(self, layer: int, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        """Stores new tokens.

        Args:
            key, value: [num_tokens, num_kv_heads, head_size].
            slot_mapping: [num_tokens] int64; -1: not stored.
        """
        kc, vc = self._pages(layer)
        kind = self.shape.cache_dtype
        if kind == "int8_per_token" or kind == "int4_per_token":  # as a type checker reads it
            zeros = (self.key_zeros[layer], self.value_zeros[layer]) if self.key_zeros else ()
            vllm_kernels.reshape_and_cache_per_token_quant(
                key, value, kc, vc, self.key_scales[layer], self.value_scales[layer], slot_mapping,
                self.shape.layout, *zeros,
            )  # fmt: skip
            return
        scales = self._k_scales[layer], self._v_scales[layer]
        if not self._is_quantized:  # the writers want one element then
            scales = scales[0][:1], scales[1][:1]
        if self.shape.layout == "vllm":
            vllm_kernels.reshape_and_cache(key, value, kc, vc, slot_mapping, kind, *scales)
        else:
            if self.shape.layout == "HND":
                kc, vc = kc.transpose(1, 2), vc.transpose(1, 2)
            vllm_kernels.reshape_and_cache_flash(key, value, kc, vc, slot_mapping, kind, *scales)
        self._update_bounds(layer, slot_mapping)

    def rope_and_write(
        self,
        layer: int,
        positions: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cos_sin_cache: Tensor,
        slot_mapping: Tensor,
        *,
        is_neox: bool = True,
        q_weight: Tensor | None = None,
        k_weight: Tensor | None = None,
        epsilon: float = 1e-6,
    ) -> None:
        """:func:`vllm_kernels.rope_and_cache` with this layer's pages: rotates query in place, and
        stores the rotated key and value. (In several ops if tokens have scales of their own.)"""
        if self.shape.has_token_scales:
            self._pages(layer)
            key = key.clone()  # the caller's stays as it is
            for heads, weight in ((query, q_weight), (key, k_weight)):
                if weight is not None:
                    vllm_kernels.rms_norm(heads, heads, weight, epsilon)
            vllm_kernels.rotary_embedding(
                positions, query, key, self.shape.head_size, cos_sin_cache, is_neox
            )
            self.write(layer, key, value, slot_mapping)
            return
        vllm_kernels.rope_and_cache(
            positions,
            query,
            key,
            value,
            cos_sin_cache,
            is_neox,
            *self._pages(layer),
            slot_mapping,
            self.shape.layout,
            q_weight=q_weight,
            k_weight=k_weight,
            epsilon=epsilon,
            **self._scales_of(layer),
        )
        self._update_bounds(layer, slot_mapping)

    def decode(
        self,
        layer: int,
        qkv: Tensor,
        positions: Tensor,
        cos_sin_cache: Tensor,
        slot_mapping: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        *,
        q_weight: Tensor | None = None,
        k_weight: Tensor | None = None,
        epsilon: float = 1e-6,
        scale: float | None = None,
        sliding_window: int = 0,
    ) -> Tensor:
        """:func:`vllm_kernels.fused_decode_attention` with this layer's pages: that
        and :meth:`attend` for one token a sequence, from the packed product ``qkv`` on."""
        if self.shape.has_token_scales:
            kv_heads = self.shape.num_kv_heads
            heads = qkv.view(len(qkv), -1, self.shape.head_size)
            query, key, value = heads.tensor_split((-2 * kv_heads, -kv_heads), 1)
            self.rope_and_write(
                layer, positions, query, key, value, cos_sin_cache, slot_mapping,
                q_weight=q_weight, k_weight=k_weight, epsilon=epsilon,
            )  # fmt: skip
            return self.attend(
                layer, query, block_tables, seq_lens, scale=scale, sliding_window=sliding_window
            )
        out = vllm_kernels.fused_decode_attention(
            qkv,
            positions,
            cos_sin_cache,
            *self._pages(layer),
            slot_mapping,
            block_tables,
            seq_lens,
            scale=scale,
            q_weight=q_weight,
            k_weight=k_weight,
            epsilon=epsilon,
            sliding_window=sliding_window,
            layout=self.shape.layout,
            **self._scales_of(layer),
        )
        self._update_bounds(layer, slot_mapping)
        return out

    def select_pages(
        self,
        layer: int,
        query: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        budget: int,
        *,
        sink_pages: int = 1,
        recent_pages: int = 4,
        per_kv_head: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """:func:`vllm_kernels.select_pages` for ``query`` [num_seqs, num_heads, head_size] with
        this layer's bounds: block tables and lengths for :meth:`attend`."""
        self._pages(layer)
        if not self.page_bounds:
            raise Error("KVCache: select_pages: there are no bounds: give KVShape page_bounds")
        return vllm_kernels.select_pages(
            query,
            self.page_bounds[layer],
            block_tables,
            seq_lens,
            budget,
            block_size=self.shape.block_size,
            sink_pages=sink_pages,
            recent_pages=recent_pages,
            per_kv_head=per_kv_head,
        )

    def attend_sparq(
        self,
        layer: int,
        query: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        *,
        r: int,
        k: int,
        window: int | None = None,
        sink_tokens: int = 0,
        select: Literal["pages", "tokens"] = "pages",
        scale: float | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """:func:`vllm_kernels.sparq_attention` of ``query`` [num_seqs, num_heads, head_size] over
        this layer's pages. An 8-bit cache has one scale a layer then."""
        self._refuse_token_scales("attend_sparq")
        scales = {name: scale[:1] for name, scale in self._scales_of(layer).items()}
        return vllm_kernels.sparq_attention(
            query.contiguous(),
            *self._pages(layer),
            block_tables,
            seq_lens,
            r=r,
            k=k,
            window=window,
            sink_tokens=sink_tokens,
            select=select,
            scale=scale,
            layout=self.shape.layout,
            out=out,
            **scales,
        )

    def attend(
        self,
        layer: int,
        query: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        *,
        query_start_loc: Tensor | None = None,
        max_query_len: int | None = None,
        scale: float | None = None,
        sliding_window: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """:func:`vllm_kernels.paged_attention` of ``query`` [num_tokens, num_heads, head_size]
        over this layer's pages."""
        scales = self._scales_of(layer)
        if block_tables.dim() == 3 and self._is_quantized and not self._has_head_scales:
            scales = {name: scale[:1] for name, scale in scales.items()}
        return vllm_kernels.paged_attention(
            query,
            *self._pages(layer),
            block_tables,
            seq_lens,
            scale=scale,
            query_start_loc=query_start_loc,
            max_query_len=max_query_len,
            alibi_slopes=alibi_slopes,
            sliding_window=sliding_window,
            softcap=softcap,
            sinks=sinks,
            layout=self.shape.layout,
            **scales,
            out=out,
        )

    def attend_cascade(
        self,
        layer: int,
        query: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        plan: vllm_kernels.CascadePlan,
        *,
        scale: float | None = None,
        softcap: float = 0.0,
        out: Tensor | None = None,
    ) -> Tensor:
        """:func:`vllm_kernels.cascade_attention` of one query token a sequence over this layer's
        pages; as :meth:`attend` if ``plan`` has common blocks."""
        self._refuse_token_scales("attend_cascade")
        return vllm_kernels.cascade_attention(
            query,
            *self._pages(layer),
            block_tables,
            seq_lens,
            plan,
            scale=scale,
            softcap=softcap,
            layout=self.shape.layout,
            **self._scales_of(layer),
            out=out,
        )

    # Copies of whole blocks, as the manager asks for them: int64 [n, 2], (source, destination), the
    # array that its call returned, a tensor or a list.

    def copy(self, pairs: Pairs) -> None:
        """Copy-on-write: within the device, in every layer: ``cache.copy(manager.step(...))``.
        ``pairs`` on the CPU, for no wait, or on the device."""
        if len(pairs):
            mapping = mapping_of(pairs)
            vllm_kernels.copy_blocks(self._keys, self._values, mapping)
            others = [*self._bounds, *flat(self._scales_of_tokens)]
            if others:
                vllm_kernels.copy_blocks_mla(others, mapping)

    def swap_out(self, pairs: Pairs) -> None:
        """From the device to the host: ``cache.swap_out(manager.swap_out(...))``. ``pairs`` on the
        CPU."""
        for device, host, mapping in self._swaps(pairs):
            vllm_kernels.swap_blocks(device, host, mapping)

    def swap_in(self, pairs: Pairs) -> None:
        """From the host to the device: ``cache.swap_in(manager.swap_in(...))``. ``pairs`` on the
        CPU."""
        for device, host, mapping in self._swaps(pairs):
            vllm_kernels.swap_blocks(host, device, mapping)

    # Inner workings.

    def _pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """Key cache and value cache of a layer."""
        if not 0 <= layer < len(self.key_caches):
            if self.is_freed:
                raise Error("KVCache: it was freed: make a new one")
            raise InvalidIndex(
                f"KVCache: layer: expected 0 to {len(self.key_caches) - 1}, got {layer}"
            )
        return self.key_caches[layer], self.value_caches[layer]

    def _scales_of(self, layer: int) -> dict[str, Any]:
        """Of an 8-bit or int4 cache; others have none."""
        if self.shape.has_token_scales:
            scales = {
                "k_token_scales": self.key_scales[layer],
                "v_token_scales": self.value_scales[layer],
            }
            if not self.shape.has_token_zeros:
                return scales
            return scales | {
                "k_token_zeros": self.key_zeros[layer],
                "v_token_zeros": self.value_zeros[layer],
            }
        if not self._is_quantized:
            return {}
        return {"k_scale": self._k_scales[layer], "v_scale": self._v_scales[layer]}

    def _refuse_token_scales(self, function: str) -> None:
        if self.shape.has_token_scales:
            raise Unsupported(
                f"KVCache: {function}: expected another cache_dtype than {self.shape.cache_dtype}"
            )

    def _update_bounds(self, layer: int, slot_mapping: Tensor) -> None:
        """After a write to these slots."""
        if self.page_bounds:
            vllm_kernels.page_bounds_update(
                self.page_bounds[layer],
                self.key_caches[layer],
                slot_mapping,
                k_scale=self._k_scales[layer] if self._is_quantized else None,
                layout=self.shape.layout,
            )

    def _swaps(self, pairs: Pairs) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """For every tensor: it, its blocks on the host, and the pairs."""
        if not len(pairs):
            return
        if not self.num_host_blocks:
            raise Error("KVCache: swap: there are no host blocks: give num_host_blocks")
        mapping = mapping_of(pairs)
        pool = flat([self._keys, self._values, self._bounds, *self._scales_of_tokens])
        for device, host in zip(pool, self._host_pool):
            yield device, host, mapping
