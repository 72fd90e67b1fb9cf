// Checks that the bindings of all ops that rotate share.
#pragma once
#include "torch_ops/base/check.h"

namespace vllm_kernels {

// [max_position, rotary_size]: cosines, then sines.
inline Argument read_cos_sin_cache(Expect& expect, const Tensor& cos_sin_cache, int64_t head_size) {
  Size max_position("max_position"), rotary_size("rotary_size");
  const Argument c = expect.tensor("cos_sin_cache", cos_sin_cache)
                         .floating()
                         .shape({&max_position, &rotary_size})
                         .inner_contiguous();
  if (rotary_size % 2 != 0 || rotary_size > head_size || rotary_size == 0) {
    c.fail("expected an even rotary_size from 2 to head_size = " + std::to_string(head_size) +
           " at dimension 1, got shape " + c.shape_text());
  }
  return c;
}

}  // namespace vllm_kernels
