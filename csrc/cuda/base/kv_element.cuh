// From what a model computes to what the paged cache stores: the same type, or 8 bits of
// value / scale.
#pragma once
#include <cstdint>
#include <type_traits>

#include "cuda/base/exact_division.cuh"
#include "cuda/base/fp8.cuh"
#include "cuda/base/int8.cuh"
#include "cuda/base/types.cuh"

namespace vllm_kernels::cuda {

template <typename C>
constexpr bool kIs8Bit = sizeof(C) == 1;

// What the elements of a KV head are divided by. `scale`, `stride`: PagedKv's k_scale or v_scale,
// and scale_stride (null for 1); not looked at where the cache stores T itself.
template <typename C>
__device__ __forceinline__ Divisor divisor_of(const float* scale, int32_t stride, int32_t head) {
  if constexpr (kIs8Bit<C>) {
    return scale == nullptr ? Divisor{} : Divisor::of(scale[head * stride]);
  } else {
    return Divisor{};
  }
}

// One element of the cache.
template <typename C, typename T>
__device__ __forceinline__ C to_cache(T x, Divisor scale) {
  if constexpr (kIs8Bit<C>) {
    return from_float<C>(scale.divide(to_float(x)));
  } else {
    return x;
  }
}

// Sixteen bytes of the cache from the kVecWidth<C> values they stand for, divided by `scale`;
// T itself is stored as it is.
template <typename T, typename C>
__device__ __forceinline__ Vector<C> quantize(const Vector<T>* parts, Divisor scale) {
  if constexpr (!kIs8Bit<C>) {
    return parts[0];
  } else {
    Vector<C> result;
    const auto quotient = [&](int i) {
      return scale.divide(to_float(parts[i / kVecWidth<T>][i % kVecWidth<T>]));
    };
    if constexpr (std::is_same_v<C, int8_t>) {
      auto* words = reinterpret_cast<uint32_t*>(result.data);
#pragma unroll
      for (int i = 0; i < kVecWidth<C>; i += 4) {
        words[i / 4] =
            quantize4_int8(quotient(i), quotient(i + 1), quotient(i + 2), quotient(i + 3));
      }
    } else {
      auto* pairs = reinterpret_cast<uint16_t*>(result.data);
#pragma unroll
      for (int i = 0; i < kVecWidth<C>; i += 2) {
        pairs[i / 2] = quantize2<C>(quotient(i), quotient(i + 1));
      }
    }
    return result;
  }
}

// Calls body(C{}) with the stored type of a cache for a model of type T: T itself or an 8-bit type.
template <typename T, typename Body>
void dispatch_cache(DType cache, Body&& body) {
  switch (cache) {
    case DType::kFp8E4M3:
      return body(Fp8E4M3{});
    case DType::kFp8E5M2:
      return body(Fp8E5M2{});
    case DType::kInt8:
      return body(int8_t{});
    default:
      return body(T{});
  }
}

// Calls body(C{}) with the device type of an 8-bit dtype.
template <typename Body>
void dispatch_8_bit(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::kFp8E5M2:
      return body(Fp8E5M2{});
    case DType::kInt8:
      return body(int8_t{});
    default:
      return body(Fp8E4M3{});
  }
}

}  // namespace vllm_kernels::cuda
