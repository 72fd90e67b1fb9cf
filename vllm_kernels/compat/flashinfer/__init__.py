"""FlashInfer's functions by their names, on this library's ops, on CPU and CUDA.

Attention over paged caches with tables in CSR form, merges, and writers of the cache. Log-sum-exps
are in base 2, as there. A name that is not served raises a NotImplementedError, which is an
AttributeError, too. :mod:`vllm_kernels.compat.flashinfer.sampling` has the sampling functions.

Example:
    >>> import vllm_kernels.compat.flashinfer as flashinfer
    >>> flashinfer.merge_states(torch.ones(2, 4, 1, 8), torch.zeros(2, 4, 1))[1].tolist()
    [[2.0], [2.0]]
"""

from . import sampling
from ._common import not_served
from .cascade import merge_state, merge_state_in_place, merge_states
from .decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    single_decode_with_kv_cache,
)
from .page import append_paged_kv_cache, get_batch_indices_positions, get_seq_lens
from .prefill import (
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
)
from .sampling import (
    chain_speculative_sampling,
    min_p_sampling_from_probs,
    sampling_from_logits,
    sampling_from_probs,
    softmax,
    top_k_mask_logits,
    top_k_renorm_probs,
    top_k_sampling_from_probs,
    top_k_top_p_sampling_from_logits,
    top_k_top_p_sampling_from_probs,
    top_p_renorm_probs,
    top_p_sampling_from_probs,
)

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "append_paged_kv_cache",
    "chain_speculative_sampling",
    "get_batch_indices_positions",
    "get_seq_lens",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "min_p_sampling_from_probs",
    "sampling",
    "sampling_from_logits",
    "sampling_from_probs",
    "single_decode_with_kv_cache",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
    "softmax",
    "top_k_mask_logits",
    "top_k_renorm_probs",
    "top_k_sampling_from_probs",
    "top_k_top_p_sampling_from_logits",
    "top_k_top_p_sampling_from_probs",
    "top_p_renorm_probs",
    "top_p_sampling_from_probs",
]


def __getattr__(name: str) -> object:
    raise not_served("flashinfer", name, __all__)
