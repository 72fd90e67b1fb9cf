// sample and top_k_top_p_mask_ (ops/sampling/sample.h), one launch: a cluster of CTAs per row.
//
//   grid       a cluster of 8 CTAs per row from sm_90 on, each with an eighth of the row in shared
//              memory; where that does not fit one CTA per row, with the row in global scratch
//   reads      the logits once. The bitmask and, where all tokens need it, the temperature are
//              applied on the way; bias and penalties, which are sparse, in shared memory
//   draw       row_sample.cuh
// Nothing is read before the PDL wait.
#include "cuda/sampling/row_sample.cuh"

namespace vllm_kernels::cuda {
namespace {

template <typename T, typename Params>
__global__ void VLLM_KERNELS_CLUSTER(kClusterSize) __launch_bounds__(kRowThreads, sm90a_or(2, 1))
    sample_cluster_kernel(const __grid_constant__ Params p, int tokens, bool aligned) {
#if defined(VLLM_KERNELS_HAS_SM90)
  sample_cluster<T, RowCluster<kClusterSize>>(p, tokens, aligned);
#endif
}

// Without the 1, ptxas takes 64 registers and spills.
template <typename T, typename Params>
__global__ void __launch_bounds__(kRowThreads, 1)
    sample_kernel(const __grid_constant__ Params p, int tokens, bool aligned) {
  sample_cluster<T, RowCluster<1>>(p, tokens, aligned);
}

template <typename Params>
void launch_sample(const Params& p, Stream stream) {
  dispatch_float(p.logits.dtype, [&](auto tag) {
    using T = decltype(tag);
    launch_clusters<sample_cluster_kernel<T, Params>, sample_kernel<T, Params>>(
        p.op, p, p.num_samples, stream);
  });
}

}  // namespace

int64_t sampling_scratch_bytes(const LogitRows& logits, int64_t rows) {
  if (uses_cluster(logits.vocab_size)) return 0;
  return rows * slice_tokens(logits.vocab_size, 1) * int64_t{sizeof(uint32_t)};
}

void launch(const SampleParams& p, Stream stream) {
  launch_sample(p, stream);
}

void launch(const SampleLogprobsParams& p, Stream stream) {
  launch_sample(p, stream);
}

}  // namespace vllm_kernels::cuda
