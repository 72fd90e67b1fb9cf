// TMA tensor maps of a paged cache, made on the host (sm_90 and later). kv_pipeline.cuh copies with
// them.
#pragma once
#include <algorithm>

#include "cuda/attention/common/kv_pipeline.cuh"
#include "cuda/attention/common/tensor_maps.h"
#include "cuda/base/launch.cuh"

namespace vllm_kernels::cuda {

// The map of a cache as a tensor of kRank dimensions of 16-bit elements. `strides` are in bytes, of
// all dimensions but the first.
template <int kRank>
CUtensorMap encode_tensor_map(
    void* base, const int64_t (&sizes)[kRank], const int64_t (&strides)[kRank - 1],
    const int (&box)[kRank], CUtensorMapSwizzle swizzle,
    CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
  TensorMapKey key = {.base = base,
                      .rank = kRank,
                      .swizzle = static_cast<uint32_t>(swizzle),
                      .promotion = static_cast<uint32_t>(promotion)};
  std::copy_n(sizes, kRank, key.sizes);
  std::copy_n(strides, kRank - 1, key.strides);
  std::copy_n(box, kRank, key.box);
  return tensor_map(key);
}

// Form kSwizzledRows, layouts NHD and HND: (dimension, token in the page, KV head, page). A box is
// 128 bytes x `tokens` tokens. With line_shift = 1, a line holds two tokens and a box has half as
// many lines. TMA fills with zeros past the head size and past the page.
inline CUtensorMap swizzled_row_map(
    const PagedKv& kv, void* base, int64_t token_stride, int64_t head_stride, int64_t block_stride,
    int tokens, CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
    int line_shift = 0) {
  const int bytes = size_of(kv.dtype);
  return encode_tensor_map<4>(
      base,
      {kv.head_size * bytes / 2 << line_shift, kv.block_size >> line_shift, kv.num_kv_heads,
       kv.num_blocks},
      {token_stride * bytes << line_shift, head_stride * bytes, block_stride * bytes},
      {kColumnBytes / 2, tokens >> line_shift, 1, 1}, CU_TENSOR_MAP_SWIZZLE_128B, promotion);
}

// map(base, token stride, head stride, block stride) of K and of V.
template <typename Map>
KvTensorMaps both_maps(const PagedKv& kv, const Map& map) {
  return {
      .key = map(kv.key, kv.key_token_stride, kv.key_head_stride, kv.key_block_stride),
      .value = map(kv.value, kv.value_token_stride, kv.value_head_stride, kv.value_block_stride)};
}

// Form kPlainRows, layout NHD: a box is `tokens` full rows of one head, contiguous in shared
// memory.
inline KvTensorMaps plain_row_maps(const PagedKv& kv, int tokens) {
  const int bytes = size_of(kv.dtype), row_words = kv.head_size * bytes / 2;
  const auto map = [&](void* base, int64_t token_stride, int64_t head_stride,
                       int64_t block_stride) {
    return encode_tensor_map<4>(base, {row_words, kv.block_size, kv.num_kv_heads, kv.num_blocks},
                                {token_stride * bytes, head_stride * bytes, block_stride * bytes},
                                {row_words, tokens, 1, 1}, CU_TENSOR_MAP_SWIZZLE_NONE,
                                CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
  };
  return both_maps(kv, map);
}

// Form kLines, layout NHD: (dimension, token in the page, column, page). kv.head_size is the size
// of a work tile's heads together, and a box has all their columns.
inline KvTensorMaps line_maps(const PagedKv& kv) {
  const auto map = [&](void* base, int64_t token_stride, int64_t head_stride,
                       int64_t block_stride) {
    return encode_tensor_map<4>(base,
                                {kColumnBytes / 2, kv.block_size,
                                 kv.num_kv_heads * head_stride / kColumnBytes, kv.num_blocks},
                                {token_stride, kColumnBytes, block_stride},
                                {kColumnBytes / 2, kLineTokens, kv.head_size / kColumnBytes, 1},
                                CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B);
  };
  return both_maps(kv, map);
}

// Form kPackedBoxes, layout vllm: a box is `tokens` tokens of one head. K is (token * 16 bytes,
// chunk, KV head, page), V is (token, dimension, KV head, page).
inline KvTensorMaps packed_box_maps(const PagedKv& kv, int tokens) {
  const int bytes = size_of(kv.dtype), chunks = kv.head_size * bytes / 16;
  return {
      .key = encode_tensor_map<4>(
          kv.key, {kv.block_size * 8, chunks, kv.num_kv_heads, kv.num_blocks},
          {kv.key_chunk_stride * bytes, kv.key_head_stride * bytes, kv.key_block_stride * bytes},
          {tokens * 8, chunks, 1, 1}, CU_TENSOR_MAP_SWIZZLE_NONE),
      .value = encode_tensor_map<4>(
          kv.value, {kv.block_size * bytes / 2, kv.head_size, kv.num_kv_heads, kv.num_blocks},
          {kv.value_dim_stride * bytes, kv.value_head_stride * bytes,
           kv.value_block_stride * bytes},
          {tokens * bytes / 2, kv.head_size, 1, 1}, CU_TENSOR_MAP_SWIZZLE_NONE)};
}

// The tensor maps for a pipeline with stages of kTokens tokens on the current device; empty where
// it uses none.
template <typename Cache, int kTokens, KvForm kForm>
KvTensorMaps kv_tensor_maps(const PagedKv& kv, int line_shift) {
  if (kForm == KvForm::kPlainRows && !rows_are_contiguous(kv))
    return plain_row_maps(kv, std::min(kv.block_size, kTokens));
  if (kForm == KvForm::kLines) return line_maps(kv);
  if (is_whole(kForm) || current_device_model().architecture < 90) return {};
  if (kForm == KvForm::kPackedBoxes) return packed_box_maps(kv, kBoxTokens<Cache, kTokens>);
  // The pages are read once, so L2 must not fetch more than one row of the box.
  constexpr auto kPromotion = CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
  const int tokens = std::min(kv.block_size, kTokens);
  return both_maps(
      kv, [&](void* base, int64_t token_stride, int64_t head_stride, int64_t block_stride) {
        return swizzled_row_map(kv, base, token_stride, head_stride, block_stride, tokens,
                                kPromotion, line_shift);
      });
}

}  // namespace vllm_kernels::cuda
