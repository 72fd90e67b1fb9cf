// When decode takes several KV heads a work tile, and when two warps share a stage.
#include <gtest/gtest.h>

#include <functional>

#include "choose_kernel_cases.h"
#include "cuda/attention/common/heuristics.h"

namespace vllm_kernels::cuda {
namespace {

// 64 sequences of one token over an e4m3 cache in layout NHD.
PagedAttentionParams call(int head_size) {
  PagedAttentionParams p = nhd_call(DType::kFp8E4M3, head_size, 64);
  p.num_seqs = p.num_tokens = 64;
  p.max_query_len = 1;
  p.max_seq_len = 5000;
  return p;
}

KernelChoice choose(const PagedAttentionParams& p, int device = 2) {
  return choose_kernel(p, kDevices[device].model).main;
}

TEST(ChooseKernel, HeadsThatFillLines) {
  const std::pair<int, int> sizes[] = {{64, 2},  {80, 8},  {96, 4}, {112, 8},
                                       {160, 4}, {192, 2}, {224, 4}};
  for (const auto& [head_size, heads] : sizes) {
    for (const int group : {1, 3, 8}) {
      PagedAttentionParams p = call(head_size);
      p.num_heads = 8 * group;
      const KernelChoice choice = choose(p);
      EXPECT_EQ(choice.form, KvForm::kLines) << head_size;
      EXPECT_EQ(choice.kv_heads, heads) << head_size;
      EXPECT_EQ(1 << choice.consumer_shift, heads);
      EXPECT_EQ(choice.warps % heads, 0) << describe(choice);
      EXPECT_GE(choice.stages, kMinStagesOfLines) << describe(choice);
      EXPECT_TRUE(head_size != 160 || choice.warps == 12) << describe(choice);
      EXPECT_EQ(choice.combine_rows, group == 3 ? 4 : group);
      EXPECT_LE(choice.shared_bytes, kDevices[2].model.shared_memory_per_block - 3072);
    }
  }
  for (const int head_size : {48, 72, 128, 144, 256}) {
    EXPECT_NE(choose(call(head_size)).form, KvForm::kLines) << head_size;
  }
  // Heads of 128 fill lines alone. Only large batches take two together.
  PagedAttentionParams p = call(128);
  p.num_heads = 8;
  p.kv.num_kv_heads = 2;
  set_strides(p.kv);
  for (const int seqs : {1023, 1024}) {
    p.num_seqs = p.num_tokens = seqs;
    EXPECT_EQ(choose(p).kv_heads, seqs == 1024 ? 2 : 1);
  }
}

// Two warps share a stage where boxes of 16 tokens are slow, in batches.
TEST(ChooseKernel, HalvedStages) {
  const auto halves = [](int head_size, int seqs, int block_size, DType dtype, int fixed = 0) {
    PagedAttentionParams p = call(head_size);
    p.kv.layout = KvLayout::kVllm;
    p.kv.dtype = dtype;
    p.kv.block_size = block_size;
    p.num_seqs = p.num_tokens = seqs;
    p.fixed_split_size = fixed;
    set_strides(p.kv);
    const KernelChoice choice = choose(p);
    const int fixed_bytes = choice.halves_stages ? 3072 : 2048;
    EXPECT_LE(choice.shared_bytes, kDevices[2].model.shared_memory_per_block - fixed_bytes);
    return choice.halves_stages;
  };
  EXPECT_TRUE(halves(256, 3, 32, DType::kFp8E4M3));
  EXPECT_TRUE(halves(144, 64, 128, DType::kInt8));
  EXPECT_FALSE(halves(256, 2, 32, DType::kFp8E4M3));
  EXPECT_FALSE(halves(256, 64, 16, DType::kFp8E4M3));
  EXPECT_FALSE(halves(128, 64, 32, DType::kFp8E4M3));
  EXPECT_FALSE(halves(256, 64, 32, DType::kBFloat16));
  EXPECT_FALSE(halves(256, 64, 32, DType::kFp8E4M3, 512));
}

TEST(ChooseKernel, CallsWithoutLines) {
  const std::function<void(PagedAttentionParams&)> changes[] = {
      [](auto& p) { p.num_seqs = p.num_tokens = 23; },  // few query tiles
      [](auto& p) { p.max_seq_len = 1024; },
      [](auto& p) { p.sliding_window = 1024; },
      [](auto& p) { p.fixed_split_size = 512; },
      [](auto& p) { p.num_heads = 9 * 8; },  // 9 rows a KV head
      [](auto& p) { p.kv.block_size = 8; },
      [](auto& p) { p.kv.num_kv_heads = 4, p.num_heads = 32; },  // 2.5 lines
      [](auto& p) { p.kv.layout = KvLayout::kHND; },
      [](auto& p) { p.kv.layout = KvLayout::kVllm; },
      [](auto& p) { p.kv.dtype = p.dtype; },
      [](auto& p) {
        p.kv.dtype = DType::kInt8;
        p.token_scales.key = p.token_scales.value = static_cast<const float*>(at(64));
      },
  };
  for (size_t i = 0; i < std::size(changes); ++i) {
    PagedAttentionParams p = call(80);
    changes[i](p);
    set_strides(p.kv);
    EXPECT_NE(choose(p).form, KvForm::kLines) << i;
  }
  for (const bool value : {false, true}) {  // heads that are not adjacent
    PagedAttentionParams sliced = call(80);
    (value ? sliced.kv.value_head_stride : sliced.kv.key_head_stride) = 160;
    EXPECT_NE(choose(sliced).form, KvForm::kLines);
  }
  for (const auto& [head_size, seqs] : {std::pair{160, 15}, {160, 16}, {96, 12}}) {
    PagedAttentionParams p = call(head_size);  // two query tiles a sequence
    p.num_seqs = p.num_tokens = seqs;
    p.max_seq_len = 1025;
    EXPECT_EQ(choose(p).form == KvForm::kLines, seqs != 15) << head_size << " " << seqs;
  }
  for (const int device : {0, 1, 3, 4}) {
    EXPECT_NE(choose(call(80), device).form, KvForm::kLines) << kDevices[device].name;
  }
}

}  // namespace
}  // namespace vllm_kernels::cuda
