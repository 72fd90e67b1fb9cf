// The `count` highest tokens of a row as a list in the first CTA, found without a look at every
// token's bin.
//
// Each thread knows the highest of its own tokens. If `count` threads have one at or above an edge,
// so have at least `count` tokens. So the edge comes from a radix round over 4096 highest tokens
// instead of 131,072, and only threads whose highest token reaches it look for more. On random
// rows little more than `count` tokens reach the edge of two rounds.
#pragma once
#include "cuda/sampling/row_load.cuh"

namespace vllm_kernels::cuda {

// The most tokens of which a list is tried.
constexpr int kMaxListed = kRowThreads * 3 / 4;

__device__ __forceinline__ void prepare_list(SelectShared& shared) {
  const int i = opaque(threadIdx.x);  // keeps no address in registers
  if (i < 3) shared.list.sizes[i] = 0;
  if (threadIdx.x == 0) {  // where fewer threads than `count` have a token, every token is listed
    shared.bin = 0;
    shared.before = shared.inside = 0;
  }
}

__device__ __forceinline__ void count_highest(Bins& bins, uint32_t highest, int round,
                                              const Radix& found) {
  if (highest == 0 || !in_radix_prefix(highest, found.prefix, round)) return;
  atomicAdd(&bins.low[highest >> radix_shift(round) & ((1u << radix_bits(round)) - 1)], 1u);
}

// Sends the tokens of this CTA with wanted(ordered bits) to the lists of the first kLists CTAs.
// Returns how many the row has. has_any: whether this thread may have one. The first CTA's counter
// is the same for all, so a CTA adds to it once.
template <typename T, typename Cluster, int kLists, typename Wanted>
__device__ __forceinline__ int send_to_lists(SelectShared& shared, const Slice& slice, bool has_any,
                                             int attempt, const Wanted& wanted) {
  int* size = Cluster::peer(&shared.list.sizes[attempt], 0);
  int mine = 0;
  if (has_any) for_each_own<T>(slice, [&](uint32_t ordered, int) { mine += wanted(ordered); });
  const BlockSum sum = block_sum(shared, mine);
  if (threadIdx.x == 0) {
    const int all = static_cast<int>(sum.all);
    shared.list_begin = all > 0 ? atomicAdd(size, all) : 0;
  }
  __syncthreads();
  int at = shared.list_begin + static_cast<int>(sum.before);
  if (mine > 0 && at + mine <= kRowThreads) {
    for_each_own<T>(slice, [&](uint32_t ordered, int index) {
      if (!wanted(ordered)) return;
#pragma unroll 1
      for (int rank = 0; rank < kLists; ++rank) {
        List* list = Cluster::peer(&shared.list, rank);
        list->ordered[at] = ordered;
        list->tokens[at] = static_cast<uint32_t>(slice.begin + index);
      }
      ++at;
    });
  }
  Cluster::sync();
  return *size;
}

// Lists at least `count` <= kMaxListed tokens. The current bins count the threads' highest tokens
// of round 0. Returns the number of listed tokens, more than kRowThreads if they do not fit. The
// first CTA must not end before the others.
template <typename T, typename Cluster>
__device__ __forceinline__ int list_highest(SelectShared& shared, BinSets& sets, const Slice& slice,
                                            uint32_t highest, uint32_t count) {
  Radix found;
  int size = 0;
#pragma unroll 1
  for (int round = 0; round < 2; ++round) {
    if (round > 0) count_highest(shared.bins[sets.current], highest, round, found);
    finish_round<Cluster, false>(shared, sets, round, found,
                                 [&](uint64_t, int) { return uint64_t{count}; });
    const uint32_t lowest = found.prefix > 0 ? found.prefix : 1;
    size = send_to_lists<T, Cluster, 1>(shared, slice, highest >= lowest, round,
                                        [&](uint32_t ordered) { return ordered >= lowest; });
    if (size <= kRowThreads || found.prefix == 0) break;
  }
  return size;
}

// The place of this thread's token in a list of at most a token per thread.
struct ListPlace {
  uint32_t ordered;
  uint32_t token;
  int by_logit;  // number of tokens before it in the order of falling logits
  int by_token;  // number of tokens before it in index order
};
__device__ __forceinline__ ListPlace place_in_list(List& list, int size) {
  const int i = opaque(threadIdx.x);  // keeps no address in registers
  if (i >= size && i < size + 3 && i < kRowThreads) {
    list.ordered[i] = 0;
    list.tokens[i] = 0xffffffffu;
  }
  __syncthreads();
  ListPlace place{0, 0, 0, 0};
  if (i >= size) return place;
  place.ordered = list.ordered[i];
  place.token = list.tokens[i];
#pragma unroll 2
  for (int j = 0; j < size; j += 4) {
    const uint4 tokens = *reinterpret_cast<const uint4*>(list.tokens + j);
    const uint32_t token_of[4] = {tokens.x, tokens.y, tokens.z, tokens.w};
    for_each_of(*reinterpret_cast<const uint4*>(list.ordered + j), [&](uint32_t ordered, int k) {
      const bool first = token_of[k] < place.token;
      place.by_token += first;
      place.by_logit += ordered > place.ordered || (ordered == place.ordered && first);
    });
  }
  return place;
}

// --- top-p ---------------------------------------------------------------------------------------

// How far a logit is below the highest one, in steps of 28 / 2^22: 22 bits that never fall where
// the logit rises. Weights are 0 from 27.8 below on. Radix bins of ordered bits would be few and
// full, and atomic additions of weights to one bin take turns. Of these steps, random rows fill
// hundreds of the 2048 bins of the upper 11 bits.
constexpr int kLogitBits = 22;
__device__ __forceinline__ uint32_t logit_steps(uint32_t ordered, float max) {
  constexpr float kMax = (1 << kLogitBits) - 1, kStepsPerUnit = (1 << kLogitBits) / 28.0f;
  const float below = (max - from_ordered_bits(ordered)) * kStepsPerUnit;
  return static_cast<uint32_t>(kMax) - static_cast<uint32_t>(fminf(below, kMax));
}

// The ordered bits of the logits whose upper 11 bits of steps are `bin`, and some more. Comparing
// costs less than computing a token's steps.
struct BinRange {
  uint32_t lowest, span;

  __device__ __forceinline__ BinRange(uint32_t bin, float max) {
    constexpr float kWidth = 28.0f / kRadixBins;
    const float below = static_cast<float>(kRadixBins - 1 - bin) * kWidth;
    lowest = ordered_bits(max - (below + 2 * kWidth));
    span = ordered_bits(max - fmaxf(below - kWidth, 0.0f)) - lowest;
  }
  __device__ __forceinline__ bool may_hold(uint32_t ordered) const {
    return ordered - lowest <= span;
  }
};

// As select() by weight, for a row with at most kRowThreads tokens in the same step. Two rounds
// find the step that holds the threshold. Its tokens become a list in every CTA, where they are
// ordered. Returns false if they are too many.
template <typename Cluster, typename TargetOf>
__device__ __forceinline__ bool select_by_steps(SelectShared& shared, BinSets& sets,
                                                const Slice& slice, uint32_t lowest, float max,
                                                Radix& found, const TargetOf& target_of) {
  for_each_token(slice, [&](uint32_t ordered) {
    if (ordered < lowest) return;
    const uint64_t weight = weight_of(ordered, max);
    if (weight == 0) return;
    add_weight(shared.bins[sets.current], logit_steps(ordered, max) / kRadixBins, weight);
  });
  finish_round<Cluster, true>(shared, sets, 0, found, target_of);
  const uint32_t bin = found.prefix >> radix_shift(0);
  const BinRange range(bin, max);
  for_each_token(slice, [&](uint32_t ordered) {
    if (!range.may_hold(ordered) || ordered < lowest) return;
    const uint32_t steps = logit_steps(ordered, max);
    const uint64_t weight = weight_of(ordered, max);
    if (steps / kRadixBins != bin || weight == 0) return;
    add_weight(shared.bins[sets.current], steps % kRadixBins, weight);
  });
  finish_round<Cluster, true>(shared, sets, 1, found, target_of);
  const uint32_t border = found.prefix >> radix_shift(1);
  // Parked in shared memory while the list is made, to save registers.
  if (threadIdx.x == 0) shared.above[0] = found.before;
  const int size =
      send_to_lists<float, Cluster, Cluster::kSize>(shared, slice, true, 2, [&](uint32_t ordered) {
        return range.may_hold(ordered) && ordered >= lowest && logit_steps(ordered, max) == border;
      });
  if (size > kRowThreads) return false;
  found.before = shared.above[0];
  auto* weights = reinterpret_cast<uint64_t*>(shared.bins[0].low);  // by falling logit
  uint32_t* values = shared.bins[0].high;
  const int i = opaque(threadIdx.x);  // keeps no address in registers
  const ListPlace place = place_in_list(shared.list, size);
  if (i < size) {
    weights[place.by_logit] = weight_of(place.ordered, max);
    values[place.by_logit] = place.ordered;
  }
  __syncthreads();
  const uint64_t weight = i < size ? weights[i] : 0;
  const uint32_t value = i < size ? values[i] : 0;
  const BlockSum sum = block_sum(shared, weight);
  const uint64_t target = target_of(0, 1) - found.before;  // behind round 0 it stays the same
  if (sum.before < target && target <= sum.before + weight) shared.bin = value;
  __syncthreads();
  found.prefix = shared.bin;
  found.before += block_sum(shared, value > found.prefix ? weight : 0).all;
  return true;
}

}  // namespace vllm_kernels::cuda
