// The last step of attention for one query token and head. See cpu/base/vec.h for the anonymous
// namespace.
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

// exp(a - b) of two maxima, where b >= a and both may be -inf.
inline float decay(float a, float b) {
  return a == b ? 1.0f : exp(splat(a - b))[0];
}

inline void store_row(DType dtype, void* to, int64_t element, const float* from, float scale,
                      int count) {
  dispatch_float(dtype, [&](auto tag) {
    auto* row = static_cast<decltype(tag)*>(to) + element;
    int d = 0;
    for (; d + kLanes <= count; d += kLanes) store(row + d, load(from + d) * scale);
    if (d < count) store_partial(row + d, load_partial(from + d, count - d) * scale, count - d);
  });
}

// What stored K and V elements of a head are to be multiplied with.
inline float key_scale(const PagedKv& kv, int32_t kv_head) {
  const bool scaled = size_of(kv.dtype) == 1 && kv.k_scale != nullptr;
  return scaled ? kv.k_scale[kv_head * kv.scale_stride] : 1.0f;
}
inline float value_scale(const PagedKv& kv, int32_t kv_head) {
  const bool scaled = size_of(kv.dtype) == 1 && kv.v_scale != nullptr;
  return scaled ? kv.v_scale[kv_head * kv.scale_stride] : 1.0f;
}

// A finished sum over tokens with weights w = exp(score - maximum), 0 and -inf where there is none.
struct WeightedSum {
  float maximum;
  float sum;            // of w
  const float* values;  // [head_size] of w v
};

// Writes out and lse of one query token and head.
inline void finish(const PagedAttentionParams& p, int64_t token, int32_t head, WeightedSum row) {
  float kept = 1.0f;
  if (p.sinks != nullptr) {
    const float sink = p.sinks[head];
    const float updated = sink > row.maximum ? sink : row.maximum;
    kept = decay(row.maximum, updated);
    row.sum = row.sum * kept + (sink == -kInfinity ? 0.0f : decay(sink, updated));
    row.maximum = updated;
  }
  if (p.lse != nullptr) {
    p.lse[token * p.num_heads + head] =
        row.sum == 0.0f ? -kInfinity : row.maximum + std::log(row.sum);
  }
  const int32_t kv_head = head / (p.num_heads / p.kv.num_kv_heads);
  const float scale = row.sum == 0.0f ? 0.0f : kept * value_scale(p.kv, kv_head) / row.sum;
  const int64_t at = token * p.out_stride + static_cast<int64_t>(head) * p.kv.head_size;
  store_row(p.dtype, p.out, at, row.values, scale, p.kv.head_size);
}

}  // namespace
}  // namespace vllm_kernels::cpu
