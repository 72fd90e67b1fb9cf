// Gathers K and V to contiguous 16-bit keys in scratch memory, before a launch of prefill sm90. It
// pays for 8-bit caches: the kernel would otherwise dequantize a token once per block of query
// rows. It also serves pages that TMA cannot copy.
#pragma once
#include "cuda/attention/common/kernel_choice.h"
#include "cuda/launchers.h"

namespace vllm_kernels::cuda {

struct GatheredKeys {
  PagedAttentionParams params;  // of the attention over the result
  // Not null if a second launch is needed: sequence s was gathered if starts[s + 1] > starts[s].
  const int32_t* starts;
};

// Enqueues the gather for `choice`, which must have gathered_rows. `scratch` has gather_bytes() of
// memory.
GatheredKeys gather_keys(const PagedAttentionParams& p, const AttentionChoice& choice,
                         void* scratch, Stream stream);

}  // namespace vllm_kernels::cuda
