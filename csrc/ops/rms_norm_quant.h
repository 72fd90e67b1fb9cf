// rms_norm and fused_add_rms_norm with an 8-bit output. Their result is rounded to the dtype, then
// quantized by the rules of ops/quant.h. quant.upper_bound bounds the magnitude.
#pragma once
#include "ops/quant.h"
#include "ops/rms_norm.h"

namespace vllm_kernels {

struct RmsNormQuantParams {
  RmsNormParams norm;  // norm.out is 8-bit; norm.dtype is that of the other three tensors
  QuantParams quant;
  const char* op;  // named in the error of a refused launch
};

}  // namespace vllm_kernels
