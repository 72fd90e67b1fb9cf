// Activation functions of one element.
#pragma once
#include <cmath>

#include "ops/activation.h"

namespace vllm_kernels::cuda {

constexpr float kLog2E = static_cast<float>(M_LOG2E);

// Computes the activation in float32, with the order of operations of torch.nn.functional's
// kernels. Results equal theirs bit for bit, except for silu of a 16-bit T.
template <Activation kActivation, typename T>
__device__ __forceinline__ float activate(float x) {
  if constexpr (kActivation == Activation::kSilu && sizeof(T) == 2) {
    // x / (1 + exp(-x)) in six instructions. The relative error is about 2^-20; 16-bit types keep
    // 2^-11. The denominator is scaled by 1/4 so that the reciprocal stays a normal float.
    float exponential, reciprocal;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(exponential) : "f"(fmaf(x, -kLog2E, -2.0f)));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(exponential + 0.25f));
    return x * 0.25f * reciprocal;
  } else if constexpr (kActivation == Activation::kSilu) {
    return x / (1.0f + expf(-x));
  } else if constexpr (kActivation == Activation::kGelu) {
    return x * 0.5f * (1.0f + erff(x * static_cast<float>(M_SQRT1_2)));
  } else if constexpr (kActivation == Activation::kGeluQuick) {
    return x / (1.0f + expf(-1.702f * x));
  } else {
    constexpr float kRoot = static_cast<float>(M_SQRT2 * M_2_SQRTPI * 0.5);  // sqrt(2 / pi)
    const float cube = x * x * x;
    return 0.5f * x * (1.0f + tanhf(kRoot * (x + 0.044715f * cube)));
  }
}

}  // namespace vllm_kernels::cuda
