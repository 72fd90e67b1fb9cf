// The few highest tokens of a row, as row_list.cuh has them, with less work per token. Behind the
// load there is one barrier of the cluster. The slice holds logits as they are: load_logits()
// (row_load.cuh).
//
//   edge    an edge that `count` threads reach is reached by at least `count` tokens. Each CTA
//           finds one for its own tokens
//   list    each CTA sends its tokens from there on to the first CTA
//   barrier behind it every CTA knows whether all lists fit
//   end     the first CTA divides the listed logits by the temperature and finds an edge of the row
//
// Division rounds, so several logits may have one quotient. A list begins at the lowest logit whose
// quotient may reach that of the edge. -inf has weight 0 and is not listed.
#pragma once
#include <cfloat>

#include "cuda/sampling/row_list.cuh"

namespace vllm_kernels::cuda {

// The most tokens that are looked for in this way, and the room for the list of a CTA.
constexpr int kMaxFew = 128;
template <typename Cluster>
constexpr int kFewRoom = sizeof(Bins) / sizeof(uint64_t) / Cluster::kSize;

// Where an edge is good enough.
constexpr int enough_of(int count) {
  return count + count / 8 + 8;
}
static_assert(enough_of(kMaxFew) <= kRowThreads);  // keys are distinct: list_few() lists no more

// An edge that at least `count` keys reach, and no more than necessary or than a few too many. At
// least `count` reach `low`, none exceeds `high`. reached_by(edge): how many reach it.
template <typename Key, typename ReachedBy>
__device__ __forceinline__ Key edge_of(Key low, Key high, int count, const ReachedBy& reached_by) {
  const int enough = enough_of(count);
#pragma unroll 1
  while (low < high) {
    const Key middle = low + (high - low) / 2 + 1;
    const int reached = reached_by(middle);
    if (reached < count) {
      high = middle - 1;
      continue;
    }
    low = middle;
    if (reached <= enough) break;
  }
  return low;
}

// Of the highest logits of a CTA's threads, in ordered bits: the highest, and the number and the
// lowest of those above -inf.
struct HighestRange {
  uint32_t lowest, highest;
  int number;
};
__device__ __forceinline__ HighestRange range_of_highest(SelectShared& shared, uint32_t highest) {
  constexpr uint32_t kAll = 0xffffffffu;
  const bool counts = highest > kOrderedMinusInfinity;
  const int thread = opaque(threadIdx.x);  // keeps no address in registers
  const int warp = thread / kWarpSize, lane = thread % kWarpSize;
  const uint32_t most = __reduce_max_sync(kAll, highest);
  const uint32_t fewest = __reduce_min_sync(kAll, counts ? highest : kAll);
  if (lane == 0) shared.warp_keys[warp] = uint64_t{most} << 32 | fewest;
  const int number = __syncthreads_count(counts);
  const uint64_t key = shared.warp_keys[lane % kRowWarps];
  return {__reduce_min_sync(kAll, static_cast<uint32_t>(key)),
          __reduce_max_sync(kAll, static_cast<uint32_t>(key >> 32)), number};
}

// Ordered bits of a logit divided by the temperature.
__device__ __forceinline__ uint32_t quotient_of(uint32_t ordered, float temperature) {
  return ordered_bits(from_ordered_bits(ordered) / temperature);
}

// A lower bound of all finite logits whose quotient reaches `quotient`. Their exact quotients
// exceed the number before `quotient`, so they exceed the product of that and the temperature.
__device__ __forceinline__ float lowest_with_quotient(uint32_t quotient, float temperature) {
  constexpr uint32_t kZero = 0x80000000u;  // ordered_bits() never returns those of -0, below it
  if (quotient <= kOrderedMinusInfinity + 1) return -FLT_MAX;
  const uint32_t before = quotient - (quotient == kZero ? 2 : 1);
  return fmaxf(__fmul_rd(from_ordered_bits(before), temperature), -FLT_MAX);
}

// The lists of all CTAs, in the first CTA.
__device__ __forceinline__ uint64_t* few_keys(SelectShared& shared) {
  return reinterpret_cast<uint64_t*>(&shared.bins[1]);
}

// Sends this CTA's tokens that may be among the `count` <= kMaxFew highest of the row to the first
// CTA, as logits. The temperature of shared.request is above 0 and finite. Every CTA of the cluster
// must have begun. Behind the next barrier all know what the others sent.
// `highest` is what load_logits() returned, `range` that of it. send_more(rank): what each of the
// first threads sends besides to a CTA, behind a barrier of this one.
template <typename T, typename Cluster, typename SendMore>
__device__ __forceinline__ void send_few(SelectShared& shared, const Slice& slice, float highest,
                                         const HighestRange& range, int count,
                                         const SendMore& send_more) {
  const float temperature = shared.request.temperature;
  uint32_t quotient = 0;
  if (range.number >= count) {
    const uint32_t mine = ordered_bits(highest);
    uint32_t edge = range.lowest;
    if (range.number > enough_of(count)) {
      edge = edge_of(edge, range.highest, count,
                     [&](uint32_t at) { return __syncthreads_count(mine >= at); });
    }
    quotient = quotient_of(edge, temperature);
  }
  const float lowest = lowest_with_quotient(quotient, temperature);
  uint64_t* keys = Cluster::peer(few_keys(shared), 0) + Cluster::rank() * kFewRoom<Cluster>;
  const int lane = threadIdx.x % kWarpSize;
  constexpr uint32_t kAll = 0xffffffffu;
  const uint32_t lower_lanes = (1u << lane) - 1;
  const auto list = [&](const float4& quad, int index) {
    const float logits[4] = {quad.x, quad.y, quad.z, quad.w};
    uint32_t listed[4];
    int number = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      listed[i] = __ballot_sync(kAll, logits[i] >= lowest);
      number += __popc(listed[i]);
    }
    if (number == 0) return;
    int place = 0;
    if (lane == 0) place = atomicAdd(&shared.list.sizes[0], number);
    place = __shfl_sync(kAll, place, 0);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = place + __popc(listed[i] & lower_lanes);
      if (logits[i] >= lowest && at < kFewRoom<Cluster>) {
        keys[at] = max_key(ordered_bits(logits[i]), slice.begin + index + i);
      }
      place += __popc(listed[i]);
    }
  };
  for_each_of_loaders<T>(slice, __ballot_sync(kAll, highest >= lowest), list);
  __syncthreads();
  if (threadIdx.x >= Cluster::kSize) return;
  const int to = threadIdx.x;
  *Cluster::peer(&shared.few[Cluster::rank()], to) = {shared.list.sizes[0], range.highest,
                                                      quotient};
  send_more(to);
}

// What all CTAs sent.
struct Few {
  int size = 0;
  bool fits = true;  // whether every list had room
  uint32_t highest = 0, quotient = 0;
};
template <typename Cluster>
__device__ __forceinline__ Few few_of_row(const SelectShared& shared) {
  Few few;
#pragma unroll
  for (int rank = 0; rank < Cluster::kSize; ++rank) {
    const FewOfCta& sent = shared.few[rank];
    few.size += sent.size;
    few.fits &= sent.size <= kFewRoom<Cluster>;
    few.highest = max(few.highest, sent.highest);
    few.quotient = max(few.quotient, sent.quotient);
  }
  return few;
}

// In the first CTA: moves the keys to the front of `to`, with divided logits.
template <typename Cluster>
__device__ __forceinline__ void divide_few(SelectShared& shared, uint64_t* to, int size,
                                           float temperature) {
#pragma unroll 1
  for (int i = threadIdx.x; i < size; i += kRowThreads) {
    int at = i, rank = 0;
    for (; at >= shared.few[rank].size; ++rank) at -= shared.few[rank].size;
    const uint64_t key = few_keys(shared)[rank * kFewRoom<Cluster> + at];
    to[i] = max_key(quotient_of(ordered_of(key), temperature), token_of(key));
  }
  __syncthreads();
}

// In the first CTA: makes a list of the `count` highest tokens and a few more, or of all that were
// sent if they are fewer. Returns its size.
template <typename Cluster>
__device__ __forceinline__ int list_few(SelectShared& shared, const Few& few, int count,
                                        float temperature) {
  auto* keys = reinterpret_cast<uint64_t*>(&shared.bins[0]);
  divide_few<Cluster>(shared, keys, few.size, temperature);
  uint64_t edge = 0;
  if (few.size > enough_of(count)) {
    const uint64_t low = uint64_t{max(few.quotient, kOrderedMinusInfinity)} << 32;
    const uint64_t high = max_key(quotient_of(few.highest, temperature), 0);
    edge = edge_of(low, high, count, [&](uint64_t at) {
      int reached = 0;
#pragma unroll 1
      for (int first = 0; first < few.size; first += kRowThreads) {
        const int i = first + static_cast<int>(threadIdx.x);
        reached += __syncthreads_count(i < few.size && keys[i] >= at);
      }
      return reached;
    });
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < few.size; i += kRowThreads) {
    const uint64_t key = keys[i];
    if (key < edge) continue;
    const int at = atomicAdd(&shared.list.sizes[1], 1);
    shared.list.ordered[at] = ordered_of(key);
    shared.list.tokens[at] = static_cast<uint32_t>(token_of(key));
  }
  __syncthreads();
  return shared.list.sizes[1];
}

}  // namespace vllm_kernels::cuda
