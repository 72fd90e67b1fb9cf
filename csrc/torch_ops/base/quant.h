// The checks of 8-bit results and their scales. ops/quant.h says what they mean.
#pragma once
#include "ops/quant.h"
#include "torch_ops/base/check.h"

namespace vllm_kernels {

// What a call reads and what it writes: `apart` requires the latter apart from all else.
struct ReadAndWritten {
  Arguments read, written;
  void apart(const Expect& expect) const;
};

// scale: one float32, given.
QuantParams given_scale(Expect& expect, const Argument& out, const Tensor& scale,
                        ReadAndWritten& arguments);

// scales: a float32 a row, such as [rows, 1]; written.
QuantParams row_scales(Expect& expect, const Argument& out, const Tensor& scales,
                       const std::optional<Tensor>& scale_ub, ReadAndWritten& arguments);

// scales: [rows, groups] float32, written; transposed: neighbouring rows next to each other.
QuantParams group_scales(Expect& expect, const Argument& out, const Tensor& scales,
                         const std::optional<Tensor>& scale_ub, int64_t group_size,
                         bool is_scale_transposed, ReadAndWritten& arguments);

}  // namespace vllm_kernels
