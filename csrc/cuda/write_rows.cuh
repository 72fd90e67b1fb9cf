// The two writers of reshape_and_cache_flash.cu, which reshape_and_cache.cu also launches.
#pragma once
#include "cuda/launchers.h"
#include "cuda/types.cuh"
#include "ops/reshape_and_cache.h"

namespace vllm_kernels::cuda {

// Layout NHD.
void launch_rows(const ReshapeAndCacheParams& params, Stream stream);

// Any layout, alignment and size: an element a thread.
void launch_elements(const ReshapeAndCacheParams& params, Stream stream);

// 16-byte loads of key and value, from the first element of any head, are aligned.
inline bool inputs_aligned(const ReshapeAndCacheParams& p) {
  const int64_t width = 16 / size_of(p.dtype);
  return aligned16(p.key) && aligned16(p.value) && p.key_token_stride % width == 0 &&
         p.key_head_stride % width == 0 && p.value_token_stride % width == 0 &&
         p.value_head_stride % width == 0;
}

}  // namespace vllm_kernels::cuda
