// Thresholds of rope_and_cache. Each has its unit and the measured row that supports it: one H200,
// bf16, 32 query and 8 KV heads of 128 (docs/lab/small_ops/rope_and_cache.md).
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
// launch(): min tokens for launch_writers(); rope_and_cache_kernel takes fewer. (Layout vllm, one
// token: rope_and_cache_kernel 2.3 us, launch_writers() 2.9. NHD, 16 tokens: 1.49 and 1.31.)
constexpr int kMinPagedWriterTokens = 2, kMinRowWriterTokens = 16;
// launch(): above this many slots launch_many() takes a slice. (1024 tokens: 7.9 us instead of 8.2.
// 256 tokens: 2.9 instead of 2.6.)
constexpr int kManySlots = 512;

}  // namespace vllm_kernels::cuda
