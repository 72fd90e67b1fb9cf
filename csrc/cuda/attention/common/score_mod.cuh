// Score modifications of all attention kernels: softcap and ALiBi (modify_scores), causal, window
// and tree mask, and the sink at a row's end. All scores are in log2 units. The order is scale,
// softcap, ALiBi, mask.
#pragma once
#include "cuda/base/ptx.cuh"
#include "ops/paged_attention.h"

namespace vllm_kernels::cuda {

struct ScoreCap {
  float cap;      // softcap in log2 units
  float inverse;  // 2 / softcap
};
constexpr ScoreCap score_cap(float softcap) {
  return {.cap = softcap * kLog2E, .inverse = softcap > 0.0f ? 2.0f / softcap : 0.0f};
}

// Softcap: cap * tanh(score / cap). A logit needs a small absolute error. The approximation has a
// few times 2^-22 * cap. kExact: tanhf, for float32 queries.
template <bool kExact>
__device__ __forceinline__ float apply_softcap(const ScoreCap& cap, float score) {
  if constexpr (kExact) return cap.cap * tanhf(score / cap.cap);
  return cap.cap - __fdividef(2.0f * cap.cap, 1.0f + exp2_approx(score * cap.inverse));
}

// Column 0 of a row of scores. `distance` is its KV position minus the query position.
struct ScoreRow {
  int head;
  int distance;
};
// Modifies a row of scores; PagedAttentionParams::modifies_scores() says when. row() returns the
// ScoreRow: it is called only where needed. each(f) replaces each score by f(score, column).
template <bool kExact = false, typename Row, typename Each>
__device__ __forceinline__ void modify_scores(const PagedAttentionParams& p, const ScoreCap& cap,
                                              const Row& row, const Each& each) {
  if (p.softcap > 0.0f) {
    each([&](float score, int) { return apply_softcap<kExact>(cap, score); });
  }
  if (p.alibi_slopes != nullptr) {
    const ScoreRow at = row();
    const float slope = p.alibi_slopes[at.head] * kLog2E;
    each([&](float score, int column) {
      return score - slope * fabsf(static_cast<float>(at.distance + column));
    });
  }
}
// The same for one score, -inf where masked. Causal: a token with distance > 0 is masked.
__device__ __forceinline__ float adjusted_score(const PagedAttentionParams& p, const ScoreCap& cap,
                                                int head, int distance, float score) {
  if (distance > 0 || (p.sliding_window > 0 && distance <= -p.sliding_window)) return -INFINITY;
  modify_scores(
      p, cap, [&] { return ScoreRow{head, distance}; },
      [&](const auto& modified) { score = modified(score, 0); });
  return score;
}

// Whether the tree mask hides a token from query token `index` of a sequence, in row `row` of
// query. `other` counts from the sequence's query token 0, as `index` does.
__device__ __forceinline__ bool tree_hides(const PagedAttentionParams& p, int row, int index,
                                           int other) {
  return p.tree_mask.any() && !p.tree_mask.is_visible(row, index, other);
}

// Epilogue of a row, after all of its tokens and with its sink. The output is `scale` times sum
// exp2(score - row_max) * v; `scale` includes v_scale. `lse` is the natural log-sum-exp.
struct RowResult {
  float scale;
  float lse;
};
// kExact: for float32 outputs; else division and logarithm are approximate (2 ulp).
template <bool kExact = false>
__device__ __forceinline__ RowResult row_result(const PagedAttentionParams& p, int kv_head,
                                                int head, float row_max, float sum) {
  float total = sum, factor = 1.0f, final_max = row_max;
  if (p.sinks != nullptr) {
    const float sink = p.sinks[head] * kLog2E;
    final_max = fmaxf(final_max, sink);
    factor = exp2_approx(row_max - final_max);
    total = total * factor + exp2_approx(sink - final_max);
  }
  const float v_scale = p.kv.v_scale != nullptr ? p.kv.v_scale[kv_head * p.kv.scale_stride] : 1.0f;
  // total is 0 where every token was masked: the result is 0. NaN passes through.
  if constexpr (kExact) {
    return {.scale = total == 0.0f ? 0.0f : factor * v_scale / total,
            .lse = total == 0.0f ? -INFINITY : (final_max + log2f(total)) * kLn2};
  }
  return {.scale = total == 0.0f ? 0.0f : __fdividef(factor * v_scale, total),
          .lse = total == 0.0f ? -INFINITY : (final_max + __log2f(total)) * kLn2};
}

}  // namespace vllm_kernels::cuda
