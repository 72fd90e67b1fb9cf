// Checks that the bindings of all RMS norms share.
#pragma once
#include <optional>

#include "ops/rms_norm.h"
#include "torch_ops/base/check.h"

namespace vllm_kernels {

inline void expect_epsilon(const Expect& expect, double epsilon, const char* name = "epsilon") {
  expect.that(epsilon >= 0,
              std::string(name) + ": expected a number >= 0, got " + std::to_string(epsilon));
}

inline void expect_hidden_size(const Argument& input, int64_t hidden_size) {
  if (hidden_size > INT32_MAX) {
    input.fail("expected hidden_size < 2^31, got shape " + input.shape_text());
  }
}

// Checks and packs a norm from `input` to `out`. `weight` is null for a norm without weight.
// Returns nullopt if there is nothing to do.
inline std::optional<RmsNormParams> read_norm(const char* op, const Tensor& out,
                                              const Tensor& input, const Tensor* weight,
                                              double epsilon) {
  Expect expect(op);
  Size hidden_size("hidden_size");
  const Argument x =
      expect.tensor("input", input).floating().rank(1, 8).at(-1, hidden_size).inner_contiguous();
  expect_hidden_size(x, hidden_size);
  Arguments read;
  const void* weights = nullptr;
  if (weight != nullptr) {
    const Argument w =
        expect.tensor("weight", *weight).same_dtype(x).shape({&hidden_size}).inner_contiguous();
    read.add(w);
    weights = w.data();
  }
  const Argument o =
      expect.tensor("out", out).same_dtype(x).same_shape(x).inner_contiguous().written();
  expect.same_or_apart(o, x);
  expect.apart(o, read);
  expect_epsilon(expect, epsilon);
  if (x.numel() == 0) return std::nullopt;
  return RmsNormParams{.out = o.mutable_data(),
                       .input = x.data(),
                       .residual = nullptr,
                       .weight = weights,
                       .out_rows = expect.rows(o),
                       .input_rows = expect.rows(x),
                       .residual_rows = {},
                       .hidden_size = hidden_size,
                       .epsilon = static_cast<float>(epsilon),
                       .dtype = x.dtype()};
}

// The same for a norm that adds `residual` to `input` and overwrites both.
inline std::optional<RmsNormParams> read_fused_add_norm(const char* op, const Tensor& input,
                                                        const Tensor& residual,
                                                        const Tensor* weight, double epsilon) {
  Expect expect(op);
  Size hidden_size("hidden_size");
  const Argument x = expect.tensor("input", input)
                         .floating()
                         .rank(1, 8)
                         .at(-1, hidden_size)
                         .inner_contiguous()
                         .written();
  expect_hidden_size(x, hidden_size);
  const Argument r =
      expect.tensor("residual", residual).same_dtype(x).same_shape(x).inner_contiguous().written();
  Arguments read;
  const void* weights = nullptr;
  if (weight != nullptr) {
    const Argument w =
        expect.tensor("weight", *weight).same_dtype(x).shape({&hidden_size}).inner_contiguous();
    read.add(w);
    weights = w.data();
  }
  expect.apart(x, r);
  expect.apart(x, read);
  expect.apart(r, read);
  expect_epsilon(expect, epsilon);
  if (x.numel() == 0) return std::nullopt;
  return RmsNormParams{.out = x.mutable_data(),
                       .input = x.data(),
                       .residual = r.mutable_data(),
                       .weight = weights,
                       .out_rows = expect.rows(x),
                       .input_rows = expect.rows(x),
                       .residual_rows = expect.rows(r),
                       .hidden_size = hidden_size,
                       .epsilon = static_cast<float>(epsilon),
                       .dtype = x.dtype()};
}

}  // namespace vllm_kernels
