// What the choice of an attention kernel asks of addresses and strides. Host code.
#pragma once
#include <cstdint>

#include "ops/paged_attention.h"

namespace vllm_kernels::cuda {

inline bool is_aligned(const void* pointer, int bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

// Whether a stride of the cache is a multiple of `bytes` that 32 bits hold in units of 16 bytes.
inline bool fits_stride(const PagedKv& kv, int64_t stride, int bytes = 16) {
  const int64_t length = stride * size_of(kv.dtype);
  return stride >= 0 && length % bytes == 0 && length / 16 <= UINT32_MAX;
}

// Whether scales and zeros of tokens can be read four at a time.
inline bool scales_are_aligned(const TokenScales& scales) {
  const auto fits = [](int64_t stride) { return stride % 4 == 0; };
  return is_aligned(scales.key, 16) && is_aligned(scales.value, 16) &&
         is_aligned(scales.key_zero, 16) && is_aligned(scales.value_zero, 16) &&
         fits(scales.key_block_stride) && fits(scales.key_head_stride) &&
         fits(scales.value_block_stride) && fits(scales.value_head_stride);
}

// Of K, V and scales of tokens: what copies of 16 bytes need.
inline bool cache_is_aligned(const PagedAttentionParams& p) {
  const PagedKv& kv = p.kv;
  return scales_are_aligned(p.token_scales) && is_aligned(kv.key, 16) && is_aligned(kv.value, 16) &&
         fits_stride(kv, kv.key_block_stride) && fits_stride(kv, kv.key_head_stride) &&
         fits_stride(kv, kv.value_block_stride) && fits_stride(kv, kv.value_head_stride) &&
         (kv.layout == KvLayout::kVllm ||
          (fits_stride(kv, kv.key_token_stride) && fits_stride(kv, kv.value_token_stride)));
}

}  // namespace vllm_kernels::cuda
