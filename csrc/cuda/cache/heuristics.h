// Thresholds of the cache writers, with measured rows of an H200: bf16, 8 KV heads of 128
// (docs/lab/small_ops/cache_writers.md).
#pragma once

namespace vllm_kernels::cuda {

// Layout vllm: up to kFewTokens tokens, a CTA stores scattered tokens from the values it has
// loaded. To get enough CTAs, a CTA then takes at most kFewChunks chunks of a head, and kFewBlocks
// CTAs share its tokens. (Random slots, 16 tokens: 3.22 to 2.54 us.)
constexpr int kFewTokens = 64;
constexpr int kFewChunks = 4;
constexpr int kFewBlocks = 4;

// Up to this many tokens inputs are prefetched into L2 before the PDL wait. (NHD, 16 tokens: 1.07
// to 0.85 us.) With more, memory is busy anyway.
constexpr int kPrefetchTokens = 1024;

// Layout NHD: above this many tokens a CTA has 256 threads, and a thread may move two tokens.
constexpr int kManyTokens = 1024;
// Layout NHD with 128 threads: up to this many tokens, 8-bit caches have the kernel of more
// registers. (T = 256: few CTAs exist; a kernel of 64 registers serves it.)
constexpr int kFewRowTokens = 512;

}  // namespace vllm_kernels::cuda
