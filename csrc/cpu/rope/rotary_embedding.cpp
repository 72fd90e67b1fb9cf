// rotary_embedding: rotates query and key heads by the angles of their positions, in place.
//   query, key [num_tokens, heads, head_size]; cos_sin_cache [max_position, rotary_size]
// batched_rotary_embedding adds an offset to each position.
// A task is a range of tokens.
#include "ops/rotary_embedding.h"

#include "cpu/base/dispatch.h"
#include "cpu/kernels.h"
#include "cpu/rope/rotate_pairs.h"

namespace vllm_kernels::cpu {
namespace {

template <typename T, typename Cache>
void rotate_heads(const RotaryParams& p, const RotaryHeads& heads, int64_t token,
                  const Cache* cosines) {
  T* head = static_cast<T*>(heads.data) + heads.tokens.offset(token);
  for (int64_t h = 0; h < heads.count; ++h, head += heads.stride) {
    rotate_head(head, cosines, p.rotary_size / 2, p.is_neox);
  }
}

Loop loop_of(const RotaryParams& p) {
  const int64_t elements = (p.query.count + p.key.count) * p.rotary_size;
  return {.count = p.position_rows.count,
          .per_task = rows_per_task(2 * elements * size_of(p.dtype))};
}

// The binding has checked that positions are in range, with their offsets.
void run(const RotaryParams& p, int64_t first, int64_t last) {
  dispatch_float(p.dtype, [&](auto tag) {
    dispatch_float(p.cache_dtype, [&](auto cache_tag) {
      using T = decltype(tag);
      using Cache = decltype(cache_tag);
      for (int64_t token = first; token < last; ++token) {
        const int64_t position = p.positions[p.position_rows.offset(token)] +
                                 (p.offsets == nullptr ? 0 : p.offsets[token]);
        const Cache* cosines =
            static_cast<const Cache*>(p.cos_sin_cache) + position * p.cache_stride;
        rotate_heads<T>(p, p.query, token, cosines);
        rotate_heads<T>(p, p.key, token, cosines);
      }
    });
  });
}

}  // namespace

VLLM_KERNELS_CPU_KERNEL(RotaryParams, loop_of, run)

}  // namespace vllm_kernels::cpu
