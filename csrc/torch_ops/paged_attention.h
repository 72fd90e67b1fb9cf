// What the ops over paged attention share.
#pragma once
#include "ops/paged_attention.h"
#include "torch_ops/check.h"

namespace vllm_kernels {

// Runs the kernel of v1 and v2: layout vllm, one query token a sequence.
void launch_decode(const PagedAttentionParams& params, const Tensor& query);

}  // namespace vllm_kernels
