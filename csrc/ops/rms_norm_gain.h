// rms_norm with another gain than its weight, with the row order and residual of RmsNormParams:
//   kNone        out = round(x / rms)                       (weightless)
//   kOnePlus     out = round(x / rms * (1 + weight))        (Gemma's: float32, rounded once)
#pragma once
#include "ops/rms_norm.h"

namespace vllm_kernels {

enum class Gain : uint8_t { kNone, kOnePlus };

struct RmsNormGainParams {
  RmsNormParams norm;  // its weight is null for kNone
  Gain gain;
  const char* op;  // whose error a refused launch is
};

}  // namespace vllm_kernels
