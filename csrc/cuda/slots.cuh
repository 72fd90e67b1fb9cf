// Slots that come up more than once in a call. The blocks of a launch run in no order, so two
// tokens that are written to one slot at the same time could leave a mixed row. Therefore a block
// looks through the slots of all later tokens before it writes and leaves out those of its tokens
// that come up again: exactly the last token of a slot is written, with whole rows.
//
// A launch takes at most kTokensPerLaunch tokens, which bounds the looking (16 slots a thread of
// 256); launches of one stream follow one another, so the last one wins there, too.
#pragma once
#include <cstdint>

#include "ops/reshape_and_cache.h"

namespace vllm_kernels::cuda {

constexpr int64_t kTokensPerLaunch = 8192;

// The tokens of a block, at most 32 of them, in shared memory.
struct OwnSlots {
  int32_t slot[32];     // -1: nothing to write
  uint32_t filter[32];  // 1024 bits; those of `slot`'s hashes are set
  uint32_t repeated;    // bit i: a later token has the slot of token i
};

__device__ __forceinline__ uint32_t slot_hash(int32_t slot) {
  return (static_cast<uint32_t>(slot) * 0x9e3779b1u) >> 22;
}

// By the first 32 threads of the block, together; `slot` is that of token first + lane, -1 when it
// has none. A barrier must follow.
__device__ __forceinline__ void put_own_slot(OwnSlots& own, int lane, int32_t slot) {
  own.slot[lane] = slot;
  own.filter[lane] = 0;
  if (lane == 0) own.repeated = 0;
  __syncwarp();
  const uint32_t hash = slot_hash(slot);
  if (slot >= 0) atomicOr(&own.filter[hash / 32], 1u << hash % 32);
}

// The slots of some later tokens, on their way to this thread: loaded before the block's own slots
// are known, so that the block waits for memory once.
struct LaterSlots {
  static constexpr int kBatch = 8;
  int64_t slot[kBatch];  // as given; -1 past the last token

  // Tokens from, from + threads, ...
  __device__ __forceinline__ void load(const ReshapeAndCacheParams& p, int from, int threads) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int token = from + i * threads;
      slot[i] = token < p.num_tokens ? p.slot_mapping[token] : -1;
    }
  }
};

// By all `threads` threads, after that barrier; ends with a barrier. `later` holds the tokens from
// first + 1 + thread on.
__device__ __forceinline__ uint32_t find_repeated(OwnSlots& own, const ReshapeAndCacheParams& p,
                                                  int first, int thread, int threads,
                                                  LaterSlots& later) {
  for (int from = first + 1 + thread; from < p.num_tokens; from += LaterSlots::kBatch * threads) {
    if (from != first + 1 + thread) later.load(p, from, threads);
    uint32_t suspects = 0;  // bit i: the filter knows the hash of later.slot[i]
#pragma unroll
    for (int i = 0; i < LaterSlots::kBatch; ++i) {
      const uint32_t hash = slot_hash(static_cast<int32_t>(later.slot[i]));
      suspects |= (own.filter[hash / 32] >> hash % 32 & 1) << i;
    }
    // Rare, and kept short: code that is jumped over costs instruction fetches all the same.
#pragma unroll 1
    while (suspects != 0) {
      const int token = from + (__ffs(suspects) - 1) * threads;
      suspects &= suspects - 1;
      const int32_t slot = token < p.num_tokens ? p.usable(p.slot_mapping[token]) : -1;
#pragma unroll 1
      for (int mine = 0; slot >= 0 && mine < 32 && first + mine < token; ++mine) {
        if (own.slot[mine] == slot) atomicOr(&own.repeated, 1u << mine);
      }
    }
  }
  __syncthreads();
  return own.repeated;
}

}  // namespace vllm_kernels::cuda
