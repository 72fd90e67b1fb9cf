// Writes rows of a model's elements into a cache. See cpu/base/vec.h for the anonymous namespace.
#pragma once
#include "cpu/base/dispatch.h"

namespace vllm_kernels::cpu {
namespace {

constexpr int kBufferElements = 16 * kLanes;  // elements converted at a time

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

// Writes one head of one token. `to` has `run` contiguous elements every `stride` elements. `run`
// is 1, x or at least n; 1 and x divide kBufferElements.
template <typename T, typename C>
void write_row(C* to, int64_t run, int64_t stride, const T* from, int64_t n, float scale) {
  if (run >= n) return convert(to, from, n, scale);
  C buffer[kBufferElements];
  for (int64_t i = 0; i < n; i += kBufferElements) {
    const int64_t count = n - i < kBufferElements ? n - i : kBufferElements;
    convert(buffer, from + i, count, scale);
    C* at = to + i / run * stride;
    if (run == 1) {
      for (int64_t j = 0; j < count; ++j) at[j * stride] = buffer[j];
    } else {
      for (int64_t j = 0; j < count; j += run, at += stride) std::memcpy(at, buffer + j, 16);
    }
  }
}

}  // namespace
}  // namespace vllm_kernels::cpu
