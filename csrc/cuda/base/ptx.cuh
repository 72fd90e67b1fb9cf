// Thin wrappers around the PTX instructions that the attention kernels use. wgmma has its own:
// attention/common/wgmma.cuh.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "cuda/base/architecture.cuh"

namespace vllm_kernels::cuda {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Hides how `value` was computed, so that the compiler keeps it instead of computing it again.
__device__ __forceinline__ int opaque(int value) {
  asm volatile("" : "+r"(value));
  return value;
}

// Makes a value that is equal in all lanes warp-uniform for the compiler: branches on it do not
// diverge.
__device__ __forceinline__ int warp_uniform(int value) {
  return __shfl_sync(0xffffffffu, value, 0);
}

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
// Initial row_max of the online softmax. It is finite, so that exp2(-inf - row_max) is 0, not NaN.
constexpr float kRowMaxInit = -1e30f;

// 2^x, flushing denormal results to zero; -inf gives 0.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Loads four 8x8 matrices of 16-bit elements (ldmatrix). Lane l gives the address of row l % 8 of
// matrix l / 8.
__device__ __forceinline__ void load_matrices(uint32_t (&matrix)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(matrix[0]), "=r"(matrix[1]), "=r"(matrix[2]), "=r"(matrix[3])
               : "r"(row_address)
               : "memory");
}

// The same, with each matrix transposed.
__device__ __forceinline__ void load_transposed(uint32_t (&matrix)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(matrix[0]), "=r"(matrix[1]), "=r"(matrix[2]), "=r"(matrix[3])
               : "r"(row_address)
               : "memory");
}

template <typename T = uint32_t>
__device__ __forceinline__ T load_shared(uint32_t address) {
  T x;
  if constexpr (std::is_same_v<T, uint4>) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(address)
                 : "memory");
  } else if constexpr (sizeof(T) == 16) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(address)
                 : "memory");
  } else if constexpr (std::is_same_v<T, uint2>) {
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                 : "=r"(x.x), "=r"(x.y)
                 : "r"(address)
                 : "memory");
  } else if constexpr (std::is_same_v<T, float>) {
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
  } else if constexpr (sizeof(T) == 8) {
    asm volatile("ld.shared.b64 %0, [%1];" : "=l"(x) : "r"(address) : "memory");
  } else {
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  }
  return x;
}
__device__ __forceinline__ void store_shared(uint32_t address, uint4 x) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.x), "r"(x.y),
               "r"(x.z), "r"(x.w)
               : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t address, float4 x) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x.x), "f"(x.y),
               "f"(x.z), "f"(x.w)
               : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t address, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t address, uint64_t x) {
  asm volatile("st.shared.b64 [%0], %1;" ::"r"(address), "l"(x) : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t address, uint32_t x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

// Increments a counter that wraps from `last` to 0, and returns the previous value.
// One thread of a CTA calls it, between two barriers of the CTA. The call releases what the CTA
// wrote before the first barrier. A CTA whose call comes later in the counter's order sees these
// writes after its second barrier.
__device__ __forceinline__ uint32_t atomic_inc_acquire_release(uint32_t* counter, uint32_t last) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(last)
               : "memory");
  return before;
}

// Relaxed loads and stores at gpu scope. They bypass L1, are not torn, and are not ordered with
// other accesses.
__device__ __forceinline__ float2 load_relaxed(const float2* at) {
  uint64_t x;
  asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(x) : "l"(at) : "memory");
  return {__uint_as_float(static_cast<uint32_t>(x)),
          __uint_as_float(static_cast<uint32_t>(x >> 32))};
}
__device__ __forceinline__ float4 load_relaxed(const float4* at) {
  uint64_t low, high;
  asm volatile(
      "{.reg .b128 x;\n"
      "ld.relaxed.gpu.global.b128 x, [%2];\n"
      "mov.b128 {%0, %1}, x;}"
      : "=l"(low), "=l"(high)
      : "l"(at)
      : "memory");
  return {__uint_as_float(static_cast<uint32_t>(low)),
          __uint_as_float(static_cast<uint32_t>(low >> 32)),
          __uint_as_float(static_cast<uint32_t>(high)),
          __uint_as_float(static_cast<uint32_t>(high >> 32))};
}
__device__ __forceinline__ uint64_t pair_bits(float low, float high) {
  return __float_as_uint(low) | static_cast<uint64_t>(__float_as_uint(high)) << 32;
}
__device__ __forceinline__ void store_relaxed(float* at, float x) {
  asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" ::"l"(at), "f"(x) : "memory");
}
__device__ __forceinline__ void store_relaxed(float2* at, float2 x) {
  asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(at), "l"(pair_bits(x.x, x.y))
               : "memory");
}
__device__ __forceinline__ void store_relaxed(float4* at, float4 x) {
  asm volatile(
      "{.reg .b128 x;\n"
      "mov.b128 x, {%1, %2};\n"
      "st.relaxed.gpu.global.b128 [%0], x;}" ::"l"(at),
      "l"(pair_bits(x.x, x.y)), "l"(pair_bits(x.z, x.w))
      : "memory");
}

// Transposes an 8x8 matrix of 16-bit elements that is distributed over the warp.
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t x) {
  uint32_t y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// c [16, 8] += a [16, 16] * b [16, 8] with float32 accumulators.
template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
  if constexpr (std::is_same_v<T, __half>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// Rounds two floats to a register of two 16-bit elements; `low` is element 0.
template <typename T>
__device__ __forceinline__ uint32_t pack2(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack2<__half>(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
template <>
__device__ __forceinline__ uint32_t pack2<__nv_bfloat16>(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

#if defined(VLLM_KERNELS_HAS_SM90)
// Rounds four floats to a register of four e4m3 elements; `x0` is element 0. Saturates.
__device__ __forceinline__ uint32_t pack4_e4m3(float x0, float x1, float x2, float x3) {
  uint32_t packed;
  asm("{\n.reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n}"
      : "=r"(packed)
      : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
  return packed;
}
#endif

// --- copies into shared memory -------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(barrier)
               : "memory");
}
// Arrivals per warp on an mbarrier: one, after __syncwarp(), on behalf of all lanes' reads and
// writes. racecheck tracks only a thread's own arrivals, so code built for it arrives once per
// lane.
#if defined(VLLM_KERNELS_RACECHECK)
constexpr int kWarpArrivals = 32;
#else
constexpr int kWarpArrivals = 1;
#endif
__device__ __forceinline__ void barrier_arrive_warp(uint32_t barrier, int lane) {
  __syncwarp();
  if (kWarpArrivals == 32 || lane == 0) barrier_arrive(barrier);
}
// Arrives once when all prior cp.async copies of this thread are complete.
__device__ __forceinline__ void barrier_arrive_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "WAIT%=:\n"
#if defined(VLLM_KERNELS_HAS_SM90)
      "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
#else
      "mbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n"
#endif
      "@!done bra WAIT%=;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

#if defined(VLLM_KERNELS_HAS_SM90)

__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Arrives once and adds `bytes` to the transaction count that bulk copies must complete.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// Policy for pages that are read once: they should not evict other data from L2.
__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// State space of a copy's destination, which is always the CTA's own shared memory. CUDA below 12.8
// has no shared::cta here. With shared::cluster, ptxas adds a call and a stack frame for sm_120.
#if __CUDA_ARCH__ >= 1000
#define VLLM_KERNELS_COPY_TO "shared::cta"
#else
#define VLLM_KERNELS_COPY_TO "shared::cluster"
#endif
// Copies `bytes` from global to shared memory. `bytes` and both addresses are multiples of 16.
__device__ __forceinline__ void bulk_copy(uint32_t to, const void* from, uint32_t bytes,
                                          uint32_t barrier, uint64_t policy) {
  asm volatile("cp.async.bulk." VLLM_KERNELS_COPY_TO
               ".global.mbarrier::complete_tx::bytes.L2::cache_hint "
               "[%0], [%1], %2, [%3], %4;" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
               : "memory");
}
// Copies one box of a 4-dimensional tensor map by TMA, starting at (c0, c1, c2, c3).
__device__ __forceinline__ void tma_copy_box(uint32_t to, const void* map, int c0, int c1, int c2,
                                             int c3, uint32_t barrier, uint64_t policy) {
  asm volatile("cp.async.bulk.tensor.4d." VLLM_KERNELS_COPY_TO
               ".global.mbarrier::complete_tx::bytes.L2::cache_hint "
               "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(to),
               "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(barrier), "l"(policy)
               : "memory");
}
// The same for 4 or 5 dimensions and without an L2 policy: other CTAs read the same pages.
__device__ __forceinline__ void tma_copy_box(uint32_t to, const void* map, int c0, int c1, int c2,
                                             int c3, uint32_t barrier) {
  asm volatile("cp.async.bulk.tensor.4d." VLLM_KERNELS_COPY_TO
               ".global.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
               "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void tma_copy_box(uint32_t to, const void* map, int c0, int c1, int c2,
                                             int c3, int c4, uint32_t barrier) {
  asm volatile("cp.async.bulk.tensor.5d." VLLM_KERNELS_COPY_TO
               ".global.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(to),
               "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void prefetch_tensor_map(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

#endif

// Orders this thread's earlier shared-memory accesses (generic proxy) before later accesses by the
// async proxy: bulk copies and wgmma.
__device__ __forceinline__ void fence_async_proxy() {
#if defined(VLLM_KERNELS_HAS_SM90)
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

__device__ __forceinline__ void copy16_async(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy8_async(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy4_async(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
// Copies the first `bytes` of 16 (or 8) bytes and fills the rest with zeros.
__device__ __forceinline__ void copy16_async(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void copy8_async(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void wait_all_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}
// Ends a group of this thread's copies.
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits for all groups but the last `kPending`.
template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace vllm_kernels::cuda
