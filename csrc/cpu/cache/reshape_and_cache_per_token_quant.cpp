// reshape_and_cache_per_token_quant: writes keys and values as int8 or int4 with one scale, and for
// int4 one zero, per token and head.
//   key, value [num_tokens, num_kv_heads, head_size]; slot_mapping [num_tokens], -1: skip
// A task is a few heads of all tokens. It keeps their order, so the last token of a slot wins.
#include "ops/reshape_and_cache_per_token_quant.h"

#include "cpu/base/dispatch.h"
#include "cpu/base/int4.h"
#include "cpu/base/quant.h"
#include "cpu/cache/cache_rows.h"
#include "cpu/kernels.h"

namespace vllm_kernels::cpu {
namespace {

using Params = ReshapeAndCachePerTokenQuantParams;

Loop loop_of(const Params& p) {
  const ReshapeAndCacheParams& w = p.write;
  return {.count = w.kv.num_kv_heads,
          .per_task = rows_per_task(3 * w.num_tokens * w.kv.head_values() * size_of(w.dtype))};
}

// The place of a row's scale, and of its zero.
int64_t scale_offset(const Params& p, bool is_key, const HeadSlot& at) {
  const int64_t block_stride = is_key ? p.key_scales_block_stride : p.value_scales_block_stride;
  const int64_t head_stride = is_key ? p.key_scales_head_stride : p.value_scales_head_stride;
  return at.block * block_stride + at.head * head_stride + at.token;
}

struct Int4Range {
  float scale, zero;
  float low, inverse;  // inverse is 0 for rows that are stored as n = 8
};

template <typename T>
Int4Range int4_range(const T* row, int64_t values) {
  Vec lows = splat(__builtin_inff()), highs = -lows, nans = {};
  for (int64_t i = 0; i < values; i += kLanes) {
    const Vec x = load(row + i);
    lows = minimum(x, lows);
    highs = maximum(x, highs);
    nans += x - x;
  }
  const float low = -largest(-lows), span = largest(highs) - low + sum(nans);
  const float scale = span / 15.0f, nan = __builtin_nanf("");
  if (!(span < __builtin_inff())) return {nan, nan, low, 0.0f};
  if (scale < 0x1p-100f) return {0.0f, low, low, 0.0f};
  return {scale, low + 8.0f * scale, low, 1.0f / scale};
}

// The bits of n of kLanes values.
inline VecUint int4_bits(Vec x, const Int4Range& range) {
  const Vec n = minimum((x - splat(range.low)) * splat(range.inverse), splat(15.0f));
  return as_bits(n + splat(0x1.8p23f)) & 0xfu;  // leaves the rounded integer in the lower bits
}

template <typename T>
void write_int4(const Params& p, bool is_key, const HeadSlot& at, const T* row) {
  const PagedKv& kv = p.write.kv;
  const int64_t elements = kv.head_size, to = scale_offset(p, is_key, at);
  const Int4Range range = int4_range(row, kv.head_values());
  Int4x2 packed[kMaxInt4Elements];
  if (range.inverse == 0.0f) {
    std::memset(packed, 0x88, elements);
  } else {
    for (int64_t i = 0; i < elements; i += kLanes) {
      const VecUint high = int4_bits(load(row + elements + i), range);
      store_bytes(packed + i, int4_bits(load(row + i), range) | high << 4);
    }
  }
  write_row(cache_row<Int4x2>(kv, is_key, at), packed, elements, 1.0f);
  (is_key ? p.key_scales : p.value_scales)[to] = range.scale;
  (is_key ? p.key_zeros : p.value_zeros)[to] = range.zero;
}

template <typename T>
void write_int8(const Params& p, bool is_key, const HeadSlot& at, const T* row) {
  const PagedKv& kv = p.write.kv;
  const auto elements = [&](int64_t i, auto count) { return load(row + i, count); };
  const float scale = largest_magnitude(0, kv.head_size, elements) / 127.0f;
  write_row(cache_row<Int8>(kv, is_key, at), row, kv.head_size, scale > 0.0f ? scale : 1.0f);
  (is_key ? p.key_scales : p.value_scales)[scale_offset(p, is_key, at)] = scale;
}

template <typename T>
void write_heads(const Params& p, int64_t first, int64_t last) {
  const bool is_int4 = p.write.kv.dtype == DType::kInt4x2;
  for_each_new_row<T>(p.write, first, last, [&](bool is_key, const HeadSlot& at, const T* row) {
    is_int4 ? write_int4(p, is_key, at, row) : write_int8(p, is_key, at, row);
  });
}

void run(const Params& p, int64_t first, int64_t last) {
  dispatch_float(p.write.dtype, [&](auto model) { write_heads<decltype(model)>(p, first, last); });
}

}  // namespace

VLLM_KERNELS_CPU_KERNEL(ReshapeAndCachePerTokenQuantParams, loop_of, run)

}  // namespace vllm_kernels::cpu
