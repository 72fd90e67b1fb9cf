// The checks of quant.h: scales of 8-bit results.
#include "torch_ops/base/quant.h"

namespace vllm_kernels {
namespace {

const float* one_float(Expect& expect, const char* name, const Tensor& tensor,
                       ReadAndWritten& arguments) {
  Argument value = expect.tensor(name, tensor).float32();
  if (value.numel() != 1) value.fail("expected one element, got shape " + value.shape_text());
  arguments.read.add(value);
  return value.as<const float>();
}

const float* bound(Expect& expect, const Argument& out, const std::optional<Tensor>& scale_ub,
                   ReadAndWritten& arguments) {
  if (!scale_ub) return nullptr;
  expect.that(out.dtype() != DType::kInt8, "scale_ub: expected None for int8");
  return one_float(expect, "scale_ub", *scale_ub, arguments);
}

// The rows of a tensor [..., width].
int64_t rows_of(const Argument& out) {
  int64_t rows = 1;
  for (int64_t d = 0; d < out.dim() - 1; ++d) rows *= out.size(d);
  return rows;
}

}  // namespace

void ReadAndWritten::apart(const Expect& expect) const {
  for (const Argument& one : written) {
    expect.apart(one, read);
    for (const Argument& other : written) {
      if (&other == &one) break;
      expect.apart(one, other);
    }
  }
}

QuantParams given_scale(Expect& expect, const Argument& out, const Tensor& scale,
                        ReadAndWritten& arguments) {
  return {.scale = one_float(expect, "scale", scale, arguments),
          .scale_of = ScaleOf::kTensor,
          .dtype = out.dtype()};
}

QuantParams row_scales(Expect& expect, const Argument& out, const Tensor& scales,
                       const std::optional<Tensor>& scale_ub, ReadAndWritten& arguments) {
  const Argument s = expect.tensor("scales", scales).float32().contiguous();
  const int64_t rows = rows_of(out);
  if (s.numel() != rows) {
    s.fail("expected one element a row of input, " + std::to_string(rows) + ", got shape " +
           s.shape_text());
  }
  const QuantParams params{.scales = s.as<float>(),
                           .upper_bound = bound(expect, out, scale_ub, arguments),
                           .scale_row_stride = 1,
                           .scale_of = ScaleOf::kRow,
                           .dtype = out.dtype()};
  arguments.written.add(s);
  return params;
}

QuantParams group_scales(Expect& expect, const Argument& out, const Tensor& scales,
                         const std::optional<Tensor>& scale_ub, int64_t group_size,
                         bool is_scale_transposed, ReadAndWritten& arguments) {
  expect.that(group_size == 64 || group_size == 128,
              "group_size: expected 64 or 128, got " + std::to_string(group_size));
  if (out.size(-1) % group_size != 0) {
    out.fail("expected a last dimension that group_size = " + std::to_string(group_size) +
             " divides, got shape " + out.shape_text());
  }
  Argument s = expect.tensor("scales", scales).float32();
  const int64_t rows = rows_of(out), groups = out.size(-1) / group_size;
  if (s.dim() != 2 || s.size(0) != rows || s.size(1) != groups) {
    s.fail("expected shape [" + std::to_string(rows) + ", " + std::to_string(groups) +
           "] (rows, groups), got shape " + s.shape_text());
  }
  const int neighbours = is_scale_transposed ? 0 : 1;
  if (s.size(neighbours) > 1 && s.stride(neighbours) != 1) {
    s.fail(std::string("expected stride 1 in dimension ") +
           (is_scale_transposed
                ? "0, for is_scale_transposed: give torch.empty(groups, rows).t(), got stride "
                : "1, got stride ") +
           std::to_string(s.stride(neighbours)));
  }
  s.written();
  const QuantParams params{.scales = s.as<float>(),
                           .upper_bound = bound(expect, out, scale_ub, arguments),
                           .scale_row_stride = s.stride(0),
                           .scale_group_stride = s.stride(1),
                           .group_size = static_cast<int32_t>(group_size),
                           .scale_of = ScaleOf::kGroup,
                           .dtype = out.dtype()};
  arguments.written.add(s);
  return params;
}

}  // namespace vllm_kernels
