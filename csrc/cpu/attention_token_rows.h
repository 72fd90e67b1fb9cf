// Products of few query rows with rows of K and V where they lie (layouts NHD and HND, contiguous
// keys): a row of a token is read, and widened, once for up to 4 query rows. What is needed next
// is fetched on the way, a line at a time: a burst of prefetches would wait for line buffers.
#pragma once
#include "cpu/attention_lanes.h"
#include "cpu/attention_pieces.h"

namespace vllm_kernels::cpu {
namespace {

// The rows of a piece's tokens in K or V; `count` of them, the rest repeats the last.
template <typename T>
struct TokenRows {
  const T* rows[kPieceTokens + kLanes];
  int count = 0;

  // Asks for the lines of `bytes` bytes from element d of the token's row on.
  void prefetch(int token, int d, int bytes) const {
    if (token < count) prefetch_span(reinterpret_cast<const char*>(rows[token] + d), bytes);
  }
};

// scores[h][token] = q . k for `begin` <= token < `end`, begin a multiple of kLanes; of whole
// vectors of tokens.
//   query: [H][query_stride] floats, zeros past head_size; scores: [H][kPieceTokens]
template <typename T, int H, bool kPrefetch>
inline void score_token_rows(const TokenRows<T>& keys, const TokenRows<T>& ahead, int begin,
                             int end, int head_size, const float* query, int query_stride,
                             float* scores) {
  constexpr int kTokens = kLanes / H;                       // at once; kLanes sums
  constexpr int kFetch = 64 / static_cast<int>(sizeof(T));  // elements of a line
  const int whole = head_size / kLanes * kLanes;
  for (int token = begin; token < end; token += kTokens) {
    const T* const* rows = keys.rows + token;
    Vec sums[kLanes] = {};
    int d = 0;
    for (; d < whole; d += kLanes) {
      Vec key[kTokens];
#pragma GCC unroll 16
      for (int i = 0; i < kTokens; ++i) {
        if constexpr (kPrefetch) {
          if (d % kFetch == 0) ahead.prefetch(token + i, d, 1);
        }
        key[i] = load(rows[i] + d);
      }
#pragma GCC unroll 4
      for (int head = 0; head < H; ++head) {
        const Vec q = load(query + head * query_stride + d);
#pragma GCC unroll 16
        for (int i = 0; i < kTokens; ++i) {
          sums[head * kTokens + i] = fma(key[i], q, sums[head * kTokens + i]);
        }
      }
    }
    if (d < head_size) {
      for (int i = 0; i < kTokens; ++i) {
        const Vec key = load_partial(rows[i] + d, head_size - d);
        for (int head = 0; head < H; ++head) {
          const Vec q = load(query + head * query_stride + d);
          sums[head * kTokens + i] = fma(key, q, sums[head * kTokens + i]);
        }
      }
    }
    alignas(64) float all[kLanes];
    store(all, sum_each(sums));
    for (int head = 0; head < H; ++head) {
      std::memcpy(scores + head * kPieceTokens + token, all + head * kTokens,
                  sizeof(float) * kTokens);
    }
  }
}

// out[h] = out[h] * decay[h] + sum over tokens begin .. end of weights[h][token] * V[token], for
// the dimensions d .. d + kVectors vectors (one of them, kPartial: up to head_size).
template <typename T, int H, int kVectors, bool kPartial, bool kPrefetch>
inline void add_token_rows(const TokenRows<T>& values, const TokenRows<T>& ahead, int begin,
                           int end, int head_size, int d, const float* weights, const float* decay,
                           float* out, int out_stride) {
  Vec sums[H][kVectors];
#pragma GCC unroll 4
  for (int head = 0; head < H; ++head) {
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) {
      sums[head][i] = load(out + head * out_stride + d + i * kLanes) * splat(decay[head]);
    }
  }
  for (int token = begin; token < end; ++token) {
    if constexpr (kPrefetch)
      ahead.prefetch(token, d, kPartial ? 1 : kVectors * kLanes * static_cast<int>(sizeof(T)));
    const T* row = values.rows[token] + d;
    Vec value[kVectors];
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) {
      value[i] = kPartial ? load_partial(row, head_size - d) : load(row + i * kLanes);
    }
#pragma GCC unroll 4
    for (int head = 0; head < H; ++head) {
      const Vec weight = splat(weights[head * kPieceTokens + token]);
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; ++i) sums[head][i] = fma(value[i], weight, sums[head][i]);
    }
  }
#pragma GCC unroll 4
  for (int head = 0; head < H; ++head) {
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) {
      store(out + head * out_stride + d + i * kLanes, sums[head][i]);
    }
  }
}

// The same of all dimensions.
template <typename T, int H, bool kPrefetch>
inline void add_token_rows(const TokenRows<T>& values, const TokenRows<T>& ahead, int begin,
                           int end, int head_size, const float* weights, const float* decay,
                           float* out, int out_stride) {
  constexpr int kVectors = kLanes == 16 ? 4 : 2;  // H * kVectors sums
  int d = 0;
  for (; d + kVectors * kLanes <= head_size; d += kVectors * kLanes) {
    add_token_rows<T, H, kVectors, false, kPrefetch>(values, ahead, begin, end, head_size, d,
                                                     weights, decay, out, out_stride);
  }
  for (; d + kLanes <= head_size; d += kLanes) {
    add_token_rows<T, H, 1, false, kPrefetch>(values, ahead, begin, end, head_size, d, weights,
                                              decay, out, out_stride);
  }
  if (d < head_size) {
    add_token_rows<T, H, 1, true, kPrefetch>(values, ahead, begin, end, head_size, d, weights,
                                             decay, out, out_stride);
  }
}

}  // namespace
}  // namespace vllm_kernels::cpu
