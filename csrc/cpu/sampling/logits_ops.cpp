// apply_token_bitmask_ and apply_repetition_penalties (ops/sampling/sample.h), a task is a range of
// rows; spec_verify (ops/sampling/spec_verify.h), a task is a sequence.
#include "cpu/sampling/vec_sampling.h"

namespace vllm_kernels::cpu {
namespace {

Loop loop_of_bitmask(const TokenBitmaskParams& p) {
  const int64_t bytes = int64_t{p.logits.vocab_size} * size_of(p.logits.dtype);
  return {.count = p.logits.num_rows, .per_task = rows_per_task(2 * bytes)};
}

void run_bitmask(const TokenBitmaskParams& p, int64_t first, int64_t last) {
  dispatch_float(p.logits.dtype, [&](auto tag) {
    using T = decltype(tag);
    for (int64_t row = first; row < last; ++row) {
      const int32_t* words = p.bitmask.of(row);
      T* logits = static_cast<T*>(p.out) + row * p.logits.stride;
      for_each_vector(0, p.logits.vocab_size, [&](int64_t i, auto count) {
        store(logits + i, masked(load(logits + i, count), p.bitmask, words, i), count);
      });
    }
  });
}

Loop loop_of_penalties(const RepetitionPenaltiesParams& p) {
  const int64_t bytes = int64_t{p.logits.vocab_size} * (2 + size_of(p.logits.dtype));
  return {.count = p.logits.num_rows, .per_task = rows_per_task(bytes)};
}

void run_penalties(const RepetitionPenaltiesParams& p, int64_t first, int64_t last) {
  dispatch_float(p.logits.dtype, [&](auto tag) {
    using T = decltype(tag);
    for (int64_t row = first; row < last; ++row) {
      const Penalties penalties{p.penalties[row], 0.0f, 0.0f};
      T* logits = static_cast<T*>(p.out) + row * p.logits.stride;
      const uint8_t* prompt = p.prompt_mask + row * p.prompt_stride;
      const uint8_t* output = p.output_mask + row * p.output_stride;
      for (int64_t i = 0; i < p.logits.vocab_size; ++i) {
        if (!prompt[i] && !output[i]) continue;
        const float logit = load(logits + i, 1)[0];
        store(logits + i, splat(penalties.apply(logit, 0)), 1);
      }
    }
  });
}

Loop loop_of_counts(const AppendTokenCountsParams& p) {
  return {.count = p.num_rows};
}

void run_counts(const AppendTokenCountsParams& p, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; ++row) {
    const AppendTokenCountsParams::Row list = p.of(row);
    if (list.token >= 0) {
      int32_t *tokens = p.tokens + list.begin, *counts = p.counts + list.begin;
      bool is_found = false;
      for (int32_t i = 0; i < list.length; ++i) {
        if (tokens[i] != list.token) continue;
        ++counts[i];
        is_found = true;
      }
      if (!is_found && list.length < list.room) {
        tokens[list.length] = list.token;
        counts[list.length] = 1;
        p.lengths[row] = list.length + 1;
      }
    }
    p.finish(row);
  }
}

Loop loop_of_verify(const SpecVerifyParams& p) {
  return {.count = p.num_seqs};
}

int64_t draw_token(const SpecVerifyParams& p, const SpecResidual& residual, uint64_t random) {
  uint64_t all = 0;
  for (int64_t i = 0; i < p.vocab_size; ++i) all += residual.weight(i);
  const bool is_empty = all == 0;
  const auto weight = [&](int64_t i) {
    return is_empty ? residual.target_weight(i) : residual.weight(i);
  };
  if (is_empty) {
    for (int64_t i = 0; i < p.vocab_size; ++i) all += weight(i);
  }
  const uint64_t target = high_product(all, random);
  uint64_t upto = 0;
  for (int64_t i = 0; i < p.vocab_size; ++i) {
    upto += weight(i);
    if (upto > target) return i;
  }
  return 0;
}

void run_verify(const SpecVerifyParams& p, int64_t first, int64_t last) {
  for (int64_t sequence = first; sequence < last; ++sequence) {
    const SpecChain chain(p, sequence);
    const int32_t accepted = chain.accepted();
    int64_t* tokens = p.tokens + sequence * (p.num_draft + 1);
    p.accepted[sequence] = accepted;
    for (int32_t i = 0; i <= p.num_draft; ++i) tokens[i] = i < accepted ? chain.draft[i] : -1;
    tokens[accepted] = chain.target != nullptr ? chain.target[accepted]
                                               : draw_token(p, SpecResidual(p, sequence, accepted),
                                                            chain.random(accepted));
  }
}

}  // namespace

VLLM_KERNELS_CPU_KERNEL(TokenBitmaskParams, loop_of_bitmask, run_bitmask)
VLLM_KERNELS_CPU_KERNEL(RepetitionPenaltiesParams, loop_of_penalties, run_penalties)
VLLM_KERNELS_CPU_KERNEL(AppendTokenCountsParams, loop_of_counts, run_counts)
VLLM_KERNELS_CPU_KERNEL(SpecVerifyParams, loop_of_verify, run_verify)

}  // namespace vllm_kernels::cpu
