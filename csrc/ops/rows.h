// Addresses of the rows of a tensor [..., width]: the leading dimensions folded to two strides.
#pragma once
#include <cstdint>

#if defined(__CUDACC__)
#define VLLM_KERNELS_HOST_DEVICE __host__ __device__
#else
#define VLLM_KERNELS_HOST_DEVICE
#endif

namespace vllm_kernels {

// Row r starts at element (r / inner_count) * outer_stride + (r % inner_count) * inner_stride. If
// the leading dimensions fold to one stride, inner_count == count.
struct Rows {
  int64_t count = 0;
  int64_t inner_count = 1;
  int64_t outer_stride = 0;  // elements
  int64_t inner_stride = 0;  // elements

  VLLM_KERNELS_HOST_DEVICE int64_t offset(int64_t row) const {
    if (inner_count >= count) return row * inner_stride;
    return (row / inner_count) * outer_stride + (row % inner_count) * inner_stride;
  }
};

}  // namespace vllm_kernels
