// The epilogue of attention for one query token and head: sink, lse, normalization, store. See
// cpu/base/vec.h for the anonymous namespace.
#pragma once
#include <cmath>
#include <limits>

#include "cpu/attention/paged_attention_decode.h"
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
    for_each_vector(0, count,
                    [&](int64_t d, auto n) { store(row + d, load(from + d, n) * scale, n); });
  });
}

// The state of a row after its last KV block. A row without visible tokens has row_sum = 0 and
// row_max = -inf.
struct RowState {
  float row_max;
  float row_sum;     // sum of p = exp(score - row_max), as rounded for acc
  float exact_sum;   // sum of unrounded p, for lse
  const float* acc;  // [head_size] sum of p v
};

// Writes out and lse of one query token and head.
inline void epilogue(const PagedAttentionParams& p, int64_t token, int32_t head, RowState row) {
  float rescale = 1.0f;
  if (p.sinks != nullptr) {
    const float sink = p.sinks[head];
    const float new_max = sink > row.row_max ? sink : row.row_max;
    rescale = rescale_factor(row.row_max, new_max);
    const float sink_p = sink == -kInfinity ? 0.0f : rescale_factor(sink, new_max);
    row.row_sum = row.row_sum * rescale + sink_p;
    row.exact_sum = row.exact_sum * rescale + sink_p;
    row.row_max = new_max;
  }
  if (p.lse != nullptr) {
    p.lse[token * p.num_heads + head] =
        row.exact_sum == 0.0f ? -kInfinity : row.row_max + std::log(row.exact_sum);
  }
  const int32_t kv_head = head / (p.num_heads / p.kv.num_kv_heads);
  const float scale =
      row.row_sum == 0.0f ? 0.0f : rescale * scale_of(p.kv, false, kv_head) / row.row_sum;
  const int64_t at = token * p.out_stride + static_cast<int64_t>(head) * p.head_size();
  store_row(p.dtype, p.out, at, row.acc, scale, p.head_size());
}

inline void epilogue(const PagedAttentionParams& p, const TileRows& rows, int row,
                     const RowState& state) {
  epilogue(p, rows.first_token + row / rows.heads, rows.first_head + row % rows.heads, state);
}

// Ends the split that `task` has of a tile. Writes out and lse if that is the whole tile, and
// stores partials otherwise. state_of(row) gives a row's result.
template <typename State>
inline void end_split(const AttentionPlan& plan, int64_t task, bool starts_tile, bool ends_tile,
                      const TileRows& rows, const State& state_of) {
  const int head_size = plan.params.head_size();
  for (int row = 0; row < rows.count; ++row) {
    const RowState state = state_of(row);
    if (starts_tile && ends_tile) {
      epilogue(plan.params, rows, row, state);
      continue;
    }
    float* to = plan.partial(task, starts_tile, row);
    to[0] = state.row_sum;
    to[1] = state.row_max;
    to[2] = state.exact_sum;
    for (int d = 0; d < head_size; ++d) to[kPartialHeader + d] = state.acc[d];
  }
}

}  // namespace
}  // namespace vllm_kernels::cpu
