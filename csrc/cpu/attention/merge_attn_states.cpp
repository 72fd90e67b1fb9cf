#include "ops/merge_attn_states.h"

#include <cmath>

#include "cpu/base/dispatch.h"
#include "cpu/kernels.h"

namespace vllm_kernels::cpu {
namespace {

struct Weights {
  float prefix, suffix, lse;
};

Weights weights_of(float prefix_lse, float suffix_lse) {
  const float p = prefix_lse == INFINITY ? -INFINITY : prefix_lse;
  const float s = suffix_lse == INFINITY ? -INFINITY : suffix_lse;
  const float largest = p > s ? p : s;
  if (p == -INFINITY && s == -INFINITY) return {0.0f, 0.0f, -INFINITY};
  const float ep = std::exp(p - largest), es = std::exp(s - largest);
  return {ep / (ep + es), es / (ep + es), largest + std::log(ep + es)};
}

// A part of weight 0 may hold anything, NaN too: it is read as 0.
template <typename T>
void merge_row(T* out, const T* prefix, const T* suffix, int64_t n, const Weights& w) {
  const auto merged = [&](Vec p, Vec s) {
    const Vec left = w.prefix == 0.0f ? Vec{} : p * splat(w.prefix);
    return w.suffix == 0.0f ? left : left + s * splat(w.suffix);
  };
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, merged(load(prefix + i), load(suffix + i)));
  if (i < n) {
    store_partial(out + i, merged(load_partial(prefix + i, n - i), load_partial(suffix + i, n - i)),
                  n - i);
  }
}

int64_t tokens_per_task(const MergeAttnStatesParams& p) {
  return rows_per_task(int64_t{3} * p.num_heads * p.head_size * size_of(p.dtype));
}

int64_t num_tasks(const MergeAttnStatesParams& p) {
  return ceil_div(p.num_tokens, tokens_per_task(p));
}

void run(const MergeAttnStatesParams& p, int64_t begin, int64_t end) {
  const int64_t step = tokens_per_task(p);
  const int64_t last = end * step < p.num_tokens ? end * step : p.num_tokens;
  dispatch_float(p.dtype, [&](auto tag) {
    using T = decltype(tag);
    for (int64_t token = begin * step; token < last; ++token) {
      for (int64_t head = 0; head < p.num_heads; ++head) {
        const int64_t at = head * p.num_tokens + token;
        const Weights weights = weights_of(p.prefix_lse[at], p.suffix_lse[at]);
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
}  // namespace vllm_kernels::cpu

VLLM_KERNELS_CPU_KERNEL(vllm_kernels::MergeAttnStatesParams, vllm_kernels::cpu::num_tasks,
                        vllm_kernels::cpu::run)
