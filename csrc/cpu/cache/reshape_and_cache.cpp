// reshape_and_cache and reshape_and_cache_flash: write the keys and values of new tokens to their
// slots, quantized for 8-bit caches.
//   key, value [num_tokens, num_kv_heads, head_size]; slot_mapping [num_tokens], -1: skip
// A task is a few heads of all tokens. It keeps their order, so the last token of a slot wins.
#include "ops/reshape_and_cache.h"

#include "cpu/cache/cache_rows.h"
#include "cpu/kernels.h"

namespace vllm_kernels::cpu {
namespace {

Loop loop_of(const ReshapeAndCacheParams& p) {
  return {.count = p.kv.num_kv_heads,
          .per_task = rows_per_task(4 * p.num_tokens * p.kv.head_size * size_of(p.dtype))};
}

template <typename T, typename C>
void write_heads(const ReshapeAndCacheParams& p, int64_t first, int64_t last) {
  const PagedKv& kv = p.kv;
  for_each_new_row<T>(p, first, last, [&](bool is_key, const HeadSlot& at, const T* row) {
    write_row(cache_row<C>(kv, is_key, at), row, kv.head_size, scale_of(kv, is_key, at.head));
  });
}

void run(const ReshapeAndCacheParams& p, int64_t first, int64_t last) {
  dispatch_float(p.dtype, [&](auto model) {
    using T = decltype(model);
    dispatch_cache<T>(p.kv.dtype,
                      [&](auto stored) { write_heads<T, decltype(stored)>(p, first, last); });
  });
}

}  // namespace

VLLM_KERNELS_CPU_KERNEL(ReshapeAndCacheParams, loop_of, run)

}  // namespace vllm_kernels::cpu
