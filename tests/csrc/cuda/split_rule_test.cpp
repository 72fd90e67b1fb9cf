// How decode splits batches of given lengths, by the rule that the device applies.
#include "cuda/attention/decode/split_rule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <vector>

#include "choose_kernel_cases.h"

namespace vllm_kernels::cuda {
namespace {

struct Splits {
  KernelChoice choice;
  SplitRule rule;
  std::vector<int> of;  // splits of each sequence's query tiles
  int work_tiles;       // of all KV heads
};

int stage_tokens(const PagedAttentionParams& p, const KernelChoice& choice) {
  if (choice.kernel == AttentionKernel::kDecodeWgmma) return kWgmmaStageTokens;
  return decode_stage_tokens(size_of(p.kv.dtype), choice.padded_head_size, choice.multi_warp)
         << choice.halves_stages;
}

// A decode step. `bound`: the host's bound on the lengths; 0: the longest one. `device`: an index
// of kDevices, by default the H200.
Splits split(PagedAttentionParams p, const std::vector<int>& lens, int query_len = 1, int bound = 0,
             int device = 2) {
  p.num_seqs = static_cast<int>(lens.size());
  p.max_query_len = query_len;
  p.num_tokens = p.num_seqs * query_len;
  p.max_seq_len = bound > 0 ? bound : *std::max_element(lens.begin(), lens.end());
  const KernelChoice choice = choose_kernel(p, kDevices[device].model).main;
  const bool is_wgmma = choice.kernel == AttentionKernel::kDecodeWgmma;
  EXPECT_TRUE(is_wgmma || choice.kernel == AttentionKernel::kDecode);
  const int tokens = stage_tokens(p, choice);
  const int shift = std::countr_zero(static_cast<unsigned>(tokens));
  Splits result = {
      .choice = choice, .rule = split_rule(p, choice, shift), .of = {}, .work_tiles = 0};
  const int heads = p.kv.num_kv_heads / choice.kv_heads;
  BatchStages batch = {};
  for (const int len : lens) {
    const uint32_t stages = (len + tokens - 1) / tokens;
    batch.all += stages;
    batch.longest = std::max(batch.longest, stages);
  }
  batch.query_tiles = p.num_seqs * heads;
  const auto ctas = static_cast<uint32_t>(choice.grid.x);
  const bool small_batches = !is_wgmma && !choice.multi_warp && choice.form != KvForm::kLines;
  float per_stage = small_batches ? splits_per_stage<true>(result.rule, batch, heads, ctas, shift)
                                  : splits_per_stage<false>(result.rule, batch, heads, ctas, shift);
  const auto count = [&](float max_stages, bool& is_long) {
    result.of.clear();
    result.work_tiles = 0;
    for (const int len : lens) {
      const int stages = (len + tokens - 1) / tokens, splits = splits_of(stages, per_stage);
      is_long |= stages > splits * max_stages;
      result.of.push_back(splits);
      result.work_tiles += splits * heads;
    }
    return static_cast<uint32_t>(result.work_tiles);
  };
  const auto longest = [&] {
    float stages = 0;
    for (const int len : lens) {
      const int all = (len + tokens - 1) / tokens;
      stages = std::max(stages, static_cast<float>(all) / splits_of(all, per_stage));
    }
    return stages;
  };
  bool is_long = false;
  const uint32_t tiles = count(0, is_long);
  const uint32_t min_stages = min_stages_of_waves(result.rule, heads, ctas);
  if (small_batches) {
    change_waves<true>(result.rule, batch, heads, ctas, tiles, min_stages, per_stage, count,
                       longest);
  } else {
    change_waves<false>(result.rule, batch, heads, ctas, tiles, min_stages, per_stage, count,
                        longest);
  }
  count(0, is_long);
  return result;
}

std::vector<int> times(int seqs, int len) {
  return std::vector<int>(seqs, len);
}

constexpr DType kBf16 = DType::kBFloat16, kE4m3 = DType::kFp8E4M3;

// Batches of decode/small_batches.md in docs/lab: heads of 128, 8 KV heads.
TEST(SplitRule, SmallBatchesAreSplitForHalfOfTheSms) {
  const PagedAttentionParams bf16 = nhd_call(kBf16, 128, 32), e4m3 = nhd_call(kE4m3, 128, 32);
  EXPECT_EQ(split(e4m3, {2048}).work_tiles, 64);
  EXPECT_EQ(split(e4m3, times(2, 1024)).work_tiles, 64);
  EXPECT_EQ(split(e4m3, times(4, 512)).work_tiles, 64);
  EXPECT_EQ(split(bf16, {2048}).work_tiles, 64);
  EXPECT_EQ(split(bf16, times(4, 512)).work_tiles, 64);
  // With a CTA for each SM the limit of 8 bits is lower.
  EXPECT_EQ(split(e4m3, {4096}).work_tiles, 64);
  EXPECT_EQ(split(e4m3, {4096}, 1, 100000).work_tiles, 128);
  EXPECT_EQ(split(e4m3, {2048}, 1, 100000).work_tiles, 64);
  EXPECT_EQ(split(e4m3, times(4, 576), 1, 100000).work_tiles, 64);
  EXPECT_EQ(split(bf16, {2048}, 1, 100000).work_tiles, 64);
  EXPECT_EQ(split(bf16, {2304}, 1, 100000).work_tiles, 64);
  EXPECT_EQ(split(bf16, {2305}, 1, 100000).work_tiles, 128);
  EXPECT_EQ(split(bf16, times(2, 800)).work_tiles, 64);
  EXPECT_EQ(split(bf16, times(4, 384)).work_tiles, 64);
  // 72 query tiles are more than half of the SMs.
  std::vector<int> lens = times(9, 128);
  lens[2] = 1024;
  EXPECT_EQ(split(e4m3, lens).of[2], 6);
  lens.pop_back();
  EXPECT_EQ(split(e4m3, lens).of[2], 4);
  // An equal share is 7.3 stages. Two splits of 22 stages are too long, and three fit.
  EXPECT_EQ(split(e4m3, {704, 288, 288, 288, 288, 64}).of[0], 3);
  // Three splits of 28 stages are too long, and four do not fit.
  EXPECT_EQ(split(e4m3, {896, 288, 288, 288, 288, 64}).of[0], 5);
  // Two splits of 19 stages, two rounds each, fit half of the SMs. Three would not.
  EXPECT_EQ(split(bf16, times(4, 300)).of, times(4, 2));
  EXPECT_EQ(split(nhd_call(kE4m3, 256, 32), {304, 304, 304, 160}).of[0], 2);
}

// Query tiles of up to 576 tokens in 8 bits, or 384 in 16 bits, stay whole, too. Half of the SMs
// must have about one each.
TEST(SplitRule, SmallBatchesOfWholeTiles) {
  const PagedAttentionParams bf16 = nhd_call(kBf16, 128, 32), e4m3 = nhd_call(kE4m3, 128, 32);
  EXPECT_EQ(split(e4m3, times(6, 576)).of, times(6, 1));
  EXPECT_EQ(split(e4m3, times(6, 577)).of, times(6, 2));
  EXPECT_EQ(split(bf16, times(7, 384)).of, times(7, 1));
  EXPECT_EQ(split(bf16, times(7, 385)).of, times(7, 2));
  EXPECT_EQ(split(e4m3, {192, 160, 416, 416, 224, 320}).of, times(6, 1));
}

// If the splits would be too long, every SM has one.
TEST(SplitRule, LongerBatchesAreSplitForAllSms) {
  const PagedAttentionParams bf16 = nhd_call(kBf16, 128, 32), e4m3 = nhd_call(kE4m3, 128, 32);
  EXPECT_EQ(split(e4m3, {4609}).work_tiles, 128);
  EXPECT_EQ(split(e4m3, times(2, 2048)).work_tiles, 128);
  EXPECT_EQ(split(bf16, {8192}).work_tiles, 128);
  EXPECT_EQ(split(bf16, times(4, 640)).work_tiles, 128);
  EXPECT_EQ(split(bf16, {640, 640, 400, 400}).of[0], 5);
  EXPECT_EQ(split(bf16, times(2, 1025)).work_tiles, 128);
}

// 8 KV heads, so 132 CTAs have 16 work tiles of a head.
TEST(SplitRule, ShortRaggedBatchesTakeOneWave) {
  const PagedAttentionParams bf16 = nhd_call(kBf16, 128, 32), e4m3 = nhd_call(kE4m3, 128, 32);
  std::vector<int> lens = {1000, 900, 800, 20, 20, 20, 20, 20, 20, 20, 20, 20};
  EXPECT_EQ(split(e4m3, lens).of, (std::vector{2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1}));
  // Splits have 8 stages, then 10, then 12.5.
  lens = times(12, 70);
  lens[0] = 1000;
  EXPECT_EQ(split(bf16, lens).of[0], 5);
  lens = times(11, 10);
  lens[0] = lens[1] = 500;
  EXPECT_EQ(split(bf16, lens).of[0], 3);
  EXPECT_EQ(split(e4m3, lens).of[0], 3);
  // One CTA a head is left for three long sequences, so none is split. Splits of 17 stages may be
  // 64 stages longer.
  lens = times(15, 20);
  lens[0] = lens[1] = lens[2] = 1296;
  EXPECT_EQ(split(bf16, lens).of, times(15, 1));
  lens[0] = lens[1] = lens[2] = 1297;
  EXPECT_GT(split(bf16, lens).work_tiles, 132);
  // One long sequence beside very short ones has splits of 8 stages.
  lens = times(16, 1);
  lens[0] = 1500;
  EXPECT_EQ(split(bf16, lens).of[0], 12);
  // One step makes the splits of the first 94 stages longer than 323.
  lens = {40000, 20000, 20000, 5000, 100, 20, 20, 20};
  EXPECT_EQ(split(bf16, lens).of[1], 3);
  // Long splits may be longer, too.
  lens = times(8, 500);
  lens[0] = 14540;
  EXPECT_EQ(split(bf16, lens).of[0], 8);
  // More query tiles than CTAs: some CTAs have two anyway.
  lens = times(20, 20);
  lens[0] = 1100;
  EXPECT_EQ(split(bf16, lens).of[0], 1);
  lens[0] = 4200;
  EXPECT_EQ(split(bf16, lens).of[0], 4);
}

// 72 query tiles for 132 SMs: in one wave 60 SMs would have none.
TEST(SplitRule, LongBatchesTakeWaves) {
  const PagedAttentionParams bf16 = nhd_call(kBf16, 128, 32), e4m3 = nhd_call(kE4m3, 128, 32);
  EXPECT_EQ(split(bf16, times(9, 8000)).of, times(9, 7));
  EXPECT_EQ(split(bf16, times(9, 2000)).of, times(9, 3));
  EXPECT_EQ(split(bf16, times(9, 1536)).of, times(9, 3));
  EXPECT_EQ(split(bf16, times(9, 1500)).of, times(9, 1));  // a third is too short
  EXPECT_EQ(split(bf16, times(6, 8000)).of, times(6, 8));
  std::vector<int> lens = times(9, 2000);
  lens[4] = 2001;  // a stage more
  EXPECT_EQ(split(bf16, lens).of, times(9, 3));
  for (int i = 0; i < 9; ++i) lens[i] = 8000 - 50 * i;
  EXPECT_EQ(split(bf16, lens).of, times(9, 7));
  EXPECT_EQ(split(bf16, times(12, 8000)).of, times(12, 4));
  EXPECT_EQ(split(bf16, times(12, 2000)).of, times(12, 1));
  EXPECT_EQ(split(bf16, times(5, 8000)).of, times(5, 3));    // 120 work tiles in one wave
  EXPECT_EQ(split(bf16, times(16, 8000)).of, times(16, 1));  // 128
  EXPECT_EQ(split(e4m3, times(9, 4000)).of, times(9, 3));
  EXPECT_EQ(split(e4m3, times(12, 4000)).of, times(12, 1));
  EXPECT_EQ(split(e4m3, times(12, 8000)).of, times(12, 5));  // two CTAs an SM
}

// Eight pipelines take eight stages at a time: 128 tokens in bf16, 256 in e4m3.
TEST(SplitRule, RoundsOfPipelines) {
  const PagedAttentionParams bf16 = nhd_call(kBf16, 128, 32), e4m3 = nhd_call(kE4m3, 128, 32);
  // Two splits of 19 stages, or five of 44, would take two rounds.
  EXPECT_EQ(split(bf16, {300}).of, times(1, 3));
  EXPECT_EQ(split(bf16, {700}).of, times(1, 6));
  EXPECT_EQ(split(bf16, {1400}).of, times(1, 8));          // nine of 88 do not fit
  EXPECT_EQ(split(bf16, times(3, 300)).of, times(3, 2));   // three would not fit half of the SMs
  EXPECT_EQ(split(bf16, {200, 200, 200, 1000}).of[3], 4);  // for half of the SMs, two rounds
  EXPECT_EQ(split(e4m3, {200, 200, 200, 3000}).of[3], 12);
  EXPECT_EQ(split(e4m3, {200, 200, 200, 3264}).of[3], 12);  // 13 have 1.05 shares of a CTA
  EXPECT_EQ(split(e4m3, times(8, 400)).of, times(8, 1));    // two would need 128 of 132 CTAs
  // One split of 13 stages would be too long for half of the SMs.
  EXPECT_EQ(split(e4m3, times(4, 400)).of, times(4, 2));
  // Five splits of 20 stages would fill 120 CTAs, and four take one round, too.
  EXPECT_EQ(split(e4m3, times(3, 640)).of, times(3, 4));
  // Calls that run beside prefill do not overlap.
  PagedAttentionParams concurrent = bf16;
  concurrent.concurrent = true;
  EXPECT_EQ(split(concurrent, {300}).of, times(1, 2));
}

// Each warp of a CTA has a pipeline, and wide heads have fewer.
TEST(SplitRule, RoundsOfWideHeads) {
  const Splits splits = split(nhd_call(kBf16, 256, 32), {300});
  EXPECT_EQ(splits.rule.round_stages, splits.choice.warps);
  EXPECT_LT(splits.choice.warps, 8);
}

// With two CTAs an SM splits may be 32 stages longer, not 64. 32 sequences of 8 KV heads are 256
// query tiles, and there are 264 CTAs, 33 a head. So none of three long sequences can be split.
// Their splits have 5 stages before.
TEST(SplitRule, OneWaveOfPairsIsShorter) {
  const PagedAttentionParams e4m3 = nhd_call(kE4m3, 128, 32);
  const auto longest = [&](int len) {
    std::vector<int> lens = times(32, 10);
    for (int i = 0; i < 3; ++i) lens[i] = len;
    return split(e4m3, lens, 1, 8000);
  };
  EXPECT_EQ(longest(1184).work_tiles, 256);
  EXPECT_GT(longest(1185).work_tiles, 264);
}

// Two CTAs an SM: a split has at least 512 tokens of 128 bytes.
TEST(SplitRule, PairsOfCtasHaveLongSplits) {
  const PagedAttentionParams e4m3 = nhd_call(kE4m3, 128, 32);
  EXPECT_EQ(split(e4m3, times(9, 8000)).of, times(9, 3));
  EXPECT_EQ(split(e4m3, times(12, 900), 1, 8000).of, times(12, 1));
  EXPECT_EQ(split(e4m3, times(12, 1100), 1, 8000).of, times(12, 2));
  // More query tiles than SMs.
  std::vector<int> lens = times(17, 50);
  lens[0] = 800;
  EXPECT_EQ(split(e4m3, lens).of[0], 8);
}

TEST(SplitRule, VeryShortSequencesAreWhole) {
  const PagedAttentionParams bf16 = nhd_call(kBf16, 128, 32), e4m3 = nhd_call(kE4m3, 128, 32);
  EXPECT_EQ(split(bf16, {256}).of, times(1, 1));
  EXPECT_EQ(split(bf16, {272}).of, times(1, 3));
  EXPECT_EQ(split(e4m3, {384}).of, times(1, 1));
  EXPECT_EQ(split(e4m3, {416}).of, times(1, 3));
  EXPECT_EQ(split(nhd_call(kBf16, 64, 32), {512}).of, times(1, 1));
  // Beside a longer one they are split as long ones are.
  EXPECT_EQ(split(bf16, {256, 300}).of, (std::vector{2, 3}));
}

// With many query tiles a split has a quarter of an SM's share, and 1024 tokens at least.
TEST(SplitRule, OfManyTilesOnlyLongOnesAreSplit) {
  const PagedAttentionParams bf16 = nhd_call(kBf16, 128, 32);
  EXPECT_EQ(split(bf16, times(64, 4096)).of, times(64, 1));
  std::vector<int> lens = times(64, 1024);
  lens[7] = 65536;
  const Splits splits = split(bf16, lens);
  EXPECT_EQ(splits.of[0], 1);
  EXPECT_EQ(splits.of[7], 33);  // a share is 493 stages of 16 tokens
  lens = times(64, 600);
  lens[7] = 4096;
  EXPECT_EQ(split(bf16, lens).of[7], 4);
  // Two CTAs per SM: half of a CTA's share is a quarter of the SM's.
  lens = times(34, 1024);
  lens[7] = 65536;
  EXPECT_EQ(split(nhd_call(kE4m3, 128, 32), lens).of[7], 42);
}

PagedAttentionParams halved_stages() {
  PagedAttentionParams p = nhd_call(kE4m3, 256, 32);
  p.kv.layout = KvLayout::kVllm;
  p.kv.block_size = 64;
  set_strides(p.kv);
  return p;
}

// The pipelines of a CTA, and the fewest stages of a split: 16 tokens for each of them.
TEST(SplitRule, Pipelines) {
  const auto check = [](const PagedAttentionParams& p, int query_len, int seqs, int pipelines,
                        int min_stages) {
    const Splits splits = split(p, times(seqs, 3000), query_len);
    EXPECT_EQ(splits.rule.combine_share, pipelines);
    EXPECT_EQ(splits.rule.min_split_stages, min_stages);
    return splits.choice;
  };
  EXPECT_EQ(check(nhd_call(kBf16, 128, 32), 1, 4, 8, 8).warps, 8);
  EXPECT_EQ(check(nhd_call(kE4m3, 128, 32), 1, 4, 8, 4).warps, 8);
  // Several warps share a pipeline.
  EXPECT_EQ(check(nhd_call(kBf16, 256, 32), 4, 4, 3, 3).warps, 6);
  // A stage has 64 tokens.
  EXPECT_EQ(check(nhd_call(kBf16, 128, 32), 4, 4, 3, 3).kernel, AttentionKernel::kDecodeWgmma);
  // Here each warp has 16 tokens. Lines of 96 have four heads, so four warps share a pipeline.
  EXPECT_TRUE(check(halved_stages(), 1, 4, 4, 4).halves_stages);
  EXPECT_EQ(check(nhd_call(kE4m3, 96, 32), 1, 24, 3, 6).form, KvForm::kLines);
}

TEST(SplitRule, WgmmaSplitsTwiceAsLong) {
  std::vector<int> lens = times(64, 1024);
  lens[7] = 65536;
  const PagedAttentionParams bf16 = nhd_call(kBf16, 128, 32);
  EXPECT_EQ(split(bf16, lens, 4).of[7], split(bf16, lens).of[7] / 2);
  // Three stages of 64 tokens are the fewest, and 1024 tokens are 5 splits.
  EXPECT_EQ(split(bf16, {1024}, 4).of, times(1, 5));
}

// int4 counts as 8 bits, and a head has twice as many values as bytes.
TEST(SplitRule, Int4) {
  PagedAttentionParams p = nhd_call(DType::kInt4x2, 64, 32);
  EXPECT_EQ(p.head_size(), 128);
  p.token_scales.key = p.token_scales.value = static_cast<const float*>(at(64));
  p.token_scales.key_zero = p.token_scales.value_zero = static_cast<const float*>(at(64));
  EXPECT_EQ(split(p, {384}).of, times(1, 1));
  EXPECT_GT(split(p, {416}).of[0], 1);
}

// Before Hopper launches do not overlap, so every SM has a split.
TEST(SplitRule, OtherDevices) {
  const PagedAttentionParams bf16 = nhd_call(kBf16, 128, 32);
  EXPECT_EQ(split(bf16, {2048}, 1, 0, 0).work_tiles, 96);  // A100, 108 SMs
  EXPECT_EQ(split(bf16, {256}, 1, 0, 0).of[0], 2);
  EXPECT_EQ(split(bf16, {2048}, 1, 0, 3).work_tiles, 72);  // B200, 74 CTAs
}

// Form kLines: eight KV heads of 80 are one query tile, and more than 66 count as many.
TEST(SplitRule, LinesAreFewUpToHalfOfTheCtas) {
  const PagedAttentionParams lines = nhd_call(kE4m3, 80, 32);
  EXPECT_EQ(split(lines, times(66, 8192)).of[0], 2);
  EXPECT_EQ(split(lines, times(67, 8192)).of[0], 7);
  EXPECT_EQ(split(lines, times(67, 2000)).of[0], 1);
}

// Rounding does not take one away.
TEST(SplitRule, EqualShare) {
  for (int stages = 1; stages <= 2000; ++stages) {
    for (int splits = 1; splits <= std::min(stages, 132); ++splits) {
      const auto longest = static_cast<float>(stages);
      const float split = equal_share(longest, static_cast<float>(splits));
      ASSERT_EQ(splits_of(stages, 1.0f / split), splits) << stages;
    }
  }
}

// The splits of a query tile cover it, differ by one stage at most, and are not empty.
TEST(SplitRule, RangesCoverAllStages) {
  for (const int share : {0, 1, 3}) {
    for (int stages = 1; stages < 200; ++stages) {
      for (int splits = std::max(1, 2 * share); splits * (share + 1) <= stages; ++splits) {
        int end = 0, shortest = stages, longest = 0;
        for (int i = 0; i < splits; ++i) {
          const StageRange range = stages_of_split(stages, splits, i, share);
          ASSERT_EQ(range.first, end) << stages << " " << splits << " " << share;
          end += range.count;
          const int count = range.count + (i + 1 == splits ? share : 0);
          shortest = std::min(shortest, count);
          longest = std::max(longest, count);
          ASSERT_GT(range.count, 0);
        }
        ASSERT_EQ(end, stages);
        ASSERT_LE(longest - shortest, 1);
      }
    }
  }
}

// The last split is shorter only if that is a quarter of it at most.
TEST(SplitRule, ShareOfTheSplitThatCombines) {
  const SplitRule rule = {.combine_share = 8};
  EXPECT_EQ(combine_share<true>(rule, 16 * 32, 16, false), 8);
  EXPECT_EQ(combine_share<true>(rule, 16 * 32 - 1, 16, false), 0);
  EXPECT_EQ(combine_share<true>(rule, 1000, 16, true), 0);
  EXPECT_EQ(combine_share<true>(rule, 1000, 4, false), 2);
  // Other kernels compare with the share itself.
  EXPECT_EQ(combine_share<false>(rule, 4 * 8, 4, false), 2);
  EXPECT_EQ(combine_share<true>(rule, 4 * 8, 4, false), 0);
  EXPECT_EQ(combine_share<false>(rule, 4 * 8 - 1, 4, false), 0);
}

TEST(SplitRule, IntegerDivision) {
  for (const int b : {1, 2, 3, 7, 8, 1000, 123457}) {
    for (const int a : {0, 1, 6, 7, 8, 9, 999, 1000, 16777215, 16777217, 100000001}) {
      EXPECT_EQ(divide(a, b), a / b);
    }
  }
}

}  // namespace
}  // namespace vllm_kernels::cuda
