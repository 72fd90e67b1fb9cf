// Bindings of the ops behind scaled_fp8_quant and scaled_int8_quant: input [..., width] -> out in 8
// bits, with a scale that is given or computed. ops/scaled_quant.h has the formulas.
#include "ops/scaled_quant.h"

#include "torch_ops/base/check.h"
#include "torch_ops/base/device.h"
#include "torch_ops/base/index_check.h"
#include "torch_ops/base/quant.h"

namespace vllm_kernels {
namespace {

// The call's tensors, checked so far.
struct Call {
  Expect expect;
  Argument x, out;
  Arguments read, written;

  Call(const char* op, const Tensor& out_tensor, const Tensor& input, DType dtype)
      : expect(op),
        x(expect.tensor("input", input).floating().rank(1, 8).inner_contiguous()),
        out(expect.tensor("out", out_tensor)
                .one_of({dtype})
                .same_shape(x)
                .inner_contiguous()
                .written()),
        read(x),
        written(out) {}

  ScaledQuantParams pack(const QuantParams& quant) const {
    ScaledQuantParams params{.op = expect.op(),
                             .out = out.mutable_data(),
                             .input = x.data(),
                             .out_rows = expect.rows(out),
                             .input_rows = expect.rows(x),
                             .width = x.size(-1),
                             .quant = quant,
                             .dtype = x.dtype()};
    const auto dense = [&](const Rows& rows) {
      return rows.inner_count == rows.count &&
             (rows.count == 1 || rows.inner_stride == params.width);
    };
    if (quant.scale_of == ScaleOf::kTensor && dense(params.out_rows) && dense(params.input_rows)) {
      params.out_rows = params.input_rows = {.count = 1};
      params.width = x.numel();
    }
    return params;
  }
};

#if defined(VLLM_KERNELS_DEVICE_CUDA)

void quantize(const ScaledQuantParams& params, const Tensor& input) {
  launch(params, input);
}

#else

void quantize(ScaledQuantParams params, const Tensor& input) {
  uint32_t magnitudes[kMagnitudeSplits];
  if (params.tensor_scale != nullptr) {
    launch(TensorMagnitudesParams{.quant = params, .magnitudes = magnitudes}, input);
    params.magnitudes = magnitudes;
  }
  launch(params, input);
}

#endif

void static_quant(const char* op, DType dtype, const Tensor& out, const Tensor& input,
                  const Tensor& scale, const Tensor* azp = nullptr) {
  Call call(op, out, input, dtype);
  const ScaleArguments given{.scale_of = ScaleOf::kTensor, .scales = scale};
  const QuantParams quant = read_scales(call.expect, given, call.out, call.read, call.written);
  const int32_t* zero_point = nullptr;
  if (azp != nullptr) {
    const Argument z = call.expect.tensor("azp", *azp).int32().one_element();
    check_index(call.expect, z,
                {.noun = "a zero point", .low = -kMaxZeroPoint, .high = kMaxZeroPoint + 1});
    call.read.add(z);
    zero_point = z.as<const int32_t>();
  }
  call.expect.apart(call.written, call.read);
  if (call.x.numel() == 0) return;
  ScaledQuantParams params = call.pack(quant);
  params.zero_point = zero_point;
  quantize(params, input);
}

void static_scaled_fp8_quant(const Tensor& out, const Tensor& input, const Tensor& scale) {
  static_quant("static_scaled_fp8_quant", DType::kFp8E4M3, out, input, scale);
}

void static_scaled_int8_quant(const Tensor& out, const Tensor& input, const Tensor& scale,
                              const std::optional<Tensor>& azp) {
  static_quant("static_scaled_int8_quant", DType::kInt8, out, input, scale, or_null(azp));
}

void dynamic_scaled_fp8_quant(const Tensor& out, const Tensor& input, const Tensor& scale) {
  Call call("dynamic_scaled_fp8_quant", out, input, DType::kFp8E4M3);
  const Argument s = call.expect.tensor("scale", scale).float32().one_element();
  call.written.add(s);
  call.expect.apart(call.written, call.read);
  if (call.x.numel() == 0) return;
  const QuantParams quant{.scale = s.as<const float>(), .dtype = DType::kFp8E4M3};
  ScaledQuantParams params = call.pack(quant);
  params.tensor_scale = s.as<float>();
  quantize(params, input);
}

void dynamic_rows(const char* op, DType dtype, const Tensor& out, const Tensor& input,
                  const ScaleArguments& scales, const Tensor* azp = nullptr) {
  Call call(op, out, input, dtype);
  const QuantParams quant = read_scales(call.expect, scales, call.out, call.read, call.written);
  int32_t* zero_points = nullptr;
  if (azp != nullptr) {
    Argument z = call.expect.tensor("azp", *azp).int32().contiguous();
    const int64_t rows = product(call.x.sizes().first(call.x.dim() - 1));
    if (z.numel() != rows) {
      z.fail("expected one element a row of input, " + std::to_string(rows) + ", got shape " +
             z.shape_text());
    }
    call.written.add(z);
    zero_points = z.as<int32_t>();
  }
  call.expect.apart(call.written, call.read);
  if (call.x.numel() == 0) return;
  ScaledQuantParams params = call.pack(quant);
  params.zero_points = zero_points;
  quantize(params, input);
}

void dynamic_per_token_scaled_fp8_quant(const Tensor& out, const Tensor& input,
                                        const Tensor& scales,
                                        const std::optional<Tensor>& scale_ub) {
  dynamic_rows("dynamic_per_token_scaled_fp8_quant", DType::kFp8E4M3, out, input,
               {.scale_of = ScaleOf::kRow, .scales = scales, .scale_ub = or_null(scale_ub)});
}

void dynamic_scaled_int8_quant(const Tensor& out, const Tensor& input, const Tensor& scales,
                               const std::optional<Tensor>& azp) {
  dynamic_rows("dynamic_scaled_int8_quant", DType::kInt8, out, input,
               {.scale_of = ScaleOf::kRow, .scales = scales}, or_null(azp));
}

}  // namespace
}  // namespace vllm_kernels

VLLM_KERNELS_IMPL(library) {
  library.impl("static_scaled_fp8_quant", TORCH_BOX(&vllm_kernels::static_scaled_fp8_quant));
  library.impl("static_scaled_int8_quant", TORCH_BOX(&vllm_kernels::static_scaled_int8_quant));
  library.impl("dynamic_scaled_fp8_quant", TORCH_BOX(&vllm_kernels::dynamic_scaled_fp8_quant));
  library.impl("dynamic_per_token_scaled_fp8_quant",
               TORCH_BOX(&vllm_kernels::dynamic_per_token_scaled_fp8_quant));
  library.impl("dynamic_scaled_int8_quant", TORCH_BOX(&vllm_kernels::dynamic_scaled_int8_quant));
}
