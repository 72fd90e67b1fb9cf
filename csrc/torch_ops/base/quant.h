// Checks of the scales of 8-bit results. ops/quant.h has the formulas.
#pragma once
#include "ops/quant.h"
#include "torch_ops/base/check.h"

namespace vllm_kernels {

// The tensors that a call reads and writes. `apart` requires each written one apart from all
// others.
struct ReadAndWritten {
  Arguments read, written;
  void apart(const Expect& expect) const;
};

// scale: one float32, which the caller gives.
QuantParams given_scale(Expect& expect, const Argument& out, const Tensor& scale,
                        ReadAndWritten& arguments);

// scales: one float32 a row, such as [rows, 1]; the op writes it.
QuantParams row_scales(Expect& expect, const Argument& out, const Tensor& scales,
                       const std::optional<Tensor>& scale_ub, ReadAndWritten& arguments);

// scales: [rows, groups] float32; the op writes it. is_scale_transposed: stride 1 between rows,
// else between groups.
QuantParams group_scales(Expect& expect, const Argument& out, const Tensor& scales,
                         const std::optional<Tensor>& scale_ub, int64_t group_size,
                         bool is_scale_transposed, ReadAndWritten& arguments);

}  // namespace vllm_kernels
