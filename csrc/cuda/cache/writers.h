// The two writers of reshape_and_cache_flash.cu, which reshape_and_cache.cu also launches.
#pragma once
#include "cuda/launchers.h"
#include "ops/reshape_and_cache.h"

namespace vllm_kernels::cuda {

// Layout NHD.
void launch_rows(const ReshapeAndCacheParams& params, Stream stream);

// Any layout, alignment and size: an element a thread.
void launch_elements(const ReshapeAndCacheParams& params, Stream stream);

}  // namespace vllm_kernels::cuda
