// 8-bit outputs of an op's last step. An element represents element * scale.
//   scale given      element = q(value * (1 / scale))
//   scale computed   from the largest magnitude of a row, or of a group of neighbours in a row:
//     scale = max(magnitude / largest_of(dtype), min_scale_of(dtype))
//     element = q(value / scale) for e4m3, q(value * (1 / scale)) for int8
//     (silu_and_mul_per_block_quant divides for both)
// q rounds to nearest even and saturates. q(NaN) is NaN in e4m3 and 0 in int8. A NaN among the
// values makes the scale NaN. All arithmetic is float32, as in vLLM's kernels.
#pragma once
#include "ops/dtype.h"
#include "ops/rows.h"

namespace vllm_kernels {

enum class ScaleOf : uint8_t {
  kTensor,  // given
  kRow,     // computed
  kGroup,   // computed
};

struct QuantParams {
  const float* scale = nullptr;  // [1]; kTensor
  float* scales = nullptr;       // [rows] or [rows, groups]; kRow, kGroup
  const float* upper_bound =
      nullptr;  // [1] or null; of the magnitude or of the scale, depending on the op
  int64_t scale_row_stride = 0;
  int64_t scale_group_stride = 0;
  int32_t group_size = 0;  // elements; kGroup
  ScaleOf scale_of = ScaleOf::kTensor;
  DType dtype = DType::kFp8E4M3;  // or kInt8
};

constexpr float largest_of(DType dtype) {
  return dtype == DType::kInt8 ? 127.0f : 448.0f;
}

// The scale of a row of zeros.
constexpr float min_scale_of(DType dtype) {
  return dtype == DType::kInt8 ? 0x1p-23f : 1.0f / (448.0f * 512.0f);
}

// max(a, b); NaN if a is NaN.
VLLM_KERNELS_HOST_DEVICE static inline float at_least(float a, float b) {
  return a < b ? b : a;
}

// min(a, b); NaN if a is NaN.
VLLM_KERNELS_HOST_DEVICE static inline float at_most(float a, float b) {
  return a > b ? b : a;
}

}  // namespace vllm_kernels
