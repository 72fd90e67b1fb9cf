"""The ops as typed Python calls.

Names and argument order are those of vLLM's ``_custom_ops``, so a call site moves over by changing
the import; docs/from_vllm.md names the exceptions. Every op runs on CPU and CUDA tensors, writes
into tensors the caller owns, and is for inference only: under grad mode a tensor that requires grad
is refused.

``torch.ops.vllm_kernels.<op>`` are the same ops without the grad check.
"""

from __future__ import annotations

import torch

from .. import _library
from .._ops import library_ops
from ..errors import InvalidIndex
from ._explain import explain
from ._fake import register_fakes
from .activation import (
    fatrelu_and_mul,
    gelu_and_mul,
    gelu_fast,
    gelu_new,
    gelu_quick,
    gelu_tanh_and_mul,
    mul_and_silu,
    silu_and_mul,
    silu_and_mul_per_block_quant,
    silu_and_mul_quant,
    silu_and_mul_split,
    silu_and_mul_with_clamp,
    swigluoai_and_mul,
)
from .attention_with_kvcache import attention_with_kvcache
from .cascade import (
    CascadePlan,
    cascade_attention,
    cascade_pays,
    cascade_plan,
)
from .copy_blocks import (
    convert_fp8,
    copy_blocks,
    copy_blocks_mla,
    swap_blocks,
    swap_blocks_batch,
)
from .fused_decode_attention import fused_decode_attention
from .gather_cache import (
    cp_gather_cache,
    gather_and_maybe_dequant_cache,
    gather_cache,
    gather_paged_kv,
)
from .merge_attn_states import combine_attn_partials, merge_attn_states
from .mla_cache import (
    concat_and_cache_mla,
    concat_mla_q,
    cp_gather_and_upconvert_fp8_kv_cache,
)
from .norm import (
    fused_add_rms_norm,
    fused_add_rms_norm_weightless,
    gemma_fused_add_rms_norm,
    gemma_rms_norm,
    rms_norm,
    rms_norm_weightless,
)
from .norm_quant import (
    fused_add_rms_norm_static_fp8_quant,
    rms_norm_dynamic_per_token_quant,
    rms_norm_per_block_quant,
    rms_norm_static_fp8_quant,
)
from .paged_attention import paged_attention, paged_attention_workspace
from .paged_attention_v1_v2 import paged_attention_v1, paged_attention_v2
from .pages import copy_slots, page_bounds_update, select_pages
from .quant import (
    dynamic_per_token_scaled_fp8_quant,
    dynamic_scaled_fp8_quant,
    dynamic_scaled_int8_quant,
    scaled_fp8_quant,
    scaled_int8_quant,
    static_scaled_fp8_quant,
    static_scaled_int8_quant,
)
from .reshape_and_cache import (
    reshape_and_cache,
    reshape_and_cache_flash,
    reshape_and_cache_per_token_quant,
)
from .rotary import (
    batched_rotary_embedding,
    fused_qk_norm_rope,
    rope_and_cache,
    rotary_embedding,
)
from .sampling import (
    append_token_counts,
    apply_repetition_penalties,
    apply_token_bitmask_,
    sample,
    softmax,
    spec_verify,
    token_logprobs,
    top_k_top_p_mask_,
)
from .sparq import sparq_attention, value_mean_update
from .varlen_attention import varlen_attention

__all__ = [
    "check",
    "explain",
    # norm
    "fused_add_rms_norm",
    "fused_add_rms_norm_weightless",
    "gemma_fused_add_rms_norm",
    "gemma_rms_norm",
    "rms_norm",
    "rms_norm_weightless",
    # norm_quant
    "fused_add_rms_norm_static_fp8_quant",
    "rms_norm_dynamic_per_token_quant",
    "rms_norm_per_block_quant",
    "rms_norm_static_fp8_quant",
    # quant
    "dynamic_per_token_scaled_fp8_quant",
    "dynamic_scaled_fp8_quant",
    "dynamic_scaled_int8_quant",
    "scaled_fp8_quant",
    "scaled_int8_quant",
    "static_scaled_fp8_quant",
    "static_scaled_int8_quant",
    # rotary
    "batched_rotary_embedding",
    "fused_qk_norm_rope",
    "rope_and_cache",
    "rotary_embedding",
    # activation
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
    # cache
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
    "swap_blocks_batch",
    # pages
    "copy_slots",
    "page_bounds_update",
    "select_pages",
    # sparq
    "sparq_attention",
    "value_mean_update",
    # attention
    "attention_with_kvcache",
    "combine_attn_partials",
    "fused_decode_attention",
    "merge_attn_states",
    "paged_attention",
    "paged_attention_v1",
    "paged_attention_v2",
    "paged_attention_workspace",
    "varlen_attention",
    # sampling
    "append_token_counts",
    "apply_repetition_penalties",
    "apply_token_bitmask_",
    "sample",
    "softmax",
    "spec_verify",
    "token_logprobs",
    "top_k_top_p_mask_",
    # cascade
    "cascade_attention",
    "cascade_pays",
    "cascade_plan",
    "CascadePlan",
]

_no_ops = {
    "CascadePlan",
    "cascade_attention",
    "cascade_pays",
    "cascade_plan",
    "check",
    "explain",
    "paged_attention_workspace",
    "scaled_fp8_quant",
    "scaled_int8_quant",
}
OPS = [name for name in __all__ if name not in _no_ops]
"""Every op of the library."""


def check() -> None:
    """Waits for the GPUs that run checks, and raises the error that check mode has found there.

    With ``VLLM_KERNELS_CHECK=1`` in the environment every CUDA op also scans its index tensors
    (slots, positions, lengths, block tables). The first bad value, which the kernels skip, is
    raised by a later op, or at once by this call; under CUDA-graph replay too. On the CPU every
    call checks its index tensors anyway, and this function does nothing.

    Raises:
        InvalidIndex: for a bad value that an op met on a GPU, with op, argument, index and value.

    Example:
        >>> vllm_kernels.check()  # nothing was found
    """
    if _library.cuda_loaded and torch.cuda.is_initialized():
        for device in library_ops.scanned_devices.default():
            torch.cuda.synchronize(device)
        try:
            library_ops.raise_bad_index.default()
        except RuntimeError as error:
            raise InvalidIndex(str(error)) from None


register_fakes(OPS)
_library.explain_missing_cuda(OPS)
