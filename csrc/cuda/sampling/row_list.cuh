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
  if (threadIdx.x < 2) shared.list.sizes[threadIdx.x] = 0;
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

// Sends this CTA's tokens of at least `edge` to the first CTA. Returns how many the row has. The
// first CTA's counter is the same for all, so a CTA adds to it once.
template <typename T, typename Cluster>
__device__ __forceinline__ int send_to_list(SelectShared& shared, const Slice& slice,
                                            uint32_t highest, uint32_t edge, int attempt) {
  const uint32_t lowest = edge > 0 ? edge : 1;
  List* list = Cluster::peer(&shared.list, 0);
  int mine = 0;
  if (highest >= lowest) {
    for_each_own<T>(slice, [&](uint32_t ordered, int) { mine += ordered >= lowest; });
  }
  const BlockSum sum = block_sum(shared, mine);
  if (threadIdx.x == 0) {
    const int all = static_cast<int>(sum.all);
    shared.list_begin = all > 0 ? atomicAdd(&list->sizes[attempt], all) : 0;
  }
  __syncthreads();
  int at = shared.list_begin + static_cast<int>(sum.before);
  if (mine > 0 && at + mine <= kRowThreads) {
    for_each_own<T>(slice, [&](uint32_t ordered, int index) {
      if (ordered < lowest) return;
      list->ordered[at] = ordered;
      list->tokens[at] = static_cast<uint32_t>(slice.begin + index);
      ++at;
    });
  }
  Cluster::sync();
  return list->sizes[attempt];
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
    size = send_to_list<T, Cluster>(shared, slice, highest, found.prefix, round);
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
  const int i = threadIdx.x;
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

}  // namespace vllm_kernels::cuda
