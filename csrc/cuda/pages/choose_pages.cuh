// The choice of the best pages of a row by the last CTA that scored some of them.
#pragma once
#include "cuda/base/prefetch.cuh"
#include "cuda/base/ptx.cuh"
#include "cuda/sampling/row_select.cuh"
#include "ops/pages/select_pages.h"

namespace vllm_kernels::cuda {

// Brings `count` elements of `size` bytes from `start` on into L2, while a CTA reads the length
// that tells whether it needs them.
__device__ __forceinline__ void prefetch_rows(const void* query, int size, int64_t start,
                                              int count) {
  constexpr int kLine = 128;
  const char* from = static_cast<const char*>(query) + start * size;
  for (int at = threadIdx.x * kLine; at < count * size; at += kRowThreads * kLine) {
    prefetch_l2(from + at);
  }
}

// What the choice needs of a CTA's shared memory.
struct ChoiceShared {
  static constexpr int kPages = 4096;

  SelectShared select;
  alignas(16) uint32_t scores[kPages];  // where they fit: each pass reads them
};

// Up to so many pages choose_few() may choose from: four for each thread, in registers.
constexpr int kFewPages = 4 * kRowThreads;

// What the threads before this one have in sum, and all of them. Two calls need a barrier between.
struct CountBefore {
  uint32_t before, all;
};
__device__ __forceinline__ CountBefore count_before(SelectShared& shared, uint32_t mine) {
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const uint32_t upto = inclusive_sum(mine);
  if (lane == kWarpSize - 1) shared.equal[warp] = upto;
  __syncthreads();
  const uint32_t of_warp = lane < kRowWarps ? shared.equal[lane] : 0;
  return {upto - mine + __reduce_add_sync(0xffffffffu, lane < warp ? of_warp : 0),
          __reduce_add_sync(0xffffffffu, of_warp)};
}

// The lowest key of the `target` highest: max_key(score, page) of own[i] and page first + i. A
// score of 0 is no page, and kAlwaysKept does not count. 0: another way must be taken, as where
// too many scores are nearly equal, or seem so beside one that is far away.
//
//   range   lowest and highest score
//   bins    2048 equal parts of the range, as integers; shared atomics count scores
//   border  the bin where the count from above reaches the target; its keys are ranked
__device__ __forceinline__ uint64_t edge_of_few(const uint32_t (&own)[4], int first, int budget,
                                                SelectShared& shared) {
  constexpr uint32_t kAll = 0xffffffffu, kAlways = SelectPagesParams::kAlwaysKept;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  reinterpret_cast<uint4*>(shared.bins[0].low)[threadIdx.x] = make_uint4(0, 0, 0, 0);
  uint32_t low = kAll, high = 0, always = 0;
#pragma unroll
  for (const uint32_t score : own) {
    always += score == kAlways;
    if (score == 0 || score == kAlways) continue;
    low = min(low, score);
    high = max(high, score);
  }
  low = __reduce_min_sync(kAll, low);
  high = __reduce_max_sync(kAll, high);
  if (lane == 0) shared.warp_keys[warp] = uint64_t{low} << 32 | high;
  if (threadIdx.x == 0) shared.list.sizes[0] = 0;
  const int target = budget - static_cast<int>(count_before(shared, always).all);
  if (target <= 0) {  // pages that are always kept fill the budget
    __syncthreads();  // the caller counts again
    return ~uint64_t{0};
  }
  const uint64_t range = shared.warp_keys[lane % kRowWarps];
  low = __reduce_min_sync(kAll, static_cast<uint32_t>(range >> 32));
  high = __reduce_max_sync(kAll, static_cast<uint32_t>(range));
  const int shift = max(0, 21 - __clz(high - low));
  const auto bin_of = [&](uint32_t score) {
    return score == 0 || score == kAlways ? kRadixBins : (score - low) >> shift;
  };
#pragma unroll
  for (const uint32_t score : own) {
    const uint32_t bin = bin_of(score);
    if (bin < kRadixBins) atomicAdd(&shared.bins[0].low[bin], 1u);
  }
  __syncthreads();
  uint64_t sums[4];
  read_quad<false>(shared.bins[0], threadIdx.x, sums);
  uint32_t before = count_before(shared, sums[0] + sums[1] + sums[2] + sums[3]).before;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t inside = sums[i];
    if (before < target && target <= before + inside) {
      shared.bin = kRadixBins - 1 - 4 * threadIdx.x - i;
      shared.before = before;
      shared.inside = inside;
    }
    before += inside;
  }
  __syncthreads();
  const int inside = static_cast<int>(shared.inside);
  const int wanted = target - static_cast<int>(shared.before);
  if (wanted == inside) return uint64_t{low + (shared.bin << shift)} << 32;
  if (inside > kRowThreads) return 0;
  auto* keys = reinterpret_cast<uint64_t*>(&shared.bins[1]);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (bin_of(own[i]) != shared.bin) continue;
    keys[atomicAdd(&shared.list.sizes[0], 1)] = max_key(own[i], first + i);
  }
  __syncthreads();
  if (threadIdx.x < inside) {
    const uint64_t mine = keys[threadIdx.x];
    int above = 0;
    for (int i = 0; i < inside; ++i) above += keys[i] > mine;
    if (above == wanted - 1) shared.warp_keys[0] = mine;
  }
  __syncthreads();
  return shared.warp_keys[0];
}

// As choose_pages(), for at most kFewPages pages. Returns false if it chose none. It reads entries
// beside scores, so that nothing waits for them.
template <bool kOnlyKept, typename Entry, typename Keep>
__device__ __forceinline__ bool choose_few(const uint32_t* scores, int pages, int budget,
                                           SelectShared& shared, const Entry& entry,
                                           const Keep& keep) {
  const int first = 4 * static_cast<int>(threadIdx.x);
  uint32_t own[4] = {};
  int32_t entries[4] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (first + i < pages) entries[i] = entry(first + i);
  }
  if (first < pages) {
    for_each_of(reinterpret_cast<const uint4*>(scores)[threadIdx.x],
                [&](uint32_t score, int i) { own[i] = first + i < pages ? score : 0; });
  }
  const uint64_t edge = edge_of_few(own, first, budget, shared);
  if (edge == 0) return false;
  bool kept[4];
  uint32_t count = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    kept[i] = own[i] == SelectPagesParams::kAlwaysKept || max_key(own[i], first + i) >= edge;
    count += kept[i];
  }
  int number = static_cast<int>(count_before(shared, count).before);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (kept[i]) {
      keep(first + i, number++, entries[i]);
    } else if (!kOnlyKept && first + i < pages) {
      keep(first + i, -1, 0);
    }
  }
  return true;
}

// Chooses the `budget` best of `pages` pages, more than budget, whose scores are complete. It calls
// keep(page, its number among the kept pages, entry(page)), or keep(page, -1, any). With kOnlyKept
// pages that are not kept may be left out. keep() may change the score of its page.
template <bool kOnlyKept, typename Entry, typename Keep>
__device__ __forceinline__ void choose_pages(uint32_t* scores, int pages, int budget,
                                             ChoiceShared& choice, const Entry& entry,
                                             const Keep& keep) {
  using Row = RowCluster<1>;
  SelectShared& shared = choice.select;
  if (pages <= kFewPages && choose_few<kOnlyKept>(scores, pages, budget, shared, entry, keep)) {
    return;
  }
  const bool fits = pages <= ChoiceShared::kPages;
  for (int i = threadIdx.x; fits && i < pages; i += kRowThreads) choice.scores[i] = scores[i];
  const Slice slice{fits ? choice.scores : scores, 0, pages};
  const int padding = 4 * slice.num_vecs() - pages;
  if (threadIdx.x < padding) slice.ordered[pages + threadIdx.x] = 0;
  BinSets sets;
  clear(shared.bins[0]);
  __syncthreads();
  const uint64_t target = budget;
  Radix found;
  select<Row, false>(shared, sets, slice, 1, 0.0f, found, [&](uint64_t, int) { return target; });
  const Kept kept{found.prefix, static_cast<uint32_t>(target - found.before)};
  const KeptSums sums = kept_sums<Row, false>(shared, slice, kept.threshold, 0.0f);
  for_each_kept<kOnlyKept>(slice, kept, sums, [&](int page, uint32_t, int number) {
    if (kOnlyKept || page < pages) keep(page, number, number < 0 ? 0 : entry(page));
  });
}

// Whether this CTA is the last of `ctas` that gets here. If so, it sees what the others wrote
// before. All threads call it.
__device__ __forceinline__ bool comes_last(uint32_t* counter, int ctas) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    const uint32_t highest = static_cast<uint32_t>(ctas - 1);
    last = atomic_inc_acquire_release(counter, highest) == highest;
  }
  __syncthreads();
  return last;
}

}  // namespace vllm_kernels::cuda
