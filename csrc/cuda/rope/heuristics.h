// Thresholds of rope_and_cache. Each has its unit and the measured row that supports it: one H200,
// bf16, 32 query and 8 KV heads of 128 (docs/lab/small_ops/rope_and_cache.md). rope_and_cache.cu
// has three more in launch().
#pragma once

namespace vllm_kernels::cuda {

// rope_and_cache_kernel: up to this many tokens a lane prefetches its row into L2 before the PDL
// wait. Each warp also checks by itself for a duplicate slot. Latency bounds so few tokens. (No row
// for this value.)
constexpr int kFewRopeTokens = 256;
// launch_writers(): above this many tokens, CTAs that rotate queries are interleaved with CTAs that
// store. The instructions of one kind then overlap the memory accesses of the other. (NHD, 4096
// tokens: 28.5 to 29.0 us interleaved, 30.5 us with storing CTAs first or last.)
constexpr int kManyRopeTokens = 1024;

}  // namespace vllm_kernels::cuda
