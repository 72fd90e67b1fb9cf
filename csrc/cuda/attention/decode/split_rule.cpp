// split_rule(): what the host decides.
#include "cuda/attention/decode/split_rule.h"

#include <algorithm>

namespace vllm_kernels::cuda {

SplitRule split_rule(const PagedAttentionParams& p, const KernelChoice& choice, int stage_shift) {
  const bool is_wgmma = choice.kernel == AttentionKernel::kDecodeWgmma;
  const bool is_lines = choice.form == KvForm::kLines;
  const int ctas = static_cast<int>(choice.grid.x);
  const int pipelines = is_wgmma ? choice.warps / 4 - 1
                                 : choice.warps >> choice.consumer_shift >> choice.halves_stages;
  // 16 tokens for each pipeline, or for each warp of lines and of halved stages.
  const int readers = choice.halves_stages || is_lines ? choice.warps : pipelines;
  SplitRule rule = {
      .few_tiles = static_cast<uint32_t>(is_lines ? ctas / kCtasOfFewLines : ctas),
      .min_split_stages = is_wgmma ? pipelines : std::max(1, readers >> (stage_shift - 4)),
      .combine_share = pipelines,
      .max_split_share = is_wgmma ? kWgmmaMaxSplitShare : kMaxSplitShare * choice.ctas_per_sm};
  const int element = size_of(p.kv.dtype), stage_values = p.head_size() << stage_shift,
            stage_bytes = stage_values * element;
  rule.one_wave_stages =
      (choice.ctas_per_sm > 1 ? kBytesOfOneWaveOfPairs : kBytesOfOneWave) / stage_bytes;
  rule.min_wave_stages = static_cast<float>(kMinWaveSplitBytes) / static_cast<float>(stage_bytes);
  const float cost_bytes = kWaveCostBytes * (element == 1 ? 2.0f : 1.0f) * (is_wgmma ? 1.5f : 1.0f);
  rule.wave_stages = cost_bytes / static_cast<float>(stage_bytes * choice.ctas_per_sm);
  const bool has_spare_ctas = int64_t{p.num_seqs} * p.kv.num_kv_heads <= ctas / 2;
  if (choice.ctas_per_sm > 1 && has_spare_ctas) {
    rule.min_split_stages = std::max(rule.min_split_stages, kMinSplitBytesOfPairs / stage_bytes);
  }
  if (choice.few_ctas == 0) return rule;
  rule.few_ctas = choice.few_ctas;
  rule.round_stages = static_cast<float>(pipelines);
  const int small_bytes = element == 1      ? kBytesOfSmallTile / 2
                          : p.num_seqs == 1 ? kBytesOfSmallTile
                                            : kBytesOfSmallTileOfSeveral;
  rule.small_stages = static_cast<float>(small_bytes) / static_cast<float>(stage_bytes);
  rule.whole_stages = (element == 1 ? kValuesOfWholeTile8Bit : kValuesOfWholeTile) / stage_values;
  return rule;
}

}  // namespace vllm_kernels::cuda
