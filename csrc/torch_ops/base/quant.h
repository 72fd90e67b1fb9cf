// Checks of the scales of 8-bit results. ops/quant.h has the formulas.
#pragma once
#include "ops/quant.h"
#include "torch_ops/base/check.h"

namespace vllm_kernels {

// The scales of an 8-bit result, as the op's arguments give them.
struct ScaleArguments {
  ScaleOf scale_of;
  // kTensor: `scale`, one float32. The op writes the others, `scales`, float32: kRow: one a row,
  // such as [rows, 1]; kGroup: [rows, groups].
  const Tensor& scales;
  const Tensor* scale_ub = nullptr;  // kRow, kGroup; or null
  int64_t group_size = 0;            // kGroup
  bool is_scale_transposed = false;  // kGroup: stride 1 between rows, else between groups
};

// Checks the dtype of an 8-bit result: e4m3, or with computed scales also int8.
Argument& quantized_dtype(Argument& out, ScaleOf scale_of);

// Checks the scales of `out`, and adds them to the tensors read or written.
QuantParams read_scales(Expect& expect, const ScaleArguments& given, const Argument& out,
                        Arguments& read, Arguments& written);

}  // namespace vllm_kernels
