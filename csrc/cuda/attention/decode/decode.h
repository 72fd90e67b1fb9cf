// The launcher of paged_attention's decode kernels. instantiations/ has one small file per cache
// type, so that they compile in parallel.
#pragma once
#include "cuda/attention/common/kernel_choice.h"
#include "cuda/attention/common/workspace.h"
#include "ops/paged_attention.h"

namespace vllm_kernels::cuda {

// Cache: element type of the cache. The query is 16-bit; with a 16-bit cache it has its type.
template <typename Cache>
struct DecodeKernels {
  static void launch(const PagedAttentionParams& params, const KernelChoice& choice,
                     const DecodeWorkspace& workspace, void* stream);
};

}  // namespace vllm_kernels::cuda
