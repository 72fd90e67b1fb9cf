// The choice of the best pages of a row by the last CTA that scored some of them.
#pragma once
#include "cuda/base/ptx.cuh"
#include "cuda/sampling/row_select.cuh"

namespace vllm_kernels::cuda {

// What the choice needs of a CTA's shared memory.
struct ChoiceShared {
  static constexpr int kPages = 4096;

  SelectShared select;
  alignas(16) uint32_t scores[kPages];  // where they fit: each pass reads them
};

// Chooses the `budget` best of `pages` pages, more than budget, whose scores are complete. It calls
// keep(page, its number among the kept pages, or -1). With kOnlyKept pages that are not kept may be
// left out. keep() may change the score of its page.
template <bool kOnlyKept, typename Keep>
__device__ __forceinline__ void choose_pages(uint32_t* scores, int pages, int budget,
                                             ChoiceShared& choice, const Keep& keep) {
  using Row = RowCluster<1>;
  SelectShared& shared = choice.select;
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
    if (kOnlyKept || page < pages) keep(page, number);
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
