// token_logprobs and softmax (ops/sampling/sample.h). A cluster of CTAs per row holds it as in
// sample.cu and reads it once.
//   token_logprobs  the highest logit, the sum of weights, the rank of the token; with num_top the
//                   first CTA sorts a list of the highest (row_list.cuh), or of those that a
//                   selection by count finds
//   softmax         the highest logit, the sum of weights, then the probabilities
// Nothing is read before the PDL wait.
#include "cuda/launchers.h"
#include "cuda/sampling/row_list.cuh"

namespace vllm_kernels::cuda {
namespace {

// ln(sum of e^(x - max)) or that sum, from weights.
__device__ __forceinline__ float log_of_sum(uint64_t weights) {
  return log_of(__ull2float_rn(weights), 40);
}

// Puts the `num_top` highest tokens into the first CTA's list, where list_highest() found too many.
template <typename Cluster>
__device__ __forceinline__ void list_selected(SelectShared& shared, BinSets& sets,
                                              const Slice& slice, float max, uint32_t num_top) {
  Radix found;
  select<Cluster, false>(shared, sets, slice, 1, max, found,
                         [&](uint64_t, int) { return uint64_t{num_top}; });
  const Kept kept{found.prefix, static_cast<uint32_t>(num_top - found.before)};
  const KeptSums sums = kept_sums<Cluster, false>(shared, slice, kept.threshold, 0.0f);
  List* list = Cluster::peer(&shared.list, 0);
  for_each_kept<true>(slice, kept, sums, [&](int index, uint32_t ordered, int number) {
    if (number < 0) return;
    list->ordered[number] = ordered;
    list->tokens[number] = static_cast<uint32_t>(slice.begin + index);
  });
  Cluster::sync();
}

// The first CTA writes the `num_top` highest tokens of its list.
__device__ __forceinline__ void write_top(const TokenLogprobsParams& p, int64_t sample, List& list,
                                          int size, int num_top, float max, float log_sum) {
  float* logprobs = p.logprobs + sample * (1 + p.num_top) + 1;
  int64_t* ids = p.ids + sample * (1 + p.num_top) + 1;
  const int i = threadIdx.x;
  if (i >= num_top && i < p.num_top) {
    logprobs[i] = -INFINITY;
    ids[i] = -1;
  }
  const ListPlace place = place_in_list(list, size);
  if (i >= size || place.by_logit >= num_top) return;
  logprobs[place.by_logit] =
      ScalarMath::add(ScalarMath::add(from_ordered_bits(place.ordered), -max), -log_sum);
  ids[place.by_logit] = place.token;
}
static_assert(kMaxTopLogprobs <= kMaxListed);

// Sum of all weights, and the number of logits of at least `ordered`, over the cluster. Others may
// still read this CTA's shared memory.
struct RowSums {
  uint64_t weights = 0;
  uint32_t rank = 0;
};
template <typename Cluster>
__device__ __forceinline__ RowSums row_sums(SelectShared& shared, const Slice& slice, float max,
                                            uint32_t lowest) {
  RowSums sums;
  for_each_token(slice, [&](uint32_t ordered) {
    if (ordered == 0) return;
    sums.weights += weight_of(ordered, max);
    sums.rank += ordered >= lowest;
  });
  sums.weights = warp_total(sums.weights);
  sums.rank = warp_total(sums.rank);
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  if (lane == 0) {
    shared.above[warp] = sums.weights;
    shared.equal[warp] = sums.rank;
  }
  Cluster::sync();
  sums = {};
  for_each_warp_of_cluster<Cluster>(shared, [&](const SelectShared& theirs, int of_cta, int) {
    sums.weights += theirs.above[of_cta];
    sums.rank += theirs.equal[of_cta];
  });
  return {warp_total(sums.weights), warp_total(sums.rank)};
}

template <typename T>
__device__ __forceinline__ Highest load_raw(const LogitRows& logits, int64_t row, bool aligned,
                                            const Slice& slice, float divisor) {
  Highest highest;
  load_slice<T>(
      logits, row, aligned, slice, true, [](int) { return 0xffffffffu; },
      [&](float logit, bool) { return ordered_bits(divisor == 1.0f ? logit : logit / divisor); },
      [&](uint32_t ordered, int token) { highest.visit(ordered, token); });
  return highest;
}

template <typename T, typename Cluster>
__device__ __forceinline__ void token_logprobs_cluster(const TokenLogprobsParams& p, int tokens,
                                                       bool aligned) {
  __shared__ SelectShared shared;
  launch_dependents();
  wait_for_primary_kernel();
  const int64_t sample = blockIdx.x / Cluster::kSize;
  const int64_t row = p.row_of(sample), token = p.tokens[sample];
  const bool is_first = Cluster::rank() == 0 && threadIdx.x == 0;
  float* logprob = p.logprobs + sample * (1 + p.num_top);
  int64_t* id = p.ids + sample * (1 + p.num_top);
  const bool inside =
      row >= 0 && row < p.logits.num_rows && token >= 0 && token < p.logits.vocab_size;
  if (!inside) {  // a contained row
    for (int i = threadIdx.x; Cluster::rank() == 0 && i <= p.num_top; i += kRowThreads) {
      logprob[i] = NAN;
      id[i] = -1;
    }
    if (is_first) p.ranks[sample] = 0;
    return;
  }
  const Slice slice = slice_of<Cluster>(slice_memory<Cluster>(p.scratch, sample, tokens),
                                        p.logits.vocab_size, tokens);
  BinSets sets;
  Cluster::begin();
  clear(shared.bins[0]);
  prepare_list(shared);
  __syncthreads();
  const Highest own = load_raw<T>(p.logits, row, aligned, slice, 1.0f);
  if (p.num_top > 0) count_highest(shared.bins[0], own.ordered, 0, Radix{});
  Cluster::wait();
  post_max_key<Cluster>(shared, own.key());
  const int num_top = min(p.num_top, p.logits.vocab_size);
  int listed = 0;
  if (num_top > 0) {
    listed = list_highest<T, Cluster>(shared, sets, slice, own.ordered, num_top);
  } else {
    Cluster::sync();
  }
  const uint32_t highest = ordered_of(row_max_key<Cluster>(shared));
  const float max = from_ordered_bits(highest);
  const float logit = to_float(static_cast<const T*>(p.logits.data)[row * p.logits.stride + token]);
  const uint32_t ordered = ordered_bits(logit);
  const RowSums sums = row_sums<Cluster>(shared, slice, max, ordered);
  const float log_sum = is_finite_ordered(highest) ? log_of_sum(sums.weights) : NAN;
  if (is_first) {
    logprob[0] = ScalarMath::add(ScalarMath::add(from_ordered_bits(ordered), -max), -log_sum);
    id[0] = token;
    p.ranks[sample] = sums.rank;
  }
  if (listed > kRowThreads) {
    list_selected<Cluster>(shared, sets, slice, max, num_top);
    listed = num_top;
  }
  if (num_top > 0 && Cluster::rank() == 0) {
    write_top(p, sample, shared.list, listed, num_top, max, log_sum);
  }
  Cluster::sync();  // others may still read this CTA's shared memory
}

template <typename T, typename Cluster>
__device__ __forceinline__ void softmax_cluster(const SoftmaxParams& p, int tokens, bool aligned) {
  __shared__ SelectShared shared;
  launch_dependents();
  wait_for_primary_kernel();
  const int64_t row = blockIdx.x / Cluster::kSize;
  const Slice slice =
      slice_of<Cluster>(slice_memory<Cluster>(p.scratch, row, tokens), p.logits.vocab_size, tokens);
  const float divisor = p.temperature == nullptr ? 1.0f : p.temperature[row];
  Cluster::begin();
  const Highest own = load_raw<T>(p.logits, row, aligned, slice, divisor);
  Cluster::wait();
  post_max_key<Cluster>(shared, own.key());
  Cluster::sync();
  const uint32_t highest = ordered_of(row_max_key<Cluster>(shared));
  const float max = from_ordered_bits(highest);
  const uint64_t weights = row_sums<Cluster>(shared, slice, max, 0).weights;
  Cluster::arrive();
  const float sum = is_finite_ordered(highest) ? __ull2float_rn(weights) * 0x1p-40f : NAN;
  float* out = p.out + row * p.out_stride + slice.begin;
  for (int i = threadIdx.x; i < slice.size; i += kRowThreads) {
    out[i] = probability(slice.ordered[i], max, sum);
  }
  Cluster::wait();  // others may still read this CTA's shared memory
}

#define VLLM_KERNELS_ROW_KERNELS(name, Params)                                                \
  template <typename T>                                                                       \
  __global__ void VLLM_KERNELS_CLUSTER(kClusterSize)                                          \
      __launch_bounds__(kRowThreads, sm90a_or(2, 1))                                          \
          name##_cluster_kernel(const __grid_constant__ Params p, int tokens, bool aligned) { \
    name##_cluster<T>(p, tokens, aligned);                                                    \
  }                                                                                           \
  template <typename T>                                                                       \
  __global__ void __launch_bounds__(kRowThreads, 1)                                           \
      name##_kernel(const __grid_constant__ Params p, int tokens, bool aligned) {             \
    name##_cluster<T, RowCluster<1>>(p, tokens, aligned);                                     \
  }

template <typename T>
__device__ __forceinline__ void token_logprobs_cluster(const TokenLogprobsParams& p, int tokens,
                                                       bool aligned) {
#if defined(VLLM_KERNELS_HAS_SM90)
  token_logprobs_cluster<T, RowCluster<kClusterSize>>(p, tokens, aligned);
#endif
}
template <typename T>
__device__ __forceinline__ void softmax_cluster(const SoftmaxParams& p, int tokens, bool aligned) {
#if defined(VLLM_KERNELS_HAS_SM90)
  softmax_cluster<T, RowCluster<kClusterSize>>(p, tokens, aligned);
#endif
}
VLLM_KERNELS_ROW_KERNELS(token_logprobs, TokenLogprobsParams)
VLLM_KERNELS_ROW_KERNELS(softmax, SoftmaxParams)

}  // namespace

void launch(const TokenLogprobsParams& p, Stream stream) {
  dispatch_float(p.logits.dtype, [&](auto tag) {
    using T = decltype(tag);
    launch_clusters<token_logprobs_cluster_kernel<T>, token_logprobs_kernel<T>>(
        "token_logprobs", p, p.num_samples, stream);
  });
}

void launch(const SoftmaxParams& p, Stream stream) {
  dispatch_float(p.logits.dtype, [&](auto tag) {
    using T = decltype(tag);
    launch_clusters<softmax_cluster_kernel<T>, softmax_kernel<T>>("softmax", p, p.logits.num_rows,
                                                                  stream);
  });
}

}  // namespace vllm_kernels::cuda
