// Rows of a model's elements stored as elements of the cache.
#pragma once
#include "cpu/base/dispatch.h"

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

}  // namespace
}  // namespace vllm_kernels::cpu
