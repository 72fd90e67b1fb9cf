"""FlashInfer's functions by their names, on this library's ops, on CPU and CUDA.

Attention over paged caches with tables in CSR form, merges, and writers of the cache. Log-sum-exps
are in base 2, as there. A name that is not served raises NotImplementedError.
:mod:`vllm_kernels.compat.flashinfer.sampling` has the sampling functions.

Example:
    >>> import vllm_kernels.compat.flashinfer as flashinfer
    >>> flashinfer.merge_states(torch.ones(2, 4, 1, 8), torch.zeros(2, 4, 1))[1].tolist()
    [[2.0], [2.0]]
"""

from ...errors import Unsupported
from . import sampling
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

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "append_paged_kv_cache",
    "get_batch_indices_positions",
    "get_seq_lens",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "sampling",
    "single_decode_with_kv_cache",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
]

_NOT_SERVED = (
    "BatchAttention",
    "BatchDecodeMlaWithPagedKVCacheWrapper",
    "BatchMLAPagedAttentionWrapper",
    "BlockSparseAttentionWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "PODWithPagedKVCacheWrapper",
    "VariableBlockSparseAttentionWrapper",
    "append_paged_mla_kv_cache",
    "trtllm_batch_context_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache",
)


def __getattr__(name: str) -> object:
    if name in _NOT_SERVED:
        raise Unsupported(f"flashinfer.{name}: not supported")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
