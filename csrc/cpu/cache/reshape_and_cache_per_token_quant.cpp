#include "ops/reshape_and_cache_per_token_quant.h"

#include "cpu/base/dispatch.h"
#include "cpu/base/quant.h"
#include "cpu/cache/write_row.h"
#include "cpu/kernels.h"

namespace vllm_kernels::cpu {
namespace {

using Params = ReshapeAndCachePerTokenQuantParams;

template <typename T>
float row_magnitude(const T* row, int64_t n) {
  VecUint most{};
  for (int64_t i = 0; i < n; i += kLanes) {
    const Vec x = i + kLanes <= n ? load(row + i) : load_partial(row + i, n - i);
    most = larger_bits(most, magnitude_bits(x));
  }
  return largest_magnitude(most);
}

template <typename T>
float write_quantised(Int8* to, int64_t run, int64_t stride, const T* row, int64_t n) {
  const float scale = row_magnitude(row, n) / 127.0f;
  write_row(to, run, stride, row, n, scale > 0.0f ? scale : 1.0f);
  return scale;
}

// A task is a few heads of all tokens, in their order: the last token of a slot wins.
int64_t heads_per_task(const Params& p) {
  const ReshapeAndCacheParams& w = p.write;
  return rows_per_task(3 * w.num_tokens * w.kv.head_size * size_of(w.dtype));
}

int64_t num_tasks(const Params& p) {
  return ceil_div(p.write.kv.num_kv_heads, heads_per_task(p));
}

template <typename T>
void write_heads(const Params& p, int64_t begin, int64_t end) {
  const ReshapeAndCacheParams& w = p.write;
  const PagedKv& kv = w.kv;
  const bool vllm = kv.layout == KvLayout::kVllm;
  for (int64_t t = 0; t < w.num_tokens; ++t) {
    const int32_t slot = w.usable(w.slot_mapping[t]);
    if (slot < 0) continue;
    const int64_t block = slot / kv.block_size, token = slot % kv.block_size;
    for (int64_t head = begin; head < end; ++head) {
      const T* key =
          static_cast<const T*>(w.key) + t * w.key_token_stride + head * w.key_head_stride;
      const T* value =
          static_cast<const T*>(w.value) + t * w.value_token_stride + head * w.value_head_stride;
      p.key_scales[block * p.key_scales_block_stride + head * p.key_scales_head_stride + token] =
          write_quantised(static_cast<Int8*>(kv.key) + kv.key_offset(block, head, token, 0),
                          vllm ? kv.x : kv.head_size, kv.key_chunk_stride, key, kv.head_size);
      p.value_scales[block * p.value_scales_block_stride + head * p.value_scales_head_stride +
                     token] =
          write_quantised(static_cast<Int8*>(kv.value) + kv.value_offset(block, head, token, 0),
                          vllm ? 1 : kv.head_size, kv.value_dim_stride, value, kv.head_size);
    }
  }
}

void run(const Params& p, int64_t begin, int64_t end) {
  const int64_t step = heads_per_task(p), heads = p.write.kv.num_kv_heads;
  const int64_t last = end * step < heads ? end * step : heads;
  dispatch_float(p.write.dtype,
                 [&](auto model) { write_heads<decltype(model)>(p, begin * step, last); });
}

}  // namespace
}  // namespace vllm_kernels::cpu

VLLM_KERNELS_CPU_KERNEL(vllm_kernels::ReshapeAndCachePerTokenQuantParams,
                        vllm_kernels::cpu::num_tasks, vllm_kernels::cpu::run)
