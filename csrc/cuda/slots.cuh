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
// has none.
__device__ __forceinline__ void put_own_slot(OwnSlots& own, int lane, int32_t slot) {
  own.slot[lane] = slot;
  own.filter[lane] = 0;
  if (lane == 0) own.repeated = 0;
  __syncwarp();
  const uint32_t hash = slot_hash(slot);
  if (slot >= 0) atomicOr(&own.filter[hash / 32], 1u << hash % 32);
}

// By all `threads` threads, after that; begins and ends with a barrier.
__device__ __forceinline__ uint32_t find_repeated(OwnSlots& own, const ReshapeAndCacheParams& p,
                                                  int first, int thread, int threads) {
  constexpr int kBatch = 4;  // loads under way; the first ones already before the barrier
  const int num_tokens = static_cast<int>(p.num_tokens);
  int32_t slots[kBatch];
  const auto load = [&](int from) {
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int later = from + j * threads;
      slots[j] = later < num_tokens ? p.usable(p.slot_mapping[later]) : -1;
    }
  };
  const int begin = first + 1 + thread;
  load(begin);
  __syncthreads();
  for (int from = begin; from < num_tokens; from += kBatch * threads) {
    if (from != begin) load(from);
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const uint32_t hash = slot_hash(slots[j]);
      if (slots[j] < 0 || (own.filter[hash / 32] >> hash % 32 & 1) == 0) continue;
      for (int i = 0; i < 32 && first + i < from + j * threads; ++i) {
        if (own.slot[i] == slots[j]) atomicOr(&own.repeated, 1u << i);
      }
    }
  }
  __syncthreads();
  return own.repeated;
}

}  // namespace vllm_kernels::cuda
