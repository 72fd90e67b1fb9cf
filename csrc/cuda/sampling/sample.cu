// sample and top_k_top_p_mask_ (ops/sampling/sample.h), one launch: a cluster of CTAs per row.
//
//   grid      a cluster of 8 CTAs per row on sm_90, each with an eighth of the row in shared
//             memory; else one CTA per row, with the row in global scratch
//   reads     the logits once. Bitmask and temperature are applied on the way; bias and penalties,
//             which are sparse, in shared memory
//   threshold top-k: radix rounds by count, the first while the row is loaded. min-p: one number.
//             top-p: radix rounds by weight over what is left
//   short row after round 0 the tokens that can be in the top k go to the first CTA as a list, if
//             they fit. It finishes alone, without cluster barriers, and the other CTAs leave
//   draw      weights of the kept tokens per warp, then the one warp that holds the random place
// Nothing is read before the PDL wait.
#include "cuda/launchers.h"
#include "cuda/sampling/row_load.cuh"

namespace vllm_kernels::cuda {
namespace {

constexpr uint32_t kAllTies = 0xffffffffu;

// Bias and penalties of the tokens in this slice, before the temperature.
__device__ __forceinline__ void penalize(const SampleParams& p, int64_t sample,
                                         const Slice& slice) {
  const auto bias = p.bias.of(sample);
  for (int64_t i = bias.begin + threadIdx.x; i < bias.end; i += kRowThreads) {
    const int64_t at = int64_t{p.bias.tokens[i]} - slice.begin;
    if (at < 0 || at >= slice.size) continue;
    const float logit = from_ordered_bits(slice.ordered[at]);
    slice.ordered[at] = ordered_bits(ScalarMath::add(logit, p.bias.values[i]));
  }
  __syncthreads();
  const auto counts = p.counts.of(sample);
  const Penalties penalties = Penalties::read(p, sample);
  for (int64_t i = counts.begin + threadIdx.x; i < counts.end; i += kRowThreads) {
    const int64_t at = int64_t{p.counts.tokens[i]} - slice.begin;
    if (at < 0 || at >= slice.size) continue;
    const float logit = from_ordered_bits(slice.ordered[at]);
    slice.ordered[at] = ordered_bits(penalties.apply(logit, p.counts.values[i]));
  }
  __syncthreads();
}

// Loads the slice as ordered bits of the final logits. If the sample has a top-k, fills the bins of
// round 0. Returns the thread's highest token.
template <typename T>
__device__ __forceinline__ Highest load_row(const SampleParams& p, int64_t sample, bool aligned,
                                            const Slice& slice, Bins& bins) {
  const int32_t* words = p.bitmask.of(sample);
  const auto has_tokens = [](auto range) { return range.begin < range.end; };
  const bool sparse = has_tokens(p.bias.of(sample)) || has_tokens(p.counts.of(sample));
  const SampleRow request = SampleRow::read(p, sample);
  const float temperature = request.temperature;
  const bool divides = temperature != 1.0f, counts = request.counts(p.logits.vocab_size);
  Highest highest;
  const auto visit = [&](uint32_t ordered, int token) {
    highest.visit(ordered, token);
    if (counts) atomicAdd(&bins.low[ordered >> radix_shift(0)], 1u);
  };
  load_slice<T>(
      p.logits, p.row_of(sample), aligned, slice,
      [&](float logit, int token) {
        if (words != nullptr && !p.bitmask.allows(words, token)) logit = -INFINITY;
        if (divides && !sparse) logit = logit / temperature;
        return ordered_bits(logit);
      },
      [&](uint32_t ordered, int token) {
        if (!sparse) visit(ordered, token);
      });
  if (!sparse) return highest;
  __syncthreads();
  penalize(p, sample, slice);
  for (int i = threadIdx.x; i < slice.size; i += kRowThreads) {
    uint32_t ordered = slice.ordered[i];
    if (divides) {
      ordered = ordered_bits(from_ordered_bits(ordered) / temperature);
      slice.ordered[i] = ordered;
    }
    visit(ordered, slice.begin + i);
  }
  return highest;
}

// The kept tokens. The rounds by count begin at `first` with `found`.
template <typename Cluster>
__device__ __forceinline__ Kept choose(SelectShared& shared, BinSets& sets, const Slice& slice,
                                       const SampleRow& request, int vocab_size, float max,
                                       int first, Radix found) {
  Kept kept{0, 0};
  uint64_t left_out = 0;  // tokens equal to the threshold that are not kept
  if (request.top_k < vocab_size) {
    const uint64_t top_k = request.top_k;
    select<Cluster, false>(shared, sets, slice, first, 1, max, found,
                           [&](uint64_t, int) { return top_k; });
    kept = {found.prefix, static_cast<uint32_t>(top_k - found.before)};
    left_out = found.inside - kept.ties;
  }
  const uint32_t cut = request.min_p_cut(max);
  if (cut > kept.threshold) {
    kept = {cut, kAllTies};
    left_out = 0;
  }
  if (request.top_p >= 1.0f) return kept;
  const uint64_t unkept = left_out > 0 ? left_out * weight_of(kept.threshold, max) : 0;
  uint64_t limit = 0;
  Radix weights;
  select<Cluster, true>(shared, sets, slice, 0, kept.threshold > 0 ? kept.threshold : 1, max,
                        weights, [&](uint64_t all, int round) {
                          if (round == 0) limit = top_p_limit(request.top_p, all - unkept);
                          return limit;
                        });
  uint32_t ties = number_to_reach(limit - weights.before, weight_of(weights.prefix, max));
  if (weights.prefix == kept.threshold && ties > kept.ties) ties = kept.ties;
  return {weights.prefix, ties};
}

// Gathers tokens of at least `edge` into the first CTA's second set of bins: ordered bits in `low`,
// tokens in `high`, in index order.
template <typename Cluster>
__device__ __forceinline__ void gather_list(SelectShared& shared, const Slice& slice,
                                            uint32_t edge) {
  const KeptSums sums = kept_sums<Cluster, false>(shared, slice, edge, 0.0f);
  Bins* list = Cluster::peer(&shared.bins[1], 0);
  for_each_kept<true>(slice, {edge, kAllTies}, sums, [&](int index, uint32_t ordered, int number) {
    if (number < 0) return;
    list->low[number] = ordered;
    list->high[number] = static_cast<uint32_t>(slice.begin + index);
  });
  clear(shared.bins[0]);  // every CTA has read it before the barrier of kept_sums()
  Cluster::sync();
}

// The draw from a list of at most a token per thread, in index order and padded with 0. A token's
// rank is the number of tokens before it in the order of falling logits, found by comparison with
// each. `sorted` has room for a number per thread.
template <typename Found>
__device__ __forceinline__ void draw_by_rank(SelectShared& shared, const uint32_t* list, int size,
                                             uint64_t* sorted, const SampleRow& request, float max,
                                             uint64_t random, const Found& found) {
  const int i = threadIdx.x;
  const uint32_t mine = i < size ? list[i] : 0;
  int rank = 0;
  for (int j = 0; j < size; j += 4) {
    for_each_of(reinterpret_cast<const uint4*>(list)[j / 4],
                [&](uint32_t other, int k) { rank += j + k < i ? other >= mine : other > mine; });
  }
  uint64_t weight = 0;
  if (i < size && rank < request.top_k && mine >= request.min_p_cut(max)) {
    weight = weight_of(mine, max);
  }
  if (request.top_p < 1.0f) {
    if (i < size) sorted[rank] = weight;
    __syncthreads();
    const uint64_t of_rank = i < size ? sorted[i] : 0;
    const BlockSum sum = block_sum(shared, of_rank);
    if (i < size) sorted[i] = sum.before;
    __syncthreads();
    if (i < size && sorted[rank] >= top_p_limit(request.top_p, sum.all)) weight = 0;
  }
  const BlockSum sum = block_sum(shared, weight);
  const uint64_t target = high_product(sum.all, random);
  if (sum.before <= target && target < sum.before + weight) found(i);
}

template <typename T, typename Cluster>
__device__ __forceinline__ void write_mask(const SampleParams& p, int64_t row, SelectShared& shared,
                                           const Slice& slice, const Kept& kept) {
  if (kept.threshold == 0) return;  // all tokens are kept
  const KeptSums sums = kept_sums<Cluster, false>(shared, slice, kept.threshold, 0.0f);
  T* masked = static_cast<T*>(p.masked) + row * p.logits.stride + slice.begin;
  for_each_kept<false>(slice, kept, sums, [&](int index, uint32_t, int number) {
    if (number < 0 && index < slice.size) masked[index] = from_float<T>(-INFINITY);
  });
}

// Returns whether other CTAs may still read this CTA's shared memory.
template <typename T, typename Cluster>
__device__ __forceinline__ bool sample_row(const SampleParams& p, int64_t sample, int64_t row,
                                           const Slice& slice, bool aligned, SelectShared& shared) {
  const int vocab_size = p.logits.vocab_size;
  BinSets sets;
  clear(shared.bins[0]);
  __syncthreads();
  post_max_key(shared, load_row<T>(p, sample, aligned, slice, shared.bins[0]).key());
  Radix found;
  const SampleRow request = SampleRow::read(p, sample);
  const bool counts = request.counts(vocab_size);
  if (counts) {
    const uint64_t top_k = request.top_k;
    finish_round<Cluster, false>(shared, sets, 0, found, [&](uint64_t, int) { return top_k; });
  } else {
    Cluster::sync();
  }
  const uint64_t key = cluster_max_key<Cluster>(shared);
  const bool is_first = Cluster::rank() == 0 && threadIdx.x == 0;
  if (request.greedy || !is_finite_ordered(ordered_of(key))) {
    if (is_first && p.tokens != nullptr) p.tokens[sample] = token_of(key);
    return true;
  }
  const float max = from_ordered_bits(ordered_of(key));
  const uint64_t candidates = found.before + found.inside;
  if (counts && p.tokens != nullptr && candidates <= kRadixBins) {
    gather_list<Cluster>(shared, slice, found.prefix);
    if (Cluster::rank() != 0) return false;
    const auto found = [&](int index) { p.tokens[sample] = shared.bins[1].high[index]; };
    const uint64_t random = SampleRow::random(p, sample);
    if (candidates <= kRowThreads) {
      draw_by_rank(shared, shared.bins[1].low, static_cast<int>(candidates),
                   reinterpret_cast<uint64_t*>(shared.bins[0].low), request, max, random, found);
      return false;
    }
    const Slice list{shared.bins[1].low, 0, static_cast<int>(candidates)};
    BinSets one{0, 0};
    const Kept kept =
        choose<RowCluster<1>>(shared, one, list, request, vocab_size, max, 0, Radix{});
    draw<RowCluster<1>>(shared, list, kept, max, random, found);
    return false;
  }
  const Kept kept =
      choose<Cluster>(shared, sets, slice, request, vocab_size, max, counts ? 1 : 0, found);
  if (p.tokens == nullptr) {
    write_mask<T, Cluster>(p, row, shared, slice, kept);
    return true;
  }
  draw<Cluster>(shared, slice, kept, max, SampleRow::random(p, sample),
                [&](int index) { p.tokens[sample] = slice.begin + index; });
  return true;
}

template <typename T, typename Cluster>
__device__ __forceinline__ void sample_cluster(const SampleParams& p, int tokens, bool aligned) {
  __shared__ SelectShared shared;
  launch_dependents();
  wait_for_primary_kernel();
  const int64_t sample = blockIdx.x / Cluster::kSize;
  const int64_t row = p.row_of(sample);
  if (row < 0 || row >= p.logits.num_rows) {
    if (Cluster::rank() == 0 && threadIdx.x == 0 && p.tokens != nullptr) p.tokens[sample] = -1;
    return;
  }
  const Slice slice = slice_of<Cluster>(slice_memory<Cluster>(p.scratch, sample, tokens),
                                        p.logits.vocab_size, tokens);
  if (sample_row<T, Cluster>(p, sample, row, slice, aligned, shared)) Cluster::sync();
}

template <typename T>
__global__ void VLLM_KERNELS_CLUSTER(kClusterSize) __launch_bounds__(kRowThreads, 2)
    sample_cluster_kernel(const __grid_constant__ SampleParams p, int tokens, bool aligned) {
#if defined(VLLM_KERNELS_HAS_SM90)
  sample_cluster<T, RowCluster<kClusterSize>>(p, tokens, aligned);
#endif
}

template <typename T>
__global__ void __launch_bounds__(kRowThreads)
    sample_kernel(const __grid_constant__ SampleParams p, int tokens, bool aligned) {
  sample_cluster<T, RowCluster<1>>(p, tokens, aligned);
}

}  // namespace

int64_t sampling_scratch_bytes(const LogitRows& logits, int64_t rows) {
  if (uses_cluster(logits.vocab_size)) return 0;
  return rows * slice_tokens(logits.vocab_size, 1) * int64_t{sizeof(uint32_t)};
}

void launch(const SampleParams& p, Stream stream) {
  dispatch_float(p.logits.dtype, [&](auto tag) {
    using T = decltype(tag);
    launch_clusters<sample_cluster_kernel<T>, sample_kernel<T>>(p.op, p, p.num_samples, stream);
  });
}

}  // namespace vllm_kernels::cuda
