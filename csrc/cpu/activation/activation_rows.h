// The gated activations of ops/activation_gated.h on vectors, and the chunks of rows of all
// activations. See cpu/base/vec.h for the anonymous namespace.
#pragma once
#include "cpu/base/dispatch.h"
#include "cpu/base/vec.h"
#include "cpu/base/vec_math.h"
#include "cpu/base/vec_pairs.h"
#include "cpu/kernels.h"
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

// Elements from i on: a vector, or its first `count`.
template <Gated kFunction, typename T, typename Count>
inline GateAndUp load_gated(const T* gate, const T* up, int64_t i, Count count) {
  if constexpr (kFunction != Gated::kSwigluOai) {
    return {load(gate + i, count), load(up + i, count)};
  } else if constexpr (std::is_same_v<Count, WholeVector>) {
    return deinterleaved(load(gate + 2 * i), load(gate + 2 * i + kLanes));
  } else {
    T pairs[2 * kLanes] = {};
    std::memcpy(pairs, gate + 2 * i, 2 * count * sizeof(T));
    return deinterleaved(load(pairs), load(pairs + kLanes));
  }
}

// The product as float32. If kRounds, it is rounded to T after the activation and at the end.
template <Gated kFunction, bool kRounds, typename T>
inline Vec gated_product(const GatedParams& p, GateAndUp x) {
  const Vec gate = gate_value<kFunction>(p, x.gate), up = up_value<kFunction>(p, x.up);
  if constexpr (!kRounds) return gate * up;
  return round_to<T>(round_to<T>(gate) * up);
}

// A chunk is up to kChunk elements of one row, in whole quantization groups.
constexpr int64_t kChunk = 4096;

inline Loop chunk_loop(int64_t rows, int64_t width, DType dtype) {
  const int64_t elements = width < kChunk ? width : kChunk;
  return {.count = rows * ceil_div(width, kChunk),
          .per_task = rows_per_task(3 * elements * size_of(dtype))};
}

// Calls body(row, first element, elements) for chunks [begin, end) of rows of `width` elements.
template <typename Body>
inline void for_each_chunk(int64_t width, int64_t begin, int64_t end, const Body& body) {
  const int64_t per_row = ceil_div(width, kChunk);
  for (int64_t chunk = begin; chunk < end; ++chunk) {
    const int64_t first = chunk % per_row * kChunk, left = width - first;
    body(chunk / per_row, first, left < kChunk ? left : kChunk);
  }
}

}  // namespace
}  // namespace vllm_kernels::cpu
