// heads_of_lines(), set_lines_shape() and halves_stages().
#include "cuda/attention/dispatch_lines.h"

#include <algorithm>
#include <bit>

#include "cuda/attention/common/heuristics.h"
#include "cuda/attention/dispatch_splits.h"

namespace vllm_kernels::cuda {

int heads_of_lines(const PagedAttentionParams& p, const DeviceModel& device) {
  const PagedKv& kv = p.kv;
  const bool can = device.has_wgmma && size_of(kv.dtype) == 1 && kv.layout != KvLayout::kVllm &&
                   values_of(kv.dtype) == 1 && !p.token_scales.any() &&
                   kv.block_size >= kLineTokens && kv.key_head_stride == kv.head_size &&
                   kv.value_head_stride == kv.head_size && p.fixed_split_size == 0;
  if (!can) return 1;
  const int heads = lines_heads(kv.head_size);
  const int64_t tiles = int64_t{p.num_seqs} * kv.num_kv_heads / heads;
  return kv.num_kv_heads % heads == 0 && tiles >= lines_min_tiles(kv.head_size) &&
                 seen_tokens(p) > kLengthOfShortLines
             ? heads
             : 1;
}

void set_lines_shape(const PagedAttentionParams& p, const DeviceModel& device, int heads,
                     KernelChoice& choice) {
  const int head_size = p.head_size();
  const uint32_t rows = p.max_query_len * (p.num_heads / p.kv.num_kv_heads);  // of a head, up to 8
  choice.form = KvForm::kLines;
  choice.padded_head_size = head_size;
  choice.kv_heads = static_cast<uint8_t>(heads);
  choice.consumer_shift = std::bit_width(choice.kv_heads) - 1;
  choice.warp_shift = 3;
  choice.combine_rows = std::bit_ceil(rows);
  const int tokens = decode_stage_tokens(1, head_size, false);
  const int stage = stage_bytes(rows_of_heads(p.kv, heads), choice.form, heads * head_size, tokens,
                                device.architecture)
                        .total;
  const int results = choice.combine_rows * partial_row_bytes(head_size);  // of a warp
  const int fixed = decode_static_smem(1, head_size, /*shares_pipelines=*/true, /*fused=*/false);
  const auto stages_for = [&](int warps) {
    const int pipelines = device.shared_memory_per_block - fixed - warps * results;
    return std::min(pipelines / (warps / heads) / stage, kMaxPipelineStages);
  };
  int warps = lines_threads(head_size) / 32 / heads * heads;
  while (warps > heads && stages_for(warps) < kMinStagesOfLines) warps -= heads;
  choice.warps = warps;
  choice.grid.x = device.num_sms;
  choice.stages = stages_for(warps);
  choice.shared_bytes = warps / heads * choice.stages * stage + warps * results;
}

bool halves_stages(const PagedAttentionParams& p, const DeviceModel& device,
                   const KernelChoice& choice) {
  return device.has_wgmma && choice.form == KvForm::kPackedBoxes && size_of(p.kv.dtype) == 1 &&
         choice.padded_head_size > 128 && !choice.multi_warp && !p.token_scales.any() &&
         p.fixed_split_size == 0 && int64_t{p.num_seqs} * p.kv.num_kv_heads >= kTilesOfHalvedStages;
}

}  // namespace vllm_kernels::cuda
