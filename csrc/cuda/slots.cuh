// Slots that come up more than once in a call. The blocks of a launch run in no order, so two
// tokens that are written to one slot at the same time could leave a mixed row. Therefore a block
// looks through the slots of all later tokens before it writes and leaves out those of its tokens
// that come up again: exactly the last token of a slot is written, with whole rows.
//
// A launch takes at most kTokensPerLaunch tokens, which bounds the looking; launches of one stream
// follow one another, so the last one wins there, too.
#pragma once
#include <cstdint>

#include "cuda/fast_divisor.cuh"
#include "ops/reshape_and_cache.h"

namespace vllm_kernels::cuda {

constexpr int64_t kTokensPerLaunch = 8192;

// What the functions below take for `p`: these members of ReshapeAndCacheParams, or this struct.
struct SlotMapping {
  const int64_t* slot_mapping;  // [num_tokens]
  int64_t num_tokens;
  int64_t limit;  // slots of the cache

  __device__ __forceinline__ int32_t usable(int64_t slot) const {
    return slot >= 0 && slot < limit ? static_cast<int32_t>(slot) : -1;
  }
};

template <typename Slots>
__device__ __forceinline__ int32_t slot_of(const Slots& p, int token) {
  return token < static_cast<int>(p.num_tokens) ? p.usable(p.slot_mapping[token]) : -1;
}

// Slots of tokens behind the block's own, on their way to this thread: loaded before anything else
// is known, so that the block waits for memory once.
struct LaterSlots {
  static constexpr int kBatch = 4;
  int64_t slot[kBatch];  // as given; -1 past the last token

  // Tokens from, from + threads, ...
  template <typename Slots>
  __device__ __forceinline__ void load(const Slots& p, int from, int threads) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int token = from + i * threads;
      slot[i] = token < static_cast<int>(p.num_tokens) ? p.slot_mapping[token] : -1;
    }
  }
};

// A block's own tokens that are looked for: a range of neighbouring slots, which are those of
// tokens 0, 1, ..., and tokens of a list in shared memory, every `step`-th.
struct OwnSlots {
  int32_t start = 0;
  uint32_t count = 0;
  const int32_t* list = nullptr;  // -1: none
  int from = 0;
  int end = 0;
  int step = 1;
};

// Bit i: some token from `from` on has the slot of own token i < kOwn. By all threads of the block
// together, each with its own `from` (that of the first thread + its number) and `later` loaded
// there; a barrier after the list was written is the caller's.
template <int kOwn, typename Slots>
__device__ __forceinline__ uint32_t find_repeated(const Slots& p, int from, int threads,
                                                  LaterSlots later, const OwnSlots& own) {
  uint32_t mine = 0;
#pragma unroll 1
  while (true) {
    int32_t slots[LaterSlots::kBatch];
#pragma unroll
    for (int i = 0; i < LaterSlots::kBatch; ++i) {
      slots[i] = p.usable(later.slot[i]);
      const auto token = static_cast<uint32_t>(slots[i] - own.start);
      if (token < own.count) mine |= 1u << token;
    }
    if constexpr (kOwn > 1) {
#pragma unroll 1
      for (int token = own.from; token < own.end; token += own.step) {
        const int32_t slot = own.list[token] < 0 ? INT32_MIN : own.list[token];
        bool hit = false;
#pragma unroll
        for (int i = 0; i < LaterSlots::kBatch; ++i) hit |= slots[i] == slot;
        mine |= static_cast<uint32_t>(hit) << token;
      }
    }
    from += LaterSlots::kBatch * threads;
    if (from >= static_cast<int>(p.num_tokens)) break;
    later.load(p, from, threads);
  }
  if (__syncthreads_or(mine != 0) == 0) return 0;
  uint32_t repeated = 0;
#pragma unroll 1
  for (int i = 0; i < kOwn; ++i) {
    if (__syncthreads_or(mine >> i & 1)) repeated |= 1u << i;
  }
  return repeated;
}

// Bit i: a later lane has the slot of lane i. By a whole warp.
__device__ __forceinline__ uint32_t repeated_in_warp(int lane, int32_t slot) {
  const uint32_t same = __match_any_sync(0xffffffffu, slot);
  return __ballot_sync(0xffffffffu, slot >= 0 && (same >> lane) > 1);
}

// Whether a token after `token` has its slot. By a whole warp, of one token.
__device__ __forceinline__ bool comes_again(const SlotMapping& slots, int token, int64_t slot,
                                            int lane) {
  bool again = false;
#pragma unroll 1
  for (int from = token + 1 + lane; from < static_cast<int>(slots.num_tokens); from += 4 * 32) {
    int64_t later[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      later[i] = from + i * 32 < slots.num_tokens ? slots.slot_mapping[from + i * 32] : -1;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) again |= later[i] == slot;
  }
  return __any_sync(0xffffffffu, again);
}

// A page and a token in it.
struct Place {
  int32_t block;
  int32_t token;
};

__device__ __forceinline__ Place place_of(int32_t slot, FastDivisor block_size, int32_t size) {
  const auto block = static_cast<int32_t>(block_size.divide(slot));
  return {.block = block, .token = slot - block * size};
}

}  // namespace vllm_kernels::cuda
