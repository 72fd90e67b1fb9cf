// Duplicate slots: a slot that several tokens of one call name. The last token must win, with its
// whole row. The CTAs of a launch run in no order. Two tokens written to one slot at the same time
// could leave a mixed row. Therefore a CTA scans the slots of all later tokens before it writes. It
// skips each own token whose slot a later token has.
//
// A launch takes at most kTokensPerLaunch tokens, which bounds the scan. Launches of one stream run
// one after the other, so the last token wins across launches, too.
//
// The scan, as the writers use it: LaterSlots loads slots early, an Own* struct tests them,
// find_duplicates() combines the CTA's threads. "Own" means: of this CTA's tokens.
#pragma once
#include <algorithm>
#include <cstdint>

#include "cuda/base/fast_divmod.cuh"
#include "ops/reshape_and_cache.h"

namespace vllm_kernels::cuda {

constexpr int64_t kTokensPerLaunch = 8192;

// The params of one launch: tokens of the call from `first` on, at most kTokensPerLaunch.
inline ReshapeAndCacheParams slice_of(const ReshapeAndCacheParams& all, int64_t first) {
  ReshapeAndCacheParams slice = all;
  const int64_t size = size_of(all.dtype);
  slice.num_tokens = std::min(kTokensPerLaunch, all.num_tokens - first);
  slice.slot_mapping += first;
  slice.key = static_cast<const char*>(all.key) + first * all.key_token_stride * size;
  slice.value = static_cast<const char*>(all.value) + first * all.value_token_stride * size;
  return slice;
}

// The functions below take as `p` any params struct with these members, or this struct.
struct SlotMapping {
  const int64_t* slot_mapping;  // [num_tokens]
  int64_t num_tokens;
  int64_t limit;  // slots of the cache, < 2^31

  __device__ __forceinline__ int32_t usable(int64_t slot) const {
    return static_cast<uint64_t>(slot) < static_cast<uint64_t>(limit) ? static_cast<int32_t>(slot)
                                                                      : -1;
  }
};

template <typename Slots>
__device__ __forceinline__ int32_t slot_of(const Slots& p, int token) {
  return token < static_cast<int>(p.num_tokens) ? p.usable(p.slot_mapping[token]) : -1;
}

// Slots of tokens after the CTA's own, in registers. They are loaded first, so that the CTA waits
// for memory only once. Only the lower 32 bits are kept. That suffices to rule a slot out, and
// takes half the registers.
template <int kBatch>
struct LaterSlots {
  int32_t slot[kBatch];  // INT32_MIN past the last token

  // Loads the slots of tokens from, from + threads, ...
  template <typename Slots>
  __device__ __forceinline__ void load(const Slots& p, int from, int threads) {
    const auto* half = reinterpret_cast<const int32_t*>(p.slot_mapping + from);
    const int left = static_cast<int>(p.num_tokens) - from;
    constexpr int kGroup = 8;
#pragma unroll
    for (int first = 0; first < kBatch; first += kGroup) {
      const int end = first + kGroup < kBatch ? first + kGroup : kBatch;
      // All tokens of the group exist: no bounds check per token.
      if (kBatch >= kGroup && left > (end - 1) * threads) {
#pragma unroll
        for (int i = first; i < end; ++i) slot[i] = half[2 * i * threads];
      } else {
#pragma unroll
        for (int i = first; i < end; ++i) {
          slot[i] = left > i * threads ? half[2 * i * threads] : INT32_MIN;
        }
      }
    }
  }
};

// The CTA's own slots, in four forms. Each has two functions. `candidates` returns a mask: bit i is
// set where later slot i may be an own slot. `find` takes a valid slot and returns a mask: bit t is
// set where it is own token t's.

// Own tokens 0, 1, ... on consecutive slots.
struct OwnRange {
  int32_t start;
  uint32_t count;

  template <int kBatch>
  __device__ __forceinline__ uint32_t candidates(const LaterSlots<kBatch>& later) const {
    uint32_t min_distance = ~0u;  // distance from `start`
#pragma unroll
    for (int slot : later.slot) {
      min_distance =
          __viaddmin_u32(static_cast<uint32_t>(slot), -static_cast<uint32_t>(start), min_distance);
    }
    return min_distance < count ? ~0u : 0;
  }
  __device__ __forceinline__ uint32_t find(int32_t slot) const {
    const auto token = static_cast<uint32_t>(slot - start);
    return token < count ? 1u << token : 0;
  }
};

// A few own tokens, in registers.
template <int kOwn>
struct OwnFew {
  int32_t slots[kOwn];  // -1: none

  template <int kBatch>
  __device__ __forceinline__ uint32_t candidates(const LaterSlots<kBatch>& later) const {
    bool any[kOwn] = {};  // one flag per own token: the comparisons are independent
#pragma unroll
    for (int slot : later.slot) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) any[i] |= slot == slots[i];
    }
    uint32_t all = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (any[i] && slots[i] >= 0) all = ~0u;
    }
    return all;
  }
  __device__ __forceinline__ uint32_t find(int32_t slot) const {
    uint32_t found = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) found |= static_cast<uint32_t>(slots[i] == slot) << i;
    return found;
  }
};

// Few own tokens, `from`, from + step, ... < end of a list in shared memory.
struct OwnList {
  const int32_t* slots;  // -1: none
  int from = 0;
  int end = 0;
  int step = 1;

  template <int kBatch>
  __device__ __forceinline__ uint32_t candidates(const LaterSlots<kBatch>& later) const {
    bool any = false;
#pragma unroll 1
    for (int token = from; token < end; token += step) {
      const int32_t slot = slots[token];
      if (slot < 0) continue;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) any |= later.slot[i] == slot;
    }
    return any ? ~0u : 0;
  }
  __device__ __forceinline__ uint32_t find(int32_t slot) const {
    uint32_t found = 0;
#pragma unroll 1
    for (int token = from; token < end; token += step) {
      if (slots[token] == slot) found |= 1u << token;
    }
    return found;
  }
};

// A Bloom filter of the own slots in shared memory (one hash). It rules out most other slots with
// one load.
struct SlotFilter {
  static constexpr uint32_t kBits = 4096;
  uint32_t words[kBits / 32];

  // Fills the filter. All lanes of one warp call it. `slot`: this lane's own slot, or -1.
  __device__ __forceinline__ void fill(int lane, int32_t slot) {
#pragma unroll
    for (uint32_t i = 0; i < kBits / 32; i += 32) words[i + lane] = 0;
    __syncwarp();
    if (slot >= 0) atomicOr(&words[slot % kBits / 32], 1u << slot % 32);
  }
  __device__ __forceinline__ uint32_t test(int32_t slot) const {
    return words[static_cast<uint32_t>(slot) % kBits / 32] >> (slot & 31) & 1;
  }
};

// Many own tokens: a list behind a filter.
struct OwnFiltered {
  const SlotFilter* filter;
  OwnList list;

  template <int kBatch>
  __device__ __forceinline__ uint32_t candidates(const LaterSlots<kBatch>& later) const {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) bits |= filter->test(later.slot[i]) << i;
    return bits;
  }
  __device__ __forceinline__ uint32_t find(int32_t slot) const { return list.find(slot); }
};

// This thread's share of the scan: tokens from, from + threads, ... Returns a mask: bit t is set
// where one of them has own token t's slot. `later` holds the first kBatch of these slots.
template <typename Own, int kBatch, typename Slots>
__device__ __forceinline__ uint32_t duplicates_later(const Slots& p, int from, int threads,
                                                     LaterSlots<kBatch> later, const Own& own) {
  uint32_t mine = 0;
#pragma unroll 1
  while (true) {
    uint32_t candidates = own.candidates(later);
#pragma unroll 1
    for (int i = 0; candidates != 0 && i < kBatch; ++i, candidates >>= 1) {
      const int token = from + i * threads;
      if ((candidates & 1) == 0 || token >= static_cast<int>(p.num_tokens)) continue;
      const int32_t slot = p.usable(p.slot_mapping[token]);
      if (slot >= 0) mine |= own.find(slot);
    }
    from += kBatch * threads;
    if (from >= static_cast<int>(p.num_tokens)) return mine;
    later.load(p, from, threads);
  }
}

// ORs `mine` over the CTA: bit t < kOwn of the result is set where any thread has it. All threads
// of the CTA call it.
template <int kOwn>
__device__ __forceinline__ uint32_t any_of_block(uint32_t mine) {
  if (__syncthreads_or(mine != 0) == 0) return 0;
  uint32_t all = 0;
#pragma unroll 1
  for (int i = 0; i < kOwn; ++i) {
    if (__syncthreads_or(mine >> i & 1)) all |= 1u << i;
  }
  return all;
}

// Scans all later tokens. Returns a mask: bit t < kOwn is set where a later token has own token t's
// slot. All threads of the CTA call it. `from` differs by thread: that of thread 0 plus the
// thread's index. The caller syncs the CTA after writing list and filter.
template <int kOwn, typename Own, int kBatch, typename Slots>
__device__ __forceinline__ uint32_t find_duplicates(const Slots& p, int from, int threads,
                                                    const LaterSlots<kBatch>& later,
                                                    const Own& own) {
  return any_of_block<kOwn>(duplicates_later(p, from, threads, later, own));
}

// Bit i: a higher lane has the slot of lane i. All lanes of the warp call it.
__device__ __forceinline__ uint32_t duplicates_in_warp(int lane, int32_t slot) {
  const uint32_t same = __match_any_sync(0xffffffffu, slot);
  return __ballot_sync(0xffffffffu, slot >= 0 && (same >> lane) > 1);
}

// Writes list and filter for OwnFiltered, and marks in `own_duplicates` the own tokens that a later
// own token repeats. The first warp calls it. `slot`: this lane's own slot, or -1. The caller syncs
// the CTA.
template <int kOwn>
__device__ __forceinline__ void list_own(int lane, int32_t slot, int32_t (&slots)[kOwn],
                                         SlotFilter& filter, uint32_t& own_duplicates) {
  static_assert(kOwn == 32);
  slots[lane] = slot;
  filter.fill(lane, slot);
  const uint32_t duplicates = duplicates_in_warp(lane, slot);
  if (lane == 0) own_duplicates = duplicates;
}

// Whether a token after `token` has its slot. All lanes of a warp call it for one token.
__device__ __forceinline__ bool is_duplicate(const SlotMapping& slots, int token, int64_t slot,
                                             int lane) {
  bool duplicate = false;
#pragma unroll 1
  for (int from = token + 1 + lane; from < static_cast<int>(slots.num_tokens); from += 4 * 32) {
    int64_t later[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      later[i] = from + i * 32 < slots.num_tokens ? slots.slot_mapping[from + i * 32] : -1;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) duplicate |= later[i] == slot;
  }
  return __any_sync(0xffffffffu, duplicate);
}

// A page and a token in that page.
struct Slot {
  int32_t block;
  int32_t token;
};

__device__ __forceinline__ Slot place_of(int32_t slot, FastDivisor block_size, int32_t size) {
  const auto block = static_cast<int32_t>(block_size.divide(slot));
  return {.block = block, .token = slot - block * size};
}

}  // namespace vllm_kernels::cuda
