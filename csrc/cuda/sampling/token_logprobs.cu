// token_logprobs and softmax (ops/sampling/sample.h). A cluster of CTAs per row holds it as in
// sample.cu and reads it once.
//   token_logprobs  row_logprobs.cuh
//   softmax         the highest logit, the sum of weights, then the probabilities
// Nothing is read before the PDL wait.
#include "cuda/launchers.h"
#include "cuda/sampling/row_logprobs.cuh"

namespace vllm_kernels::cuda {
namespace {

// The sum of all weights over the cluster. Others may still read this CTA's shared memory.
template <typename Cluster>
__device__ __forceinline__ uint64_t weight_of_row(SelectShared& shared, const Slice& slice,
                                                  float max) {
  uint64_t sum = 0;
  for_each_token(slice, [&](uint32_t ordered) {
    if (ordered != 0) sum += weight_of(ordered, max);
  });
  sum = warp_total(sum);
  if (threadIdx.x % kWarpSize == 0) shared.above[threadIdx.x / kWarpSize] = sum;
  Cluster::sync();
  sum = 0;
  for_each_warp_of_cluster<Cluster>(
      shared, [&](const SelectShared& theirs, int of_cta, int) { sum += theirs.above[of_cta]; });
  return warp_total(sum);
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
  if (row < 0 || row >= p.logits.num_rows || token < 0 || token >= p.logits.vocab_size) {
    if (Cluster::rank() == 0) write_no_logprobs(p, sample);
    return;
  }
  const Slice slice = slice_of<Cluster>(slice_memory<Cluster>(p.scratch, sample, tokens),
                                        p.logits.vocab_size, tokens);
  logprobs_of_row<T, Cluster>(p, sample, row, token, slice, aligned, shared);
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
  const uint64_t weights = weight_of_row<Cluster>(shared, slice, max);
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
