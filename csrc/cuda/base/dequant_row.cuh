// Dequantization of neighbouring cache elements into a row of the model's dtype.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda/base/fp8.cuh"
#include "cuda/base/int4.cuh"
#include "cuda/base/int8.cuh"
#include "cuda/base/types.cuh"
#include "cuda/base/upcast.cuh"
#include "cuda/base/vec.cuh"

namespace vllm_kernels::cuda {

// Writes vec[i] * scale, rounded to Out. Where Out is Stored it copies the bits and ignores
// `scale`.
template <typename Out, typename Stored, int kWidth>
__device__ __forceinline__ void store_dequantized(Out* to, const Elements<Stored, kWidth>& vec,
                                                  float scale) {
  using Written = Elements<Out, kWidth>;
  if constexpr (std::is_same_v<Out, Stored>) {
    *reinterpret_cast<Written*>(to) = vec;
  } else if constexpr (kWidth % 4 != 0) {
    static_assert(kWidth == 1);
    *to = from_float<Out>(to_float(vec[0]) * scale);
  } else {
    Written written;
#pragma unroll
    for (int i = 0; i < kWidth; i += 4) {
      uint32_t bytes, pairs[2];
      memcpy(&bytes, vec.data + i, 4);
      upcast4<Stored>(bytes, pairs[0], pairs[1]);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        __half2 pair;
        memcpy(&pair, &pairs[j], 4);
        const float2 values = __half22float2(pair);
        written[i + 2 * j] = from_float<Out>(values.x * scale);
        written[i + 2 * j + 1] = from_float<Out>(values.y * scale);
      }
    }
    *reinterpret_cast<Written*>(to) = written;
  }
}

// int4: the same of both halves of a row of 2 * `half` values, with a zero.
template <typename Out, int kWidth>
__device__ __forceinline__ void store_dequantized(Out* to, const Elements<ScaledInt4, kWidth>& vec,
                                                  float scale, float zero, int half) {
  Elements<Out, kWidth> low, high;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    low[i] = from_float<Out>(dequantized(vec[i].bits, scale, zero));
    high[i] = from_float<Out>(dequantized(vec[i].bits >> 4, scale, zero));
  }
  *reinterpret_cast<Elements<Out, kWidth>*>(to) = low;
  *reinterpret_cast<Elements<Out, kWidth>*>(to + half) = high;
}

}  // namespace vllm_kernels::cuda
