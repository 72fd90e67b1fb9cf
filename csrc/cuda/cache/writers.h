// The two launchers of reshape_and_cache_flash.cu, which reshape_and_cache.cu calls, too.
#pragma once
#include "cuda/launchers.h"
#include "ops/reshape_and_cache.h"

namespace vllm_kernels::cuda {

// Layout NHD; falls back to launch_elements() where 16-byte accesses are not aligned.
void launch_rows(const ReshapeAndCacheParams& params, Stream stream);

// Any layout, alignment and size: one element a thread.
void launch_elements(const ReshapeAndCacheParams& params, Stream stream);

}  // namespace vllm_kernels::cuda
