// Element types on the device: conversion to and from float, and dispatch by DType.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "ops/dtype.h"

namespace vllm_kernels::cuda {

using Half = __half;
using BFloat16 = __nv_bfloat16;

__device__ __forceinline__ float to_float(float x) {
  return x;
}
__device__ __forceinline__ float to_float(Half x) {
  return __half2float(x);
}
__device__ __forceinline__ float to_float(BFloat16 x) {
  return __bfloat162float(x);
}

template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ Half from_float<Half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ BFloat16 from_float<BFloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// Elements per 16-byte access.
template <typename T>
constexpr int kVecWidth = 16 / sizeof(T);

// Calls body(T{}) with the device type of a floating-point dtype. The bindings reject all other
// dtypes.
template <typename Body>
void dispatch_float(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::kFloat16:
      return body(Half{});
    case DType::kBFloat16:
      return body(BFloat16{});
    default:
      return body(float{});
  }
}

// The same for a 16-bit dtype.
template <typename Body>
void dispatch_16_bit(DType dtype, Body&& body) {
  dtype == DType::kFloat16 ? body(Half{}) : body(BFloat16{});
}

// Whether every value is a multiple of `of`.
inline bool multiples(int64_t of, std::initializer_list<int64_t> values) {
  return std::all_of(values.begin(), values.end(), [of](int64_t value) { return value % of == 0; });
}

inline bool aligned16(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

}  // namespace vllm_kernels::cuda
