// spec_verify: a chain of drafted tokens per sequence against the target model. The rule is the
// rejection sampling of Leviathan et al. 2022 (arXiv:2211.17192) and Chen et al. 2023
// (arXiv:2302.01318); with sampled target tokens it is their comparison.
#pragma once
#include <cstdint>

#include "ops/sampling/sampling_math.h"

namespace vllm_kernels {

struct SpecVerifyParams {
  int64_t* tokens;    // [num_seqs, num_draft + 1]: accepted tokens, one more, then -1
  int32_t* accepted;  // [num_seqs]
  int64_t num_seqs;
  int32_t num_draft;
  int32_t vocab_size;
  const int64_t* draft_tokens;   // [num_seqs, num_draft]; -1 ends a sequence's draft
  const int64_t* target_tokens;  // [num_seqs, num_draft + 1], sampled; or null: with probabilities
  const float* target_probs;     // [num_seqs, num_draft + 1, vocab_size]
  const float* draft_probs;      // [num_seqs, num_draft, vocab_size]; null: 1 at the drafted token
  const float* uniforms;         // [num_seqs, num_draft + 1, 2]: to accept, to draw
};

// One sequence's chain.
struct SpecChain {
  const SpecVerifyParams& p;
  int64_t sequence;
  const int64_t* draft;   // [num_draft]
  const int64_t* target;  // [num_draft + 1]

  VLLM_KERNELS_INLINE SpecChain(const SpecVerifyParams& p, int64_t sequence)
      : p(p),
        sequence(sequence),
        draft(p.draft_tokens + sequence * p.num_draft),
        target(p.target_tokens == nullptr ? nullptr
                                          : p.target_tokens + sequence * (p.num_draft + 1)) {}

  VLLM_KERNELS_INLINE bool accepts(int32_t i) const {
    const int64_t token = draft[i];
    if (target != nullptr) return token >= 0 && token == target[i];
    if (token < 0 || token >= p.vocab_size) return false;
    const int64_t at = sequence * (p.num_draft + 1) + i;
    const float probability = p.target_probs[at * p.vocab_size + token];
    const float drafted = p.draft_probs == nullptr
                              ? 1.0f
                              : p.draft_probs[(sequence * p.num_draft + i) * p.vocab_size + token];
    return ScalarMath::multiply(p.uniforms[2 * at], drafted) < probability;
  }
  VLLM_KERNELS_INLINE int32_t accepted() const {
    int32_t count = 0;
    while (count < p.num_draft && accepts(count)) ++count;
    return count;
  }
  VLLM_KERNELS_INLINE uint64_t random(int32_t i) const {
    return fixed_point(p.uniforms[2 * (sequence * (p.num_draft + 1) + i) + 1]);
  }
};

// The distribution after the accepted tokens: max(target - draft, 0) where a token was rejected,
// else the target's. Weights are floor(p * 2^40).
struct SpecResidual {
  const float* target;           // [vocab_size]
  const float* draft = nullptr;  // [vocab_size], or null
  int64_t rejected = -1;         // without draft_probs: the rejected token

  VLLM_KERNELS_INLINE SpecResidual(const SpecVerifyParams& p, int64_t sequence, int32_t i)
      : target(p.target_probs + (sequence * (p.num_draft + 1) + i) * p.vocab_size) {
    const int64_t token = i < p.num_draft ? p.draft_tokens[sequence * p.num_draft + i] : -1;
    if (token < 0 || token >= p.vocab_size) return;
    rejected = token;
    if (p.draft_probs != nullptr) {
      draft = p.draft_probs + (sequence * p.num_draft + i) * p.vocab_size;
    }
  }

  VLLM_KERNELS_INLINE static uint64_t to_weight(float probability) {
    if (!(probability > 0.0f)) return 0;
    return static_cast<uint64_t>(
        ScalarMath::multiply(probability < 1.0f ? probability : 1.0f, kWeightOne));
  }
  VLLM_KERNELS_INLINE uint64_t target_weight(int64_t token) const {
    return to_weight(target[token]);
  }
  VLLM_KERNELS_INLINE uint64_t weight(int64_t token) const {
    if (draft != nullptr) return to_weight(ScalarMath::add(target[token], -draft[token]));
    return token == rejected ? 0 : target_weight(token);
  }
};

}  // namespace vllm_kernels
