// A row is one head of one token, between the QKV GEMM and the paged cache or attention. This file
// has its address, its processing (ops/rope_and_cache.h) and its address in the cache. It also
// declares the launchers that rope_and_cache.cu chooses from.
#pragma once
#include <cstdint>
#include <cstring>

#include "cuda/base/fast_divmod.cuh"
#include "cuda/base/kv_element.cuh"
#include "cuda/base/prefetch.cuh"
#include "cuda/cache/duplicate_slots.cuh"
#include "cuda/launchers.h"
#include "cuda/rope/rope_heads.cuh"
#include "ops/rope_and_cache.h"

namespace vllm_kernels::cuda {

// Whether 16-byte Vecs fit the heads, weights, angles and cache.
bool vecs_fit(const RopeAndCacheParams& params);

// The params of the cache writers: values, and keys before the rotation, of the tokens with slots.
ReshapeAndCacheParams as_write(const RopeAndCacheParams& params);

// Rotates keys inside the cache writers' kernels. Fits: no bias, no norm, 16-byte accesses for
// both, and 32-bit strides.
bool fits_writers(const RopeAndCacheParams& params);
void launch_writers(const RopeAndCacheParams& params, Stream stream);

// The same for many slots: more than kFewTokens of cache/heuristics.h. Requires fits_writers(), and
// fits_runs() in layout vllm. Layout NHD needs nothing else.
bool fits_runs(const RopeAndCacheParams& params);
void launch_many(const RopeAndCacheParams& params, Stream stream);

// One head of one token: its address, bias and norm weight.
template <typename T>
struct HeadRow {
  T* start;
  const T* bias;
  const T* weight;
  int token;
  int head;
  bool is_second;  // row of `second`, not of `first`

  // Row `row` of all tokens. A token has `heads` rows: the heads of `first`, then the heads of
  // `second`.
  __device__ __forceinline__ HeadRow(const ProjectedHeads& first, const ProjectedHeads& second,
                                     FastDivisor heads, int row) {
    token = heads.divide(row);
    head = row - token * (first.count + second.count);
    is_second = head >= first.count;
    if (is_second) head -= first.count;
    find(is_second ? second : first);
  }
  __device__ __forceinline__ HeadRow(const ProjectedHeads& own, int token, int head)
      : token(token), head(head), is_second(false) {
    find(own);
  }

 private:
  __device__ __forceinline__ void find(const ProjectedHeads& own) {
    start = static_cast<T*>(own.data) + token * own.token_stride + head * own.head_stride;
    bias = static_cast<const T*>(own.bias);
    weight = static_cast<const T*>(own.weight);
  }
};

// Bias, norm and rotation of a row in the registers of `lanes` neighbouring lanes. All lanes of a
// warp call it.
template <typename T, typename A, int kWidth, int kVecPairs>
__device__ __forceinline__ void prepare(const RopeAndCacheParams& p, const HeadRow<T>& row,
                                        const HeadVecPairs<kWidth, kVecPairs>& vec_pairs,
                                        const HeadAngles<A, kWidth, kVecPairs>& angles, int lanes,
                                        HeadVecs<T, kWidth, kVecPairs>& x) {
  if (row.bias != nullptr) x.add(vec_pairs, row.bias + row.head * p.head_size);
  if (p.query.weight != nullptr || p.key.weight != nullptr) {
    const float inverse = x.inverse_root(p.head_size, lanes, p.epsilon);
    if (row.weight != nullptr) x.norm(vec_pairs, row.weight, inverse);
  }
  x.rotate(vec_pairs, angles, p.is_neox);
}

template <typename C, typename T, int kWidth>
__device__ __forceinline__ Elements<C, kWidth> round_to(const Vec<T, kWidth>& vec, Divisor scale) {
  Elements<C, kWidth> stored;
  if constexpr (kIs8Bit<C>) {
    float values[kWidth];
    upcast(vec, values);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) stored.data[j] = from_float<C>(scale.divide(values[j]));
  } else {
    memcpy(&stored, &vec, sizeof(stored));
  }
  return stored;
}

// Address of a row in the cache: its first element, and the stride inside the row.
template <typename C>
struct CacheRow {
  C* start;
  int64_t stride;  // between chunks of K, or between elements of V
  Divisor scale;
  bool is_key;

  __device__ __forceinline__ CacheRow(const PagedKv& kv, bool is_key, int head, Slot at)
      : is_key(is_key) {
    C* data = static_cast<C*>(is_key ? kv.key : kv.value);
    start = data + at.block * (is_key ? kv.key_block_stride : kv.value_block_stride) +
            head * (is_key ? kv.key_head_stride : kv.value_head_stride) +
            at.token * (is_key ? kv.key_token_stride : kv.value_token_stride);
    stride = is_key ? kv.key_chunk_stride : kv.value_dim_stride;
    scale = divisor_of<C>(is_key ? kv.k_scale : kv.v_scale, kv.scale_stride, head);
  }

  template <typename T, int kWidth>
  __device__ __forceinline__ Elements<C, kWidth> round(const Vec<T, kWidth>& vec) const {
    return round_to<C>(vec, scale);
  }
  // Stores kWidth elements from element `d` of the head on.
  template <int kWidth>
  __device__ __forceinline__ void store(const Elements<C, kWidth>& stored, int d) const {
    constexpr int kX = 16 / sizeof(C);  // elements of a chunk
    if (is_key || stride == 1) {
      C* to = is_key ? start + d / kX * stride + d % kX : start + d;
      *reinterpret_cast<Elements<C, kWidth>*>(to) = stored;
    } else {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) start[(d + j) * stride] = stored.data[j];
    }
  }
};

// The registers of one lane. `lanes` neighbouring lanes, a power of two, hold one row.
template <typename T, typename A, int kWidth, int kVecPairs>
struct Lane {
  using VecPairs = HeadVecPairs<kWidth, kVecPairs>;
  HeadVecs<T, kWidth, kVecPairs> x;
  HeadAngles<A, kWidth, kVecPairs> angles{};

  __device__ __forceinline__ static VecPairs vec_pairs(const RopeAndCacheParams& p, bool is_value,
                                                       bool inside, int lane, int lanes) {
    return VecPairs(p.head_size, is_value ? 0 : p.rotary_size, p.is_neox, lane, lanes, inside);
  }
  // Prefetches into L2, before the PDL wait.
  __device__ __forceinline__ void prefetch(const RopeAndCacheParams& p, const HeadRow<T>& row,
                                           const VecPairs& vec_pairs) {
    x.prefetch(vec_pairs, row.start);
    prefetch_l2(p.positions + row.token);
  }
  // Returns whether the row's position is valid.
  __device__ __forceinline__ bool load(const RopeAndCacheParams& p, const HeadRow<T>& row,
                                       const VecPairs& vec_pairs) {
    x.load(vec_pairs, row.start);
    const int64_t position = p.positions[row.token];
    const bool valid = position >= 0 && position < p.max_position;
    if (valid) {
      angles.load(vec_pairs, p.cos_sin_cache, p.cos_sin_dtype, position * p.cos_sin_stride,
                  p.rotary_size / 2);
    }
    return valid;
  }
};

}  // namespace vllm_kernels::cuda
