// Checks that the root-mean-square norms share.
#pragma once
#include "torch_ops/check.h"

namespace vllm_kernels {

inline void expect_epsilon(const Expect& expect, double epsilon) {
  expect.that(epsilon >= 0, "epsilon: expected a number >= 0, got " + std::to_string(epsilon));
}

inline void expect_hidden_size(const Argument& input, int64_t hidden_size) {
  if (hidden_size > INT32_MAX) {
    input.fail("expected hidden_size < 2^31, got shape " + input.shape_text());
  }
}

}  // namespace vllm_kernels
