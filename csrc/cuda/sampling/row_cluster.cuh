// The CTAs that share a row: a cluster, or one CTA. Every thread of the cluster takes part in every
// call of this folder.
#pragma once
#include <cstdint>

#include "cuda/base/launch.cuh"
#include "cuda/base/reduce.cuh"

namespace vllm_kernels::cuda {

constexpr int kRowThreads = 512;
constexpr int kRowWarps = kRowThreads / kWarpSize;
constexpr int kClusterSize = 8;  // the most that every Hopper GPU takes

template <int kCtas>
struct RowCluster {
  static constexpr int kSize = kCtas;

  __device__ __forceinline__ static int rank() {
    if constexpr (kCtas == 1) return 0;
    uint32_t rank = 0;
#if defined(VLLM_KERNELS_HAS_SM90)
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
    return static_cast<int>(rank);
  }

  // A barrier. Writes to shared memory before it are visible to the cluster after it. CTAs that
  // have ended count as arrived.
  __device__ __forceinline__ static void sync() {
    arrive();
    wait();
  }
  // A barrier's first half, which makes no write visible: its wait() shows that all CTAs have
  // begun. The usual first half costs a fence.
  __device__ __forceinline__ static void begin() {
#if defined(VLLM_KERNELS_HAS_SM90)
    if constexpr (kCtas > 1) asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif
  }
  // The halves of a barrier.
  __device__ __forceinline__ static void arrive() {
#if defined(VLLM_KERNELS_HAS_SM90)
    if constexpr (kCtas > 1) asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
  }
  __device__ __forceinline__ static void wait() {
    if constexpr (kCtas == 1) __syncthreads();
#if defined(VLLM_KERNELS_HAS_SM90)
    if constexpr (kCtas > 1) asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
  }

  // The same variable of another CTA. `mine` is in shared memory.
  template <typename T>
  __device__ __forceinline__ static T* peer(T* mine, int rank) {
    if constexpr (kCtas == 1) return mine;
#if defined(VLLM_KERNELS_HAS_SM90)
    uint64_t theirs;
    asm("mapa.u64 %0, %1, %2;" : "=l"(theirs) : "l"(reinterpret_cast<uint64_t>(mine)), "r"(rank));
    return reinterpret_cast<T*>(theirs);
#else
    return mine;
#endif
  }
};

// --- sums over a warp ----------------------------------------------------------------------------

template <typename Int>
__device__ __forceinline__ Int warp_total(Int value) {
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, distance);
  }
  return value;
}

}  // namespace vllm_kernels::cuda
