// reshape_and_cache_per_token_quant: writes keys and values as int8 with one scale per token and
// head.
//   key, value [num_tokens, num_kv_heads, head_size]; slot_mapping [num_tokens], -1: skip
// A task is a few heads of all tokens. It keeps their order, so the last token of a slot wins.
#include "ops/reshape_and_cache_per_token_quant.h"

#include "cpu/base/dispatch.h"
#include "cpu/base/quant.h"
#include "cpu/cache/cache_rows.h"
#include "cpu/kernels.h"

namespace vllm_kernels::cpu {
namespace {

using Params = ReshapeAndCachePerTokenQuantParams;

Loop loop_of(const Params& p) {
  const ReshapeAndCacheParams& w = p.write;
  return {.count = w.kv.num_kv_heads,
          .per_task = rows_per_task(3 * w.num_tokens * w.kv.head_size * size_of(w.dtype))};
}

template <typename T>
void write_heads(const Params& p, int64_t first, int64_t last) {
  const PagedKv& kv = p.write.kv;
  for_each_new_row<T>(p.write, first, last, [&](bool is_key, const HeadSlot& at, const T* row) {
    const auto elements = [&](int64_t i, auto count) { return load(row + i, count); };
    const float scale = largest_magnitude(0, kv.head_size, elements) / 127.0f;
    write_row(cache_row<Int8>(kv, is_key, at), row, kv.head_size, scale > 0.0f ? scale : 1.0f);
    float* scales = is_key ? p.key_scales : p.value_scales;
    const int64_t block_stride = is_key ? p.key_scales_block_stride : p.value_scales_block_stride;
    const int64_t head_stride = is_key ? p.key_scales_head_stride : p.value_scales_head_stride;
    scales[at.block * block_stride + at.head * head_stride + at.token] = scale;
  });
}

void run(const Params& p, int64_t first, int64_t last) {
  dispatch_float(p.write.dtype, [&](auto model) { write_heads<decltype(model)>(p, first, last); });
}

}  // namespace

VLLM_KERNELS_CPU_KERNEL(ReshapeAndCachePerTokenQuantParams, loop_of, run)

}  // namespace vllm_kernels::cpu
