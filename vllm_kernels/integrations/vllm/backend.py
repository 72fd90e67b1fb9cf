"""The attention backend for vLLM's V1 engine, one class for CPUs and GPUs.

vLLM's CPU platform asks no backend what it serves: each layer comes here. So on a CPU the classes
inherit from vLLM's own, and a layer that is not served runs the inherited methods: encoders, cross
attention, odd head sizes. On a GPU vLLM asks first, and refuses CUSTOM with the reasons.

The cache of a layer is [num_blocks, num_kv_heads, block_size, 2 * head_size]; K and V of a token
lie side by side. All strides but the last are free, so vLLM's layouts HND and NHD both fit.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm import envs
from vllm.config import get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8StaticTensorSym
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
)

from ... import _C, _library
from ..._version import version
from ...errors import Unsupported
from ...ops import (
    paged_attention,
    paged_attention_workspace,
    reshape_and_cache_flash,
    rope_and_cache,
    static_scaled_fp8_quant,
)
from . import count
from .context_parallel import Shards, attend_to_shards

on_cpu = current_platform.is_cpu()
if on_cpu:
    from vllm.v1.attention.backends import cpu_attn

    _Backend = cpu_attn.CPUAttentionBackend
    _Impl, _Builder = cpu_attn.CPUAttentionBackendImpl, cpu_attn.CPUAttentionMetadataBuilder
else:
    _Backend, _Impl, _Builder = AttentionBackend, AttentionImpl, AttentionMetadataBuilder

# A child of vLLM's logger: others print nothing in vLLM's processes.
logger = init_logger("vllm.vllm_kernels")

FP8 = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
BLOCK_SIZES = [256, 128, 64, 32, 16]
SPLIT_SIZE = 2048
"""Tokens of a split in batch-invariant mode."""


def head_size_reason(head_size: int, kv_cache_dtype: str | None) -> str | None:
    step = 16 if kv_cache_dtype in FP8 else 8
    if head_size % step == 0 and 32 <= head_size <= 256:
        return None
    return f"head size {head_size}, not a multiple of {step} from 32 to 256"


def reason_not_served(
    head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, attn_type: str
) -> str | None:
    """Why a layer is left to vLLM; None: it is served."""
    own = str(dtype).removeprefix("torch.")
    if attn_type != AttentionType.DECODER:
        return f"attention type {getattr(attn_type, 'value', attn_type)}"
    if dtype not in Backend.supported_dtypes:
        return f"dtype {own}"
    if kv_cache_dtype not in (None, "auto", own, *FP8):
        return f"a KV cache of {kv_cache_dtype} for {own}"
    return head_size_reason(head_size, kv_cache_dtype)


class Backend(_Backend):
    """The class that vLLM takes as CUSTOM, and on a CPU with VLLM_KERNELS_VLLM=1 as CPU_ATTN."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar = ["auto", "float16", "bfloat16", "float32", *FP8]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # vLLM's name for a class that is not its own

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec: Any = None) -> list[Any]:
        head_size = getattr(kv_cache_spec, "head_size", 64)
        if on_cpu and head_size_reason(head_size, None):
            return super().get_supported_kernel_block_sizes()
        return BLOCK_SIZES

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *_: object
    ) -> str | None:
        if not (on_cpu or _library.cuda_loaded):
            return _library.cuda_reason
        return reason_not_served(head_size, dtype, kv_cache_dtype, AttentionType.DECODER)

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return capability.major >= 8

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True


@dataclass
class Metadata:
    """What a batch has in common for the layers of a group. Tensors are vLLM's persistent ones, so
    that a CUDA graph reads the next batch from the same places."""

    max_query_len: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    causal: bool | Tensor
    workspace: Tensor | None
    shard_lens: Tensor | None = None
    """[num_seqs], with decode context parallelism: tokens of the context on this rank."""
    combine: Callable[..., Any] | None = None


class Builder(_Builder):
    """Passes on what vLLM has computed; nothing is planned on the host."""

    # A graph is captured for one max_query_len, by which CUDA chooses the kernel.
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names)
        impls = [layer.impl for layer in layers.values()]
        # Layers of a group have one spec and one attention type: all or none are served.
        self.served = all(impl.served for impl in impls)
        self.supports_update_block_table = self.served
        if not self.served:
            super().__init__(kv_cache_spec, layer_names, vllm_config, device)
            return
        AttentionMetadataBuilder.__init__(self, kv_cache_spec, layer_names, vllm_config, device)
        for impl in impls:
            impl.move_to(device)
        sharded = impls[0].dcp_world_size > 1 and getattr(kv_cache_spec, "dcp_sharded", True)
        self.shards = Shards(vllm_config, impls, device) if sharded else None
        # One a builder: vLLM has a builder for each of the batches that it runs side by side.
        self.workspace = paged_attention_workspace(device) if device.type == "cuda" else None
        self.max_query_len = (
            vllm_config.scheduler_config.max_num_batched_tokens if envs.VLLM_BATCH_INVARIANT else 0
        )

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any:
        if not self.served:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        batch = common_attn_metadata
        metadata = Metadata(
            max_query_len=self.max_query_len or batch.max_query_len,
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            block_table=batch.block_table_tensor,
            slot_mapping=batch.slot_mapping,
            causal=batch.causal,
            workspace=self.workspace,
        )
        if self.shards is not None:
            metadata.combine = self.shards.combine
            metadata.shard_lens = self.shards.context_lens(batch.query_start_loc, batch.seq_lens)
        return metadata

    def update_block_table(self, metadata: Any, blk_table: Tensor, slot_mapping: Tensor) -> Any:
        changed = copy(metadata)
        changed.block_table, changed.slot_mapping = blk_table, slot_mapping
        return changed


class Impl(_Impl):
    """A layer: writes new tokens to its cache, and attends with one call for any batch."""

    # Decode context parallelism; vLLM's slots on a CPU do not know it.
    supports_dcp = can_return_lse_for_decode = not on_cpu
    lse_base_on_e = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        reason = reason_not_served(head_size, torch.get_default_dtype(), kv_cache_dtype, attn_type)
        self.served = reason is None
        if on_cpu:
            super().__init__(
                num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window,
                kv_cache_dtype, logits_soft_cap, attn_type, kv_sharing_target_layer_name, sinks,
            )  # fmt: skip
        elif reason is not None:
            raise Unsupported(f"vllm_kernels: attention layer: not served: {reason}")
        log_once(reason)
        self.num_heads, self.num_kv_heads, self.head_size = num_heads, num_kv_heads, head_size
        self.scale = float(scale)
        self.kv_cache_dtype = kv_cache_dtype
        self.cache_kind: Any = kv_cache_dtype if kv_cache_dtype in FP8 else "auto"
        self.window = sliding_window or 0
        self.softcap = float(logits_soft_cap or 0)
        self.sinks = self.float_sinks = sinks
        self.slopes = None
        if alibi_slopes is not None:
            self.slopes = torch.tensor(alibi_slopes, dtype=torch.float32)
        self.split_size = SPLIT_SIZE if envs.VLLM_BATCH_INVARIANT else 0
        self.shard: dict[str, Any] = {}  # what positions in a shard need; see Shards

    def move_to(self, device: torch.device) -> None:
        """After the weights are loaded and before graphs are captured: what the op takes."""
        if self.slopes is not None:
            self.slopes = self.slopes.to(device)
        if self.sinks is not None:
            self.float_sinks = self.sinks.to(device, torch.float32)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        super().process_weights_after_loading(act_dtype)
        if self.sinks is not None:
            self.move_to(self.sinks.device)

    def fused_output_quant_supported(self, quant_key: object) -> bool:
        return self.served and quant_key == kFp8StaticTensorSym

    def fused_rope_kvcache_supported(self) -> bool:
        return self.served and self.dcp_world_size == 1  # which needs the rotated keys

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        if not self.served:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
            return
        count("do_kv_cache_update")
        key_cache, value_cache = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        reshape_and_cache_flash(
            key, value, key_cache, value_cache, slot_mapping, self.cache_kind, layer._k_scale,
            layer._v_scale,
        )  # fmt: skip

    def do_rope_and_kv_cache_update(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor,
        cos_sin_cache: Tensor,
        is_neox: bool,
        kv_cache: Tensor,
        layer_slot_mapping: Tensor,
    ) -> None:
        """In one launch. ``key`` stays as it is: attention reads the cache."""
        count("do_rope_and_kv_cache_update")
        key_cache, value_cache, *scales = self.split_cache(layer, kv_cache)
        rope_and_cache(
            positions, query, key, value, cos_sin_cache, is_neox, key_cache, value_cache,
            layer_slot_mapping, "HND", *scales,
        )  # fmt: skip

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """query and output: [num_tokens, num_heads, head_size]. Tokens that query_start_loc leaves
        out are padding of CUDA graphs. No metadata: vLLM measures memory."""
        if not self.served:
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale,
                output_block_scale,
            )  # fmt: skip
        if attn_metadata is None:
            return output.zero_()
        count("forward")
        result = output if output_scale is None else torch.empty_like(query)
        cache = self.split_cache(layer, kv_cache)
        if attn_metadata.shard_lens is not None:
            attend_to_shards(self, query, key, value, cache, attn_metadata, result)
        elif isinstance(attn_metadata.causal, Tensor):
            self.attend_by_request(query, cache, attn_metadata, result)
        else:
            self.attend(query, cache, attn_metadata, result, attn_metadata.causal)
        if output_scale is not None:
            static_scaled_fp8_quant(output.flatten(1), result.flatten(1), output_scale)
        return output

    def split_cache(self, layer: Any, kv_cache: Tensor) -> tuple[Any, ...]:
        """Keys and values in layout HND, and their scales for 8 bits."""
        if self.cache_kind in FP8:
            kv_cache = kv_cache.view(FP8[self.cache_kind])
            return *kv_cache.split(self.head_size, dim=-1), layer._k_scale, layer._v_scale
        return *kv_cache.split(self.head_size, dim=-1), None, None

    def attend(
        self, query: Tensor, cache: tuple[Any, ...], metadata: Metadata, out: Tensor, causal: bool
    ) -> None:
        key_cache, value_cache, k_scale, v_scale = cache
        paged_attention(
            query, key_cache, value_cache, metadata.block_table, metadata.seq_lens,
            scale=self.scale, query_start_loc=metadata.query_start_loc,
            max_query_len=metadata.max_query_len, alibi_slopes=self.slopes,
            sliding_window=self.window, softcap=self.softcap, sinks=self.float_sinks,
            k_scale=k_scale, v_scale=v_scale, layout="HND", out=out, workspace=metadata.workspace,
            fixed_split_size=self.split_size, causal=causal,
            window_right=-1 if causal else self.window - 1,  # a window has two sides then
        )  # fmt: skip

    def attend_by_request(
        self, query: Tensor, cache: tuple[Any, ...], metadata: Metadata, out: Tensor
    ) -> None:
        """Where causal is a tensor [num_reqs]: attends both ways, and picks by token."""
        other = torch.empty_like(out)
        self.attend(query, cache, metadata, out, causal=True)
        self.attend(query, cache, metadata, other, causal=False)
        index = torch.arange(len(query), dtype=torch.int32, device=query.device)
        request = torch.searchsorted(metadata.query_start_loc[1:-1], index, right=True)
        is_causal = metadata.causal[request].bool()  # type: ignore[index]
        torch.where(is_causal[:, None, None], out, other, out=out)


def log_once(reason: str | None) -> None:
    """A line in vLLM's log for each thing that happens to layers of this process."""
    if reason is not None:
        logger.info_once("vllm_kernels leaves attention layers to vLLM: %s", reason)
        return
    where = f"CPU, level {_C.cpu_level()}" if on_cpu else "CUDA"
    logger.info_once("vllm_kernels %s serves attention layers (%s)", version, where)
