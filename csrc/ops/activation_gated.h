// Gated activations of a gate g and an up u, element by element, besides those of activation.h:
//   kSilu       round(silu(g)) * u                             g and u in tensors of their own
//   kFatRelu    (g > threshold ? g : 0) * u
//   kSiluClamp  round(silu(min(g, limit))) * clamp(u, -limit, limit)
//   kSwigluOai  round(g' * sigmoid(alpha g') * (u' + 1))       g' and u' bounded as in kSiluClamp;
//               gate and up alternate in one tensor
// With 8-bit results, of kSilu: with a scale that is given, what silu_and_mul stores, quantised;
// with scales of groups, silu(g) * u in float32, not rounded, divided by the scale. There the upper
// bound is one of the scale.
#pragma once
#include "ops/dtype.h"
#include "ops/quant.h"
#include "ops/rows.h"

namespace vllm_kernels {

enum class Gated : uint8_t { kSilu, kFatRelu, kSiluClamp, kSwigluOai };

struct GatedParams {
  void* out;         // [rows, width]
  const void* gate;  // [rows, width]; kSwigluOai: [rows, 2 width], up in its odd elements
  const void* up;    // [rows, width]; kSwigluOai: not looked at
  Rows out_rows;
  Rows gate_rows;
  Rows up_rows;
  int64_t width;
  float bound;  // kFatRelu: threshold; kSiluClamp, kSwigluOai: limit
  float alpha;  // kSwigluOai
  Gated function;
  DType dtype;     // of all three
  const char* op;  // whose error a refused launch is
};

struct GatedQuantParams {
  GatedParams gated;  // kSilu; out is 8-bit
  QuantParams quant;  // kTensor, or kGroup
};

}  // namespace vllm_kernels
