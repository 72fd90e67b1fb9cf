// WarpgroupValues: a lane's fragments of V for warpgroup_mma.cuh.
#pragma once
#include "cuda/attention/common/kernel_choice.h"
#include "cuda/attention/common/kv_smem_layout.cuh"

namespace vllm_kernels::cuda {

template <typename Cache, int kMaxHeadSize, int kTokens, KvForm kForm>
struct WarpgroupValues : KvFragments<Cache, kMaxHeadSize, kTokens, kForm> {
  using Fragments = KvFragments<Cache, kMaxHeadSize, kTokens, kForm>;
  using Fragments::kCacheIs16Bit, Fragments::kRows, Fragments::load_value, Fragments::value_chunk,
      Fragments::value_masks, Fragments::value_row, Fragments::value_step;
  static constexpr int kHalves = kMaxHeadSize / 64;  // groups of 64 dimensions

  uint32_t value_base, value_half;  // bytes: this lane's V; from there to the next 64 dimensions

  // After set_addresses(). `warp`: of the warpgroup.
  __device__ __forceinline__ void set_value_base(const KvStageLayout& layout, int lane, int warp) {
    // 8-bit: the upper 16 lanes load the next 64 dimensions, or the next 16 tokens if D = 64.
    const int upper = lane >> 4;
    if constexpr (kCacheIs16Bit && kRows) {
      value_base = value_row + (value_chunk ^ warp * 32);
      value_half = kColumnStride<kTokens>;
    } else if constexpr (kCacheIs16Bit) {
      value_base = value_row + warp * value_step;
      value_half = 4 * value_step;
    } else if constexpr (kRows) {
      const int dim_block = kHalves == 2 ? warp + 4 * upper : warp;
      value_base = value_row + (value_chunk ^ (upper ^ dim_block) * 16);
    } else {
      const int dimension = warp * 16 + (kHalves == 2 ? 64 * upper : 0) + lane % 16;
      value_base = dimension * layout.page_tokens;
    }
    if (!kCacheIs16Bit && kHalves == 1) value_base += upper * layout.value_step;
    if (!kCacheIs16Bit) value_base = opaque(value_base);
  }

  // Byte offset of group i of 16 tokens.
  static __device__ __forceinline__ uint32_t value_group(const KvStageLayout& layout, int i) {
    return (i & 1) * layout.value_step + (i >> 1) * layout.value_half;
  }

  // This lane's fragments of V for kCount groups of 16 tokens.
  template <int kCount>
  struct Values {
    static constexpr int kLoads = kCacheIs16Bit ? kCount * kHalves : kCount * kHalves / 2;
    uint32_t data[kLoads][4];
  };
  template <int kCount>
  __device__ __forceinline__ void load_values(Values<kCount>& values, int first, uint32_t value,
                                              const KvStageLayout& layout) const {
#pragma unroll
    for (int i = 0; i < Values<kCount>::kLoads; ++i) {
      // Past the head size this reads arbitrary data; the outputs there are not used.
      uint32_t at = value + value_base;
      if constexpr (kCacheIs16Bit) {
        at += value_group(layout, first + i / kHalves) + i % kHalves * value_half;
      } else {
        at += value_group(layout, first + (kHalves == 2 ? i : 2 * i));
      }
      load_value(values.data[i], at);
    }
  }
  template <int kCount>
  static __device__ __forceinline__ void mask_values(Values<kCount>& values, int first,
                                                     uint64_t tokens, int lane) {
#pragma unroll
    for (int i = 0; i < Values<kCount>::kLoads; ++i) {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        // 8-bit, 64 dimensions: the upper two registers are of the next 16 tokens.
        const int group = first + (kCacheIs16Bit ? i / kHalves : kHalves == 2 ? i : 2 * i + w / 2);
        uint32_t masks[2];
        value_masks(masks, static_cast<uint32_t>(tokens >> 16 * group), lane);
        values.data[i][w] &= masks[kCacheIs16Bit ? w / 2 : w % 2];
      }
    }
  }
};

}  // namespace vllm_kernels::cuda
