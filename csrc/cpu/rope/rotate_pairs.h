// One head turned by its position's angles, in place.
#pragma once
#include <cstdint>
#include <type_traits>

#include "cpu/base/vec_pairs.h"

namespace vllm_kernels::cpu {
namespace {

inline void turn(Vec& x, Vec& y, Vec cosine, Vec sine) {
  const Vec turned = fma(x, cosine, -(y * sine));
  y = fma(y, cosine, x * sine);
  x = turned;
}

// One head, pairs (i, i + n).
template <typename T, typename Cache>
inline void turn_neox(T* head, const Cache* cosines, int64_t n) {
  const Cache* sines = cosines + n;
  int64_t i = 0;
  if constexpr (std::is_same_v<T, Cache>) {  // all in the order that pairs of T have
    for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
      VecPair x = load_pair(head + i), y = load_pair(head + n + i);
      const VecPair cosine = load_pair(cosines + i), sine = load_pair(sines + i);
      turn(x.a, y.a, cosine.a, sine.a);
      turn(x.b, y.b, cosine.b, sine.b);
      store_pair(head + i, x);
      store_pair(head + n + i, y);
    }
  }
  for (; i + kLanes <= n; i += kLanes) {
    Vec x = load(head + i), y = load(head + n + i);
    turn(x, y, load(cosines + i), load(sines + i));
    store(head + i, x);
    store(head + n + i, y);
  }
  if (i < n) {
    Vec x = load_partial(head + i, n - i), y = load_partial(head + n + i, n - i);
    turn(x, y, load_partial(cosines + i, n - i), load_partial(sines + i, n - i));
    store_partial(head + i, x, n - i);
    store_partial(head + n + i, y, n - i);
  }
}

// One head, pairs (2i, 2i + 1).
template <typename T, typename Cache>
inline void turn_gptj(T* head, const Cache* cosines, int64_t n) {
  const Cache* sines = cosines + n;
  Vec x, y, low, high;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Vec cosine = load(cosines + i), sine = load(sines + i);
    if constexpr (std::is_same_v<T, BFloat16>) {  // pairs are even and odd elements already
      VecPair pair = load_pair(head + 2 * i);
      turn(pair.a, pair.b, cosine, sine);
      store_pair(head + 2 * i, pair);
    } else {
      split_pairs(load(head + 2 * i), load(head + 2 * i + kLanes), x, y);
      turn(x, y, cosine, sine);
      join_pairs(x, y, low, high);
      store(head + 2 * i, low);
      store(head + 2 * i + kLanes, high);
    }
  }
  if (i < n) {
    const int64_t left = 2 * (n - i);
    const int64_t in_low = left < kLanes ? left : kLanes;
    T* rest = head + 2 * i;
    split_pairs(load_partial(rest, in_low), load_partial(rest + in_low, left - in_low), x, y);
    turn(x, y, load_partial(cosines + i, n - i), load_partial(sines + i, n - i));
    join_pairs(x, y, low, high);
    store_partial(rest, low, in_low);
    store_partial(rest + in_low, high, left - in_low);
  }
}

// One head of either style; `half` cosines, then as many sines.
template <typename T, typename Cache>
inline void turn_head(T* head, const Cache* cosines, int64_t half, bool is_neox) {
  if (is_neox) {
    turn_neox(head, cosines, half);
  } else {
    turn_gptj(head, cosines, half);
  }
}

}  // namespace
}  // namespace vllm_kernels::cpu
