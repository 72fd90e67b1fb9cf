// Shared by the cache writers' device bodies, write_rows.cuh and write_pages.cuh: their params,
// addressing, and the source of keys.
#pragma once
#include <cstdint>
#include <type_traits>

#include "cuda/base/fast_divmod.cuh"
#include "cuda/base/launch.cuh"
#include "cuda/base/prefetch.cuh"
#include "cuda/base/types.cuh"
#include "cuda/base/vec.cuh"
#include "cuda/cache/duplicate_slots.cuh"
#include "ops/reshape_and_cache.h"

namespace vllm_kernels::cuda {

// The address `index` steps of `stride` bytes after `base`.
template <typename T>
__device__ __forceinline__ T* stepped(T* base, uint32_t index, uint32_t stride) {
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  return reinterpret_cast<T*>(reinterpret_cast<Byte*>(base) + uint64_t{index} * stride);
}

// The address of page `block`. `stride` is in units of 16 bytes.
template <typename T>
__device__ __forceinline__ T* page(T* base, uint32_t block, uint32_t stride) {
  return reinterpret_cast<T*>(reinterpret_cast<char*>(base) + (uint64_t{block} * stride << 4));
}

// ReshapeAndCacheParams packed for the kernels. It takes few lines of the constant cache, and a
// kernel of a few microseconds waits for each. Strides are 32-bit and in bytes; page strides are in
// units of 16 bytes. A product with a 32-bit index takes one instruction. A 64 x 64 bit product
// takes four.
struct CacheWrite {
  const void* key;
  const void* value;
  const int64_t* slot_mapping;
  int32_t num_tokens;
  uint32_t limit;  // slots of the cache
  uint32_t key_token, key_head, value_token, value_head;
  FastDivisor by_block_size;
  int32_t block_size;
  int32_t num_kv_heads;
  int32_t head_size;
  int32_t scale_stride;
  void* key_cache;
  void* value_cache;
  uint32_t to_key_block, to_key_head, to_key_token, to_key_chunk;
  uint32_t to_value_block, to_value_head, to_value_token, to_value_dim;
  const float* k_scale;
  const float* v_scale;
  bool values_only;

  CacheWrite() = default;
  explicit CacheWrite(const ReshapeAndCacheParams& p)
      : key(p.key),
        value(p.value),
        slot_mapping(p.slot_mapping),
        num_tokens(static_cast<int32_t>(p.num_tokens)),
        limit(static_cast<uint32_t>(p.kv.num_blocks * p.kv.block_size)),
        by_block_size(p.kv.block_size),
        block_size(p.kv.block_size),
        num_kv_heads(p.kv.num_kv_heads),
        head_size(p.kv.head_size),
        scale_stride(p.kv.scale_stride),
        key_cache(p.kv.key),
        value_cache(p.kv.value),
        k_scale(p.kv.k_scale),
        v_scale(p.kv.v_scale),
        values_only(p.values_only) {
    const PagedKv& kv = p.kv;
    const auto bytes = [](int64_t stride, DType dtype) {
      return static_cast<uint32_t>(stride * size_of(dtype));
    };
    const auto chunks = [&](int64_t stride) {
      return static_cast<uint32_t>(stride * size_of(kv.dtype) / 16);
    };
    key_token = bytes(p.key_token_stride, p.dtype);
    key_head = bytes(p.key_head_stride, p.dtype);
    value_token = bytes(p.value_token_stride, p.dtype);
    value_head = bytes(p.value_head_stride, p.dtype);
    to_key_block = chunks(kv.key_block_stride);
    to_key_head = bytes(kv.key_head_stride, kv.dtype);
    to_key_token = bytes(kv.key_token_stride, kv.dtype);
    to_key_chunk = bytes(kv.key_chunk_stride, kv.dtype);
    to_value_block = chunks(kv.value_block_stride);
    to_value_head = bytes(kv.value_head_stride, kv.dtype);
    to_value_token = bytes(kv.value_token_stride, kv.dtype);
    to_value_dim = bytes(kv.value_dim_stride, kv.dtype);
  }
  // Whether the strides fit these units.
  static bool fits(const ReshapeAndCacheParams& p) {
    const PagedKv& kv = p.kv;
    const auto small = [](int64_t stride, DType dtype) {
      return stride < (1ll << 32) / size_of(dtype);
    };
    return small(p.key_token_stride, p.dtype) && small(p.key_head_stride, p.dtype) &&
           small(p.value_token_stride, p.dtype) && small(p.value_head_stride, p.dtype) &&
           small(kv.key_block_stride / 16, kv.dtype) && small(kv.key_head_stride, kv.dtype) &&
           small(kv.key_token_stride, kv.dtype) && small(kv.key_chunk_stride, kv.dtype) &&
           small(kv.value_block_stride / 16, kv.dtype) && small(kv.value_head_stride, kv.dtype) &&
           small(kv.value_token_stride, kv.dtype) && small(kv.value_dim_stride, kv.dtype);
  }

  __device__ __forceinline__ int32_t usable(int64_t slot) const {
    return static_cast<uint64_t>(slot) < limit ? static_cast<int32_t>(slot) : -1;
  }
  __device__ __forceinline__ Slot place(int32_t slot) const {
    return place_of(slot, by_block_size, block_size);
  }

  // The given value, element `d` of a KV head of a token.
  template <typename T>
  __device__ __forceinline__ const T* value_at(int token, int head, int d) const {
    return stepped(stepped(static_cast<const T*>(value) + d, token, value_token), head, value_head);
  }
  // Addresses of element `d` of a KV head of a slot, in a cache of rows (NHD and HND).
  template <typename C>
  __device__ __forceinline__ C* key_row(Slot at, int head, int d) const {
    return stepped(stepped(page(static_cast<C*>(key_cache) + d, at.block, to_key_block), at.token,
                           to_key_token),
                   head, to_key_head);
  }
  template <typename C>
  __device__ __forceinline__ C* value_row(Slot at, int head, int d) const {
    return stepped(stepped(page(static_cast<C*>(value_cache) + d, at.block, to_value_block),
                           at.token, to_value_token),
                   head, to_value_head);
  }
  // A KV head of a page.
  template <typename C>
  __device__ __forceinline__ C* key_page(int32_t block, int head) const {
    return stepped(page(static_cast<C*>(key_cache), block, to_key_block), head, to_key_head);
  }
  template <typename C>
  __device__ __forceinline__ C* value_page(int32_t block, int head) const {
    return stepped(page(static_cast<C*>(value_cache), block, to_value_block), head, to_value_head);
  }
};

// The source of a writer's keys: here, the keys as given. (RotatedKeys of
// cuda/rope/rotated_keys.cuh is the other one.) `load` only issues the loads of a token's key.
// `rotate` computes the key that the cache gets. `valid`: whether the token has a key to store.
template <typename T, int kVectors>
struct GivenKeys {
  static constexpr bool kByHead = false;  // whether d must be an element of a head, not of a row
  const T* key;
  uint32_t token_stride;
  uint32_t head_stride;

  GivenKeys() = default;
  __device__ __forceinline__ explicit GivenKeys(const CacheWrite& p)
      : key(static_cast<const T*>(p.key)), token_stride(p.key_token), head_stride(p.key_head) {}
  __device__ __forceinline__ const Elements16<T>* at(int token, int head, int d) const {
    return reinterpret_cast<const Elements16<T>*>(
        stepped(stepped(key + d, token, token_stride), head, head_stride));
  }
  __device__ __forceinline__ void prefetch(int token, int head, int d) const {
    prefetch_l2(at(token, head, d));
  }
  __device__ __forceinline__ void load(int token, int head, int d, Elements16<T> (&k)[kVectors]) {
    const Elements16<T>* key = at(token, head, d);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) k[i] = key[i];
  }
  __device__ __forceinline__ void rotate(int, Elements16<T> (&)[kVectors]) const {}
  __device__ __forceinline__ bool valid() const { return true; }
};

// Whether 16-byte loads of key and value are aligned for every head.
inline bool inputs_aligned(const ReshapeAndCacheParams& p) {
  const int64_t width = 16 / size_of(p.dtype);
  return aligned16(p.key) && aligned16(p.value) &&
         multiples(width, {p.key_token_stride, p.key_head_stride, p.value_token_stride,
                           p.value_head_stride});
}

}  // namespace vllm_kernels::cuda
