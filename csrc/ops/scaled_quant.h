// scaled_fp8_quant and scaled_int8_quant: rows of floats as 8-bit elements. An element represents
// (element - zero_point) * scale. Without zero points, zero_point is 0.
//
//   result                      element
//   e4m3, scale of the tensor   q(x * (1 / scale))
//   e4m3, scale per row         q(x / scale)
//   int8, scale given           q(x / scale)
//   int8, scale per row         q(x * (127 / magnitude))
//   int8 with zero points       saturate(round(x * (1 / scale)) + zero_point); a NaN counts as 0
//
//   computed scale              of row or tensor
//   e4m3                        ops/quant.h; upper_bound bounds the magnitude
//   int8, int8 with zero points below
//
// ops/quant.h defines q and magnitude. A NaN makes the computed scale NaN. All arithmetic is
// float32, with the roundings of vLLM's kernels.
#pragma once
#include "ops/quant.h"
#include "ops/rows.h"

namespace vllm_kernels {

struct ScaledQuantParams {
  const char* op;     // named in the error of a refused launch
  void* out;          // [rows, width] of quant.dtype
  const void* input;  // [rows, width]
  Rows out_rows;
  Rows input_rows;
  int64_t width;
  QuantParams quant;              // kTensor or kRow
  float* tensor_scale = nullptr;  // [1], kTensor: computed before use; null: quant.scale is given
  const int32_t* zero_point = nullptr;  // [1], int8 and kTensor; or null
  int32_t* zero_points = nullptr;       // [rows], int8 and kRow, computed; or null
  DType dtype;                          // of input
  // CPU only, kTensor with tensor_scale: magnitudes of splits of the tensor, as bits of floats.
  const uint32_t* magnitudes = nullptr;  // [kMagnitudeSplits]
};

constexpr int kMagnitudeSplits = 64;

// CPU only: the first step of a computed tensor scale.
struct TensorMagnitudesParams {
  ScaledQuantParams quant;
  uint32_t* magnitudes;  // [kMagnitudeSplits]
};

// Given zero points are within this distance from 0.
constexpr int32_t kMaxZeroPoint = (1 << 21) + 128;

// How a row becomes int8.
struct Int8Scale {
  float scale;
  float inverse;  // 0 if the row has no finite elements other than 0
  int32_t zero_point;
};

// scale = magnitude / 127. A row of zeros has scale 0.
VLLM_KERNELS_HOST_DEVICE static inline Int8Scale int8_scale(float magnitude) {
  const bool usable = magnitude > 0x1p-119f && magnitude <= 0x1.fffffep127f;
  return {magnitude / 127.0f, usable ? 127.0f / magnitude : 0.0f, 0};
}

// scale = max((high - low) / 255, magnitude / 2^21), zero_point = round(-128 - low / scale). The
// second bound keeps zero_point in range for rows of nearly equal elements. A row that is not
// finite gets zeros, and a row of zeros -128.
VLLM_KERNELS_HOST_DEVICE static inline Int8Scale int8_scale(float low, float high,
                                                            float magnitude) {
  const float scale = at_least(magnitude * 0x1p-21f, (high - low) / 255.0f);
  if (!(scale <= 0x1.fffffep127f)) return {scale, 0.0f, 0};
  if (scale < 0x1p-126f) return {scale, 0.0f, -128};
  const float shift = -128.0f - low / scale;
  // Adding 1.5 * 2^23 rounds to an integer.
  return {scale, 1.0f / scale, static_cast<int32_t>(shift + 0x1.8p23f - 0x1.8p23f)};
}

}  // namespace vllm_kernels
