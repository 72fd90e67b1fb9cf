// rms_norm and fused_add_rms_norm: out = round(x / sqrt(mean(x^2) + epsilon)) * weight, row by row.
// The normalized value is rounded to the dtype before the product, as in vLLM and Llama. With a
// residual, residual = round(residual + x) first, then x = residual.
#pragma once
#include "ops/dtype.h"
#include "ops/rows.h"

namespace vllm_kernels {

struct RmsNormParams {
  void* out;           // [rows, hidden_size]
  const void* input;   // [rows, hidden_size]; may be out
  void* residual;      // [rows, hidden_size], or null: no residual
  const void* weight;  // [hidden_size]
  Rows out_rows;
  Rows input_rows;
  Rows residual_rows;
  int64_t hidden_size;
  float epsilon;
  DType dtype;  // of all four tensors
};

// --- another gain than the weight; rows and residual as in RmsNormParams
//   kNone        out = round(x / rms)                       (weightless)
//   kOnePlus     out = round(x / rms * (1 + weight))        (Gemma: float32, rounded once)
enum class Gain : uint8_t { kNone, kOnePlus };

struct RmsNormGainParams {
  RmsNormParams norm;  // norm.weight is null for kNone
  Gain gain;
  const char* op;  // named in the error of a refused launch
};

}  // namespace vllm_kernels
