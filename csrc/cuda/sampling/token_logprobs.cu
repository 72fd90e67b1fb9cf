// token_logprobs and softmax (ops/sampling/sample.h). A cluster of CTAs per row holds it as in
// sample.cu and reads it once.
//   token_logprobs  the highest logit, the sum of weights, the rank of the token; with num_top a
//                   selection by count, and the first CTA sorts what it gathers
//   softmax         the highest logit, the sum of weights, then the probabilities
// Nothing is read before the PDL wait.
#include "cuda/launchers.h"
#include "cuda/sampling/row_load.cuh"

namespace vllm_kernels::cuda {
namespace {

// ln(sum of e^(x - max)) or that sum, from weights.
__device__ __forceinline__ float log_of_sum(uint64_t weights) {
  return log_of(__ull2float_rn(weights), 40);
}

template <typename Cluster>
__device__ __forceinline__ void write_top(const TokenLogprobsParams& p, int64_t sample,
                                          SelectShared& shared, BinSets& sets, const Slice& slice,
                                          float max, float log_sum) {
  const int num_top = min(p.num_top, p.logits.vocab_size);
  const uint64_t target = num_top;
  Radix found;
  select<Cluster, false>(shared, sets, slice, 0, 1, max, found,
                         [&](uint64_t, int) { return target; });
  const Kept kept{found.prefix, static_cast<uint32_t>(target - found.before)};
  const KeptSums sums = kept_sums<Cluster, false>(shared, slice, kept.threshold, 0.0f);
  // The rounds end with the second set of bins in use; the first is free.
  Bins* list = Cluster::peer(&shared.bins[0], 0);
  for_each_kept<true>(slice, kept, sums, [&](int index, uint32_t ordered, int number) {
    if (number < 0) return;
    list->low[number] = ordered;
    list->high[number] = static_cast<uint32_t>(slice.begin + index);
  });
  Cluster::sync();
  if (Cluster::rank() != 0) return;
  float* logprobs = p.logprobs + sample * (1 + p.num_top) + 1;
  int64_t* ids = p.ids + sample * (1 + p.num_top) + 1;
  for (int i = threadIdx.x; i < p.num_top; i += kRowThreads) {
    if (i >= num_top) {
      logprobs[i] = -INFINITY;
      ids[i] = -1;
      continue;
    }
    const uint32_t mine = shared.bins[0].low[i];
    int place = 0;
    for (int j = 0; j < num_top; ++j) {
      const uint32_t other = shared.bins[0].low[j];
      place += other > mine || (other == mine && j < i);
    }
    logprobs[place] = ScalarMath::add(ScalarMath::add(from_ordered_bits(mine), -max), -log_sum);
    ids[place] = shared.bins[0].high[i];
  }
}

// Sum of all weights, and the number of logits of at least `ordered`, over the cluster.
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
  for (int chunk = lane; chunk < Cluster::kSize * kRowWarps; chunk += kWarpSize) {
    const SelectShared* theirs = Cluster::peer(&shared, chunk / kRowWarps);
    sums.weights += theirs->above[chunk % kRowWarps];
    sums.rank += theirs->equal[chunk % kRowWarps];
  }
  Cluster::sync();  // all have read before these places are used again
  return {warp_total(sums.weights), warp_total(sums.rank)};
}

template <typename T>
__device__ __forceinline__ Highest load_raw(const LogitRows& logits, int64_t row, bool aligned,
                                            const Slice& slice, float divisor) {
  Highest highest;
  load_slice<T>(
      logits, row, aligned, slice,
      [&](float logit, int) { return ordered_bits(divisor == 1.0f ? logit : logit / divisor); },
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
  clear(shared.bins[0]);
  post_max_key(shared, load_raw<T>(p.logits, row, aligned, slice, 1.0f).key());
  Cluster::sync();
  const uint32_t highest = ordered_of(cluster_max_key<Cluster>(shared));
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
  if (p.num_top > 0) write_top<Cluster>(p, sample, shared, sets, slice, max, log_sum);
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
  post_max_key(shared, load_raw<T>(p.logits, row, aligned, slice, divisor).key());
  Cluster::sync();
  const uint32_t highest = ordered_of(cluster_max_key<Cluster>(shared));
  const float max = from_ordered_bits(highest);
  const uint64_t weights = row_sums<Cluster>(shared, slice, max, 0).weights;
  const float sum = is_finite_ordered(highest) ? __ull2float_rn(weights) * 0x1p-40f : NAN;
  float* out = p.out + row * p.out_stride + slice.begin;
  for (int i = threadIdx.x; i < slice.size; i += kRowThreads) {
    out[i] = probability(slice.ordered[i], max, sum);
  }
}

#define VLLM_KERNELS_ROW_KERNELS(name, Params)                                            \
  template <typename T>                                                                   \
  __global__ void VLLM_KERNELS_CLUSTER(kClusterSize) __launch_bounds__(kRowThreads, 2)    \
      name##_cluster_kernel(const __grid_constant__ Params p, int tokens, bool aligned) { \
    name##_cluster<T>(p, tokens, aligned);                                                \
  }                                                                                       \
  template <typename T>                                                                   \
  __global__ void __launch_bounds__(kRowThreads)                                          \
      name##_kernel(const __grid_constant__ Params p, int tokens, bool aligned) {         \
    name##_cluster<T, RowCluster<1>>(p, tokens, aligned);                                 \
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
