// value_mean_update (ops/pages/value_mean_update.h). A task is a range of rows; it looks for their
// tokens among all of the call.
#include "ops/pages/value_mean_update.h"

#include "cpu/base/dispatch.h"
#include "cpu/kernels.h"

namespace vllm_kernels::cpu {
namespace {

Loop loop_of(const ValueMeanUpdateParams& p) {
  return {.count = p.num_rows};
}

// mean = a mean + b value, of all heads.
template <typename T>
void add(const ValueMeanUpdateParams& p, float* mean, const T* value, float a, float b) {
  for (int32_t head = 0; head < p.num_kv_heads; ++head, value += p.head_stride) {
    for_each_vector(0, p.head_size, [&](int64_t i, auto lanes) {
      store(mean + i, load(mean + i, lanes) * a + load(value + i, lanes) * b, lanes);
    });
    mean += p.head_size;
  }
}

void run(const ValueMeanUpdateParams& p, int64_t begin, int64_t end) {
  const int64_t elements = int64_t{p.num_kv_heads} * p.head_size;
  dispatch_float(p.dtype, [&](auto model) {
    const auto* values = static_cast<const decltype(model)*>(p.value);
    for (int64_t row = begin; row < end; ++row) {
      float* mean = p.mean + row * elements;
      const int32_t old = p.counts[row] > 0 ? p.counts[row] : 0;
      int32_t found = 0;
      for (int32_t t = 0; t < p.num_tokens; ++t) found += p.rows[t] == row ? 1 : 0;
      if (found == 0) continue;
      if (old == 0) std::memset(mean, 0, elements * sizeof(float));
      const float share = 1.0f / static_cast<float>(int64_t{old} + found);
      float a = static_cast<float>(old) * share;
      for (int32_t t = 0; t < p.num_tokens; ++t) {
        if (p.rows[t] != row) continue;
        add(p, mean, values + t * p.token_stride, a, share);
        a = 1.0f;
      }
      p.counts[row] = old + found;
    }
  });
}

}  // namespace

VLLM_KERNELS_CPU_KERNEL(ValueMeanUpdateParams, loop_of, run)

}  // namespace vllm_kernels::cpu
