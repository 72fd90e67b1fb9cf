// rms_norm: out = round(x / sqrt(mean(x^2) + epsilon)) * weight, row by row.
// The normalised value is rounded to the dtype before the product, as in vLLM and Llama.
#pragma once
#include "ops/dtype.h"
#include "ops/rows.h"

namespace vllm_kernels {

struct RmsNormParams {
  void* out;          // [rows, hidden_size]
  const void* input;  // [rows, hidden_size]; may be out itself
  const void* weight; // [hidden_size]
  Rows out_rows;
  Rows input_rows;
  int64_t hidden_size;
  float epsilon;
  DType dtype;  // of out, input and weight
};

}  // namespace vllm_kernels
