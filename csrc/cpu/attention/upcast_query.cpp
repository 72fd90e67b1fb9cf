// e4m3 queries as 16-bit ones, for attention. A task is a range of tokens.
#include "ops/upcast_query.h"

#include "cpu/base/dispatch.h"
#include "cpu/kernels.h"

namespace vllm_kernels::cpu {
namespace {

Loop loop_of(const UpcastQueryParams& p) {
  return {.count = p.num_tokens,
          .per_task = rows_per_task(int64_t{p.num_heads} * p.head_size * (1 + size_of(p.dtype)))};
}

void run(const UpcastQueryParams& p, int64_t first, int64_t last) {
  const int64_t width = int64_t{p.num_heads} / p.num_kv_heads * p.head_size;  // of a KV head
  dispatch_float(p.dtype, [&](auto model) {
    for (int64_t token = first; token < last; ++token) {
      const Fp8E4M3* from = static_cast<const Fp8E4M3*>(p.query) + token * p.query_stride;
      auto* to = static_cast<decltype(model)*>(p.out) + token * p.num_kv_heads * width;
      for (int64_t head = 0; head < p.num_kv_heads; ++head, from += width, to += width) {
        const Vec scale = splat(p.scales.of(head));
        for_each_vector(0, width, [&](int64_t i, auto count) {
          store(to + i, load(from + i, count) * scale, count);
        });
      }
    }
  });
}

}  // namespace

VLLM_KERNELS_CPU_KERNEL(UpcastQueryParams, loop_of, run)

}  // namespace vllm_kernels::cpu
