// What the cache writers' bodies (write_rows.cuh, write_pages.cuh) take from outside.
#pragma once
#include <cstdint>

#include "cuda/pack.cuh"
#include "cuda/types.cuh"
#include "ops/reshape_and_cache.h"

namespace vllm_kernels::cuda {

// Where a writer's keys come from; these: as they are given. `load` only sends for a token's key,
// `turn` makes of it what the cache is to get, `known`: whether there is one.
template <typename T, int kVectors>
struct GivenKeys {
  static constexpr int kLater = 16;       // slots a thread that registers leave room for
  static constexpr bool kByHead = false;  // needs to know where in its head an element is
  const T* key;
  int64_t token_stride;
  int64_t head_stride;

  GivenKeys() = default;
  __device__ __forceinline__ explicit GivenKeys(const ReshapeAndCacheParams& p)
      : key(static_cast<const T*>(p.key)),
        token_stride(p.key_token_stride),
        head_stride(p.key_head_stride) {}
  __device__ __forceinline__ const Vector<T>* at(int token, int head, int d) const {
    return reinterpret_cast<const Vector<T>*>(key + token * token_stride + head * head_stride + d);
  }
  __device__ __forceinline__ void prefetch(int token, int head, int d) const {
    prefetch_l2(at(token, head, d));
  }
  __device__ __forceinline__ void load(int token, int head, int d, Vector<T> (&k)[kVectors]) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) k[i] = at(token, head, d)[i];
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
