// Copies K and V of an e4m3 cache to scratch memory, V transposed, before prefill sm90 multiplies
// in 8 bits.
#pragma once
#include "cuda/attention/common/kernel_choice.h"
#include "ops/upcast_query.h"

namespace vllm_kernels::cuda {

// Enqueues the launches for a `choice` with fp8_rows. Returns the parameters of the attention over
// the result. `scratch` is an Fp8Scratch.
PagedAttentionParams gather_fp8_keys(const PagedAttentionParams& p, const E4M3Query& query,
                                     const AttentionChoice& choice, void* scratch, void* stream);

}  // namespace vllm_kernels::cuda
