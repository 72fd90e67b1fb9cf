// Activations, plain and gated, element by element:
//   out = round(f(gate))          up is null
//   out = round(f(gate)) * up     the product in the dtype
// silu_and_mul reads gate from the first half of each input row and up from the second.
// mul_and_silu swaps the two.
#pragma once
#include "ops/dtype.h"
#include "ops/rows.h"

namespace vllm_kernels {

enum class Activation : uint8_t {
  kSilu,       // x / (1 + e^-x)
  kGelu,       // x * (1 + erf(x / sqrt(2))) / 2
  kGeluTanh,   // x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) / 2
  kGeluQuick,  // x / (1 + e^(-1.702 x))
};

struct ActivationParams {
  void* out;         // [rows, width]
  const void* gate;  // [rows, width]
  const void* up;    // [rows, width], row strides as gate; or null
  Rows out_rows;
  Rows input_rows;
  int64_t width;
  Activation activation;
  DType dtype;     // of out, gate and up
  const char* op;  // named in the error of a refused launch
};

}  // namespace vllm_kernels
