"""vllm_kernels: the kernels an LLM inference engine needs around its matrix products.

Every op runs on CPU and CUDA tensors and is for inference only. ``help(vllm_kernels.<op>)`` gives
shapes, dtypes, errors and an example. The examples need ``import torch, vllm_kernels``.

Attention
    paged_attention: decode, prefill and mixed batches over a paged cache. Use this one.
    varlen_attention: the same over contiguous keys.
    attention_with_kvcache: appends new tokens to a cache and attends, in one op.
    fused_decode_attention: a decode step from the QKV product on.
    sparq_attention, value_mean_update: decode attention that reads a part of K to choose pages.
    cascade_attention, cascade_plan, cascade_pays, CascadePlan: common prefixes, read once.
    merge_attn_states, combine_attn_partials: partial results by their log-sum-exp.
    paged_attention_v1, paged_attention_v2: vLLM's signatures.
    paged_attention_workspace, explain: scratch; which kernel a call runs.
Cache
    reshape_and_cache, reshape_and_cache_flash, reshape_and_cache_per_token_quant: write tokens.
    gather_paged_kv, cp_gather_cache, gather_cache, gather_and_maybe_dequant_cache: read them.
    concat_and_cache_mla, concat_mla_q, cp_gather_and_upconvert_fp8_kv_cache: latent attention.
    copy_blocks, copy_blocks_mla, swap_blocks, swap_blocks_batch, convert_fp8: copy and convert.
    copy_slots: moves tokens. page_bounds_update, select_pages: the pages that matter to a query.
Rotary embedding
    rotary_embedding, batched_rotary_embedding, fused_qk_norm_rope, rope_and_cache.
Norms
    rms_norm, fused_add_rms_norm, rms_norm_weightless, fused_add_rms_norm_weightless,
    gemma_rms_norm, gemma_fused_add_rms_norm.
    In 8 bits: rms_norm_static_fp8_quant, fused_add_rms_norm_static_fp8_quant,
    rms_norm_dynamic_per_token_quant, rms_norm_per_block_quant.
Activations
    silu_and_mul, silu_and_mul_split, mul_and_silu, gelu_and_mul, gelu_tanh_and_mul,
    fatrelu_and_mul, silu_and_mul_with_clamp, swigluoai_and_mul, gelu_new, gelu_fast, gelu_quick.
    In 8 bits: silu_and_mul_quant, silu_and_mul_per_block_quant.
Quantization
    scaled_fp8_quant, scaled_int8_quant, and the ops behind them: static_scaled_fp8_quant,
    dynamic_scaled_fp8_quant, dynamic_per_token_scaled_fp8_quant, static_scaled_int8_quant,
    dynamic_scaled_int8_quant.
Sampling
    sample: a token per request. token_logprobs, softmax, top_k_top_p_mask_, apply_token_bitmask_,
    apply_repetition_penalties, append_token_counts: its parts. spec_verify: which drafted tokens
    stay.
Errors
    Error, a RuntimeError, is the base of InvalidArgument, InvalidType, InvalidIndex, Unsupported,
    NonFiniteLogits and OutOfMemory. check raises what check mode has found on a GPU.

Modules
    vllm_kernels.kv_cache: KVCacheManager and BatchBuffers; kv_cache.tensors: KVCache and KVShape.
    vllm_kernels.distributed: ContextParallel, attention over the caches of several ranks.
    vllm_kernels.compat: flash_attn, flash_attn_interface and flashinfer, under their names.
    vllm_kernels.integrations: Engine, and transformers.
    vllm_kernels.reference: what each op means, in plain PyTorch.
"""

from . import _library
from . import ops as ops
from ._types import KVCacheDType, Layout
from ._version import version as __version__
from .errors import (
    EngineBusy,
    Error,
    InvalidArgument,
    InvalidIndex,
    InvalidType,
    NonFiniteLogits,
    OutOfMemory,
    UnknownRequest,
    Unsupported,
)
from .ops import (
    OPS,
    CascadePlan,
    append_token_counts,
    apply_repetition_penalties,
    apply_token_bitmask_,
    attention_with_kvcache,
    batched_rotary_embedding,
    cascade_attention,
    cascade_pays,
    cascade_plan,
    check,
    combine_attn_partials,
    concat_and_cache_mla,
    concat_mla_q,
    convert_fp8,
    copy_blocks,
    copy_blocks_mla,
    copy_slots,
    cp_gather_and_upconvert_fp8_kv_cache,
    cp_gather_cache,
    dynamic_per_token_scaled_fp8_quant,
    dynamic_scaled_fp8_quant,
    dynamic_scaled_int8_quant,
    explain,
    fatrelu_and_mul,
    fused_add_rms_norm,
    fused_add_rms_norm_static_fp8_quant,
    fused_add_rms_norm_weightless,
    fused_decode_attention,
    fused_qk_norm_rope,
    gather_and_maybe_dequant_cache,
    gather_cache,
    gather_paged_kv,
    gelu_and_mul,
    gelu_fast,
    gelu_new,
    gelu_quick,
    gelu_tanh_and_mul,
    gemma_fused_add_rms_norm,
    gemma_rms_norm,
    merge_attn_states,
    mul_and_silu,
    page_bounds_update,
    paged_attention,
    paged_attention_v1,
    paged_attention_v2,
    paged_attention_workspace,
    reshape_and_cache,
    reshape_and_cache_flash,
    reshape_and_cache_per_token_quant,
    rms_norm,
    rms_norm_dynamic_per_token_quant,
    rms_norm_per_block_quant,
    rms_norm_static_fp8_quant,
    rms_norm_weightless,
    rope_and_cache,
    rotary_embedding,
    sample,
    scaled_fp8_quant,
    scaled_int8_quant,
    select_pages,
    silu_and_mul,
    silu_and_mul_per_block_quant,
    silu_and_mul_quant,
    silu_and_mul_split,
    silu_and_mul_with_clamp,
    softmax,
    sparq_attention,
    spec_verify,
    static_scaled_fp8_quant,
    static_scaled_int8_quant,
    swap_blocks,
    swap_blocks_batch,
    swigluoai_and_mul,
    token_logprobs,
    top_k_top_p_mask_,
    value_mean_update,
    varlen_attention,
)

__all__ = [
    "OPS",
    "EngineBusy",
    "Error",
    "InvalidArgument",
    "InvalidIndex",
    "InvalidType",
    "KVCacheDType",
    "Layout",
    "NonFiniteLogits",
    "OutOfMemory",
    "UnknownRequest",
    "Unsupported",
    "__version__",
    "cuda_loaded",
    "check",
    "explain",
    "fused_add_rms_norm",
    "fused_add_rms_norm_weightless",
    "gemma_fused_add_rms_norm",
    "gemma_rms_norm",
    "rms_norm",
    "rms_norm_weightless",
    "fused_add_rms_norm_static_fp8_quant",
    "rms_norm_dynamic_per_token_quant",
    "rms_norm_per_block_quant",
    "rms_norm_static_fp8_quant",
    "dynamic_per_token_scaled_fp8_quant",
    "dynamic_scaled_fp8_quant",
    "dynamic_scaled_int8_quant",
    "scaled_fp8_quant",
    "scaled_int8_quant",
    "static_scaled_fp8_quant",
    "static_scaled_int8_quant",
    "batched_rotary_embedding",
    "fused_qk_norm_rope",
    "rope_and_cache",
    "rotary_embedding",
    "fatrelu_and_mul",
    "gelu_and_mul",
    "gelu_fast",
    "gelu_new",
    "gelu_quick",
    "gelu_tanh_and_mul",
    "mul_and_silu",
    "silu_and_mul",
    "silu_and_mul_per_block_quant",
    "silu_and_mul_quant",
    "silu_and_mul_split",
    "silu_and_mul_with_clamp",
    "swigluoai_and_mul",
    "concat_and_cache_mla",
    "concat_mla_q",
    "convert_fp8",
    "copy_blocks",
    "copy_blocks_mla",
    "cp_gather_and_upconvert_fp8_kv_cache",
    "cp_gather_cache",
    "gather_and_maybe_dequant_cache",
    "gather_cache",
    "gather_paged_kv",
    "reshape_and_cache",
    "reshape_and_cache_flash",
    "reshape_and_cache_per_token_quant",
    "swap_blocks",
    "copy_slots",
    "page_bounds_update",
    "select_pages",
    "sparq_attention",
    "value_mean_update",
    "attention_with_kvcache",
    "swap_blocks_batch",
    "combine_attn_partials",
    "fused_decode_attention",
    "merge_attn_states",
    "paged_attention",
    "paged_attention_v1",
    "paged_attention_v2",
    "paged_attention_workspace",
    "varlen_attention",
    "append_token_counts",
    "apply_repetition_penalties",
    "apply_token_bitmask_",
    "sample",
    "softmax",
    "spec_verify",
    "token_logprobs",
    "top_k_top_p_mask_",
    "cascade_attention",
    "cascade_pays",
    "cascade_plan",
    "CascadePlan",
]

cuda_loaded: bool = _library.cuda_loaded
