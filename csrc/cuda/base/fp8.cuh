// fp8 elements of the KV cache. Quantizing rounds to nearest even and saturates to the largest
// finite value; a NaN becomes 0x7f. cuda_fp8.h uses the hardware conversions where the GPU has
// them.
#pragma once
#include <cuda_fp8.h>

#include <cstdint>

#include "cuda/base/types.cuh"
#include "cuda/base/upcast.cuh"

namespace vllm_kernels::cuda {

using Fp8E4M3 = __nv_fp8_e4m3;
using Fp8E5M2 = __nv_fp8_e5m2;

template <typename T>
constexpr bool kIsFp8 = false;
template <>
inline constexpr bool kIsFp8<Fp8E4M3> = true;
template <>
inline constexpr bool kIsFp8<Fp8E5M2> = true;

template <typename Fp8>
constexpr __nv_fp8_interpretation_t kInterpretation = __NV_E4M3;
template <>
inline constexpr __nv_fp8_interpretation_t kInterpretation<Fp8E5M2> = __NV_E5M2;

// Quantizes two floats to two bytes; `low` is element 0.
template <typename Fp8>
__device__ __forceinline__ uint16_t quantize2(float low, float high) {
  return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, kInterpretation<Fp8>);
}

template <typename Fp8>
  requires kIsFp8<Fp8>
__device__ __forceinline__ Fp8 from_float(float x) {
  Fp8 result;
  result.__x = __nv_cvt_float_to_fp8(x, __NV_SATFINITE, kInterpretation<Fp8>);
  return result;
}
template <typename Fp8>
  requires kIsFp8<Fp8>
__device__ __forceinline__ float to_float(Fp8 x) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(x.__x, kInterpretation<Fp8>)));
}

}  // namespace vllm_kernels::cuda
