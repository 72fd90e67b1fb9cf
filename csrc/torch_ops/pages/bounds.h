// The bounds of pages as an argument.
#pragma once
#include "torch_ops/base/check.h"
#include "torch_ops/cache/paged_kv.h"

namespace vllm_kernels {

// bounds [num_blocks, num_kv_heads, 2, head_size]; the bounds of a page are contiguous. The caller
// checks the dtype.
inline Argument read_bounds(Expect& expect, const Tensor& bounds, CacheSizes& sizes) {
  Size two("2", 2, nullptr);
  Argument b = expect.tensor("bounds", bounds)
                   .shape({&sizes.num_blocks, &sizes.num_kv_heads, &two, &sizes.head_size});
  int64_t elements = 1;
  for (int64_t d = 3; d > 0; elements *= b.size(d--)) {
    if (b.size(d) <= 1 || b.stride(d) == elements) continue;
    b.fail("expected the bounds of a page to be contiguous, got stride " +
           std::to_string(b.stride(d)) + " at dimension " + std::to_string(d) + " of shape " +
           b.shape_text());
  }
  return b;
}

}  // namespace vllm_kernels
