#include "ops/combine_attn_partials.h"

#include <cmath>

#include "cpu/base/dispatch.h"
#include "cpu/kernels.h"

namespace vllm_kernels::cpu {
namespace {

// One row of every part, and what each weighs.
template <typename T>
struct PartRows {
  const T* first;  // the first part's
  int64_t stride;  // elements between out_partial
  const float* lses;
  int64_t lse_stride;
  int32_t count;

  float lse(int32_t part) const {
    const float lse = lses[part * lse_stride];
    return lse == INFINITY ? -INFINITY : lse;
  }
};

// What the out_partial of a row weigh: part i exp(lse_i - largest) / sum.
struct Weights {
  float largest, sum;  // sum is 0 where every part is empty

  float of(float lse) const { return sum == 0.0f ? 0.0f : std::exp(lse - largest) / sum; }
};

template <typename T>
Weights weights_of(const PartRows<T>& out_partial) {
  float largest = -INFINITY;
  for (int32_t part = 0; part < out_partial.count; ++part) {
    largest = out_partial.lse(part) > largest ? out_partial.lse(part) : largest;
  }
  if (largest == -INFINITY) largest = 0.0f;
  float sum = 0.0f;
  for (int32_t part = 0; part < out_partial.count; ++part)
    sum += std::exp(out_partial.lse(part) - largest);
  return {largest, sum};
}

template <typename T>
void merge_row(T* out, const PartRows<T>& out_partial, int64_t n, const Weights& weights) {
  const auto merged = [&](auto load_at) {
    Vec sum{};
    for (int32_t part = 0; part < out_partial.count; ++part) {
      // A part of weight 0 may hold anything, NaN too: it is read as 0.
      const float weight = weights.of(out_partial.lse(part));
      if (weight != 0.0f)
        sum = sum + load_at(out_partial.first + part * out_partial.stride) * splat(weight);
    }
    return sum;
  };
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    store(out + i, merged([&](const T* row) { return load(row + i); }));
  }
  if (i < n) {
    store_partial(out + i, merged([&](const T* row) { return load_partial(row + i, n - i); }),
                  n - i);
  }
}

int64_t tokens_per_task(const CombineAttnPartialsParams& p) {
  return rows_per_task((int64_t{p.num_partials} + 1) * p.num_heads * p.head_size *
                       size_of(p.dtype));
}

int64_t num_tasks(const CombineAttnPartialsParams& p) {
  return ceil_div(p.num_tokens, tokens_per_task(p));
}

void run(const CombineAttnPartialsParams& p, int64_t begin, int64_t end) {
  const int64_t step = tokens_per_task(p);
  const int64_t last = end * step < p.num_tokens ? end * step : p.num_tokens;
  dispatch_float(p.dtype, [&](auto tag) {
    using T = decltype(tag);
    for (int64_t token = begin * step; token < last; ++token) {
      for (int64_t head = 0; head < p.num_heads; ++head) {
        const int64_t row = token * p.num_heads + head;
        const PartRows<T> out_partial = {.first = static_cast<const T*>(p.out_partial) +
                                                  token * p.token_stride + head * p.head_stride,
                                         .stride = p.partial_stride,
                                         .lses = p.lse_partial + row,
                                         .lse_stride = p.num_tokens * p.num_heads,
                                         .count = p.num_partials};
        const Weights weights = weights_of(out_partial);
        merge_row(
            static_cast<T*>(p.output) + token * p.output_token_stride + head * p.output_head_stride,
            out_partial, p.head_size, weights);
        if (p.output_lse != nullptr) p.output_lse[row] = weights.largest + std::log(weights.sum);
      }
    }
  });
}

}  // namespace
}  // namespace vllm_kernels::cpu

VLLM_KERNELS_CPU_KERNEL(vllm_kernels::CombineAttnPartialsParams, vllm_kernels::cpu::num_tasks,
                        vllm_kernels::cpu::run)
