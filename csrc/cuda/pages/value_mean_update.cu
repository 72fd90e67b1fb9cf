// value_mean_update (ops/pages/value_mean_update.h): a CTA has a row, and a thread some of its
// components. All of them look for the row's tokens, in the order of the call, so a result repeats
// bit for bit. A decode step of 256 sequences compares 256 rows in each CTA. Nothing is read before
// the PDL wait.
#include "ops/pages/value_mean_update.h"

#include "cuda/base/launch.cuh"
#include "cuda/base/types.cuh"
#include "cuda/launchers.h"

namespace vllm_kernels::cuda {
namespace {

constexpr int kThreads = 256;

template <typename T>
__global__ void __launch_bounds__(kThreads) value_mean_update_kernel(ValueMeanUpdateParams p) {
  launch_dependents();
  wait_for_primary_kernel();
  const int row = blockIdx.x, elements = p.num_kv_heads * p.head_size;
  const int32_t old = max(p.counts[row], 0);
  __shared__ int32_t found;
  if (threadIdx.x == 0) found = 0;
  __syncthreads();  // all have read the count
  int32_t mine = 0;
  for (int t = threadIdx.x; t < p.num_tokens; t += kThreads) mine += p.rows[t] == row;
  if (mine > 0) atomicAdd(&found, mine);
  __syncthreads();
  const int32_t count = found;
  if (count == 0) return;
  const float share = 1.0f / (static_cast<float>(old) + static_cast<float>(count));
  for (int i = threadIdx.x; i < elements; i += kThreads) {
    float* mean = p.mean + int64_t{row} * elements + i;
    const int head = i / p.head_size;
    const T* value = static_cast<const T*>(p.value) + head * p.head_stride + i % p.head_size;
    float sum = old > 0 ? *mean * (static_cast<float>(old) * share) : 0.0f;
#pragma unroll 1
    for (int t = 0; t < p.num_tokens; ++t) {
      if (p.rows[t] == row) sum += to_float(value[t * p.token_stride]) * share;
    }
    *mean = sum;
  }
  if (threadIdx.x == 0) p.counts[row] = old + count;
}

}  // namespace

void launch(const ValueMeanUpdateParams& p, Stream stream) {
  dispatch_float(p.dtype, [&](auto model) {
    launch_kernel("value_mean_update", value_mean_update_kernel<decltype(model)>,
                  dim3(static_cast<unsigned>(p.num_rows)), dim3(kThreads), 0, stream, p);
  });
}

}  // namespace vllm_kernels::cuda
