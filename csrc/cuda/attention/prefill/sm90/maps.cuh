// Tensor maps of a launch of prefill sm90: queries, K and V as TMA boxes. Host code.
#pragma once
#include <algorithm>
#include <bit>

#include "cuda/attention/common/tensor_maps.cuh"
#include "cuda/attention/prefill/sm90/producer.cuh"

namespace vllm_kernels::cuda {

// The boxes of V in layout vllm.
template <typename Config>
ValueBoxes value_boxes(const PagedKv& kv) {
  ValueBoxes boxes;
  boxes.shift = std::min(std::countr_zero(static_cast<uint32_t>(Config::kTokens / 16)),
                         std::min(2, std::countr_zero(static_cast<uint32_t>(kv.block_size / 16))));
  if (kv.block_size == 16 << boxes.shift) {  // a box has a whole page
    boxes.permutation = 3 >> boxes.shift;
  } else {
    boxes.swizzle = (2 << boxes.shift) - 1;
    boxes.permutation = 0;
  }
  return boxes;
}

// Queries as (dimension, head, token, 1): one box has a column of all rows of a work tile. A
// dimension counts 16 bits.
template <typename Config>
CUtensorMap query_map(const PagedAttentionParams& p, const PrefillShape& shape) {
  constexpr int kBytes = sizeof(typename Config::Operand);
  const int64_t stride = p.query_stride * kBytes;
  return encode_tensor_map<4>(
      const_cast<void*>(p.query), {p.kv.head_size * kBytes / 2, p.num_heads, p.num_tokens, 1},
      {p.kv.head_size * kBytes, stride, stride}, {64, shape.group, Config::kRows / shape.group, 1},
      CU_TENSOR_MAP_SWIZZLE_128B);
}

// Whether work tiles keep the memory bus busy, and each reads pages of its own.
template <typename Config>
bool is_bound_by_memory(const PagedAttentionParams& p) {
  const int64_t rows = int64_t{p.max_query_len} * (p.num_heads / p.kv.num_kv_heads);
  const auto tiles = static_cast<float>(int64_t{p.num_seqs} * p.kv.num_kv_heads);
  return rows <= Config::kRows && tiles >= kTilesOfShortReads * current_device_model().num_sms;
}

// How much of K and V L2 fetches at once. 256 bytes have the shortest latency.
// - Rows that begin within a sector of 32 bytes: fetching more of them costs time.
//   (prefill/any_shape.md, d72_8x1k NHD: 152.7 us with 256 bytes, 136.4 us without.)
// - Where memory is busy, 128 bytes are faster. (prefill/splits.md)
template <typename Config>
CUtensorMapL2promotion kv_promotion(const PagedAttentionParams& p) {
  if (p.kv.layout != KvLayout::kVllm && p.kv.head_size * size_of(p.kv.dtype) % 32 != 0) {
    return CU_TENSOR_MAP_L2_PROMOTION_NONE;
  }
  return is_bound_by_memory<Config>(p) ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B
                                       : CU_TENSOR_MAP_L2_PROMOTION_L2_256B;
}

// Layout vllm: K as (8 tokens x 16 bytes, chunk, token / 8, KV head, block). Chunks have 16 bytes.
template <typename Config>
CUtensorMap packed_key_map(const PagedAttentionParams& p) {
  const PagedKv& kv = p.kv;
  const int bytes = size_of(kv.dtype);
  return encode_tensor_map<5>(
      kv.key, {64, kv.head_size * bytes / 16, kv.block_size / 8, kv.num_kv_heads, kv.num_blocks},
      {kv.key_chunk_stride * bytes, 128, kv.key_head_stride * bytes, kv.key_block_stride * bytes},
      {64, Config::kHeadSize * bytes / 16, 2, 1, 1}, CU_TENSOR_MAP_SWIZZLE_NONE,
      kv_promotion<Config>(p));
}

// Swizzled rows of K: boxes of contiguous keys have a KV tile, those of pages 16 tokens.
template <typename Config>
CUtensorMap key_row_map(const PagedAttentionParams& p) {
  const PagedKv& kv = p.kv;
  const bool contiguous = p.key_start_loc != nullptr;  // a single block: its stride is unused
  return swizzled_row_map(kv, kv.key, kv.key_token_stride, kv.key_head_stride,
                          contiguous ? kv.key_token_stride : kv.key_block_stride,
                          contiguous ? Config::kTokens : kPrefillBoxTokens,
                          kv_promotion<Config>(p));
}

// Tensor maps of K, V and queries. Layout vllm: V is (token, dimension, KV head, block), or in
// lines of 128 bytes that hold rows of several dimensions; mainloop.cuh says why.
template <typename Config>
PrefillMaps prefill_maps(const PagedAttentionParams& p, const PrefillShape& shape) {
  const PagedKv& kv = p.kv;
  PrefillMaps maps;
  if (shape.query_by_tma) maps.query = query_map<Config>(p, shape);
  if (Config::kCacheIs8Bit) return maps;
  if (kv.layout != KvLayout::kVllm) {
    const bool contiguous = p.key_start_loc != nullptr;  // a single block: its stride is unused
    const int tokens = contiguous ? Config::kTokens : kPrefillBoxTokens;
    const auto value_map = [&](int tokens) {
      return swizzled_row_map(kv, kv.value, kv.value_token_stride, kv.value_head_stride,
                              contiguous ? kv.value_token_stride : kv.value_block_stride, tokens,
                              kv_promotion<Config>(p));
    };
    maps.key = key_row_map<Config>(p);
    maps.value = value_map(tokens);
    if (contiguous) maps.value_box = value_map(kPrefillBoxTokens);
    return maps;
  }
  maps.key = packed_key_map<Config>(p);
  // A line has the rows of `dims` dimensions.
  const ValueBoxes& boxes = shape.value_boxes;
  const int dims = boxes.swizzle == 7 ? 4 >> boxes.shift : 1;
  maps.value = encode_tensor_map<4>(
      kv.value,
      {dims == 1 ? kv.block_size : 64, kv.head_size / dims, kv.num_kv_heads, kv.num_blocks},
      {kv.value_dim_stride * dims * 2, kv.value_head_stride * 2, kv.value_block_stride * 2},
      {(16 << boxes.shift) * dims, Config::kHeadSize / dims, 1, 1},
      boxes.swizzle == 7   ? CU_TENSOR_MAP_SWIZZLE_128B
      : boxes.swizzle == 3 ? CU_TENSOR_MAP_SWIZZLE_64B
                           : CU_TENSOR_MAP_SWIZZLE_32B,
      kv_promotion<Config>(p));
  return maps;
}

}  // namespace vllm_kernels::cuda
