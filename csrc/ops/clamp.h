// Clamping that propagates NaN.
#pragma once
#include "ops/rows.h"

namespace vllm_kernels {

// max(a, b); NaN if a is NaN.
VLLM_KERNELS_HOST_DEVICE static inline float at_least(float a, float b) {
  return a < b ? b : a;
}

// min(a, b); NaN if a is NaN.
VLLM_KERNELS_HOST_DEVICE static inline float at_most(float a, float b) {
  return a > b ? b : a;
}

}  // namespace vllm_kernels
