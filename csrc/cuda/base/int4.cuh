// Elements of int4 caches: a byte with two numbers n of 4 bits, one of each half of the row
// (TokenScales in ops/paged_kv.h).
#pragma once
#include <cstdint>
#include <type_traits>

namespace vllm_kernels::cuda {

struct ScaledInt4 {
  uint8_t bits;
};

// Values that an element of a cache holds.
template <typename Cache>
constexpr int kValuesOf = std::is_same_v<Cache, ScaledInt4> ? 2 : 1;

// scale * (n - 8) + zero of the low four bits n, each operation rounded by itself. The float
// 0x4b000000 | n is 2^23 + n.
__device__ __forceinline__ float dequantized(uint32_t bits, float scale, float zero) {
  const float centred = __uint_as_float(0x4b000000u | (bits & 15u)) - (0x1p23f + 8.0f);
  return __fadd_rn(__fmul_rn(scale, centred), zero);
}

}  // namespace vllm_kernels::cuda
