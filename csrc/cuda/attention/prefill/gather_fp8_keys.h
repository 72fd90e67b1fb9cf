// Transposes V of an e4m3 cache to scratch memory, before prefill sm90 multiplies in 8 bits. K may
// be copied, too.
#pragma once
#include "cuda/attention/common/kernel_choice.h"
#include "ops/upcast_query.h"

namespace vllm_kernels::cuda {

struct Fp8Keys {
  // K lies where it was, or in scratch memory like V^T: as in layout NHD.
  PagedAttentionParams params;
  const int32_t* value_starts;  // [num_seqs] of V^T: each sequence's first row
};

// Enqueues the launches for a `choice` with fp8_rows. `scratch` is an Fp8Scratch.
Fp8Keys gather_fp8_keys(const PagedAttentionParams& p, const E4M3Query& query,
                        const AttentionChoice& choice, void* scratch, void* stream);

}  // namespace vllm_kernels::cuda
