// rms_norm with another gain than its weight; rows and residual as in RmsNormParams:
//   kNone        out = round(x / rms)                       (weightless)
//   kOnePlus     out = round(x / rms * (1 + weight))        (Gemma: float32, rounded once)
#pragma once
#include "ops/rms_norm.h"

namespace vllm_kernels {

enum class Gain : uint8_t { kNone, kOnePlus };

struct RmsNormGainParams {
  RmsNormParams norm;  // norm.weight is null for kNone
  Gain gain;
  const char* op;  // named in the error of a refused launch
};

}  // namespace vllm_kernels
