// When prefill sm90 splits its work tiles, or gathers an 8-bit cache, in place of decode.
#include <gtest/gtest.h>

#include "choose_kernel_cases.h"

namespace vllm_kernels::cuda {
namespace {

// 64 query tokens of each of 4 sequences: 64 work tiles for 132 SMs.
PagedAttentionParams few_tiles(int64_t tokens, bool contiguous = false) {
  PagedAttentionParams p = nhd_call(DType::kBFloat16, 128, 32);
  p.num_seqs = 4;
  p.max_query_len = 64;
  p.num_tokens = 4 * 64;
  p.max_seq_len = contiguous ? 4 * tokens : tokens;
  if (contiguous) p.key_start_loc = static_cast<const int32_t*>(at(64));
  return p;
}

void set_queries(PagedAttentionParams& p, int seqs, int query_len) {
  p.num_seqs = seqs;
  p.max_query_len = query_len;
  p.num_tokens = seqs * query_len;
}

// e4m3, or int8 with a scale per token.
void set_8_bits(PagedAttentionParams& p, bool scaled = false) {
  p.kv.dtype = scaled ? DType::kInt8 : DType::kFp8E4M3;
  set_strides(p.kv);
  if (scaled) p.token_scales.key = p.token_scales.value = static_cast<const float*>(at(64));
}

// Few work tiles of short sequences: prefill is faster than decode, though it splits none of them.
// (prefill/splits.md, 4 sequences of 64 tokens on 1k.) Of contiguous keys the sum is known.
TEST(ChooseKernel, ShortSequencesAreNoDecode) {
  for (const bool contiguous : {false, true}) {
    for (const int64_t tokens : {int64_t{100}, int64_t{1000}, int64_t{10000}}) {
      const AttentionChoice choice =
          choose_kernel(few_tiles(tokens, contiguous), kDevices[2].model);
      EXPECT_EQ(choice.main.kernel, AttentionKernel::kPrefillSm90) << describe(choice);
      EXPECT_EQ(choice.may_split, tokens == 10000) << describe(choice);
    }
  }
}

// The same where prefill cannot split, or has few rows.
TEST(ChooseKernel, FewTilesAreDecodeWithoutSplits) {
  const auto is_prefill = [](const PagedAttentionParams& p) {
    return choose_kernel(p, kDevices[2].model).main.kernel == AttentionKernel::kPrefillSm90;
  };
  PagedAttentionParams p = few_tiles(1000);
  EXPECT_TRUE(is_prefill(p));
  set_8_bits(p);
  EXPECT_TRUE(is_prefill(p));
  p = few_tiles(1000);
  p.kv.head_size = 96;
  set_strides(p.kv);
  EXPECT_FALSE(is_prefill(p));
  p = few_tiles(1000);
  set_queries(p, 4, 9);  // 36 rows
  EXPECT_TRUE(is_prefill(p));
  set_queries(p, 4, 8);
  EXPECT_FALSE(is_prefill(p));
  p = few_tiles(1000);
  p.num_tokens = 3 * 64;  // a sequence may have a single token
  EXPECT_FALSE(is_prefill(p));
}

// 8-bit caches, 64 rows: prefill dequantizes keys more slowly than decode, most so with scales of
// tokens. (prefill/dequantize.md, 16 sequences of 9 tokens on 8k.)
TEST(ChooseKernel, FewRowsOverManyKeysAreDecode) {
  const auto is_prefill = [](int64_t tokens, KvLayout layout, bool scaled) {
    PagedAttentionParams p = few_tiles(tokens);
    p.kv.layout = layout;
    set_8_bits(p, scaled);
    set_queries(p, 16, 16);
    return choose_kernel(p, kDevices[2].model).main.kernel == AttentionKernel::kPrefillSm90;
  };
  for (const auto layout : {KvLayout::kNHD, KvLayout::kVllm}) {
    EXPECT_TRUE(is_prefill(1000, layout, false));
    EXPECT_TRUE(is_prefill(4096, layout, false));
    EXPECT_FALSE(is_prefill(8192, layout, false));
    EXPECT_TRUE(is_prefill(1000, layout, true));
    EXPECT_FALSE(is_prefill(4096, layout, true));
  }
}

// Heads above 128: decode has no wgmma. (prefill/heads_above_128.md, d160_16x8_on_4k.)
TEST(ChooseKernel, WideHeadsAreDecodeWithFewerRows) {
  const auto is_prefill = [](int seqs, int query_len, int head_size, DType cache, int device) {
    PagedAttentionParams p = few_tiles(4096);
    p.kv.head_size = head_size;
    p.kv.dtype = cache;
    set_strides(p.kv);
    p.query_stride = p.out_stride = 32 * head_size;
    set_queries(p, seqs, query_len);
    const AttentionKernel kernel = choose_kernel(p, kDevices[device].model).main.kernel;
    return kernel == AttentionKernel::kPrefillSm90 || kernel == AttentionKernel::kPrefillSm80;
  };
  const DType k16 = DType::kBFloat16, k8 = DType::kFp8E4M3;
  for (const DType cache : {k16, k8}) {
    EXPECT_TRUE(is_prefill(16, 8, 192, cache, 2));
    EXPECT_FALSE(is_prefill(16, 4, 192, cache, 2));  // 16 rows
    EXPECT_FALSE(is_prefill(16, 8, 128, cache, 2));
    EXPECT_FALSE(is_prefill(1, 64, 192, cache, 2));  // 16 tiles
    EXPECT_TRUE(is_prefill(1, 96, 192, cache, 2));
  }
  // A mixed batch: each kernel has sequences.
  PagedAttentionParams p = few_tiles(4096);
  p.kv.head_size = 192;
  set_strides(p.kv);
  p.query_stride = p.out_stride = 32 * 192;
  set_queries(p, 16, 8);
  p.num_tokens -= 3;
  const AttentionChoice mixed = choose_kernel(p, kDevices[2].model);
  EXPECT_TRUE(mixed.has_concurrent_decode);
  EXPECT_EQ(mixed.min_query_len, 5);
  // Prefill sm80: 8-bit caches of heads of 256 that are not gathered, and other devices.
  EXPECT_FALSE(is_prefill(16, 8, 256, k8, 2));
  EXPECT_TRUE(is_prefill(16, 8, 256, k16, 2));
  EXPECT_FALSE(is_prefill(16, 8, 192, k16, 0));
}

// Lengths may differ, so long launches of several sequences may be split. (prefill/splits.md)
TEST(ChooseKernel, UnequalLengthsMaySplit) {
  const auto may_split = [](int seqs, int query_len, int64_t tokens) {
    PagedAttentionParams p = few_tiles(tokens);
    set_queries(p, seqs, query_len);
    return choose_kernel(p, kDevices[2].model).may_split;
  };
  EXPECT_TRUE(may_split(16, 16, 11000));
  EXPECT_FALSE(may_split(16, 16, 3000));  // 128 tiles of 3000 tokens: the launch is short
  EXPECT_FALSE(may_split(64, 16, 2000));  // so is the longest sequence
  EXPECT_TRUE(may_split(128, 16, 11000));
  EXPECT_FALSE(may_split(129, 16, 11000));  // each CTA counts them
  EXPECT_FALSE(
      may_split(8, 300, 11000));  // the tiles of one sequence fill more than half of the SMs
}

// Contiguous keys: the longest is an eighth of all, if the caller does not give it.
TEST(ChooseKernel, LongestOfContiguousKeys) {
  PagedAttentionParams p = few_tiles(3875, true);  // 11000 and 15 times 300 keys
  set_queries(p, 16, 16);
  const auto may_split = [&](int64_t max_key_len, DType stored = DType::kBFloat16) {
    p.max_key_len = static_cast<int32_t>(max_key_len);
    p.kv.dtype = stored;
    set_strides(p.kv);
    return choose_kernel(p, kDevices[2].model).may_split;
  };
  EXPECT_FALSE(may_split(0));
  EXPECT_TRUE(may_split(11000));
  EXPECT_TRUE(may_split(INT32_MAX));  // it has no more keys than there are
  EXPECT_FALSE(may_split(1000));
  // Over 8 bits, too: nothing is estimated.
  EXPECT_FALSE(may_split(0, DType::kFp8E4M3));
  EXPECT_TRUE(may_split(11000, DType::kFp8E4M3));
  // A window bounds what is seen.
  p.sliding_window = 1000;
  EXPECT_FALSE(may_split(11000));
}

TEST(ChooseKernel, EightBitCachesAreGathered) {
  const auto choose = [](int query_len, int64_t tokens, int seqs, int head_size, KvLayout layout,
                         bool scaled = false, float softcap = 0.0f) {
    PagedAttentionParams p = few_tiles(tokens);
    p.softcap = softcap;
    p.kv.layout = layout;
    p.kv.head_size = head_size;
    set_8_bits(p, scaled);
    p.query_stride = p.out_stride = 32 * head_size;
    set_queries(p, seqs, query_len);
    return choose_kernel(p, kDevices[2].model);
  };
  EXPECT_GT(choose(384, 1000, 4, 128, KvLayout::kNHD).gathered_rows, 0);
  EXPECT_EQ(choose(380, 1000, 4, 128, KvLayout::kNHD).gathered_rows, 0);
  EXPECT_GT(choose(128, 1000, 4, 128, KvLayout::kNHD, true).gathered_rows, 0);
  EXPECT_EQ(choose(120, 1000, 4, 128, KvLayout::kNHD, true).gathered_rows, 0);
  EXPECT_GT(choose(128, 1000, 4, 128, KvLayout::kNHD, false, 5.0f).gathered_rows, 0);
  EXPECT_EQ(choose(1500, 2000, 1, 64, KvLayout::kNHD).gathered_rows, 0);
  EXPECT_GT(choose(1600, 2000, 1, 64, KvLayout::kNHD).gathered_rows, 0);
  EXPECT_GT(choose(1000, 1000, 8, 64, KvLayout::kNHD).gathered_rows, 0);  // 2000 tiles
  EXPECT_EQ(choose(384, 1000, 4, 128, KvLayout::kVllm).gathered_rows, 0);
  EXPECT_GT(choose(512, 1000, 4, 128, KvLayout::kVllm).gathered_rows, 0);
  EXPECT_EQ(choose(600, 1000, 4, 96, KvLayout::kVllm).gathered_rows, 0);
  EXPECT_GT(choose(100, 4096, 3, 192, KvLayout::kVllm).gathered_rows, 0);
  EXPECT_EQ(choose(100, 4000, 3, 192, KvLayout::kVllm).gathered_rows, 0);
  EXPECT_EQ(choose(100, 4096, 4, 192, KvLayout::kVllm).gathered_rows, 0);
  EXPECT_EQ(choose(100, 100000, 1, 192, KvLayout::kNHD).gathered_rows, 0);  // there is no room
  EXPECT_NE(choose(100, 100000, 1, 256, KvLayout::kNHD).main.kernel, AttentionKernel::kPrefillSm90);
  EXPECT_GT(choose(256, 1000, 4, 192, KvLayout::kVllm).gathered_rows, 0);
  EXPECT_GT(choose(100, 1000, 4, 256, KvLayout::kVllm).gathered_rows, 0);
  const AttentionChoice some = choose(400, 100000, 4, 128, KvLayout::kNHD);
  EXPECT_TRUE(some.gathers_some);
  EXPECT_FALSE(some.may_split);
  // One sequence, whose keys have no room: with splits they are dequantized where they are read.
  const AttentionChoice one = choose(200, 100000, 1, 128, KvLayout::kNHD);
  EXPECT_TRUE(one.may_split);
  EXPECT_EQ(one.gathered_rows, 0);
  // Two launches do not split, so few tiles of them are left to decode.
  PagedAttentionParams p = few_tiles(400000);
  p.num_heads = 16;
  p.kv.num_kv_heads = 4;
  set_8_bits(p);
  set_queries(p, 1, 400);
  EXPECT_NE(choose_kernel(p, kDevices[2].model).main.kernel, AttentionKernel::kPrefillSm90);
  set_queries(p, 1, 380);  // 1520 rows: one launch, which splits
  EXPECT_EQ(choose_kernel(p, kDevices[2].model).main.kernel, AttentionKernel::kPrefillSm90);
}

// One sequence with a bound that makes it small gets CTAs for half of the SMs.
TEST(ChooseKernel, GridsOfSmallBatches) {
  const auto call = [](int seqs, int64_t tokens, DType dtype, int head_size = 128) {
    PagedAttentionParams p = nhd_call(dtype, head_size, 32);
    set_queries(p, seqs, 1);
    p.max_seq_len = tokens;
    return p;
  };
  const auto grid = [](const PagedAttentionParams& p, int device = 2) {
    const KernelChoice choice = choose_kernel(p, kDevices[device].model).main;
    const bool pairs = kDevices[device].model.architecture >= 90;
    EXPECT_EQ(choice.few_ctas, pairs ? kDevices[device].model.num_sms / 2 : 0);
    return choice.grid.x;
  };
  const DType bf16 = DType::kBFloat16, e4m3 = DType::kFp8E4M3;
  EXPECT_EQ(grid(call(1, 2304, bf16)), 66);  // 8 splits of 73728 bytes of K
  EXPECT_EQ(grid(call(1, 2305, bf16)), 132);
  EXPECT_EQ(grid(call(1, 4608, e4m3)), 66);
  EXPECT_EQ(grid(call(1, 4609, e4m3)), 132);
  EXPECT_EQ(grid(call(1, 4608, bf16, 64)), 66);
  EXPECT_EQ(grid(call(1, 4609, bf16, 64)), 132);
  EXPECT_EQ(grid(call(2, 100, bf16)), 132);
  EXPECT_EQ(grid(call(1, 2000, bf16), 0), 108);
  EXPECT_EQ(grid(call(1, 2000, bf16), 3), 74);
  EXPECT_EQ(grid(call(1, 2000, bf16), 4), 85);
  PagedAttentionParams p = call(1, 2000, bf16);
  p.fixed_split_size = 512;
  EXPECT_EQ(grid(p), 132);
  p = call(1, 100000, bf16);
  p.sliding_window = 2000;
  EXPECT_EQ(grid(p), 66);
  // 40 KV heads: a split for 66 CTAs is none.
  p = call(1, 288, bf16);
  p.num_heads = p.kv.num_kv_heads = 40;
  set_strides(p.kv);
  EXPECT_EQ(grid(p), 66);
  p.max_seq_len = 289;
  EXPECT_EQ(grid(p), 132);
  p.num_heads = p.kv.num_kv_heads = 80;
  p.max_seq_len = 16;
  set_strides(p.kv);
  EXPECT_EQ(grid(p), 132);
}

// In 8 bits, more query tiles than half of the SMs may have CTAs of half an SM.
TEST(ChooseKernel, CtasOfHalfAnSm) {
  const DType e4m3 = DType::kFp8E4M3;
  const auto call = [](int seqs, int64_t tokens, DType dtype, int head_size = 128) {
    PagedAttentionParams p = nhd_call(dtype, head_size, 32);
    set_queries(p, seqs, 1);
    p.max_seq_len = tokens;
    return p;
  };
  // Warps, and CTAs of the grid.
  using Shape = std::pair<int, int64_t>;
  const auto shape = [](const PagedAttentionParams& p, int device = 2) -> Shape {
    const KernelChoice choice = choose_kernel(p, kDevices[device].model).main;
    EXPECT_EQ(choice.grid.x, kDevices[device].model.num_sms * choice.ctas_per_sm);
    return {choice.warps, choice.grid.x};
  };
  const Shape whole = {8, 132}, half = {6, 132}, pairs = {6, 264};
  EXPECT_EQ(shape(call(8, 500, e4m3)), whole);
  for (const int seqs : {9, 16}) {
    EXPECT_EQ(shape(call(seqs, 1024, e4m3)), half);
    EXPECT_EQ(shape(call(seqs, 1025, e4m3)), whole);
    EXPECT_EQ(shape(call(seqs, 4095, e4m3)), whole);
    EXPECT_EQ(shape(call(seqs, 4096, e4m3)), pairs);
    EXPECT_EQ(shape(call(seqs, 500, DType::kBFloat16)), whole);
  }
  EXPECT_EQ(shape(call(17, 500, e4m3)), pairs);
  // Two of 228 KB fit, with static and reserved memory.
  const int bytes = choose_kernel(call(16, 500, e4m3), kDevices[2].model).main.shared_bytes;
  EXPECT_LE(2 * (bytes + 3072 + 1024), 228 * 1024);
  EXPECT_EQ(shape(call(9, 100, e4m3, 256)), whole);
  const auto in_layout_vllm = [](PagedAttentionParams p) {
    p.kv.layout = KvLayout::kVllm;
    set_strides(p.kv);
    return p;
  };
  EXPECT_EQ(shape(in_layout_vllm(call(12, 500, e4m3, 64))).first, 6);
  EXPECT_EQ(shape(in_layout_vllm(call(12, 500, e4m3, 64)), 0).first, 12);  // A100, 108 SMs
  PagedAttentionParams p = call(9, 500, e4m3);
  p.concurrent = true;
  EXPECT_EQ(shape(p), whole);
  p = call(9, 500, e4m3);
  p.fixed_split_size = 512;
  EXPECT_EQ(shape(p), whole);
  p = call(9, 500, DType::kInt8);
  EXPECT_EQ(shape(p), half);
  p.token_scales.key = p.token_scales.value = static_cast<const float*>(at(64));
  EXPECT_GT(shape(p).first, 6);
  p = call(9, 100000, e4m3);
  p.sliding_window = 1000;
  EXPECT_EQ(shape(p), half);
}

// These have no other grid, and are not split as small ones.
TEST(ChooseKernel, DecodeThatIsNeverSmall) {
  const auto few_ctas = [](const PagedAttentionParams& p) {
    const KernelChoice choice = choose_kernel(p, kDevices[2].model).main;
    EXPECT_TRUE(choice.kernel == AttentionKernel::kDecode) << describe(choice);
    EXPECT_GE(choice.grid.x, 132);
    return choice.few_ctas;
  };
  PagedAttentionParams p = nhd_call(DType::kFp8E4M3, 128, 32);
  p.max_seq_len = 300;
  set_queries(p, 16, 1);
  EXPECT_GT(few_ctas(p), 0);
  set_queries(p, 20, 1);  // two CTAs per SM
  EXPECT_EQ(few_ctas(p), 0);
  p = nhd_call(DType::kBFloat16, 256, 32);  // several warps a pipeline
  p.max_seq_len = 300;
  set_queries(p, 1, 4);
  EXPECT_EQ(few_ctas(p), 0);
  p = nhd_call(DType::kBFloat16, 128, 32);  // pages of one token, 16 rows in blocks of 8
  p.max_seq_len = 300;
  p.kv.block_size = 1;
  set_queries(p, 1, 4);
  set_strides(p.kv);
  EXPECT_EQ(few_ctas(p), 0);
  p = nhd_call(DType::kFp8E4M3, 256, 32);  // halved stages
  p.max_seq_len = 300;
  p.kv.layout = KvLayout::kVllm;
  p.kv.block_size = 64;
  set_queries(p, 4, 1);
  set_strides(p.kv);
  EXPECT_EQ(few_ctas(p), 0);
}

}  // namespace
}  // namespace vllm_kernels::cuda
