// Score modifications of the tensor-core attention kernels: causal and window mask, softcap, ALiBi,
// and the sink at a row's end. All scores are in log2 units. The order is scale, softcap, ALiBi,
// mask.
#pragma once
#include "cuda/base/ptx.cuh"
#include "ops/paged_attention.h"

namespace vllm_kernels::cuda {

struct ScoreCap {
  float cap;      // softcap in log2 units
  float inverse;  // 2 / softcap
};
inline ScoreCap score_cap(float softcap) {
  return {.cap = softcap * kLog2E, .inverse = softcap > 0.0f ? 2.0f / softcap : 0.0f};
}

// Softcap: cap * tanh(score / cap), in log2 units. A logit needs a small absolute error; here it is
// a few times 2^-22 * cap.
__device__ __forceinline__ float apply_softcap(const ScoreCap& cap, float score) {
  return cap.cap - __fdividef(2.0f * cap.cap, 1.0f + exp2_approx(score * cap.inverse));
}
// ALiBi. `slope` is in log2 units; `distance` is the KV position minus the query position.
__device__ __forceinline__ float apply_alibi(float slope, int distance, float score) {
  return score - slope * fabsf(static_cast<float>(distance));
}
// The modified score of one (query row, token) pair, -inf where masked. Causal: a token with
// distance > 0 is masked. `distance` is the KV position minus the query position.
__device__ __forceinline__ float adjusted_score(const PagedAttentionParams& p, const ScoreCap& cap,
                                                int head, int distance, float score) {
  if (distance > 0 || (p.sliding_window > 0 && distance <= -p.sliding_window)) return -INFINITY;
  if (p.softcap > 0.0f) score = apply_softcap(cap, score);
  if (p.alibi_slopes != nullptr)
    score = apply_alibi(p.alibi_slopes[head] * kLog2E, distance, score);
  return score;
}

// Epilogue of a row, after all of its tokens and with its sink. `scale` turns sum exp2(score -
// row_max) * v into the output; it includes v_scale. `lse` is the natural log-sum-exp.
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
  const bool is_8bit = size_of(p.kv.dtype) == 1;
  const float v_scale =
      is_8bit && p.kv.v_scale != nullptr ? p.kv.v_scale[kv_head * p.kv.scale_stride] : 1.0f;
  // total is 0 where every token was masked: the result is 0. NaN passes through.
  if constexpr (kExact) {
    return {.scale = total == 0.0f ? 0.0f : factor * v_scale / total,
            .lse = total == 0.0f ? -INFINITY : (final_max + log2f(total)) * kLn2};
  }
  return {.scale = total == 0.0f ? 0.0f : __fdividef(factor * v_scale, total),
          .lse = total == 0.0f ? -INFINITY : (final_max + __log2f(total)) * kLn2};
}

}  // namespace vllm_kernels::cuda
