#include "ops/gather_cache.h"

#include "cpu/base/dispatch.h"
#include "cpu/kernels.h"

namespace vllm_kernels::cpu {
namespace {

// Storage of elements that are only moved.
template <int kBytes>
struct Raw {
  char bytes[kBytes];
};

constexpr int kPiece = 16 * kLanes;  // elements converted at a time

template <typename T, typename C>
void convert(T* to, const C* from, int64_t n, float scale) {
  if constexpr (std::is_same_v<T, C>) {
    std::memcpy(to, from, n * sizeof(T));
  } else {
    const Vec factor = splat(scale);
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) store(to + i, load(from + i) * factor);
    if (i < n) store_partial(to + i, load_partial(from + i, n - i) * factor, n - i);
  }
}

// One head of one token: `from` has `run` elements in a row, then the next `run` start `stride`
// later.
template <typename T, typename C>
void read_row(T* to, const C* from, int64_t run, int64_t stride, int64_t n, float scale) {
  if (run >= n) return convert(to, from, n, scale);
  C piece[kPiece];
  for (int64_t i = 0; i < n; i += kPiece) {  // kPiece is a multiple of run, which is 1 or x
    const int64_t count = n - i < kPiece ? n - i : kPiece;
    const C* at = from + i / run * stride;
    if (run == 1) {
      for (int64_t j = 0; j < count; ++j) piece[j] = at[j * stride];
    } else {
      for (int64_t j = 0; j < count; j += run, at += stride) std::memcpy(piece + j, at, 16);
    }
    convert(to + i, piece, count, scale);
  }
}

template <typename T, typename C>
void read_token(const GatherCacheParams& p, int64_t row, TokenLocation at) {
  const PagedKv& kv = p.kv;
  const bool vllm = kv.layout == KvLayout::kVllm;
  for (int64_t head = 0; head < kv.num_kv_heads; ++head) {
    T* key = static_cast<T*>(p.key) + row * p.key_row_stride + head * p.key_head_stride;
    T* value = static_cast<T*>(p.value) + row * p.value_row_stride + head * p.value_head_stride;
    if (at.block < 0) {
      std::memset(static_cast<void*>(key), 0, kv.head_size * sizeof(T));
      if (p.value != nullptr) {
        std::memset(static_cast<void*>(value), 0, kv.head_size * sizeof(T));
      }
      continue;
    }
    constexpr bool kScaled = !std::is_same_v<T, C>;
    read_row(key, static_cast<const C*>(kv.key) + kv.key_offset(at.block, head, at.token, 0),
             vllm ? kv.x : kv.head_size, kv.key_chunk_stride, kv.head_size,
             kScaled ? p.scale(kv.k_scale, at, head) : 1.0f);
    if (p.value == nullptr) continue;
    read_row(value, static_cast<const C*>(kv.value) + kv.value_offset(at.block, head, at.token, 0),
             vllm ? 1 : kv.head_size, kv.value_dim_stride, kv.head_size,
             kScaled ? p.scale(kv.v_scale, at, head) : 1.0f);
  }
}

int64_t task_rows(const GatherCacheParams& p) {
  return rows_per_task(2 * int64_t{p.kv.num_kv_heads} * p.kv.head_size *
                       (size_of(p.dtype) + size_of(p.kv.dtype)));
}

int64_t num_tasks(const GatherCacheParams& p) {
  return ceil_div(p.tokens.num_rows, task_rows(p));
}

template <typename T, typename C>
void read_tokens(const GatherCacheParams& p, int64_t begin, int64_t end) {
  const PagedTokens& tokens = p.tokens;
  int32_t seq = 0;
  for (int64_t row = begin; row < end; ++row) {
    if (tokens.token_to_seq != nullptr) {
      seq = tokens.token_to_seq[row];
    } else {
      while (seq < tokens.num_seqs && tokens.cu_seq_lens[seq + 1] <= row) ++seq;
    }
    const TokenLocation at = tokens.locate(static_cast<int32_t>(row), seq);
    if (at.block != TokenLocation::kUnwritten) read_token<T, C>(p, row, at);
  }
}

void run(const GatherCacheParams& p, int64_t begin, int64_t end) {
  const int64_t step = task_rows(p), rows = p.tokens.num_rows;
  const int64_t first = begin * step, last = end * step < rows ? end * step : rows;
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
  dispatch_float(p.dtype, [&](auto rows_of) {
    using T = decltype(rows_of);
    dispatch_8_bit(p.kv.dtype,
                   [&](auto stored) { read_tokens<T, decltype(stored)>(p, first, last); });
  });
}

}  // namespace
}  // namespace vllm_kernels::cpu

VLLM_KERNELS_CPU_KERNEL(vllm_kernels::GatherCacheParams, vllm_kernels::cpu::num_tasks,
                        vllm_kernels::cpu::run)
