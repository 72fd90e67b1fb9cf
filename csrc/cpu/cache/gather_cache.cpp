// cp_gather_cache, gather_and_maybe_dequant_cache and gather_paged_kv: read tokens of paged
// sequences into contiguous rows. 8-bit caches may be upcast.
//   key, value out [num_rows, num_kv_heads, head_size]; K and V in pages (ops/paged_kv.h)
// A task is a range of rows.
#include "ops/gather_cache.h"

#include "cpu/base/int4.h"
#include "cpu/cache/cache_rows.h"
#include "cpu/kernels.h"

namespace vllm_kernels::cpu {
namespace {

// A storage type for elements that are copied, not converted.
template <int kBytes>
struct Raw {
  char bytes[kBytes];
};

// A row of int4: scale * (n - 8) + zero.
template <typename T>
void read_row(T* to, const CacheRow<Int4x2>& from, int64_t elements, float scale, float zero) {
  Int4x2 buffer[kMaxInt4Elements];
  read_row(buffer, from, elements, 1.0f);
  for (int64_t i = 0; i < elements; i += kLanes) {
    const VecPair n = load_values(buffer + i);
    store(to + i, n.a * splat(scale) + splat(zero));
    store(to + elements + i, n.b * splat(scale) + splat(zero));
  }
}

template <typename T, typename C>
void read_token(const GatherCacheParams& p, int64_t row, TokenLocation at) {
  const PagedKv& kv = p.kv;
  const auto read = [&](bool is_key, int64_t head, T* to, const float* scales) {
    if (at.block < 0) {
      std::memset(static_cast<void*>(to), 0, kv.head_values() * sizeof(T));
      return;
    }
    const CacheRow<C> row = cache_row<C>(kv, is_key, {at.block, head, at.token});
    const float scale = std::is_same_v<T, C> ? 1.0f : p.scale(scales, at, head);
    if constexpr (std::is_same_v<C, Int4x2>) {
      const float* zeros = is_key ? p.k_zero : p.v_zero;
      read_row(to, row, kv.head_size, scale, zeros[p.scale_offset(at, head)]);
    } else {
      read_row(to, row, kv.head_size, scale);
    }
  };
  T* keys = static_cast<T*>(p.key) + row * p.key_row_stride;
  T* values = static_cast<T*>(p.value) + row * p.value_row_stride;
  for (int64_t head = 0; head < kv.num_kv_heads; ++head) {
    read(true, head, keys + head * p.key_head_stride, kv.k_scale);
    if (p.value != nullptr) read(false, head, values + head * p.value_head_stride, kv.v_scale);
  }
}

Loop loop_of(const GatherCacheParams& p) {
  const int64_t values = 2 * int64_t{p.kv.num_kv_heads} * p.kv.head_values();
  return {.count = p.tokens.num_rows,
          .per_task = rows_per_task(values * (size_of(p.dtype) + size_of(p.kv.dtype)))};
}

template <typename T, typename C>
void read_tokens(const GatherCacheParams& p, int64_t first, int64_t last) {
  const PagedTokens& tokens = p.tokens;
  int32_t seq = 0;
  for (int64_t row = first; row < last; ++row) {
    if (tokens.token_to_seq != nullptr) {
      seq = tokens.token_to_seq[row];
    } else {
      while (seq < tokens.num_seqs && tokens.cu_seq_lens[seq + 1] <= row) ++seq;
    }
    const TokenLocation at = tokens.locate(static_cast<int32_t>(row), seq);
    if (at.block != TokenLocation::kUnwritten) read_token<T, C>(p, row, at);
  }
}

void run(const GatherCacheParams& p, int64_t first, int64_t last) {
  if (p.dtype == p.kv.dtype) {
    switch (size_of(p.dtype)) {
      case 1:
        return read_tokens<Raw<1>, Raw<1>>(p, first, last);
      case 2:
        return read_tokens<Raw<2>, Raw<2>>(p, first, last);
      default:
        return read_tokens<Raw<4>, Raw<4>>(p, first, last);
    }
  }
  dispatch_float(p.dtype, [&](auto model) {
    using T = decltype(model);
    if (p.kv.dtype == DType::kInt4x2) return read_tokens<T, Int4x2>(p, first, last);
    dispatch_8_bit(p.kv.dtype,
                   [&](auto stored) { read_tokens<T, decltype(stored)>(p, first, last); });
  });
}

}  // namespace

VLLM_KERNELS_CPU_KERNEL(GatherCacheParams, loop_of, run)

}  // namespace vllm_kernels::cpu
