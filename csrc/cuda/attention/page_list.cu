// paged_attention with a table in CSR form: the block table and the lengths that its kernels read
// (ops/pages/page_list.h). For 64 sequences of 2048 tokens in pages of 1 it moves 1 MB.
//
// Grid: a grid-stride loop over the iterations. Nothing is read or written before the PDL wait: the
// list may be an earlier kernel's result, and the memory of the table an earlier call's.
#include "ops/pages/page_list.h"

#include <algorithm>

#include "cuda/base/launch.cuh"
#include "cuda/launchers.h"

namespace vllm_kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 1024;

__global__ void __launch_bounds__(kThreads) page_list_kernel(PageListParams p) {
  launch_dependents();
  wait_for_primary_kernel();
  const int64_t count = p.count(), step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += step) p.run(i);
}

}  // namespace

void launch(const PageListParams& p, Stream stream) {
  const int64_t blocks = std::min(ceil_div(p.count(), kThreads), kMaxBlocks);
  launch_kernel("paged_attention", page_list_kernel, dim3(static_cast<unsigned>(blocks)),
                dim3(kThreads), 0, stream, p);
}

}  // namespace vllm_kernels::cuda
