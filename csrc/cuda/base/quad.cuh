// Shuffles within a quad: the four lanes that hold one row of an mma accumulator fragment.
#pragma once
#include <cstdint>

namespace vllm_kernels::cuda {

__device__ __forceinline__ float quad_sum(float sum) {
  sum += __shfl_xor_sync(0xffffffffu, sum, 1);
  return sum + __shfl_xor_sync(0xffffffffu, sum, 2);
}

__device__ __forceinline__ float quad_max(float most) {
  most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
  return fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
}

// Swaps `second` of the lower lane with `first` of the upper lane, for lanes `distance` apart.
// `quarter` is the lane's index in its quad.
template <int distance>
__device__ __forceinline__ void quad_exchange(uint32_t& first, uint32_t& second, int quarter) {
  const bool upper = quarter & distance;
  const uint32_t got = __shfl_xor_sync(0xffffffffu, upper ? first : second, distance);
  (upper ? first : second) = got;
}

// Transposes a 4x4 matrix of words across the quad: word i of lane `quarter` swaps with word
// `quarter` of lane i.
__device__ __forceinline__ void quad_transpose(uint32_t (&words)[4], int quarter) {
  quad_exchange<1>(words[0], words[1], quarter);
  quad_exchange<1>(words[2], words[3], quarter);
  quad_exchange<2>(words[0], words[2], quarter);
  quad_exchange<2>(words[1], words[3], quarter);
}

}  // namespace vllm_kernels::cuda
