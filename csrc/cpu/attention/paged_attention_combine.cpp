// The second launch of both attention kernels. It combines the partials of tiles that several tasks
// had splits of:
//   row_max = max_i row_max_i    w_i = exp(row_max_i - row_max)
//   out = sum_i w_i acc_i / sum_i w_i row_sum_i      exact_sum = sum_i w_i exact_sum_i
// Task i combines the tile that begins in task i of the first launch and ends in a later one. There
// is at most one.
#include "cpu/attention/decode_tiles.h"
#include "cpu/attention/epilogue.h"
#include "cpu/attention/paged_attention.h"
#include "cpu/kernels.h"

namespace vllm_kernels::cpu {
namespace {

// Combines the tile of grains [begin, end) if it begins in `task` and ends in a later one.
void combine_tile(const AttentionPlan& plan, int64_t task, int64_t begin, int64_t end,
                  const TileRows& rows) {
  if (begin < plan.first_grain(task) || end <= plan.first_grain(task + 1)) return;
  const int head_size = plan.params.head_size();
  int64_t last = task + 1;
  while (plan.first_grain(last + 1) < end) ++last;
  for (int row = 0; row < rows.count; ++row) {
    float row_max = -kInfinity;
    for (int64_t owner = task; owner <= last; ++owner) {
      const float* from = plan.partial(owner, owner == task, row);
      if (from[1] > row_max) row_max = from[1];
    }
    alignas(64) float acc[kMaxHeadSize] = {};
    float row_sum = 0.0f, exact_sum = 0.0f;
    for (int64_t owner = task; owner <= last; ++owner) {
      const float* from = plan.partial(owner, owner == task, row);
      const float weight = rescale_factor(from[1], row_max);
      row_sum += weight * from[0];
      exact_sum += weight * from[2];
      for (int d = 0; d < head_size; ++d) acc[d] += weight * from[kPartialHeader + d];
    }
    epilogue(plan.params, rows, row,
             {.row_max = row_max, .row_sum = row_sum, .exact_sum = exact_sum, .acc = acc});
  }
}

Loop decode_loop(const DecodeCombine& combine) {
  return {.count = combine.plan.tasks, .per_task = 8};
}

void run_decode(const DecodeCombine& combine, int64_t first, int64_t last) {
  const DecodePlan& plan = combine.plan;
  for (int64_t task = first; task < last; ++task) {
    const int64_t end = plan.first_grain(task + 1);
    Split split{};
    SplitIterator(plan, end - 1, end).next(split);
    combine_tile(plan, task, split.tile_begin, split.tile_end, split.rows(plan.params));
  }
}

Loop loop_of(const PagedAttentionCombine& combine) {
  return {.count = combine.plan.tasks};
}

void run(const PagedAttentionCombine& combine, int64_t first, int64_t last) {
  const PagedAttentionPlan& plan = combine.plan;
  for (int64_t task = first; task < last; ++task) {
    const int64_t end = plan.first_grain(task + 1);
    for_each_query_tile(plan, end - 1, end, [&](const QueryTile& tile) {
      combine_tile(plan, task, tile.first_grain, tile.first_grain + tile.num_grains, tile.rows());
    });
  }
}

}  // namespace

VLLM_KERNELS_CPU_KERNEL(DecodeCombine, decode_loop, run_decode)
VLLM_KERNELS_CPU_KERNEL(PagedAttentionCombine, loop_of, run)

}  // namespace vllm_kernels::cpu
