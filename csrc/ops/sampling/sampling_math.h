// Arithmetic of the sampling ops. CPU, CUDA and vllm_kernels/reference/sampling.py give equal bits:
// every step is one float32 operation, rounded to nearest, in a fixed order. Weights are integers,
// so sums do not depend on their order.
//
// `Math` says what a float is: a scalar here, a vector in csrc/cpu/sampling/vec_sampling.h.
#pragma once
#include <cstdint>
#include <cstring>

#include "ops/rows.h"

// For members: inlined at every level, so no level of csrc/cpu can get another's copy.
#if defined(__CUDACC__)
#define VLLM_KERNELS_INLINE __host__ __device__ __forceinline__
#else
#define VLLM_KERNELS_INLINE inline __attribute__((always_inline))
#endif

namespace vllm_kernels {

constexpr int64_t kMaxVocab = int64_t{1} << 18;
// A weight is floor(e^(x - max) * 2^40). kMaxVocab of them add up to less than 2^59.
constexpr float kWeightOne = 0x1p40f;
// Temperatures below this select the highest logit.
constexpr float kMinTemperature = 1e-5f;
// Radix selection: 11, 11 and 10 bits of ordered bits, from the top.
constexpr int kRadixBins = 2048;
constexpr int kRadixRounds = 3;

template <typename To, typename From>
VLLM_KERNELS_HOST_DEVICE static inline To sampling_bits(From from) {
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

struct ScalarMath {
  using F = float;
  VLLM_KERNELS_INLINE static F constant(float x) { return x; }
#if defined(__CUDA_ARCH__)
  VLLM_KERNELS_INLINE static F fused(F a, F b, F c) { return __fmaf_rn(a, b, c); }
  VLLM_KERNELS_INLINE static F multiply(F a, F b) { return __fmul_rn(a, b); }
  VLLM_KERNELS_INLINE static F add(F a, F b) { return __fadd_rn(a, b); }
#else
  VLLM_KERNELS_INLINE static F fused(F a, F b, F c) { return __builtin_fmaf(a, b, c); }
  VLLM_KERNELS_INLINE static F multiply(F a, F b) { return a * b; }
  VLLM_KERNELS_INLINE static F add(F a, F b) { return a + b; }
#endif
  VLLM_KERNELS_INLINE static F at_least(F x, F low) { return x < low ? low : x; }
  // Multiplies x by 2^n. The low bits of `shifted` hold n.
  VLLM_KERNELS_INLINE static F scale(F x, F shifted) {
    return sampling_bits<F>(sampling_bits<uint32_t>(x) + (sampling_bits<uint32_t>(shifted) << 23));
  }
};

// e^d for d <= 0, within 1.01 ulp. Below -87 it is e^-87.
template <typename Math>
VLLM_KERNELS_HOST_DEVICE static inline typename Math::F exp_of_difference(typename Math::F d) {
  const auto c = [](float x) { return Math::constant(x); };
  d = Math::at_least(d, c(-87.0f));
  // d = n * ln2 + r, |r| <= ln2 / 2. Adding 1.5 * 2^23 leaves the rounded n in the low bits.
  const auto shifted = Math::fused(d, c(0x1.715476p0f), c(0x1.8p23f));
  const auto n = Math::add(shifted, c(-0x1.8p23f));
  auto r = Math::fused(n, c(-0x1.63p-1f), d);
  r = Math::fused(n, c(0x1.bd0106p-13f), r);
  // The polynomial of csrc/cpu/base/vec_math.h.
  const auto r2 = Math::multiply(r, r);
  const auto low = Math::fused(r, c(0x1.555492p-3f), c(0x1.fffffcp-2f));
  auto q = Math::fused(r, c(0x1.1239c6p-7f), c(0x1.5558bcp-5f));
  q = Math::fused(r2, c(0x1.6a4154p-10f), q);
  q = Math::fused(r2, q, low);
  return Math::scale(Math::add(Math::fused(q, r2, r), c(1.0f)), shifted);
}

// ln(v) - bits * ln2 for a normal v > 0, within 2 ulp or 1e-7 of the result.
VLLM_KERNELS_HOST_DEVICE static inline float log_of(float v, int bits = 0) {
  using M = ScalarMath;
  // v = f * 2^n with f in [sqrt(1/2), sqrt(2)).
  const uint32_t word = sampling_bits<uint32_t>(v);
  const int32_t n = static_cast<int32_t>(word - 0x3f3504f3u) >> 23;
  const float r = M::add(sampling_bits<float>(word - (static_cast<uint32_t>(n) << 23)), -1.0f);
  // ln(1 + r) = r + r^2 (r p(r) - 1/2), a minimax fit made for this file.
  float p = -0x1.403966p-4f;
  p = M::fused(p, r, 0x1.069198p-3f);
  p = M::fused(p, r, -0x1.0c9ccep-3f);
  p = M::fused(p, r, 0x1.229d9cp-3f);
  p = M::fused(p, r, -0x1.5485c2p-3f);
  p = M::fused(p, r, 0x1.99a390p-3f);
  p = M::fused(p, r, -0x1.0001e2p-2f);
  p = M::fused(p, r, 0x1.55554ep-2f);
  p = M::fused(p, r, -0.5f);
  p = M::fused(p, M::multiply(r, r), r);
  const float exponent = static_cast<float>(n - bits);
  return M::fused(exponent, 0x1.63p-1f, M::fused(exponent, -0x1.bd0106p-13f, p));
}

// --- order: unsigned integers that compare like the logits, -0 like +0, NaN above +inf -----------

constexpr uint32_t kOrderedNan = 0xffffffffu;
constexpr uint32_t kOrderedInfinity = 0xff800000u;
constexpr uint32_t kOrderedMinusInfinity = 0x007fffffu;

VLLM_KERNELS_HOST_DEVICE static inline uint32_t ordered_bits(float x) {
  const uint32_t word = sampling_bits<uint32_t>(ScalarMath::add(x, 0.0f));
  const uint32_t ordered =
      word ^ (static_cast<uint32_t>(static_cast<int32_t>(word) >> 31) | 0x80000000u);
  return x != x ? kOrderedNan : ordered;
}
VLLM_KERNELS_HOST_DEVICE static inline float from_ordered_bits(uint32_t ordered) {
  const uint32_t flip = ~static_cast<uint32_t>(static_cast<int32_t>(ordered) >> 31) | 0x80000000u;
  return sampling_bits<float>(ordered ^ flip);
}
VLLM_KERNELS_HOST_DEVICE static inline bool is_finite_ordered(uint32_t ordered) {
  return ordered > kOrderedMinusInfinity && ordered < kOrderedInfinity;
}

// The bin of a round, and whether the rounds before chose the value's leading bits.
VLLM_KERNELS_HOST_DEVICE constexpr int radix_shift(int round) {
  return round == 0 ? 21 : round == 1 ? 10 : 0;
}
VLLM_KERNELS_HOST_DEVICE constexpr int radix_bits(int round) {
  return round == 2 ? 10 : 11;
}
VLLM_KERNELS_HOST_DEVICE static inline bool in_radix_prefix(uint32_t ordered, uint32_t prefix,
                                                            int round) {
  return round == 0 || ((ordered ^ prefix) >> (radix_shift(round) + radix_bits(round))) == 0;
}

// floor(e^d * 2^40) for d <= 0, the difference of a logit from the highest one.
VLLM_KERNELS_HOST_DEVICE static inline uint64_t weight_of_difference(float d) {
  return static_cast<uint64_t>(ScalarMath::multiply(exp_of_difference<ScalarMath>(d), kWeightOne));
}

// floor(e^(x - max) * 2^40), given both in ordered bits and finite, or x = -inf.
VLLM_KERNELS_HOST_DEVICE static inline uint64_t weight_of(uint32_t ordered, float max) {
  return weight_of_difference(ScalarMath::add(from_ordered_bits(ordered), -max));
}

// e^(x - max) / sum; NaN if the sum is NaN.
VLLM_KERNELS_HOST_DEVICE static inline float probability(uint32_t ordered, float max, float sum) {
  const float d = ScalarMath::add(from_ordered_bits(ordered), -max);
  return (d < -87.0f ? 0.0f : exp_of_difference<ScalarMath>(d)) / sum;
}

// --- exact products of a sum and a fraction ------------------------------------------------------

// floor(fraction * 2^64), within [0, 2^64); NaN and numbers below 0 give 0.
VLLM_KERNELS_HOST_DEVICE static inline uint64_t fixed_point(float fraction) {
  if (!(fraction > 0.0f)) return 0;
  if (fraction >= 1.0f) return ~uint64_t{0};
  return static_cast<uint64_t>(ScalarMath::multiply(fraction, 0x1p64f));
}

VLLM_KERNELS_HOST_DEVICE static inline uint64_t high_product(uint64_t a, uint64_t b) {
#if defined(__CUDA_ARCH__)
  return __umul64hi(a, b);
#else
  return static_cast<uint64_t>((static_cast<unsigned __int128>(a) * b) >> 64);
#endif
}

// Tokens are kept while the weights before them sum to less than this: ceil(top_p * sum), at
// lowest 1.
VLLM_KERNELS_HOST_DEVICE static inline uint64_t top_p_limit(float top_p, uint64_t sum) {
  const uint64_t fraction = fixed_point(top_p);
  const uint64_t limit = high_product(sum, fraction) + (sum * fraction != 0);
  return limit > 0 ? limit : 1;
}

// ceil(rest / weight) for 1 <= rest <= 2^18 * weight: how many tokens of a weight reach `rest`.
VLLM_KERNELS_HOST_DEVICE static inline uint32_t number_to_reach(uint64_t rest, uint64_t weight) {
  uint32_t fewer = 0;  // the largest number that does not reach it
  for (uint32_t bit = 1u << 18; bit != 0; bit >>= 1) {
    if ((fewer + bit) * weight < rest) fewer += bit;
  }
  return fewer + 1;
}

// --- random numbers --------------------------------------------------------------------------

// Philox 4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): the first 64
// bits for key `seed` and counter `offset`.
VLLM_KERNELS_HOST_DEVICE static inline uint64_t philox(uint64_t seed, uint64_t offset) {
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  uint32_t x0 = static_cast<uint32_t>(offset), x1 = static_cast<uint32_t>(offset >> 32);
  uint32_t x2 = 0, x3 = 0;
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * x0, b = uint64_t{0xCD9E8D57u} * x2;
    x0 = static_cast<uint32_t>(b >> 32) ^ x1 ^ key0;
    x2 = static_cast<uint32_t>(a >> 32) ^ x3 ^ key1;
    x1 = static_cast<uint32_t>(b);
    x3 = static_cast<uint32_t>(a);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return uint64_t{x1} << 32 | x0;
}

}  // namespace vllm_kernels
