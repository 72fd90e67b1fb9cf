// The second launch of the general attention kernel. It combines the partials of tiles that several
// tasks had splits of:
//   row_max = max_i row_max_i    w_i = exp(row_max_i - row_max)
//   out = sum_i w_i acc_i / sum_i w_i row_sum_i
// Task i combines the tile that begins in task i of the first launch and ends in a later one. There
// is at most one.
#include "cpu/attention/epilogue.h"
#include "cpu/attention/paged_attention.h"
#include "cpu/kernels.h"

namespace vllm_kernels::cpu {
namespace {

Loop loop_of(const PagedAttentionCombine& combine) {
  return {.count = combine.plan.tasks};
}

// Combines the tile that begins in `task` and ends in a later one.
void combine_tile(const PagedAttentionPlan& plan, int64_t task, const WorkTile& tile) {
  const PagedAttentionParams& p = plan.params;
  const int head_size = p.kv.head_size;
  int64_t last = task + 1;
  while (plan.first_grain(last + 1) < tile.first_grain + tile.num_grains) ++last;
  const auto partial_of = [&](int64_t owner, int row) {
    const int64_t at = owner == task ? 2 * owner + 1 : 2 * owner;
    return plan.partials + at * plan.partial_size() + static_cast<int64_t>(row) * (head_size + 2);
  };
  for (int row = 0; row < tile.queries * tile.heads; ++row) {
    float row_max = -kInfinity;
    for (int64_t owner = task; owner <= last; ++owner) {
      if (partial_of(owner, row)[1] > row_max) row_max = partial_of(owner, row)[1];
    }
    alignas(64) float acc[kMaxHeadSize] = {};
    float row_sum = 0.0f;
    for (int64_t owner = task; owner <= last; ++owner) {
      const float* from = partial_of(owner, row);
      const float weight = rescale_factor(from[1], row_max);
      row_sum += weight * from[0];
      for (int d = 0; d < head_size; ++d) acc[d] += weight * from[2 + d];
    }
    epilogue(p, tile.first_token + row / tile.heads, tile.first_head + row % tile.heads,
             {.row_max = row_max, .row_sum = row_sum, .acc = acc});
  }
}

void run(const PagedAttentionCombine& combine, int64_t begin, int64_t end) {
  const PagedAttentionPlan& plan = combine.plan;
  for (int64_t task = begin; task < end; ++task) {
    const int64_t next_grain = plan.first_grain(task + 1);
    for_each_work_tile(plan, next_grain - 1, next_grain, [&](const WorkTile& tile) {
      const bool starts = tile.first_grain >= plan.first_grain(task);
      if (starts && tile.first_grain + tile.num_grains > next_grain) combine_tile(plan, task, tile);
    });
  }
}

}  // namespace

VLLM_KERNELS_CPU_KERNEL(PagedAttentionCombine, loop_of, run)

}  // namespace vllm_kernels::cpu
