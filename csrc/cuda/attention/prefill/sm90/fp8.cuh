// Prefill sm90 of e4m3 queries: both products by wgmma of e4m3, at twice the rate of 16 bits.
//   K        where it lies, or in scratch memory
//   V^T      [num_kv_heads, head_size, rows] in scratch memory (gather_fp8_keys.cu), because wgmma
//            reads 8-bit operands along k alone. A sequence has rows of its own there
//   P        up to 2^8.75, rounded to e4m3. Sums of P are of its float32 values
//   O        of a KV tile by the tensor cores, which keep 14 bits; over KV tiles in float32
//   scales   k_scale, times that of the queries, is in the softmax scale, v_scale in the result
// The rest is prefill_kernel.cuh.
#pragma once
#include "cuda/attention/prefill/sm90/prefill_kernel.cuh"

namespace vllm_kernels::cuda {

// As PrefillConfig. A column has 128 dimensions. The form is that of K.
template <typename Result, int kSize, KvForm kKeyForm, bool kSplits>
struct PrefillFp8Config : PrefillCta<prefill_fp8_tuning(kSize), 1, (kSize + 127) / 128> {
  using T = Result;
  using Operand = Fp8E4M3;
  static constexpr int kHeadSize = kSize;
  static constexpr KvForm kForm = kKeyForm;
  static constexpr bool kAdjusts = false;
  static constexpr bool kCacheIs8Bit = false;  // K and V are not dequantized
  static constexpr bool kMaySplit = kSplits;
  static constexpr bool kConvertsQueries = false;
  static constexpr int kRawBytes = 0;
  static constexpr int kSharedBytes = PrefillFp8Config::kOperandBytes;
  // V^T of a KV tile is no larger than K.
  static_assert(kHeadSize * PrefillFp8Config::kTokens <= PrefillFp8Config::kTileBytes);
};

// `p` is that of an Fp8Keys.
template <typename Config>
PrefillMaps prefill_fp8_maps(const PagedAttentionParams& p, const PrefillShape& shape) {
  const PagedKv& kv = p.kv;
  PrefillMaps maps{};
  if (shape.query_by_tma) maps.query = query_map<Config>(p, shape);
  maps.key =
      Config::kForm == KvForm::kSwizzledRows ? key_row_map<Config>(p) : packed_key_map<Config>(p);
  const int64_t rows = kv.value_dim_stride;
  maps.value = encode_tensor_map<4>(
      kv.value, {rows / 2, kv.head_size, kv.num_kv_heads, 1},
      {kv.value_dim_stride, kv.value_head_stride, kv.value_head_stride},
      {Config::kTokens / 2, Config::kHeadSize, 1, 1}, CU_TENSOR_MAP_SWIZZLE_128B);
  return maps;
}

template <typename Result, int kHeadSize, KvForm kKeyForm>
void launch_prefill_fp8(const PagedAttentionParams& p, const PrefillLaunch& launch, void* stream) {
  const auto run = [&](auto splits) {
    using Config = PrefillFp8Config<Result, kHeadSize, kKeyForm, decltype(splits)::value>;
    PrefillShape shape = launch_shape<Config>(p, launch);
    shape.concurrent_ratio *= kPrefillCyclesFp8 / kPrefillCycles8Bit;
    launch_with<Config>(p, shape, prefill_fp8_maps<Config>(p, shape), launch, stream);
  };
  launch.workspace != nullptr ? run(std::true_type{}) : run(std::false_type{});
}

}  // namespace vllm_kernels::cuda
