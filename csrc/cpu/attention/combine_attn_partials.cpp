// combine_attn_partials: combines attention results of the same queries by their log-sum-exp. Their
// sets of keys are disjoint.
//   out_partial [num_partials, num_tokens, num_heads, head_size]
//   lse_partial [num_partials, num_tokens, num_heads]
//   out [num_tokens, num_heads, head_size]
// A task is a range of tokens.
#include "ops/merge_attn_states.h"

#include <cmath>

#include "cpu/base/dispatch.h"
#include "cpu/kernels.h"

namespace vllm_kernels::cpu {
namespace {

// One row (token, head) of every partial.
template <typename T>
struct PartialRows {
  const T* first;  // of partial 0
  int64_t stride;  // elements from one partial to the next
  const float* lses;
  int64_t lse_stride;
  int32_t count;

  float lse(int32_t partial) const {
    const float lse = lses[partial * lse_stride];
    return lse == INFINITY ? -INFINITY : lse;
  }
};

// The split weights of a row: partial i has exp(lse_i - max_lse) / sum.
struct PartialWeights {
  float max_lse, sum;  // sum is 0 if every partial is empty

  float of(float lse) const { return sum == 0.0f ? 0.0f : std::exp(lse - max_lse) / sum; }
};

template <typename T>
PartialWeights weights_of_partials(const PartialRows<T>& rows) {
  float max_lse = -INFINITY;
  for (int32_t partial = 0; partial < rows.count; ++partial) {
    max_lse = rows.lse(partial) > max_lse ? rows.lse(partial) : max_lse;
  }
  if (max_lse == -INFINITY) max_lse = 0.0f;
  float sum = 0.0f;
  for (int32_t partial = 0; partial < rows.count; ++partial) {
    sum += std::exp(rows.lse(partial) - max_lse);
  }
  return {max_lse, sum};
}

template <typename T>
void combine_row(T* out, const PartialRows<T>& rows, int64_t n, const PartialWeights& weights) {
  for_each_vector(0, n, [&](int64_t i, auto count) {
    Vec sum{};
    for (int32_t partial = 0; partial < rows.count; ++partial) {
      // A partial of weight 0 may hold anything, even NaN, and counts as 0.
      const float weight = weights.of(rows.lse(partial));
      if (weight == 0.0f) continue;
      sum = sum + load(rows.first + partial * rows.stride + i, count) * splat(weight);
    }
    store(out + i, sum, count);
  });
}

Loop loop_of(const CombineAttnPartialsParams& p) {
  const int64_t elements = (int64_t{p.num_partials} + 1) * p.num_heads * p.head_size;
  return {.count = p.num_tokens, .per_task = rows_per_task(elements * size_of(p.dtype))};
}

void run(const CombineAttnPartialsParams& p, int64_t first, int64_t last) {
  dispatch_float(p.dtype, [&](auto tag) {
    using T = decltype(tag);
    for (int64_t token = first; token < last; ++token) {
      for (int64_t head = 0; head < p.num_heads; ++head) {
        const int64_t row = token * p.num_heads + head;
        const PartialRows<T> rows = {.first = static_cast<const T*>(p.out_partial) +
                                              token * p.token_stride + head * p.head_stride,
                                     .stride = p.partial_stride,
                                     .lses = p.lse_partial + row,
                                     .lse_stride = p.num_tokens * p.num_heads,
                                     .count = p.num_partials};
        const PartialWeights weights = weights_of_partials(rows);
        combine_row(
            static_cast<T*>(p.output) + token * p.output_token_stride + head * p.output_head_stride,
            rows, p.head_size, weights);
        if (p.output_lse != nullptr) p.output_lse[row] = weights.max_lse + std::log(weights.sum);
      }
    }
  });
}

}  // namespace

VLLM_KERNELS_CPU_KERNEL(CombineAttnPartialsParams, loop_of, run)

}  // namespace vllm_kernels::cpu
