// attention_with_kvcache: the indices between its writer and its attention
// (ops/attention_with_kvcache.h).
//
// Grid: a grid-stride loop, one index of each kind a thread. Nothing is read or written before the
// PDL wait: the lengths may be an earlier kernel's result, and the memory of the indices an earlier
// call's.
#include "ops/attention_with_kvcache.h"

#include <algorithm>

#include "cuda/base/launch.cuh"
#include "cuda/launchers.h"

namespace vllm_kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 1024;

__global__ void __launch_bounds__(kThreads) kvcache_indices_kernel(KvcacheIndicesParams p) {
  launch_dependents();
  wait_for_primary_kernel();
  const int64_t count = p.count(), step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += step) p.run(i);
}

}  // namespace

void launch(const KvcacheIndicesParams& p, Stream stream) {
  const int64_t blocks = std::min(ceil_div(p.count(), kThreads), kMaxBlocks);
  launch_kernel("attention_with_kvcache", kvcache_indices_kernel,
                dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, stream, p);
}

}  // namespace vllm_kernels::cuda
