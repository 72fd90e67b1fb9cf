#include "ops/reshape_and_cache.h"

#include "cpu/dispatch.h"
#include "cpu/kernels.h"

namespace vllm_kernels::cpu {
namespace {

constexpr int kPiece = 16 * kLanes;  // elements converted at a time

template <typename T, typename C>
void convert(C* to, const T* from, int64_t n, float scale) {
  if constexpr (sizeof(T) == sizeof(C)) {
    std::memcpy(to, from, n * sizeof(T));
  } else {
    const Vec divisor = splat(scale);
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) store(to + i, load(from + i) / divisor);
    if (i < n) store_partial(to + i, load_partial(from + i, n - i) / divisor, n - i);
  }
}

// One head of one token: `to` has `run` elements in a row, then the next `run` start `stride`
// later.
template <typename T, typename C>
void write_row(C* to, int64_t run, int64_t stride, const T* from, int64_t n, float scale) {
  if (run >= n) return convert(to, from, n, scale);
  C piece[kPiece];
  for (int64_t i = 0; i < n; i += kPiece) {  // kPiece is a multiple of run, which is 1 or x
    const int64_t count = n - i < kPiece ? n - i : kPiece;
    convert(piece, from + i, count, scale);
    C* at = to + i / run * stride;
    if (run == 1) {
      for (int64_t j = 0; j < count; ++j) at[j * stride] = piece[j];
    } else {
      for (int64_t j = 0; j < count; j += run, at += stride) std::memcpy(at, piece + j, 16);
    }
  }
}

// A task is a few heads of all tokens, in their order: the last token of a slot wins.
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
  const float k_scale = kv.k_scale == nullptr ? 1.0f : *kv.k_scale;
  const float v_scale = kv.v_scale == nullptr ? 1.0f : *kv.v_scale;
  for (int64_t t = 0; t < p.num_tokens; ++t) {
    const int32_t slot = p.usable(p.slot_mapping[t]);
    if (slot < 0) continue;
    const int32_t block = slot / kv.block_size, token = slot % kv.block_size;
    for (int64_t head = begin; head < end; ++head) {
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
