#include "ops/rotary_embedding.h"

#include "cpu/base/dispatch.h"
#include "cpu/kernels.h"
#include "cpu/rope/rotate_pairs.h"

namespace vllm_kernels::cpu {
namespace {

template <typename T, typename Cache>
void turn_heads(const RotaryParams& p, const RotaryHeads& heads, int64_t token,
                const Cache* cosines) {
  T* head = static_cast<T*>(heads.data) + heads.tokens.offset(token);
  for (int64_t h = 0; h < heads.count; ++h, head += heads.stride) {
    turn_head(head, cosines, p.rotary_size / 2, p.is_neox);
  }
}

int64_t tokens_per_task(const RotaryParams& p) {
  return rows_per_task(2 * (p.query.count + p.key.count) * p.rotary_size * size_of(p.dtype));
}

int64_t num_tasks(const RotaryParams& p) {
  return ceil_div(p.position_rows.count, tokens_per_task(p));
}

// The binding has seen every position in range.
void run(const RotaryParams& p, int64_t begin, int64_t end) {
  const int64_t chunk = tokens_per_task(p);
  const int64_t tokens = p.position_rows.count;
  const int64_t last = end * chunk < tokens ? end * chunk : tokens;
  dispatch_float(p.dtype, [&](auto tag) {
    dispatch_float(p.cache_dtype, [&](auto cache_tag) {
      using T = decltype(tag);
      using Cache = decltype(cache_tag);
      for (int64_t token = begin * chunk; token < last; ++token) {
        const int64_t position = p.positions[p.position_rows.offset(token)];
        const Cache* cosines =
            static_cast<const Cache*>(p.cos_sin_cache) + position * p.cache_stride;
        turn_heads<T>(p, p.query, token, cosines);
        turn_heads<T>(p, p.key, token, cosines);
      }
    });
  });
}

}  // namespace
}  // namespace vllm_kernels::cpu

VLLM_KERNELS_CPU_KERNEL(vllm_kernels::RotaryParams, vllm_kernels::cpu::num_tasks,
                        vllm_kernels::cpu::run)
