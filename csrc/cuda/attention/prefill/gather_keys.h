// Gathers K and V to contiguous 16-bit keys in scratch memory, before a launch of prefill sm90. It
// pays for 8-bit caches: the kernel would otherwise dequantize a token once per block of query
// rows. It also serves pages that TMA cannot copy.
#pragma once
#include "cuda/attention/common/kernel_choice.h"
#include "ops/gather_cache.h"

namespace vllm_kernels::cuda {

struct GatheredKeys {
  GatherCacheParams gather;     // the launch that fills them, after the one of gather_keys()
  PagedAttentionParams params;  // of the attention over the result
  // Not null if a second launch is needed: sequence s was gathered if starts[s + 1] > starts[s].
  const int32_t* starts;
};

// Enqueues the kernel that finds the first rows of the sequences, for a `choice` with
// gathered_rows. `scratch` has gather_bytes() of memory.
GatheredKeys gather_keys(const PagedAttentionParams& p, const AttentionChoice& choice,
                         void* scratch, void* stream);

}  // namespace vllm_kernels::cuda
