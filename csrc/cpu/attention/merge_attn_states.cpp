// merge_attn_states: combines two attention results of the same queries by their log-sum-exp. One
// is over a prefix of the keys, the other over the suffix.
//   out, prefix, suffix [num_tokens, num_heads, head_size]; lse [num_heads, num_tokens]
// A task is a range of tokens.
#include "ops/merge_attn_states.h"

#include <cmath>

#include "cpu/base/dispatch.h"
#include "cpu/kernels.h"

namespace vllm_kernels::cpu {
namespace {

struct StateWeights {
  float prefix, suffix, lse;
};

StateWeights weights_of_states(float prefix_lse, float suffix_lse) {
  const float p = prefix_lse == INFINITY ? -INFINITY : prefix_lse;
  const float s = suffix_lse == INFINITY ? -INFINITY : suffix_lse;
  const float max_lse = p > s ? p : s;
  if (p == -INFINITY && s == -INFINITY) return {0.0f, 0.0f, -INFINITY};
  const float ep = std::exp(p - max_lse), es = std::exp(s - max_lse);
  return {ep / (ep + es), es / (ep + es), max_lse + std::log(ep + es)};
}

// A state of weight 0 may hold anything, even NaN, and counts as 0.
template <typename T>
void merge_row(T* out, const T* prefix, const T* suffix, int64_t n, const StateWeights& w) {
  const auto merged = [&](Vec p, Vec s) {
    const Vec first = w.prefix == 0.0f ? Vec{} : p * splat(w.prefix);
    return w.suffix == 0.0f ? first : first + s * splat(w.suffix);
  };
  map_elements(out, n, merged, prefix, suffix);
}

Loop loop_of(const MergeAttnStatesParams& p) {
  const int64_t elements = int64_t{3} * p.num_heads * p.head_size;
  return {.count = p.num_tokens, .per_task = rows_per_task(elements * size_of(p.dtype))};
}

void run(const MergeAttnStatesParams& p, int64_t first, int64_t last) {
  dispatch_float(p.dtype, [&](auto tag) {
    using T = decltype(tag);
    for (int64_t token = first; token < last; ++token) {
      for (int64_t head = 0; head < p.num_heads; ++head) {
        const int64_t at = head * p.num_tokens + token;
        const StateWeights weights = weights_of_states(p.prefix_lse[at], p.suffix_lse[at]);
        merge_row(
            static_cast<T*>(p.output) + token * p.output_token_stride + head * p.output_head_stride,
            static_cast<const T*>(p.prefix.data) + token * p.prefix.token_stride +
                head * p.prefix.head_stride,
            static_cast<const T*>(p.suffix.data) + token * p.suffix.token_stride +
                head * p.suffix.head_stride,
            p.head_size, weights);
        if (p.output_lse != nullptr) p.output_lse[at] = weights.lse;
      }
    }
  });
}

}  // namespace

VLLM_KERNELS_CPU_KERNEL(MergeAttnStatesParams, loop_of, run)

}  // namespace vllm_kernels::cpu
