// Thresholds of the cache writers. Each has its unit and the measured row that supports it: one
// H200, bf16, 8 KV heads of 128 (docs/lab/small_ops/cache_writers.md).
#pragma once

namespace vllm_kernels::cuda {

// Layout vllm: up to kFewTokens tokens, a CTA stores scattered tokens from the values it has
// loaded. To get enough CTAs, it then takes at most kFewChunks 16-byte chunks of a head. kFewBlocks
// CTAs share its tokens. (Random slots, 16 tokens: 3.22 to 2.54 us.)
constexpr int kFewTokens = 64;
constexpr int kFewChunks = 4;
constexpr int kFewBlocks = 4;

// Layout vllm: up to this many tokens, inputs are prefetched into L2 before the PDL wait. With
// more, memory is busy anyway. (NHD, where each CTA of one token a thread prefetches, 16
// tokens: 1.07 to 0.85 us. No row for this value.)
constexpr int kPrefetchTokens = 1024;

// Layout NHD: above this many tokens a CTA has 256 threads, and a thread may move two tokens. (No
// row for this value.)
constexpr int kManyTokens = 1024;
// Layout NHD with 128 threads, 16- and 32-bit caches: up to this many tokens the kernel has more
// registers and fewer resident CTAs (kCrowd is false). 8-bit caches have one kernel for any number.
// (1024 tokens: 40 registers instead of 32 take 13% longer, as the next launch has no room.)
constexpr int kFewRowTokens = 512;
// Layout NHD: above so many 16-byte chunks in a row, a CTA has 128 threads, or 256. Shorter rows
// share a CTA. (No row.)
constexpr int kShortRowChunks = 16, kLongRowChunks = 128;

// attention_with_kvcache: up to this many new tokens a call, one launch writes them and computes
// the indices. Each CTA compares its slot with those of all later tokens. (No row.)
constexpr int64_t kMaxAppended = 1024;

// reshape_and_cache_per_token_quant: up to this many tokens a CTA is one warp. (No row.)
constexpr int kFewQuantTokens = 64;
// MLA cache ops: up to this many tokens a CTA takes one token. (No row.)
constexpr int kFewMlaTokens = 1024;

}  // namespace vllm_kernels::cuda
