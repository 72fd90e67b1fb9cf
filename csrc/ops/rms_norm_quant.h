// rms_norm and fused_add_rms_norm with an 8-bit result: what they give, rounded to the dtype, and
// then quantised as ops/quant.h says. The upper bound is one of the magnitude.
#pragma once
#include "ops/quant.h"
#include "ops/rms_norm.h"

namespace vllm_kernels {

struct RmsNormQuantParams {
  RmsNormParams norm;  // out is 8-bit; dtype is that of the other three
  QuantParams quant;
  const char* op;  // whose error a refused launch is
};

}  // namespace vllm_kernels
