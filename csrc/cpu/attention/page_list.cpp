// paged_attention with a table in CSR form: its block table and lengths. A task is a range of
// sequences.
#include "ops/pages/page_list.h"

#include "cpu/kernels.h"

namespace vllm_kernels::cpu {
namespace {

Loop loop_of(const PageListParams& p) {
  return {.count = p.count(), .per_task = 16 * PageListParams::kLanes};
}

void run(const PageListParams& p, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) p.run(i);
}

}  // namespace

VLLM_KERNELS_CPU_KERNEL(PageListParams, loop_of, run)

}  // namespace vllm_kernels::cpu
