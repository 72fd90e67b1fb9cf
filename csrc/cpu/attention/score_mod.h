// Score modifications of the CPU attention kernels: softcap, then ALiBi. The caller scales before
// and masks after. See cpu/base/vec.h for the anonymous namespace.
#pragma once
#include "cpu/base/vec_math.h"
#include "ops/paged_attention.h"

namespace vllm_kernels::cpu {
namespace {

// Whether modify_scores() asks for distances.
inline bool needs_distances(const PagedAttentionParams& p) {
  return p.alibi_slopes != nullptr;
}

// Distances of the shard's tokens [stored, stored + kLanes) from a query token.
inline Vec stripe_distances(const Stripe& stripe, int32_t stored, int32_t query_position) {
  Vec distances;
  for (int lane = 0; lane < kLanes; ++lane) {
    distances[lane] = static_cast<float>(stripe.position_of(stored + lane) - query_position);
  }
  return distances;
}

// Modifies the scores of a query head for kLanes tokens. distances() returns KV position minus
// query position.
template <typename Distances>
inline Vec modify_scores(const PagedAttentionParams& p, int head, Vec scores,
                         const Distances& distances) {
  if (p.softcap > 0.0f) scores = tanh(scores / p.softcap) * p.softcap;
  if (p.alibi_slopes != nullptr) {
    scores = fma(splat(-p.alibi_slopes[head]), absolute(distances()), scores);
  }
  return scores;
}

}  // namespace
}  // namespace vllm_kernels::cpu
