// The checks of quant.h: scales of 8-bit results.
#include "torch_ops/base/quant.h"

#include "torch_ops/base/index_check.h"

namespace vllm_kernels {
namespace {

const float* one_scale(Expect& expect, const char* name, const Tensor& tensor, Arguments& read) {
  const Argument value = expect.tensor(name, tensor).float32().one_element();
  check_scale(expect, value);
  read.add(value);
  return value.as<const float>();
}

void check_group_size(const Expect& expect, const Argument& out, int64_t group_size) {
  expect.that(group_size == 64 || group_size == 128,
              "group_size: expected 64 or 128, got " + std::to_string(group_size));
  if (out.size(-1) % group_size != 0) {
    out.fail("expected a last dimension that group_size = " + std::to_string(group_size) +
             " divides, got shape " + out.shape_text());
  }
}

void check_group_scales(Argument& scales, int64_t rows, int64_t groups, bool transposed) {
  if (scales.dim() != 2 || scales.size(0) != rows || scales.size(1) != groups) {
    scales.fail("expected shape [" + std::to_string(rows) + ", " + std::to_string(groups) +
                "] (rows, groups), got shape " + scales.shape_text());
  }
  const int neighbours = transposed ? 0 : 1;
  if (scales.size(neighbours) > 1 && scales.stride(neighbours) != 1) {
    scales.fail(std::string("expected stride 1 in dimension ") +
                (transposed
                     ? "0, for is_scale_transposed: give torch.empty(groups, rows).t(), got stride "
                     : "1, got stride ") +
                std::to_string(scales.stride(neighbours)));
  }
  scales.written();
}

}  // namespace

Argument& quantized_dtype(Argument& out, ScaleOf scale_of) {
  return scale_of == ScaleOf::kTensor ? out.one_of({DType::kFp8E4M3})
                                      : out.one_of({DType::kFp8E4M3, DType::kInt8});
}

QuantParams read_scales(Expect& expect, const ScaleArguments& given, const Argument& out,
                        Arguments& read, Arguments& written) {
  QuantParams params{.scale_of = given.scale_of, .dtype = out.dtype()};
  if (given.scale_of == ScaleOf::kTensor) {
    params.scale = one_scale(expect, "scale", given.scales, read);
    return params;
  }
  const bool grouped = given.scale_of == ScaleOf::kGroup;
  if (grouped) check_group_size(expect, out, given.group_size);
  Argument s = expect.tensor("scales", given.scales).float32();
  const int64_t rows = product(out.sizes().first(out.dim() - 1));
  if (grouped) {
    check_group_scales(s, rows, out.size(-1) / given.group_size, given.is_scale_transposed);
    params.scale_group_stride = s.stride(1);
    params.group_size = clamped_int32(given.group_size);
  } else if (s.contiguous().numel() != rows) {
    s.fail("expected one element a row of input, " + std::to_string(rows) + ", got shape " +
           s.shape_text());
  }
  params.scale_row_stride = grouped ? s.stride(0) : 1;
  params.scales = s.as<float>();
  if (given.scale_ub != nullptr) {
    expect.that(params.dtype != DType::kInt8, "scale_ub: expected None for int8");
    params.upper_bound = one_scale(expect, "scale_ub", *given.scale_ub, read);
  }
  written.add(s);
  return params;
}

}  // namespace vllm_kernels
