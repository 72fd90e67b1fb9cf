// The general kernel's second launch: tiles that several tasks had pieces of.
#include "cpu/attention/epilogue.h"
#include "cpu/attention/paged_attention.h"
#include "cpu/kernels.h"

namespace vllm_kernels::cpu {
namespace {

int64_t num_tasks(const GeneralAttentionMerge& merge) {
  return merge.work.tasks;
}

// Merges the tile that starts in `task` and goes on in later ones.
void merge_tile(const GeneralAttentionWork& work, int64_t task, const AttentionTile& tile) {
  const PagedAttentionParams& p = work.params;
  const int head_size = p.kv.head_size;
  int64_t last = task + 1;
  while (work.first_unit(last + 1) < tile.first_unit + tile.units) ++last;
  const auto slot = [&](int64_t part, int row) {
    const int64_t at = part == task ? 2 * part + 1 : 2 * part;
    return work.partials + at * work.partial_size() + static_cast<int64_t>(row) * (head_size + 2);
  };
  for (int row = 0; row < tile.queries * tile.heads; ++row) {
    float maximum = -kInfinity;
    for (int64_t part = task; part <= last; ++part) {
      if (slot(part, row)[1] > maximum) maximum = slot(part, row)[1];
    }
    alignas(64) float weighted[kMaxHeadSize] = {};
    float sum = 0.0f;
    for (int64_t part = task; part <= last; ++part) {
      const float* from = slot(part, row);
      const float share = decay(from[1], maximum);
      sum += share * from[0];
      for (int d = 0; d < head_size; ++d) weighted[d] += share * from[2 + d];
    }
    finish(p, tile.first_token + row / tile.heads, tile.first_head + row % tile.heads,
           {.maximum = maximum, .sum = sum, .values = weighted});
  }
}

void run(const GeneralAttentionMerge& merge, int64_t begin, int64_t end) {
  const GeneralAttentionWork& work = merge.work;
  for (int64_t task = begin; task < end; ++task) {
    const int64_t after = work.first_unit(task + 1);
    for_each_tile(work, after - 1, after, [&](const AttentionTile& tile) {
      const bool starts = tile.first_unit >= work.first_unit(task);
      if (starts && tile.first_unit + tile.units > after) merge_tile(work, task, tile);
    });
  }
}

}  // namespace
}  // namespace vllm_kernels::cpu

VLLM_KERNELS_CPU_KERNEL(vllm_kernels::cpu::GeneralAttentionMerge, vllm_kernels::cpu::num_tasks,
                        vllm_kernels::cpu::run)
