// More gated activations of a gate g and an up u, element by element (activation.h has the first):
//   kSilu       round(silu(g)) * u                         g and u in tensors of their own
//   kFatRelu    (g > threshold ? g : 0) * u
//   kSiluClamp  round(silu(min(g, limit))) * clamp(u, -limit, limit)
//   kSwigluOai  round(g' * sigmoid(alpha g') * (u' + 1))   g' and u' bounded as in kSiluClamp;
//               gate and up alternate in one tensor
//
// kSilu may have an 8-bit result (GatedQuantParams). With a given scale (kTensor), the result of
// silu_and_mul is quantized. With computed scales (kGroup), silu(g) * u in float32 is quantized
// without rounding to the dtype first; quant's upper_bound then bounds the scale.
#pragma once
#include "ops/dtype.h"
#include "ops/quant.h"
#include "ops/rows.h"

namespace vllm_kernels {

enum class Gated : uint8_t { kSilu, kFatRelu, kSiluClamp, kSwigluOai };

struct GatedParams {
  void* out;         // [rows, width]
  const void* gate;  // [rows, width]; kSwigluOai: [rows, 2 width], up in the odd elements
  const void* up;    // [rows, width]; kSwigluOai: unused
  Rows out_rows;
  Rows gate_rows;
  Rows up_rows;
  int64_t width;
  float bound;  // kFatRelu: threshold; kSiluClamp, kSwigluOai: limit
  float alpha;  // kSwigluOai
  Gated function;
  DType dtype;     // of out, gate and up
  const char* op;  // named in the error of a refused launch
};

struct GatedQuantParams {
  GatedParams gated;  // kSilu; out is 8-bit
  QuantParams quant;  // kTensor, or kGroup
};

}  // namespace vllm_kernels
