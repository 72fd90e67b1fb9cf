// Prefill sm90 of e4m3 queries: both products by wgmma of e4m3, at twice the rate of 16 bits.
//   K, V     in scratch memory (gather_fp8_keys.cu): K [num_kv_heads, rows, head_size] and V^T
//            [num_kv_heads, head_size, rows]. wgmma reads 8-bit operands along k alone
//   P        up to 2^8.75, rounded to e4m3. Sums of P are of its float32 values
//   O        of a KV tile by the tensor cores, which keep 14 bits; over KV tiles in float32
//   scales   k_scale, times that of the queries, is in the softmax scale, v_scale in the result
// The rest is prefill_kernel.cuh.
#pragma once
#include "cuda/attention/prefill/sm90/prefill_kernel.cuh"

namespace vllm_kernels::cuda {

// As PrefillConfig. Result: type of the result.
template <typename Result, int kSize>
struct PrefillFp8Config {
  using T = Result;
  using Operand = Fp8E4M3;
  static constexpr int kHeadSize = kSize;
  static constexpr KvForm kForm = KvForm::kSwizzledRows;
  static constexpr bool kAdjusts = false;
  static constexpr bool kCacheIs8Bit = false;  // K and V are not dequantized
  static constexpr PrefillTuning kTuning = prefill_fp8_tuning(kSize);
  static constexpr int kConsumers = kTuning.consumers;
  static constexpr int kRows = 64 * kConsumers;
  static constexpr int kTokens = kTuning.tokens;
  static constexpr bool kQueryInRegisters = kTuning.query_in_registers;
  static constexpr int kKeyStages = kTuning.key_stages;
  static constexpr int kValueStages = kTuning.value_stages;
  static constexpr int kQueryStages = kTuning.query_stages;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  static_assert(kConsumers * kTuning.consumer_registers + kTuning.producer_registers <=
                kThreads / 128 * (65536 / kThreads / 8 * 8));
  // [column][row][128 dimensions]. V^T of a KV tile is no larger than K.
  static constexpr int kColumns = (kHeadSize + 127) / 128;
  static constexpr int kQueryBytes = kColumns * kRows * 128;
  static constexpr int kTileBytes = kColumns * kTokens * 128;
  static_assert(kHeadSize * kTokens <= kTileBytes);
  static constexpr int kRawBytes = 0;
  static constexpr int kSharedBytes =
      kQueryStages * kQueryBytes + (kKeyStages + kValueStages) * kTileBytes;
};

// `p` has the gathered K and V.
template <typename Config>
PrefillMaps prefill_fp8_maps(const PagedAttentionParams& p, const PrefillShape& shape) {
  const PagedKv& kv = p.kv;
  PrefillMaps maps{};
  // A dimension counts 16 bits.
  if (shape.query_by_tma) {
    maps.query = encode_tensor_map<4>(
        const_cast<void*>(p.query), {kv.head_size / 2, p.num_heads, p.num_tokens, 1},
        {kv.head_size, p.query_stride, p.query_stride},
        {64, shape.group, Config::kRows / shape.group, 1}, CU_TENSOR_MAP_SWIZZLE_128B);
  }
  maps.key = swizzled_row_map(kv, kv.key, kv.key_token_stride, kv.key_head_stride,
                              kv.key_head_stride, Config::kTokens);
  maps.value = encode_tensor_map<4>(
      kv.value, {kv.block_size / 2, kv.head_size, kv.num_kv_heads, 1},
      {kv.value_dim_stride, kv.value_head_stride, kv.value_head_stride},
      {Config::kTokens / 2, Config::kHeadSize, 1, 1}, CU_TENSOR_MAP_SWIZZLE_128B);
  return maps;
}

template <typename Result, int kHeadSize>
void launch_prefill_fp8(const PagedAttentionParams& p, const PrefillLaunch& launch, void* stream) {
  using Config = PrefillFp8Config<Result, kHeadSize>;
  constexpr auto kKernel = paged_attention_prefill_kernel<Config>;
  PrefillShape shape = prefill_shape(p, launch.min_query_len);
  shape.query_by_tma = Config::kRows % shape.group == 0;
  shape.has_concurrent_launch = launch.has_concurrent_launch;
  shape.concurrent_ratio = concurrent_ratio(p, current_device_model(), Config::kRows, kHeadSize) *
                           (kPrefillCyclesFp8 / kPrefillCycles8Bit);
  static_cast<void>(dynamic_shared_memory<kKernel>("paged_attention"));  // raises the limit
  launch_kernel("paged_attention", kKernel, dim3(current_device_model().num_sms),
                dim3(Config::kThreads), Config::kSharedBytes, stream, p, shape,
                score_cap(p.softcap), prefill_fp8_maps<Config>(p, shape), launch.next);
}

}  // namespace vllm_kernels::cuda
