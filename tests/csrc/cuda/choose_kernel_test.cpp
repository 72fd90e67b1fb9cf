// choose_kernel() and choose_fused_decode() against a golden table: 500 calls and up to 100 over
// int4, on each of five devices. No GPU.
//
// A call is drawn from the axes below by a fixed generator. To accept a wanted change of the
// choice: UPDATE_GOLDEN=1 build/csrc_tests/choose_kernel_tests, then read the diff.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <random>
#include <sstream>
#include <tuple>

#include "cuda/attention/common/heuristics.h"
#include "cuda/attention/dispatch.h"
#include "ops/upcast_query.h"

#include "choose_kernel_cases.h"

namespace vllm_kernels::cuda {
namespace {

class Draw {
 public:
  explicit Draw(uint32_t seed) : generator_(seed) {}
  template <typename T>
  T of(std::initializer_list<T> values) {
    return values.begin()[generator_() % values.size()];
  }
  bool one_in(uint32_t n) { return generator_() % n == 0; }

 private:
  std::mt19937 generator_;  // the same numbers with every standard library
};

struct Call {
  PagedAttentionParams params{};
  std::string name;
};

const char* name_of(KvLayout layout) {
  return layout == KvLayout::kVllm ? "vllm" : layout == KvLayout::kNHD ? "NHD" : "HND";
}
Call draw_call(Draw& draw) {
  Call call;
  PagedAttentionParams& p = call.params;
  PagedKv& kv = p.kv;
  p.dtype = draw.of({DType::kBFloat16, DType::kBFloat16, DType::kBFloat16, DType::kBFloat16,
                     DType::kFloat16, DType::kFloat16, DType::kFloat16, DType::kFloat32});
  kv.dtype = draw.of({p.dtype, p.dtype, DType::kFp8E4M3, DType::kFp8E5M2, DType::kInt8});
  kv.layout = draw.of({KvLayout::kVllm, KvLayout::kNHD, KvLayout::kHND});
  kv.head_size = draw.of({32, 64, 64, 80, 96, 112, 128, 128, 128, 160, 192, 256});
  kv.block_size = draw.of({1, 2, 4, 8, 16, 16, 16, 16, 16, 32, 32, 64, 128, 256});
  kv.num_kv_heads = draw.of({1, 2, 8, 8, 32});
  kv.num_blocks = draw.one_in(40) ? 0 : 1000;
  set_strides(kv);
  const bool unaligned_cache = draw.one_in(20);
  const int fault = unaligned_cache ? draw.of({0, 1, 2}) : 0;
  if (unaligned_cache) (fault == 0 ? kv.key_block_stride : kv.value_token_stride) += fault < 2;
  kv.key = const_cast<void*>(at(4096));
  kv.value = const_cast<void*>(at(4096 + (fault == 2 ? 8 : 0)));
  const int group = draw.of({1, 4, 4, 7, 8, 16, 32, 71});
  p.num_heads = group * kv.num_kv_heads;
  p.num_seqs = draw.of({1, 2, 32, 256});
  p.max_query_len = draw.of({1, 1, 1, 2, 5, 8, 16, 40, 300, 300, 4096, 4096});
  const bool ragged = p.max_query_len > 1 && draw.one_in(3);
  p.num_tokens = p.num_seqs * p.max_query_len - (ragged ? p.max_query_len - 1 : 0);
  p.max_seq_len = p.num_seqs == 2 ? 1 << 13 : 1 << 17;  // short enough to be gathered, or not
  p.max_blocks_per_seq = static_cast<int32_t>(p.max_seq_len / kv.block_size);
  const int query_offset = draw.one_in(15) ? draw.of({2, 4, 8}) : 0;
  p.query = at(4096 + query_offset);
  p.query_stride = int64_t{p.num_heads} * kv.head_size + (draw.one_in(15) ? 4 : 0);
  p.out = const_cast<void*>(at(4096 + (draw.one_in(20) ? 8 : 0)));
  p.out_stride = int64_t{p.num_heads} * kv.head_size;
  p.scale = draw.one_in(30) ? 0.0f : 0.1f;
  p.softcap = draw.one_in(6) ? 30.0f : 0.0f;
  static const float slopes = 0.0f;
  p.alibi_slopes = draw.one_in(8) ? &slopes : nullptr;
  p.window_right = p.max_query_len > 1 && draw.one_in(8) ? INT32_MAX : 0;
  p.fixed_split_size = draw.one_in(8) ? 2048 : 0;
  static const int32_t starts = 0;
  const bool contiguous = kv.layout == KvLayout::kNHD && draw.one_in(6);
  if (contiguous) p.key_start_loc = &starts;
  if (draw.one_in(25)) p.sparse.vert_stride = 8;

  std::ostringstream name;
  name << name_of(p.dtype) << " " << name_of(kv.dtype) << " " << name_of(kv.layout) << " page "
       << kv.block_size << " head " << kv.head_size << " kv_heads " << kv.num_kv_heads << " group "
       << group << " seqs " << p.num_seqs << " query_len " << p.max_query_len
       << (ragged ? " ragged" : "") << (kv.num_blocks == 0 ? " empty" : "")
       << (unaligned_cache ? " cache+" + std::to_string(fault) : "")
       << (query_offset > 0 ? " query+" : "")
       << (query_offset > 0 ? std::to_string(query_offset) : "")
       << (p.query_stride % 8 == 4 ? " query_stride+4" : "")
       << (reinterpret_cast<uintptr_t>(p.out) % 16 != 0 ? " out+8" : "")
       << (p.scale > 0.0f ? "" : " scale0") << (p.softcap > 0.0f ? " softcap" : "")
       << (p.alibi_slopes != nullptr ? " alibi" : "") << (p.window_right != 0 ? " full" : "")
       << (p.fixed_split_size > 0 ? " fixed_split" : "") << (contiguous ? " contiguous" : "")
       << (p.sparse.on() ? " sparse" : "");
  call.name = name.str();
  return call;
}

// Gives an int8 or int4 cache a scale a token; every fourth time where copies of 16 bytes cannot
// read them.
void scale_tokens(Call& call, int number) {
  PagedAttentionParams& p = call.params;
  if ((p.kv.dtype != DType::kInt8 && p.kv.dtype != DType::kInt4x2) || p.key_start_loc != nullptr) {
    return;
  }
  const int64_t head = p.kv.block_size, block = head * p.kv.num_kv_heads;
  const auto* scales = static_cast<const float*>(at(4096 + (number % 4 == 0 ? 4 : 0)));
  p.token_scales = {.key = scales,
                    .value = scales,
                    .key_block_stride = block,
                    .key_head_stride = head,
                    .value_block_stride = block,
                    .value_head_stride = head};
  if (p.kv.dtype == DType::kInt4x2) {
    p.token_scales.key_zero = p.token_scales.value_zero = scales;
  }
  call.name += " token_scales";
}

// The same call over an int4 cache. Returns false where the op refuses it.
bool over_int4(Call& call) {
  PagedKv& kv = call.params.kv;
  if (kv.head_size < 64 || kv.head_size % 32 != 0 || call.params.key_start_loc != nullptr) {
    return false;
  }
  kv.dtype = DType::kInt4x2;
  kv.head_size /= 2;
  set_strides(kv);
  call.name += " over int4";
  return true;
}

std::string one_line(std::string text) {
  for (char& c : text) c = c == '\n' ? '|' : c;
  return text;
}

// What describe() leaves out.
std::string shifts(const KernelChoice& choice) {
  return " [" + std::to_string(choice.warp_shift) + "+" + std::to_string(choice.consumer_shift) +
         " " + std::to_string(choice.combine_rows) + "]";
}

std::string table() {
  std::ostringstream lines;
  for (const NamedDevice& device : kDevices) {
    Draw draw(20261124);
    for (int i = 0; i < 600; ++i) {
      Call call = draw_call(draw);
      if (i >= 500) {
        if (!over_int4(call)) continue;
        scale_tokens(call, i);
      }
      const AttentionChoice choice = choose_kernel(call.params, device.model);
      lines << device.name << " " << call.name << " -> " << one_line(describe(choice))
            << shifts(choice.main);
      if (call.params.max_query_len == 1 && call.params.kv.layout == KvLayout::kVllm) {
        const int threads = (call.params.num_heads / call.params.kv.num_kv_heads + 2) * 16;
        const KernelChoice fused = choose_fused_decode(call.params, device.model, threads);
        lines << " fused: " << describe(fused) << shifts(fused);
      }
      lines << "\n";
    }
  }
  return lines.str();
}

TEST(ChooseKernel, IsAsInTheGoldenTable) {
  const std::string path = VLLM_KERNELS_GOLDEN;
  const std::string now = table();
  if (std::getenv("UPDATE_GOLDEN") != nullptr) {
    std::ofstream(path) << now;
    return;
  }
  std::istringstream lines(now);
  std::ifstream golden(path);
  ASSERT_TRUE(golden) << path;
  std::string want, got;
  while (std::getline(golden, want)) {
    ASSERT_TRUE(std::getline(lines, got));
    EXPECT_EQ(got, want);
  }
  EXPECT_FALSE(std::getline(lines, got)) << got;
}

// Static shared memory of a kernel that has dynamic one of a chosen size, too.
int static_shared_bytes(const PagedAttentionParams& p, const KernelChoice& choice) {
  switch (choice.kernel) {
    case AttentionKernel::kDecode:
      return decode_static_smem(
          size_of(p.kv.dtype), choice.padded_head_size,
          choice.multi_warp || choice.halves_stages || choice.form == KvForm::kLines, false);
    case AttentionKernel::kDecodeWgmma:
      return wgmma_static_smem(choice.row_shift() <= 5 ? 4 : 8);
    case AttentionKernel::kPrefillSm80:
      return PrefillSm80Sizes::kStaticSmem;
    default:
      return 0;
  }
}

TEST(ChooseKernel, LaunchShapesFitTheDevice) {
  for (const NamedDevice& device : kDevices) {
    Draw draw(7);
    for (int i = 0; i < 20000; ++i) {
      Call call = draw_call(draw);
      if (i % 4 == 0) over_int4(call);
      if (i % 2 == 0) scale_tokens(call, i / 2);
      const AttentionChoice choice = choose_kernel(call.params, device.model);
      for (const KernelChoice* launch : {&choice.main, &choice.concurrent_decode}) {
        const int static_bytes = static_shared_bytes(call.params, *launch);
        EXPECT_LE((launch->shared_bytes + static_bytes) * launch->ctas_per_sm,
                  device.model.shared_memory_per_block)
            << call.name;
        EXPECT_LE(launch->stages, kMaxPipelineStages) << call.name;
        const bool pipelined = launch->kernel == AttentionKernel::kDecode ||
                               launch->kernel == AttentionKernel::kDecodeWgmma;
        if (pipelined) {
          EXPECT_GE(launch->stages, 2) << device.name << " " << call.name;
        }
        if (launch->kernel == AttentionKernel::kSimt && launch == &choice.main) {
          EXPECT_NE(launch->obstacles, kNoObstacle) << call.name;
        }
      }
    }
  }
}

// More sequences than rows can be counted in 64 bits.
TEST(ChooseKernel, E4M3QueriesOfManySequences) {
  Draw draw(5);
  Call call = draw_call(draw);
  PagedAttentionParams& p = call.params;
  p.num_seqs = 1 << 20;
  p.max_seq_len = int64_t{1} << 60;
  p.max_query_len = p.num_tokens = 4096;
  p.dtype = DType::kBFloat16;
  p.kv.dtype = DType::kFp8E4M3;
  set_strides(p.kv);
  EXPECT_EQ(choose_e4m3_kernel(p, kDevices[2].model).fp8_rows, 0);
}

// Calls with e4m3 queries: which are multiplied in 8 bits, and which get queries of 16 bits.
TEST(ChooseKernel, E4M3Queries) {
  Draw draw(5);
  int multiplied = 0, copied = 0;
  for (int i = 0; i < 20000; ++i) {
    Call call = draw_call(draw);
    PagedAttentionParams& p = call.params;
    if (p.dtype == DType::kFloat32 || p.sparse.on()) continue;
    p.kv.dtype = DType::kFp8E4M3;
    set_strides(p.kv);
    const AttentionChoice choice = choose_e4m3_kernel(p, kDevices[2].model);
    const bool in_8_bits = choice.fp8_rows > 0;
    multiplied += in_8_bits;
    EXPECT_EQ(choice.upcasts_query, !in_8_bits || choice.has_concurrent_decode) << call.name;
    if (!in_8_bits) continue;
    const Fp8Scratch scratch(p, choice.fp8_rows, choice.copies_fp8_keys);
    EXPECT_LE(scratch.starts, kMaxGatherBytes) << call.name;
    const bool is_paged = p.key_start_loc == nullptr;
    EXPECT_TRUE(choice.copies_fp8_keys ? is_paged : !is_paged || p.kv.block_size >= 16);
    copied += choice.copies_fp8_keys;
    EXPECT_EQ(scratch.value % 16 + scratch.starts % 4, 0) << call.name;
    EXPECT_LE(p.head_size(), kMaxHeadSizeFp8) << call.name;
    EXPECT_EQ(choice.main.kernel, AttentionKernel::kPrefillSm90) << call.name;
    EXPECT_EQ(choice.gathered_rows, 0) << call.name;
    EXPECT_FALSE(p.modifies_scores() || p.fixed_split_size > 0) << call.name;
    EXPECT_EQ(choice.fp8_rows % kFp8Rows, 0) << call.name;
    EXPECT_GE(choice.fp8_rows,
              kFp8Rows + (p.key_start_loc != nullptr ? p.max_seq_len + p.num_seqs * kFp8Rows
                                                     : p.num_seqs * p.max_seq_len));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(p.query) % 16 + p.query_stride % 16, 0) << call.name;
  }
  EXPECT_GT(multiplied, 100);
  EXPECT_GT(copied, 10);
  EXPECT_GT(multiplied - copied, 10);
}

// No kernel runs that would take the scales for one.
TEST(ChooseKernel, ScalesOfTokensAreRead) {
  for (const NamedDevice& device : kDevices) {
    Draw draw(13);
    for (int i = 0; i < 20000; ++i) {
      Call call = draw_call(draw);
      if (i % 3 == 0) over_int4(call);
      scale_tokens(call, i);
      if (!call.params.token_scales.any()) continue;
      const AttentionChoice choice = choose_kernel(call.params, device.model);
      EXPECT_NE(choice.main.kernel, AttentionKernel::kPrefillSm80) << call.name;
      const bool copies = choice.main.kernel != AttentionKernel::kSimt && choice.gathered_rows == 0;
      if (copies || choice.has_concurrent_decode) {
        EXPECT_NE(i % 4, 0) << call.name;
      }
    }
  }
}

}  // namespace

// Splits of prefill sm90 use the workspace of a concurrent decode launch, and the batch decides
// them.
TEST(ChooseKernel, OnlyWholeBatchesAreSplit) {
  int split = 0;
  for (const NamedDevice& device : kDevices) {
    Draw draw(12);
    for (int i = 0; i < 20000; ++i) {
      const Call call = draw_call(draw);
      const AttentionChoice choice = choose_kernel(call.params, device.model);
      if (!choice.may_split) continue;
      ++split;
      EXPECT_EQ(choice.main.kernel, AttentionKernel::kPrefillSm90) << call.name;
      EXPECT_TRUE(choice.main.padded_head_size == 64 || choice.main.padded_head_size == 128)
          << call.name;
      EXPECT_FALSE(choice.has_concurrent_decode) << call.name;
      EXPECT_FALSE(choice.gathers_some) << call.name;
      EXPECT_FALSE(call.params.modifies_scores()) << call.name;
      EXPECT_EQ(call.params.fixed_split_size, 0) << call.name;
    }
  }
  EXPECT_GT(split, 100);
}

// An e4m3 query that is not multiplied in 8 bits takes the way of a 16-bit one.
TEST(ChooseKernel, E4M3QueriesInSixteenBits) {
  alignas(16) static char memory[16];
  int split = 0;
  for (const NamedDevice& device : kDevices) {
    Draw draw(13);
    for (int i = 0; i < 20000; ++i) {
      const Call call = draw_call(draw);
      const AttentionChoice choice = choose_e4m3_kernel(call.params, device.model);
      split += choice.fp8_rows > 0 && choice.may_split;
      if (choice.fp8_rows > 0) continue;
      const PagedAttentionParams wide = with_upcast_query(call.params, memory);
      AttentionChoice as_16_bits = choose_kernel(wide, device.model);
      as_16_bits.upcasts_query = true;
      EXPECT_EQ(describe(choice), describe(as_16_bits)) << call.name;
    }
  }
  EXPECT_GT(split, 0);
}

// With fixed_split_size a sequence has the same bits in every batch, so the batch must not choose
// what rounds: kernel, form, and how rows and tokens are shared by warps.
TEST(ChooseKernel, FixedSplitsMakeTheBatchIrrelevant) {
  for (const NamedDevice& device : kDevices) {
    Draw draw(11);
    for (int i = 0; i < 20000; ++i) {
      Call call = draw_call(draw);
      if (i % 4 == 0) over_int4(call);
      if (i % 2 == 0) scale_tokens(call, i / 2);
      call.params.fixed_split_size = 2048;
      PagedAttentionParams alone = call.params;
      alone.num_seqs = 1;
      alone.num_tokens = std::min(alone.num_tokens, draw.of({1, alone.max_query_len}));
      const AttentionChoice in_batch = choose_kernel(call.params, device.model);
      const AttentionChoice single = choose_kernel(alone, device.model);
      const auto rounding = [](const AttentionChoice& choice) {
        const KernelChoice& main = choice.main;
        const bool decodes =
            main.kernel == AttentionKernel::kDecode || main.kernel == AttentionKernel::kDecodeWgmma;
        return std::tuple(main.kernel, main.form, main.padded_head_size, main.multi_warp,
                          main.consumer_shift, main.warp_shift, decodes ? main.warps : 0,
                          main.simt.split_tokens, choice.has_concurrent_decode);
      };
      EXPECT_EQ(rounding(in_batch), rounding(single)) << device.name << " " << call.name;
      EXPECT_FALSE(in_batch.has_concurrent_decode) << device.name << " " << call.name;
    }
  }
}

}  // namespace vllm_kernels::cuda
