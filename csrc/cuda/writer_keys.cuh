// What the cache writers' bodies (write_rows.cuh, write_pages.cuh) take from outside.
#pragma once
#include <cstdint>
#include <type_traits>

#include "cuda/pack.cuh"
#include "cuda/types.cuh"
#include "ops/reshape_and_cache.h"

namespace vllm_kernels::cuda {

// The strides of keys, values and pages in bytes, those of blocks in 16 bytes: each times an index
// of 32 bits is one instruction, where 64 bits times 64 bits are four.
struct WriterStrides {
  uint32_t key_token, key_head, value_token, value_head;  // of what is given
  uint32_t to_key_block, to_key_head, to_key_token, to_key_chunk;
  uint32_t to_value_block, to_value_head, to_value_token, to_value_dim;

  explicit WriterStrides(const ReshapeAndCacheParams& p) {
    const auto given = [&](int64_t stride) {
      return static_cast<uint32_t>(stride * size_of(p.dtype));
    };
    const auto stored = [&](int64_t stride) {
      return static_cast<uint32_t>(stride * size_of(p.kv.dtype));
    };
    const PagedKv& kv = p.kv;
    key_token = given(p.key_token_stride);
    key_head = given(p.key_head_stride);
    value_token = given(p.value_token_stride);
    value_head = given(p.value_head_stride);
    to_key_block = static_cast<uint32_t>(kv.key_block_stride * size_of(kv.dtype) / 16);
    to_key_head = stored(kv.key_head_stride);
    to_key_token = stored(kv.key_token_stride);
    to_key_chunk = stored(kv.key_chunk_stride);
    to_value_block = static_cast<uint32_t>(kv.value_block_stride * size_of(kv.dtype) / 16);
    to_value_head = stored(kv.value_head_stride);
    to_value_token = stored(kv.value_token_stride);
    to_value_dim = stored(kv.value_dim_stride);
  }
  // Whether they are exact.
  static bool fit(const ReshapeAndCacheParams& p) {
    const PagedKv& kv = p.kv;
    const auto small = [](int64_t stride, int64_t unit) { return stride < (1ll << 32) / unit; };
    const int64_t given = size_of(p.dtype), stored = size_of(kv.dtype);
    return small(p.key_token_stride, given) && small(p.key_head_stride, given) &&
           small(p.value_token_stride, given) && small(p.value_head_stride, given) &&
           small(kv.key_block_stride / 16, stored) && small(kv.key_head_stride, stored) &&
           small(kv.key_token_stride, stored) && small(kv.key_chunk_stride, stored) &&
           small(kv.value_block_stride / 16, stored) && small(kv.value_head_stride, stored) &&
           small(kv.value_token_stride, stored) && small(kv.value_dim_stride, stored);
  }
};

// `base` and `index` times `stride` bytes.
template <typename T>
__device__ __forceinline__ T* stepped(T* base, uint32_t index, uint32_t stride) {
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  return reinterpret_cast<T*>(reinterpret_cast<Byte*>(base) + uint64_t{index} * stride);
}

// `base` and a block, whose stride is in 16 bytes.
template <typename T>
__device__ __forceinline__ T* page(T* base, uint32_t block, uint32_t stride) {
  return reinterpret_cast<T*>(reinterpret_cast<char*>(base) + (uint64_t{block} * stride << 4));
}

// Where a writer's keys come from; these: as they are given. `load` only sends for a token's key,
// `turn` makes of it what the cache is to get, `known`: whether there is one.
template <typename T, int kVectors>
struct GivenKeys {
  static constexpr int kLater = 16;       // slots a thread that registers leave room for
  static constexpr bool kByHead = false;  // needs to know where in its head an element is
  const T* key;
  uint32_t token_stride;
  uint32_t head_stride;

  GivenKeys() = default;
  __device__ __forceinline__ GivenKeys(const ReshapeAndCacheParams& p, const WriterStrides& strides)
      : key(static_cast<const T*>(p.key)),
        token_stride(strides.key_token),
        head_stride(strides.key_head) {}
  __device__ __forceinline__ const Vector<T>* at(int token, int head, int d) const {
    return reinterpret_cast<const Vector<T>*>(
        stepped(stepped(key + d, token, token_stride), head, head_stride));
  }
  __device__ __forceinline__ void prefetch(int token, int head, int d) const {
    prefetch_l2(at(token, head, d));
  }
  __device__ __forceinline__ void load(int token, int head, int d, Vector<T> (&k)[kVectors]) {
    const Vector<T>* key = at(token, head, d);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) k[i] = key[i];
  }
  __device__ __forceinline__ void turn(int, Vector<T> (&)[kVectors]) const {}
  __device__ __forceinline__ bool known() const { return true; }
};

// 16-byte loads of key and value, from the first element of any head, are aligned.
inline bool inputs_aligned(const ReshapeAndCacheParams& p) {
  const int64_t width = 16 / size_of(p.dtype);
  return aligned16(p.key) && aligned16(p.value) && p.key_token_stride % width == 0 &&
         p.key_head_stride % width == 0 && p.value_token_stride % width == 0 &&
         p.value_head_stride % width == 0;
}

inline int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

}  // namespace vllm_kernels::cuda
