// Bounds that let a NaN through.
#pragma once
#include "ops/rows.h"

namespace vllm_kernels {

// a where it is above b, or a NaN.
VLLM_KERNELS_HOST_DEVICE static inline float at_least(float a, float b) {
  return a < b ? b : a;
}

// a where it is below b, or a NaN.
VLLM_KERNELS_HOST_DEVICE static inline float at_most(float a, float b) {
  return a > b ? b : a;
}

}  // namespace vllm_kernels
