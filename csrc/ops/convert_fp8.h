// convert_fp8: output[i] = fp8(input[i] / scale), or output[i] = input[i] * scale where input is
// the 8-bit side. i counts elements in memory order.
#pragma once
#include "ops/dtype.h"
#include "ops/rows.h"

namespace vllm_kernels {

struct ConvertFp8Params {
  void* output;       // [count]
  const void* input;  // [count]
  int64_t count;
  DType output_dtype;  // one of the two is fp8, the other float32, float16 or bfloat16
  DType input_dtype;
  float scale;
};

}  // namespace vllm_kernels
