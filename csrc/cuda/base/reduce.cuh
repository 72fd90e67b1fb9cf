// Reductions (sum, max) and prefix sums across a warp and across a CTA, and a search by a warp.
#pragma once
#include <cstdint>

namespace vllm_kernels::cuda {

constexpr int kWarpSize = 32;

// The lower or the higher of two numbers; NaN if one is NaN.
__device__ __forceinline__ float min_or_nan(float a, float b) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, distance);
  }
  return value;
}

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, distance));
  }
  return value;
}

// The same over groups of `lanes` neighbouring lanes; `lanes` is a power of two. All lanes of the
// warp must call it.
template <typename Int>
__device__ __forceinline__ float lanes_sum(float value, Int lanes) {
  for (int distance = lanes / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, distance);
  }
  return value;
}
__device__ __forceinline__ uint32_t lanes_max(uint32_t value, int lanes) {
  for (int distance = lanes / 2; distance > 0; distance /= 2) {
    value = max(value, __shfl_xor_sync(0xffffffffu, value, distance));
  }
  return value;
}

// Returns the sum over the CTA to every thread. A kernel may call it only once: there is one
// barrier, so a second call would overwrite `partial` while other warps still read it.
__device__ __forceinline__ float block_sum(float value) {
  __shared__ alignas(16) float partial[32];
  value = warp_sum(value);
  const int warps = (blockDim.x + kWarpSize - 1) / kWarpSize;
  if (threadIdx.x % kWarpSize == 0) partial[threadIdx.x / kWarpSize] = value;
  if (threadIdx.x >= warps && threadIdx.x < 32) partial[threadIdx.x] = 0.0f;
  __syncthreads();
  // Adds float4s of 8, 16 or 32 partials. The code is shorter and faster than a loop over warps.
  const auto* quads = reinterpret_cast<const float4*>(partial);
  const auto added = [](float4 a, float4 b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
  };
  float4 sums = added(quads[0], quads[1]);
  if (warps > 8) {
    sums = added(sums, added(quads[2], quads[3]));
    if (warps > 16) {
#pragma unroll
      for (int i = 4; i < 8; ++i) sums = added(sums, quads[i]);
    }
  }
  return (sums.x + sums.y) + (sums.z + sums.w);
}

// Returns the maximum over the CTA to every thread. A kernel may call it only once.
__device__ __forceinline__ float block_max(float value) {
  __shared__ float partial[32];
  value = warp_max(value);
  const int warps = (blockDim.x + kWarpSize - 1) / kWarpSize;
  if (threadIdx.x % kWarpSize == 0) partial[threadIdx.x / kWarpSize] = value;
  __syncthreads();
  float largest = partial[0];
  for (int warp = 1; warp < warps; ++warp) largest = fmaxf(largest, partial[warp]);
  return largest;
}

// The same for unsigned integers, or for the bits of floats >= 0. A kernel may call it only once.
__device__ __forceinline__ uint32_t block_max(uint32_t value) {
  __shared__ uint32_t partial[32];
  value = __reduce_max_sync(0xffffffffu, value);
  if (threadIdx.x % kWarpSize == 0) partial[threadIdx.x / kWarpSize] = value;
  __syncthreads();
  const int lane = threadIdx.x % kWarpSize;
  const int warps = (blockDim.x + kWarpSize - 1) / kWarpSize;
  return __reduce_max_sync(0xffffffffu, lane < warps ? partial[lane] : 0);
}

// The sum of the values of this lane and the lower ones.
template <typename Int>
__device__ __forceinline__ Int inclusive_sum(Int value, int lane = threadIdx.x % kWarpSize) {
#pragma unroll
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const Int other = __shfl_up_sync(0xffffffffu, value, distance);
    if (lane >= distance) value += other;
  }
  return value;
}

// The same over a CTA of kWarps warps: of this thread and the ones before it. `total` becomes the
// sum of all. A barrier must lie between two calls with the same warp_sums.
template <int kWarps>
__device__ __forceinline__ int64_t inclusive_block_sum(int64_t value, int64_t (&warp_sums)[kWarps],
                                                       int64_t& total) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  value = inclusive_sum(value);
  if (lane == kWarpSize - 1) warp_sums[warp] = value;
  __syncthreads();
  total = 0;
  for (int i = 0; i < kWarps; ++i) {
    if (i < warp) value += warp_sums[i];
    total += warp_sums[i];
  }
  return value;
}

// Counts the values <= bound in an ascending array. A 32-way search: each round probes one value a
// lane. All lanes of a warp call it.
__device__ __forceinline__ int count_up_to(const int32_t* values, int count, int bound) {
  const int lane = threadIdx.x % 32;
  int low = 0, high = count;  // the result lies in [low, high]
  while (low < high) {
    const int step = (high - low + 31) / 32;
    const int at = low + (lane + 1) * step - 1;  // last value of this lane's interval
    const bool within = at < high && values[at] <= bound;
    const uint32_t beyond = ~__ballot_sync(0xffffffffu, within);
    low += (beyond == 0 ? 32 : __ffs(beyond) - 1) * step;
    high = min(low + step - 1, high);
  }
  return low;
}

}  // namespace vllm_kernels::cuda
