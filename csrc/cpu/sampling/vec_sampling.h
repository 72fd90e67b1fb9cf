// Sampling arithmetic on vectors, bit for bit that of ops/sampling/sampling_math.h, and selection
// on a row of ordered bits. See cpu/base/vec.h for the anonymous namespace.
#pragma once
#include "cpu/base/dispatch.h"
#include "cpu/kernels.h"
#include "ops/sampling/sample.h"

namespace vllm_kernels::cpu {
namespace {

struct VecMath {
  using F = Vec;
  static Vec constant(float x) { return splat(x); }
  static Vec fused(Vec a, Vec b, Vec c) {
#if defined(__AVX2__)
    return fma(a, b, c);
#else
    for (int lane = 0; lane < kLanes; ++lane) c[lane] = __builtin_fmaf(a[lane], b[lane], c[lane]);
    return c;
#endif
  }
  static Vec multiply(Vec a, Vec b) { return a * b; }
  static Vec add(Vec a, Vec b) { return a + b; }
  static Vec at_least(Vec x, Vec low) { return maximum(low, x); }
  static Vec scale(Vec x, Vec shifted) { return as_float(as_bits(x) + (as_bits(shifted) << 23)); }
};

inline VecUint ordered_bits(Vec x) {
  const VecUint word = as_bits(x + Vec{});
  const VecUint sign = (VecUint)((VecInt)word >> 31);
  const VecUint ordered = word ^ (sign | 0x80000000u);
  return ordered | (VecUint)(x != x);  // NaN: all ones
}
inline Vec from_ordered_bits(VecUint ordered) {
  const VecUint sign = (VecUint)((VecInt)ordered >> 31);
  return as_float(ordered ^ (~sign | 0x80000000u));
}

inline VecUint load_ordered(const uint32_t* from) {
  return load_raw<VecUint>(from);
}

// e^(x - max) * 2^40. A weight is its whole part, which a float holds exactly.
inline Vec to_weights(Vec e) {
  return e * splat(kWeightOne);
}
inline Vec weights_of(VecUint ordered, float max) {
  return to_weights(exp_of_difference<VecMath>(from_ordered_bits(ordered) + splat(-max)));
}

// The exact sum of the whole parts of weights.
#if defined(__AVX512DQ__)
class WeightSum {
 public:
  void add(Vec weights) {
    const __m512 x = (__m512)weights;
    low_ = _mm512_add_epi64(low_, _mm512_cvttps_epu64(_mm512_castps512_ps256(x)));
    high_ = _mm512_add_epi64(high_, _mm512_cvttps_epu64(_mm512_extractf32x8_ps(x, 1)));
  }
  uint64_t total() const {
    return static_cast<uint64_t>(_mm512_reduce_add_epi64(_mm512_add_epi64(low_, high_)));
  }

 private:
  __m512i low_ = _mm512_setzero_si512();
  __m512i high_ = _mm512_setzero_si512();
};
#else
class WeightSum {
 public:
  void add(Vec weights) {
    const VecInt has_fraction = weights < splat(0x1p23f);
    const Vec small = as_float(as_bits(weights) & (VecUint)has_fraction);
    const Vec whole = __builtin_convertvector(__builtin_convertvector(small, VecInt), Vec);
    const Vec floors = select(has_fraction, whole, weights);
    // Two native vectors: GCC keeps one of 8 * kLanes bytes in memory.
#if defined(__AVX2__)
    low_ += (VecDouble)_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)floors));
    high_ += (VecDouble)_mm256_cvtps_pd(_mm256_extractf128_ps((__m256)floors, 1));
#else
    VecHalf halves[2];
    std::memcpy(halves, &floors, sizeof(halves));
    low_ += __builtin_convertvector(halves[0], VecDouble);
    high_ += __builtin_convertvector(halves[1], VecDouble);
#endif
    if (++count_ == 4096) flush();  // a double holds 2^13 weights of 2^40
  }
  uint64_t total() {
    flush();
    return total_;
  }

 private:
  typedef float VecHalf __attribute__((vector_size(2 * kLanes)));
  typedef double VecDouble __attribute__((vector_size(4 * kLanes)));

  void flush() {
    double sums[kLanes / 2];  // so that low_ and high_ stay in registers
    const VecDouble both = low_ + high_;
    std::memcpy(sums, &both, sizeof(sums));
    for (const double sum : sums) total_ += static_cast<uint64_t>(sum);
    low_ = high_ = VecDouble{};
    count_ = 0;
  }
  VecDouble low_ = {};
  VecDouble high_ = {};
  uint64_t total_ = 0;
  int count_ = 0;
};
#endif

inline Vec keep_lanes(VecInt mask, Vec x) {
  return as_float(as_bits(x) & (VecUint)mask);
}

// --- a row of ordered bits, padded with 0, which is below every logit, to whole vectors ----------

inline int64_t padded(int64_t n) {
  return (n + kLanes - 1) / kLanes * kLanes;
}

// The highest of unsigned values.
class Highest {
 public:
  void add(VecUint values) {
    // Flipping the top bit makes the order that of signed integers.
    const VecInt value = (VecInt)(values ^ 0x80000000u);
    best_ = value > best_ ? value : best_;
  }
  uint32_t get() const {
    int32_t result = best_[0];
    for (int lane = 1; lane < kLanes; ++lane) result = best_[lane] > result ? best_[lane] : result;
    return static_cast<uint32_t>(result) ^ 0x80000000u;
  }

 private:
  VecInt best_ = VecInt{} + INT32_MIN;
};

inline int64_t first_equal(const uint32_t* ordered, int64_t n, uint32_t value) {
  for (int64_t i = 0; i < n; ++i) {
    if (ordered[i] == value) return i;
  }
  return 0;
}

inline VecInt not_below_mask(VecUint a, uint32_t b) {
  return (VecInt)(a >= VecUint{} + b);
}

// Whether any lane of a mask is set.
inline bool any(VecInt mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps((__m256)mask) != 0;
#else
  int32_t lanes = 0;
  for (int lane = 0; lane < kLanes; ++lane) lanes |= mask[lane];
  return lanes != 0;
#endif
}

// Copies the values of at least `lowest` to `list` and returns their number. The list needs room
// for n + kLanes values.
inline int64_t compact(const uint32_t* ordered, int64_t n, uint32_t lowest, uint32_t* list) {
  int64_t count = 0;
  for (int64_t i = 0; i < n; i += kLanes) {
    const VecUint value = load_ordered(ordered + i);
    const VecInt mask = not_below_mask(value, lowest);
#if defined(__AVX512F__)
    const __mmask16 lanes = _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask);
    _mm512_storeu_si512(list + count, _mm512_maskz_compress_epi32(lanes, (__m512i)value));
    count += __builtin_popcount(lanes);
#else
    if (!any(mask)) continue;
    for (int lane = 0; lane < kLanes; ++lane) {
      list[count] = value[lane];
      count += mask[lane] & 1;
    }
#endif
  }
  return count;
}

// The sum of weights of values above `threshold`, and the number of values equal to it.
struct KeptSums {
  uint64_t above = 0;
  uint32_t equal = 0;
};
inline KeptSums kept_sums(const uint32_t* ordered, int64_t n, uint32_t threshold, float max) {
  WeightSum above;
  VecInt equal = {};
  for (int64_t i = 0; i < n; i += kLanes) {
    const VecUint value = load_ordered(ordered + i);
    const VecInt is_above = (VecInt)(value > VecUint{} + threshold);
    equal -= (VecInt)(value == VecUint{} + threshold);
    if (any(is_above)) above.add(keep_lanes(is_above, weights_of(value, max)));
  }
  KeptSums sums{above.total(), 0};
  for (int lane = 0; lane < kLanes; ++lane) sums.equal += static_cast<uint32_t>(equal[lane]);
  return sums;
}

// What a radix selection found: the threshold, the count or weight above it, and that of the values
// equal to it.
struct Radix {
  uint32_t prefix = 0;
  uint64_t before = 0;
  uint64_t inside = 0;
};

// The value where the cumulated count, or the cumulated `weights`, of a list reaches `target`, from
// the highest value down. The list is compacted in place.
template <bool kWeights>
inline Radix select(uint32_t* list, float* weights, int64_t n, uint64_t target) {
  Radix found;
  uint64_t bins[kRadixBins];
  for (int round = 0; round < kRadixRounds; ++round) {
    const int shift = radix_shift(round);
    const uint32_t mask = (1u << radix_bits(round)) - 1;
    std::memset(bins, 0, sizeof(bins));
    for (int64_t i = 0; i < n; ++i) {
      bins[list[i] >> shift & mask] += kWeights ? static_cast<uint64_t>(weights[i]) : 1;
    }
    int bin = kRadixBins - 1;
    while (bin > 0 && found.before + bins[bin] < target) found.before += bins[bin--];
    found.inside = bins[bin];
    found.prefix |= static_cast<uint32_t>(bin) << shift;
    int64_t left = 0;
    for (int64_t i = 0; i < n; ++i) {
      if ((list[i] >> shift & mask) != static_cast<uint32_t>(bin)) continue;
      if constexpr (kWeights) weights[left] = weights[i];
      list[left++] = list[i];
    }
    n = left;
  }
  return found;
}

// The selection by count on a row, for a target of 1 to n. `list` gets the values that pass round
// 0.
inline Radix select_by_count(const uint32_t* ordered, int64_t n, uint64_t target, uint32_t* list) {
  uint32_t bins[kRadixBins] = {};
  for (int64_t i = 0; i < n; ++i) ++bins[ordered[i] >> radix_shift(0)];
  uint64_t before = 0;
  int bin = kRadixBins - 1;
  while (bin > 0 && before + bins[bin] < target) before += bins[bin--];
  const uint32_t edge = static_cast<uint32_t>(bin) << radix_shift(0);
  return select<false>(list, nullptr, compact(ordered, n, edge > 0 ? edge : 1, list), target);
}

// --- from logits to ordered bits -----------------------------------------------------------------

// ordered[i] = ordered bits of n logits, padded with 0. logits(i, count): `count` of them from i
// on. Returns the highest.
template <typename Logits>
inline uint32_t to_ordered(int64_t n, uint32_t* ordered, const Logits& logits) {
  Highest highest;
  for_each_vector(0, n, [&](int64_t i, auto count) {
    VecUint bits = ordered_bits(logits(i, count));
    store_raw(ordered + i, bits);
    if constexpr (!std::is_same_v<decltype(count), WholeVector>) {
      for (int64_t lane = count; lane < kLanes; ++lane) ordered[i + lane] = 0;
      bits = load_ordered(ordered + i);
    }
    highest.add(bits);
  });
  return highest.get();
}

// -inf for the lanes' tokens, `token` and the next, that the words of a bitmask forbid.
inline Vec masked(Vec logits, const Bitmask& mask, const int32_t* words, int64_t token) {
  if (words == nullptr || token / 32 >= mask.num_words) return logits;
  VecUint lane = {};
  for (int i = 0; i < kLanes; ++i) lane[i] = 1u << i;
  const uint32_t bits = static_cast<uint32_t>(words[token / 32]) >> (token % 32);
  const VecInt allowed = (VecInt)(((VecUint{} + bits) & lane) != 0);
  return select(allowed, logits, splat(-__builtin_inff()));
}

}  // namespace
}  // namespace vllm_kernels::cpu
