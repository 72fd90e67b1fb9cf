// The epilogue of attention for one query token and head: sink, lse, normalization, store. See
// cpu/base/vec.h for the anonymous namespace.
#pragma once
#include <cmath>
#include <limits>

#include "cpu/base/dispatch.h"
#include "cpu/base/vec_math.h"
#include "ops/paged_attention.h"

namespace vllm_kernels::cpu {
namespace {

constexpr int kMaxHeadSize = 256;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// exp(a - b) for two values of row_max, b >= a. Both may be -inf.
inline float rescale_factor(float a, float b) {
  return a == b ? 1.0f : exp(splat(a - b))[0];
}

inline void store_row(DType dtype, void* to, int64_t element, const float* from, float scale,
                      int count) {
  dispatch_float(dtype, [&](auto tag) {
    auto* row = static_cast<decltype(tag)*>(to) + element;
    int d = 0;
    for (; d + kLanes <= count; d += kLanes) store(row + d, load(from + d) * scale);
    if (d < count) store(row + d, load(from + d, count - d) * scale, count - d);
  });
}

// The dequantization scales of a KV head; 1 for caches without scales.
inline float key_scale(const PagedKv& kv, int32_t kv_head) {
  const bool scaled = size_of(kv.dtype) == 1 && kv.k_scale != nullptr;
  return scaled ? kv.k_scale[kv_head * kv.scale_stride] : 1.0f;
}
inline float value_scale(const PagedKv& kv, int32_t kv_head) {
  const bool scaled = size_of(kv.dtype) == 1 && kv.v_scale != nullptr;
  return scaled ? kv.v_scale[kv_head * kv.scale_stride] : 1.0f;
}

// The state of a row after its last KV block. A row without visible tokens has row_sum = 0 and
// row_max = -inf.
struct RowState {
  float row_max;
  float row_sum;     // sum of p = exp(score - row_max)
  const float* acc;  // [head_size] sum of p v
};

// Writes out and lse of one query token and head.
inline void epilogue(const PagedAttentionParams& p, int64_t token, int32_t head, RowState row) {
  float rescale = 1.0f;
  if (p.sinks != nullptr) {
    const float sink = p.sinks[head];
    const float new_max = sink > row.row_max ? sink : row.row_max;
    rescale = rescale_factor(row.row_max, new_max);
    row.row_sum =
        row.row_sum * rescale + (sink == -kInfinity ? 0.0f : rescale_factor(sink, new_max));
    row.row_max = new_max;
  }
  if (p.lse != nullptr) {
    p.lse[token * p.num_heads + head] =
        row.row_sum == 0.0f ? -kInfinity : row.row_max + std::log(row.row_sum);
  }
  const int32_t kv_head = head / (p.num_heads / p.kv.num_kv_heads);
  const float scale =
      row.row_sum == 0.0f ? 0.0f : rescale * value_scale(p.kv, kv_head) / row.row_sum;
  const int64_t at = token * p.out_stride + static_cast<int64_t>(head) * p.kv.head_size;
  store_row(p.dtype, p.out, at, row.acc, scale, p.kv.head_size);
}

}  // namespace
}  // namespace vllm_kernels::cpu
