// Combines partial attention results of one query row.
//
// A partial is the result of a row over some of its tokens. It has row_max in log2 units, the sum
// of exp2(score - row_max), and the unnormalized output relative to row_max. The warps of a CTA
// exchange partials through shared memory. The CTAs of a split query tile exchange them through the
// workspace: with a semaphore, or as flag-in-data (split_exchange.cuh).
#pragma once
#include "cuda/attention/common/online_softmax.cuh"
#include "cuda/attention/common/split_exchange.cuh"
#include "cuda/base/ptx.cuh"
#include "cuda/base/types.cuh"

namespace vllm_kernels::cuda {

struct RowState {
  float row_max = kRowMaxInit;
  float sum = 0.0f;
  float4 out = {0.0f, 0.0f, 0.0f, 0.0f};  // 4 dimensions of the row

  // Explicit roundings: otherwise the compiler chooses which product it fuses. Its choice may
  // differ between flag-in-data partials and semaphore partials.
  __device__ __forceinline__ void add(float weight, float other_sum, float4 other) {
    sum = __fmaf_rn(weight, other_sum, sum);
    out.x = __fmaf_rn(weight, other.x, out.x);
    out.y = __fmaf_rn(weight, other.y, out.y);
    out.z = __fmaf_rn(weight, other.z, out.z);
    out.w = __fmaf_rn(weight, other.w, out.w);
  }
  // Makes the state relative to `updated`, which is at least row_max.
  __device__ __forceinline__ void raise(float updated) {
    const float factor = update_row_max(row_max, updated);
    sum = __fmul_rn(sum, factor);
    out = {__fmul_rn(out.x, factor), __fmul_rn(out.y, factor), __fmul_rn(out.z, factor),
           __fmul_rn(out.w, factor)};
  }
  __device__ __forceinline__ void add_token(float score, float4 value) {
    raise(fmaxf(row_max, score));
    add(exp2_approx(score - row_max), 1.0f, value);
  }
  // Partial i has stats[i * stats_step] = {row_max, sum} and outs[i * out_step]. kGroups * 8
  // partials are loaded at a time. They are combined in order, so the result does not depend on
  // kGroups.
  template <int kGroups, typename Source>
  __device__ __forceinline__ void combine(int num_partials, float2* stats, uint32_t stats_step,
                                          float4* outs, uint32_t out_step, const Source& source) {
    constexpr int kBatch = 8 * kGroups;
#pragma unroll 1
    for (int first = 0; first < num_partials; first += kBatch) {
      float2 s[kBatch];
      float4 o[kBatch];
      bool all_present;
      // Lanes may diverge here. After a combine of flag-in-data partials, the caller may use a CTA
      // barrier, but no warp-wide instruction and no mbarrier. (DecodeWgmmaEpilogue keeps its warps
      // together.)
#pragma unroll 1
      do {
        all_present = true;
        const int begin = opaque(first);  // the compiler must not keep 16 addresses
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const uint32_t partial = min(begin + i, num_partials - 1);
          s[i] = source.load(stats + partial * stats_step);
          o[i] = source.load(outs + partial * out_step);
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          all_present &= source.present(s[i].x) & source.present(o[i].x);
        }
      } while (!all_present);
#pragma unroll
      for (int group = 0; group < kBatch; group += 8) {
        float updated = row_max;
#pragma unroll
        for (int i = group; i < group + 8; ++i) updated = fmaxf(updated, s[i].x);
        raise(updated);
#pragma unroll
        for (int i = group; i < group + 8; ++i) {
          // Absent partials weigh 0; a branch would serialise the loads.
          const bool present = first + i < num_partials;
          const float4 zero = {0.0f, 0.0f, 0.0f, 0.0f};
          add(present ? exp2_approx(s[i].x - row_max) : 0.0f, s[i].y, present ? o[i] : zero);
        }
      }
      const int begin = opaque(first);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        source.clear(outs + static_cast<uint32_t>(min(begin + i, num_partials - 1)) * out_step);
      }
    }
  }
};

// Source of RowState::combine(): partials in shared memory.
struct SharedPartials {
  template <typename T>
  __device__ __forceinline__ T load(const T* from) const {
    return *from;
  }
  __device__ __forceinline__ bool present(float) const { return true; }
  __device__ __forceinline__ void clear(float4*) const {}
};
// Source: partials in the workspace, after the semaphore.
struct SemaphorePartials : SharedPartials {
  template <typename T>
  __device__ __forceinline__ T load(const T* from) const {
    return __ldcg(from);
  }
};
// Source: flag-in-data partials, which are polled until they are present.
struct FlaggedPartials {
  template <typename T>
  __device__ __forceinline__ T load(const T* from) const {
    return load_relaxed(from);
  }
  __device__ __forceinline__ bool present(float x) const { return is_published(x); }
  __device__ __forceinline__ void clear(float4* from) const { clear_flag(from); }
};

template <typename T>
__device__ __forceinline__ void store4(void* out, int64_t at, const float (&values)[4]) {
  struct alignas(4 * sizeof(T)) Four {
    T data[4];
  } four;
#pragma unroll
  for (int j = 0; j < 4; ++j) four.data[j] = from_float<T>(values[j]);
  *reinterpret_cast<Four*>(static_cast<T*>(out) + at) = four;
}

}  // namespace vllm_kernels::cuda
