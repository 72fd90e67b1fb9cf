// Thresholds of rope_and_cache, with measured rows of an H200
// (docs/lab/small_ops/rope_and_cache.md).
#pragma once

namespace vllm_kernels::cuda {

// Up to this many tokens the kernel that prefetches its heads runs, with a token's K and V shared
// by the lanes of a few warps. (16 tokens: latency is the time.)
constexpr int kFewRopeTokens = 256;
// Above this many tokens the CTAs that rotate queries lie between those that store. One kind's
// instructions then overlap the other's memory accesses.
constexpr int kManyRopeTokens = 1024;

}  // namespace vllm_kernels::cuda
