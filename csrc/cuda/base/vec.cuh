// Vec: neighbouring elements that one access moves. 16-bit elements stay packed, two per register.
// They are converted in pairs, with one instruction per pair and direction.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda/base/types.cuh"
#include "ops/rows.h"

namespace vllm_kernels::cuda {

template <typename T, int kWidth>
struct alignas(kWidth * sizeof(T)) Vec {
  static constexpr int kBytes = kWidth * sizeof(T);
  using Word = std::conditional_t<kBytes % 4 == 0, uint32_t, uint16_t>;
  Word words[kBytes / sizeof(Word)];
};

// A Vec of 16 bytes.
template <typename T>
using Vec16 = Vec<T, kVecWidth<T>>;

// The bytes of a Vec as separate elements, for code that takes them one by one. With a Vec
// instead the cache writers compile to other code; some kernels then take more registers.
template <typename T, int kWidth>
struct alignas(kWidth * sizeof(T)) Elements {
  T data[kWidth];
  __device__ __forceinline__ T& operator[](int i) { return data[i]; }
  __device__ __forceinline__ const T& operator[](int i) const { return data[i]; }
};

// Elements of 16 bytes.
template <typename T>
using Elements16 = Elements<T, kVecWidth<T>>;

template <typename To, typename From>
__device__ __forceinline__ To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

// Stores 1, 2, 4 or 16 bytes with the evict-first policy (st.global.cs).
template <typename T>
__device__ __forceinline__ void store_streaming(T* to, T x) {
  static_assert(sizeof(T) == 16 || sizeof(T) <= 4);
  using Word =
      std::conditional_t<sizeof(T) == 16, uint4,
                         std::conditional_t<sizeof(T) == 4, uint32_t,
                                            std::conditional_t<sizeof(T) == 2, uint16_t, uint8_t>>>;
  __stcs(reinterpret_cast<Word*>(to), bits_as<Word>(x));
}

template <typename T, int kWidth>
__device__ __forceinline__ void upcast(const Vec<T, kWidth>& vec, float (&values)[kWidth]) {
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) values[i] = bits_as<float>(vec.words[i]);
  } else if constexpr (kWidth == 1) {
    values[0] = to_float(bits_as<T>(vec.words[0]));
  } else {
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) {
      if constexpr (std::is_same_v<T, Half>) {
        const float2 pair = __half22float2(bits_as<__half2>(vec.words[i]));
        values[2 * i] = pair.x;
        values[2 * i + 1] = pair.y;
      } else {  // bf16 is the upper half of a float: 1 instruction each, cuda_bf16.h needs 3
        values[2 * i] = bits_as<float>(vec.words[i] << 16);
        values[2 * i + 1] = bits_as<float>(vec.words[i] & 0xffff0000u);
      }
    }
  }
}

// Rounds to nearest even.
template <typename T, int kWidth>
__device__ __forceinline__ Vec<T, kWidth> downcast(const float (&values)[kWidth]) {
  Vec<T, kWidth> vec;
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) vec.words[i] = bits_as<uint32_t>(values[i]);
  } else if constexpr (kWidth == 1) {
    vec.words[0] = bits_as<uint16_t>(from_float<T>(values[0]));
  } else {
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) {
      if constexpr (std::is_same_v<T, Half>) {
        vec.words[i] = bits_as<uint32_t>(__floats2half2_rn(values[2 * i], values[2 * i + 1]));
      } else {
        vec.words[i] = bits_as<uint32_t>(__floats2bfloat162_rn(values[2 * i], values[2 * i + 1]));
      }
    }
  }
  return vec;
}

// Returns body(x, y) for each word of two Vecs.
template <typename T, int kWidth, typename Body>
__device__ __forceinline__ Vec<T, kWidth> elementwise(const Vec<T, kWidth>& a,
                                                      const Vec<T, kWidth>& b, Body&& body) {
  // The type of a word: a pair of 16-bit elements, or one element.
  using Pair = std::conditional_t<std::is_same_v<T, Half>, __half2, __nv_bfloat162>;
  using Element = std::conditional_t<(sizeof(T) < 4 && kWidth > 1), Pair, T>;
  Vec<T, kWidth> result;
#pragma unroll
  for (int i = 0; i < Vec<T, kWidth>::kBytes / static_cast<int>(sizeof(Element)); ++i) {
    result.words[i] = bits_as<typename Vec<T, kWidth>::Word>(
        static_cast<Element>(body(bits_as<Element>(a.words[i]), bits_as<Element>(b.words[i]))));
  }
  return result;
}

// Element-wise sum and product of two Vecs, each rounded once. One instruction handles two 16-bit
// elements.
template <typename T, int kWidth>
__device__ __forceinline__ Vec<T, kWidth> operator+(const Vec<T, kWidth>& a,
                                                    const Vec<T, kWidth>& b) {
  return elementwise(a, b, [](auto x, auto y) { return x + y; });
}
template <typename T, int kWidth>
__device__ __forceinline__ Vec<T, kWidth> operator*(const Vec<T, kWidth>& a,
                                                    const Vec<T, kWidth>& b) {
  return elementwise(a, b, [](auto x, auto y) { return x * y; });
}

// Loads Vec i of a row of `size` elements. Without kAligned the row may have any alignment and any
// size: elements are loaded one by one, and those past the row's end are zero.
template <bool kAligned, int kWidth, typename T>
__device__ __forceinline__ Vec<T, kWidth> load_vec(const T* row, int64_t i, int64_t size) {
  if constexpr (kAligned) {
    return reinterpret_cast<const Vec<T, kWidth>*>(row)[i];
  } else {
    T elements[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      elements[j] = i * kWidth + j < size ? row[i * kWidth + j] : from_float<T>(0.0f);
    }
    Vec<T, kWidth> vec;
    memcpy(&vec, elements, sizeof(vec));
    return vec;
  }
}

// Stores Vec i of a row; see load_vec(). Without kAligned nothing is written past the row's end.
template <bool kAligned, typename T, int kWidth>
__device__ __forceinline__ void store_vec(T* row, int64_t i, int64_t size,
                                          const Vec<T, kWidth>& vec) {
  if constexpr (kAligned) {
    reinterpret_cast<Vec<T, kWidth>*>(row)[i] = vec;
  } else {
    T elements[kWidth];
    memcpy(elements, &vec, sizeof(vec));
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      if (i * kWidth + j < size) row[i * kWidth + j] = elements[j];
    }
  }
}

// Whether every row starts at a multiple of `width` elements of `bytes` bytes. A null `base` (no
// tensor) counts as aligned.
inline bool rows_aligned(const void* base, const Rows& rows, int64_t bytes, int64_t width) {
  return reinterpret_cast<uintptr_t>(base) % (width * bytes) == 0 &&
         rows.inner_stride % width == 0 && rows.outer_stride % width == 0;
}
// The same, for a multiple of 16 bytes.
inline bool rows_aligned16(const void* base, const Rows& rows, DType dtype) {
  return rows_aligned(base, rows, size_of(dtype), 16 / size_of(dtype));
}

}  // namespace vllm_kernels::cuda
