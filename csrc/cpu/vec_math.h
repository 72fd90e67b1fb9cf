// exp and friends on one vector of floats. Polynomials were fitted for this file (minimax in relative
// error, coefficients rounded to float one by one). Anonymous namespace: see cpu/vec.h.
#pragma once
#include "cpu/vec.h"

namespace vllm_kernels::cpu {
namespace {

// e^x within 1 ulp. 0 from -104 down (also -inf), denormal between -103.9 and -87.4, inf from 88.73
// up; NaN stays NaN.
inline Vec exp(Vec x) {
  x = minimum(splat(89.0f), maximum(splat(-104.0f), x));  // NaN is the second argument: it passes
  // x = n * ln2 + r, |r| <= ln2 / 2. Adding 1.5 * 2^23 rounds to the integer n, left in the low bits.
  const Vec magic = splat(0x1.8p23f);
  const Vec shifted = fma(x, splat(0x1.715476p0f), magic);
  const Vec n = shifted - magic;
  Vec r = fma(n, splat(-0x1.63p-1f), x);  // ln2 in two parts; n times the first is exact
  r = fma(n, splat(0x1.bd0106p-13f), r);
  // e^r = 1 + r + r^2 q(r)
  Vec q = splat(0x1.6a4154p-10f);
  q = fma(q, r, splat(0x1.1239c6p-7f));
  q = fma(q, r, splat(0x1.5558bcp-5f));
  q = fma(q, r, splat(0x1.555492p-3f));
  q = fma(q, r, splat(0x1.fffffcp-2f));
  const Vec power = fma(q, r * r, r) + splat(1.0f);
  // 2^n as a product of two powers, because n runs from -150 to 128.
  const VecInt exponent = (VecInt)as_bits(shifted) - (VecInt)as_bits(magic);
  const VecInt half = exponent >> 1;
  return power * as_float((half + 127) << 23) * as_float((exponent - half + 127) << 23);
}

}  // namespace
}  // namespace vllm_kernels::cpu
