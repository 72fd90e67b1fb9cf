// attention_with_kvcache: the indices between its writer and its attention. A task is a range of
// them.
#include "ops/attention_with_kvcache.h"

#include "cpu/kernels.h"

namespace vllm_kernels::cpu {
namespace {

Loop loop_of(const KvcacheIndicesParams& p) {
  return {.count = p.count(), .per_task = 8192};
}

void run(const KvcacheIndicesParams& p, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) p.run(i);
}

}  // namespace

VLLM_KERNELS_CPU_KERNEL(KvcacheIndicesParams, loop_of, run)

}  // namespace vllm_kernels::cpu
