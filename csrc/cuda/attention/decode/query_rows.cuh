// store_query_rows(): the query rows of a work tile in shared memory, [D / 8][rows][8], as wgmma
// reads them. For 8-bit caches each row is scaled by a power of two and converted to fp16.
#pragma once
#include "cuda/base/ptx.cuh"
#include "cuda/base/upcast.cuh"
#include "cuda/base/vec.cuh"

namespace vllm_kernels::cuda {

// 8 elements. Aligned to 4 bytes at least.
template <typename Query>
__device__ __forceinline__ uint4 load8(const Query* from) {
  if (reinterpret_cast<uintptr_t>(from) % 16 == 0) return *reinterpret_cast<const uint4*>(from);
  const auto* pairs = reinterpret_cast<const uint32_t*>(from);
  return uint4{pairs[0], pairs[1], pairs[2], pairs[3]};
}

// Threads 0 .. count - 1 store the query, 4 threads per row. start(row) points to a query row of
// type Query; null for no row. `scales`: of the rows, in shared memory.
template <typename Query, typename Mma, typename Start>
__device__ __forceinline__ void store_query_rows(const Start& start, const Mma& mma,
                                                 uint32_t scales, int thread, int count) {
  constexpr int kSteps = Mma::kSteps;
  const int rows = mma.tiles * 8;
  const int quarter = thread & 3;
#pragma unroll 1
  for (int row = thread >> 2; row < rows; row += count >> 2) {
    const Query* from = start(row);
    // Thread `quarter` of a row takes chunks quarter, quarter + 4, ... of 16 dimensions.
    uint4 low[kSteps / 4], high[kSteps / 4];
#pragma unroll
    for (int i = 0; i < kSteps / 4; ++i) {
      const int d = (i * 4 + quarter) * 16;
      low[i] = high[i] = uint4{0, 0, 0, 0};
      if (from != nullptr && d < mma.head_size) low[i] = load8(from + d);
      if (from != nullptr && d + 8 < mma.head_size) high[i] = load8(from + d + 8);
    }
    if constexpr (!Mma::kCacheIs16Bit) {
      float largest = 0.0f;
      const auto each = [&](uint4& eight, const auto& action) {
        uint32_t* words = &eight.x;
#pragma unroll
        for (int w = 0; w < 4; ++w) action(words[w]);
      };
      const auto element = [](uint32_t pair, int j) {
        return to_float(bits_as<Query>(static_cast<uint16_t>(j ? pair >> 16 : pair)));
      };
#pragma unroll
      for (int i = 0; i < kSteps / 4; ++i) {
        const auto raise = [&](uint32_t pair) {
          largest = fmaxf(largest, fmaxf(fabsf(element(pair, 0)), fabsf(element(pair, 1))));
        };
        each(low[i], raise);
        each(high[i], raise);
      }
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
      const auto [factor, inverse] = query_scale(largest);
      if (quarter == 0) store_shared(scales + row * 4, inverse);
#pragma unroll
      for (int i = 0; i < kSteps / 4; ++i) {
        const auto convert = [&](uint32_t& pair) {
          pair = pack2<__half>(element(pair, 0) * factor, element(pair, 1) * factor);
        };
        each(low[i], convert);
        each(high[i], convert);
        // k slots {2j, 2j+1, 2j+8, 2j+9} are elements 4j .. 4j+3.
        const uint4 a = low[i], b = high[i];
        low[i] = uint4{a.x, a.z, b.x, b.z};
        high[i] = uint4{a.y, a.w, b.y, b.w};
      }
    }
#pragma unroll
    for (int i = 0; i < kSteps / 4; ++i) {
      const uint32_t to = mma.query + ((i * 4 + quarter) * 2 * rows + row) * 16;
      store_shared(to, low[i]);
      store_shared(to + rows * 16, high[i]);
    }
  }
}

}  // namespace vllm_kernels::cuda
