// Activation functions of one element, and how the activation kernels cut rows into chunks.
#pragma once
#include <cmath>

#include "cuda/base/launch.cuh"
#include "cuda/base/ptx.cuh"
#include "ops/activation.h"

namespace vllm_kernels::cuda {

// A CTA computes one chunk of one row. The CTA is as wide as possible while every SM gets a CTA.
// Then all chunks of a row get the same width. Width 14336 in bf16 (1792 Vecs): 128 threads for 16
// rows, 256 from 19 rows on.
struct RowChunks {
  int64_t per_row;
  unsigned threads = 256;  // of a CTA, one Vec each

  RowChunks(int64_t rows, int64_t vecs) {
    while (threads > 64 && ceil_div(vecs, threads) * rows < current_device_model().num_sms) {
      threads /= 2;
    }
    per_row = ceil_div(vecs, threads);
    threads = static_cast<unsigned>(ceil_div(ceil_div(vecs, per_row), 32) * 32);
  }
};

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
