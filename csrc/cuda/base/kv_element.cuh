// Conversion from the model's type to the element type of the KV cache. The cache stores the same
// type, or value / scale quantized to 8 bits.
#pragma once
#include <cstdint>
#include <stdexcept>
#include <type_traits>

#include "cuda/base/exact_division.cuh"
#include "cuda/base/fp8.cuh"
#include "cuda/base/int8.cuh"
#include "cuda/base/types.cuh"
#include "cuda/base/vec.cuh"

namespace vllm_kernels::cuda {

template <typename C>
constexpr bool kIs8Bit = sizeof(C) == 1;

// Returns the divisor for the elements of KV head `head`. `scale` and `stride` are PagedKv's
// k_scale or v_scale, and scale_stride. A null `scale` means 1. Both are ignored unless the cache
// is 8-bit.
template <typename C>
__device__ __forceinline__ Divisor divisor_of(const float* scale, int32_t stride, int32_t head) {
  if constexpr (kIs8Bit<C>) {
    return scale == nullptr ? Divisor{} : Divisor::of(scale[head * stride]);
  } else {
    return Divisor{};
  }
}

// Converts one element to the type of the cache.
template <typename C, typename T>
__device__ __forceinline__ C to_cache(T x, Divisor scale) {
  if constexpr (kIs8Bit<C>) {
    return from_float<C>(scale.divide(to_float(x)));
  } else {
    return x;
  }
}

// Quantizes kVecWidth<C> values to 16 bytes of the cache: value / scale. With a 16- or 32-bit cache
// C is T, and the values are copied. `elements` hold the values.
template <typename T, typename C>
__device__ __forceinline__ Elements16<C> quantize(const Elements16<T>* elements, Divisor scale) {
  if constexpr (!kIs8Bit<C>) {
    return elements[0];
  } else {
    Elements16<C> result;
    const auto quotient = [&](int i) {
      return scale.divide(to_float(elements[i / kVecWidth<T>][i % kVecWidth<T>]));
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

// Calls body(C{}) with the cache's element type for a model of type T: an 8-bit type, or T itself.
// Callers that have int4 caches handle them before.
template <typename T, typename Body>
void dispatch_cache(DType cache, Body&& body) {
  switch (cache) {
    case DType::kFp8E4M3:
      return body(Fp8E4M3{});
    case DType::kFp8E5M2:
      return body(Fp8E5M2{});
    case DType::kInt8:
      return body(int8_t{});
    case DType::kInt4x2:
      throw std::logic_error("an int4 cache where none is supported");
    default:
      return body(T{});
  }
}

// Calls body(C{}) with the device type of an 8-bit dtype, not of int4.
#pragma nv_exec_check_disable
template <typename Body>
__host__ __device__ __forceinline__ void dispatch_8_bit(DType dtype, Body&& body) {
  if (dtype == DType::kFp8E4M3) {
    body(Fp8E4M3{});
  } else if (dtype == DType::kFp8E5M2) {
    body(Fp8E5M2{});
  } else {
    body(int8_t{});
  }
}

}  // namespace vllm_kernels::cuda
