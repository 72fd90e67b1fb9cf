// RoPE of one head, in place. `cosines` has n cosines, then n sines. See cpu/base/vec.h for the
// anonymous namespace.
#pragma once
#include <cstdint>
#include <type_traits>

#include "cpu/base/vec_pairs.h"

namespace vllm_kernels::cpu {
namespace {

inline void rotate(Vec& x, Vec& y, Vec cosine, Vec sine) {
  const Vec rotated = fma(x, cosine, -(y * sine));
  y = fma(y, cosine, x * sine);
  x = rotated;
}

// One head, pairs (i, i + n).
template <typename T, typename Cache>
inline void rotate_neox(T* head, const Cache* cosines, int64_t n) {
  const Cache* sines = cosines + n;
  int64_t i = 0;
  if constexpr (std::is_same_v<T, Cache>) {  // load_pair() orders all alike
    for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
      VecPair x = load_pair(head + i), y = load_pair(head + n + i);
      const VecPair cosine = load_pair(cosines + i), sine = load_pair(sines + i);
      rotate(x.a, y.a, cosine.a, sine.a);
      rotate(x.b, y.b, cosine.b, sine.b);
      store_pair(head + i, x);
      store_pair(head + n + i, y);
    }
  }
  for_each_vector(i, n, [&](int64_t j, auto count) {
    Vec x = load(head + j, count), y = load(head + n + j, count);
    rotate(x, y, load(cosines + j, count), load(sines + j, count));
    store(head + j, x, count);
    store(head + n + j, y, count);
  });
}

// One head, pairs (2i, 2i + 1).
template <typename T, typename Cache>
inline void rotate_gptj(T* head, const Cache* cosines, int64_t n) {
  const Cache* sines = cosines + n;
  Vec x, y, low, high;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Vec cosine = load(cosines + i), sine = load(sines + i);
    if constexpr (std::is_same_v<T, BFloat16>) {  // load_pair() deinterleaves
      VecPair pair = load_pair(head + 2 * i);
      rotate(pair.a, pair.b, cosine, sine);
      store_pair(head + 2 * i, pair);
    } else {
      split_pairs(load(head + 2 * i), load(head + 2 * i + kLanes), x, y);
      rotate(x, y, cosine, sine);
      join_pairs(x, y, low, high);
      store(head + 2 * i, low);
      store(head + 2 * i + kLanes, high);
    }
  }
  if (i < n) {
    const int64_t left = 2 * (n - i);
    const int64_t in_low = left < kLanes ? left : kLanes;
    T* rest = head + 2 * i;
    split_pairs(load(rest, in_low), load(rest + in_low, left - in_low), x, y);
    rotate(x, y, load(cosines + i, n - i), load(sines + i, n - i));
    join_pairs(x, y, low, high);
    store(rest, low, in_low);
    store(rest + in_low, high, left - in_low);
  }
}

// `half` is the number of cosines: half of rotary_size.
template <typename T, typename Cache>
inline void rotate_head(T* head, const Cache* cosines, int64_t half, bool is_neox) {
  if (is_neox) {
    rotate_neox(head, cosines, half);
  } else {
    rotate_gptj(head, cosines, half);
  }
}

}  // namespace
}  // namespace vllm_kernels::cpu
