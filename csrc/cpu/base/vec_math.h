// Functions on one vector of floats. The polynomials were fitted for this file (minimax in relative
// error, coefficients rounded to float one after the other). Anonymous namespace: see
// cpu/base/vec.h.
#pragma once
#include "cpu/base/vec.h"

namespace vllm_kernels::cpu {
namespace {

// e^x within 1.01 ulp. 0 below -87.3 (also -inf; from -104 on AVX-512, denormal in between), inf
// from 88.73 up; NaN stays NaN.
inline Vec exp(Vec x) {
#if defined(__AVX512F__)
  x = minimum(splat(89.0f), maximum(splat(-105.0f), x));  // NaN is the second argument: it passes
#endif
  // x = n * ln2 + r, |r| <= ln2 / 2. Adding 1.5 * 2^23 rounds to the integer n, left in the low
  // bits.
  const Vec magic = splat(0x1.8p23f);
  const Vec shifted = fma(x, splat(0x1.715476p0f), magic);
  const Vec n = shifted - magic;
  Vec r = fma(n, splat(-0x1.63p-1f), x);  // ln2 in two parts; n times the first is exact
  r = fma(n, splat(0x1.bd0106p-13f), r);
  // e^r = 1 + r + r^2 q(r), q in pairs of terms: what bounds exp is its longest chain.
  const Vec r2 = r * r;
  const Vec low = fma(r, splat(0x1.555492p-3f), splat(0x1.fffffcp-2f));
  Vec q = fma(r, splat(0x1.1239c6p-7f), splat(0x1.5558bcp-5f));
  q = fma(r2, splat(0x1.6a4154p-10f), q);
  q = fma(r2, q, low);
  const Vec power = fma(q, r2, r) + splat(1.0f);
#if defined(__AVX512F__)
  return (Vec)_mm512_scalef_ps((__m512)power, (__m512)n);
#else
  // n joins the exponent, which holds it for -126 <= n <= 128 (then power < 1). Past the ends the
  // bits are rubbish, to be replaced; x + inf is inf or NaN.
  const Vec scaled = as_float(as_bits(power) + (as_bits(shifted) << 23));
  const Vec upper = select(x < splat(88.7228394f), scaled, x + splat(__builtin_inff()));
  const VecUint is_zero = (VecUint)(x < splat(-87.3365402f));
  return as_float(as_bits(upper) & ~is_zero);
#endif
}

inline Vec absolute(Vec x) {
  return as_float(as_bits(x) & 0x7fffffffu);
}

// tanh x, odd and with a small relative error: x + x^3 p(x^2), from 0.6 up 1 - 2 / (e^2x + 1).
inline Vec tanh(Vec x) {
  const Vec u = absolute(x), square = x * x;
  Vec p = splat(-0x1.828776p-8f);
  p = fma(p, square, splat(0x1.54c3c2p-6f));
  p = fma(p, square, splat(-0x1.b89abap-5f));
  p = fma(p, square, splat(0x1.1109bep-3f));
  p = fma(p, square, splat(-0x1.55553ep-2f));
  const Vec small = fma(p * square, x, x);
  const Vec large = splat(1.0f) - splat(2.0f) / (exp(u + u) + splat(1.0f));
  const VecUint sign = as_bits(x) & 0x80000000u;
  return select(u < splat(0.6f), small, as_float(as_bits(large) | sign));
}

// The normal distribution's cumulative function, (1 + erf(x / sqrt(2))) / 2, with a small relative
// error also where 1 + erf cancels: for u = |x|, Phi(-u) = e^(-u^2 / 2) p(1 / (1 + 0.35 u)).
inline Vec normal_cdf(Vec x) {
  const Vec u = minimum(splat(15.0f), absolute(x));  // Phi(-15) is 0 in float; NaN passes
  const Vec t = splat(1.0f) / fma(u, splat(0.35f), splat(1.0f));
  Vec p = splat(-0x1.ddc3f8p-6f);
  p = fma(p, t, splat(0x1.27006cp-3f));
  p = fma(p, t, splat(-0x1.0601b8p-2f));
  p = fma(p, t, splat(0x1.4659c2p-3f));
  p = fma(p, t, splat(-0x1.7caafap-6f));
  p = fma(p, t, splat(0x1.b0619cp-4f));
  p = fma(p, t, splat(0x1.eac738p-4f));
  p = fma(p, t, splat(0x1.1e70f0p-3f));
  p = fma(p, t, splat(0x1.1df1c4p-3f)) * t;
  // u^2 / 2 = square - error; e^-square alone would be off by half a unit of the exponent.
  const Vec half = u * splat(0.5f);
  const Vec square = half * u;
  const Vec error = fma(-half, u, square);
  Vec power = exp(-square);
  power = fma(power, error, power);
  const Vec below = power * p;  // Phi(-u)
  return select(x > Vec{}, splat(1.0f) - below, below);
}

}  // namespace
}  // namespace vllm_kernels::cpu
