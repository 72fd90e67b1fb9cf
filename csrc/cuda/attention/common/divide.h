// Approximate division of floats and fast division of integers, on the device and on the host.
#pragma once
#include "ops/rows.h"

namespace vllm_kernels::cuda {

// a / b. On the device within 2 ulp.
VLLM_KERNELS_HOST_DEVICE inline float fast_quotient(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdividef(a, b);
#else
  return a / b;
#endif
}

// a / b for a >= 0 and b > 0; fast where the quotient is small.
VLLM_KERNELS_HOST_DEVICE inline int divide(int a, int b) {
  int quotient = static_cast<int>(fast_quotient(static_cast<float>(a), static_cast<float>(b)));
  int rest = a - quotient * b;
#if defined(__CUDA_ARCH__)
#pragma unroll 1
#endif
  for (; rest < 0; rest += b) --quotient;
#if defined(__CUDA_ARCH__)
#pragma unroll 1
#endif
  for (; rest >= b; rest -= b) ++quotient;
  return quotient;
}

}  // namespace vllm_kernels::cuda
