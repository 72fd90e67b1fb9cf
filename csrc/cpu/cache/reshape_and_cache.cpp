// reshape_and_cache and reshape_and_cache_flash: write the keys and values of new tokens to their
// slots, quantized for 8-bit caches.
//   key, value [num_tokens, num_kv_heads, head_size]; slot_mapping [num_tokens], -1: skip
// A task is a few heads of all tokens. It keeps their order, so the last token of a slot wins.
#include "ops/reshape_and_cache.h"

#include "cpu/base/dispatch.h"
#include "cpu/cache/write_row.h"
#include "cpu/kernels.h"

namespace vllm_kernels::cpu {
namespace {

int64_t heads_per_task(const ReshapeAndCacheParams& p) {
  return rows_per_task(4 * p.num_tokens * p.kv.head_size * size_of(p.dtype));
}

int64_t num_tasks(const ReshapeAndCacheParams& p) {
  return ceil_div(p.kv.num_kv_heads, heads_per_task(p));
}

template <typename T, typename C>
void write_heads(const ReshapeAndCacheParams& p, int64_t begin, int64_t end) {
  const PagedKv& kv = p.kv;
  const bool vllm = kv.layout == KvLayout::kVllm;
  for (int64_t t = 0; t < p.num_tokens; ++t) {
    const int32_t slot = p.usable(p.slot_mapping[t]);
    if (slot < 0) continue;
    const int32_t block = slot / kv.block_size, token = slot % kv.block_size;
    for (int64_t head = begin; head < end; ++head) {
      const float k_scale = kv.k_scale[head * kv.scale_stride];
      const float v_scale = kv.v_scale[head * kv.scale_stride];
      write_row(static_cast<C*>(kv.key) + kv.key_offset(block, head, token, 0),
                vllm ? kv.x : kv.head_size, kv.key_chunk_stride,
                static_cast<const T*>(p.key) + t * p.key_token_stride + head * p.key_head_stride,
                kv.head_size, k_scale);
      write_row(
          static_cast<C*>(kv.value) + kv.value_offset(block, head, token, 0),
          vllm ? 1 : kv.head_size, kv.value_dim_stride,
          static_cast<const T*>(p.value) + t * p.value_token_stride + head * p.value_head_stride,
          kv.head_size, v_scale);
    }
  }
}

void run(const ReshapeAndCacheParams& p, int64_t begin, int64_t end) {
  const int64_t step = heads_per_task(p);
  const int64_t last = end * step < p.kv.num_kv_heads ? end * step : p.kv.num_kv_heads;
  dispatch_float(p.dtype, [&](auto model) {
    using T = decltype(model);
    dispatch_cache<T>(
        p.kv.dtype, [&](auto stored) { write_heads<T, decltype(stored)>(p, begin * step, last); });
  });
}

}  // namespace
}  // namespace vllm_kernels::cpu

VLLM_KERNELS_CPU_KERNEL(vllm_kernels::ReshapeAndCacheParams, vllm_kernels::cpu::num_tasks,
                        vllm_kernels::cpu::run)
