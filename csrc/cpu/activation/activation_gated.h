// The gated activations of ops/activation_gated.h on vectors, and the chunks of their rows. See
// cpu/base/vec.h for the anonymous namespace.
#pragma once
#include "cpu/base/dispatch.h"
#include "cpu/base/vec.h"
#include "cpu/base/vec_math.h"
#include "cpu/base/vec_pairs.h"
#include "ops/activation_gated.h"

namespace vllm_kernels::cpu {
namespace {

struct GateAndUp {
  Vec gate, up;
};

inline GateAndUp deinterleaved(Vec a, Vec b) {
  GateAndUp pair;
  split_pairs(a, b, pair.gate, pair.up);
  return pair;
}

// NaN passes as the second argument of minimum().
inline Vec bounded_above(Vec x, float bound) {
  return minimum(splat(bound), x);
}

inline Vec sigmoid_product(Vec x, Vec exponent) {  // x / (1 + e^exponent)
  return x / (splat(1.0f) + exp(exponent));
}

template <Gated kFunction>
inline Vec gate_value(const GatedParams& p, Vec gate) {
  if constexpr (kFunction == Gated::kSilu) {
    return sigmoid_product(gate, -gate);
  } else if constexpr (kFunction == Gated::kFatRelu) {
    return select(gate <= splat(p.bound), Vec{}, gate);
  } else {
    const Vec bounded = bounded_above(gate, p.bound);
    if constexpr (kFunction == Gated::kSiluClamp) return sigmoid_product(bounded, -bounded);
    return sigmoid_product(bounded, bounded * splat(-p.alpha));
  }
}

template <Gated kFunction>
inline Vec up_value(const GatedParams& p, Vec up) {
  if constexpr (kFunction == Gated::kSilu || kFunction == Gated::kFatRelu) {
    return up;
  } else {
    const Vec bounded = maximum(splat(-p.bound), bounded_above(up, p.bound));
    return kFunction == Gated::kSwigluOai ? bounded + splat(1.0f) : bounded;
  }
}

// Elements from i on: a vector, or `count` < kLanes of them.
template <Gated kFunction, typename T>
inline GateAndUp load_gated(const T* gate, const T* up, int64_t i) {
  if constexpr (kFunction == Gated::kSwigluOai) {
    return deinterleaved(load(gate + 2 * i), load(gate + 2 * i + kLanes));
  } else {
    return {load(gate + i), load(up + i)};
  }
}
template <Gated kFunction, typename T>
inline GateAndUp load_gated_partial(const T* gate, const T* up, int64_t i, int64_t count) {
  if constexpr (kFunction == Gated::kSwigluOai) {
    T pairs[2 * kLanes] = {};
    std::memcpy(pairs, gate + 2 * i, 2 * count * sizeof(T));
    return deinterleaved(load(pairs), load(pairs + kLanes));
  } else {
    return {load_partial(gate + i, count), load_partial(up + i, count)};
  }
}

// The product as float32. If kRounds, it is rounded to T after the activation and at the end.
template <Gated kFunction, bool kRounds, typename T>
inline Vec gated_product(const GatedParams& p, GateAndUp x) {
  const Vec gate = gate_value<kFunction>(p, x.gate), up = up_value<kFunction>(p, x.up);
  if constexpr (!kRounds) return gate * up;
  return round_to<T>(round_to<T>(gate) * up);
}

// A chunk is up to kGatedChunk elements of one row, in whole quantization groups.
constexpr int64_t kGatedChunk = 4096;

struct GatedChunks {
  int64_t per_row;
  int64_t count;
  int64_t per_task;
  explicit GatedChunks(const GatedParams& p) {
    per_row = ceil_div(p.width, kGatedChunk);
    count = per_row * p.gate_rows.count;
    const int64_t elements = p.width < kGatedChunk ? p.width : kGatedChunk;
    per_task = rows_per_task(3 * elements * size_of(p.dtype));
  }
  int64_t num_tasks() const { return ceil_div(count, per_task); }

  // Calls body(row, first element, elements) for the chunks of tasks [begin, end).
  template <typename Body>
  void for_each(const GatedParams& p, int64_t begin, int64_t end, Body&& body) const {
    const int64_t last = end * per_task < count ? end * per_task : count;
    for (int64_t chunk = begin * per_task; chunk < last; ++chunk) {
      const int64_t first = chunk % per_row * kGatedChunk;
      const int64_t left = p.width - first;
      body(chunk / per_row, first, left < kGatedChunk ? left : kGatedChunk);
    }
  }
};

}  // namespace
}  // namespace vllm_kernels::cpu
