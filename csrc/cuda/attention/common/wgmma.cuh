// Hopper's wgmma for narrow tiles, N = 16, 32 or 64, with float32 accumulators. A [64, 16] is in
// the registers of 4 warps, as four m16n8k16 fragments. B [16, N] is in shared memory without
// swizzle. The instructions are asynchronous: operands and accumulators must not be touched before
// wgmma_wait(). For N = 64 .. 256 see wgmma_wide.cuh.
#pragma once
#include <type_traits>

#include "cuda/base/ptx.cuh"

namespace vllm_kernels::cuda {

// Shared-memory descriptor of B without swizzle. Core matrices are 8 columns x 16 bytes along k,
// 128 contiguous bytes each. along_k and along_columns: bytes from one core matrix to the next.
__device__ __forceinline__ uint64_t core_matrices(uint32_t address, uint32_t along_k,
                                                  uint32_t along_columns) {
  return static_cast<uint64_t>(address >> 4 & 0x3fff) | static_cast<uint64_t>(along_k >> 4) << 16 |
         static_cast<uint64_t>(along_columns >> 4) << 32;
}

// The descriptor of the operand `bytes` later. The address field does not overflow into the next
// field.
__device__ __forceinline__ uint64_t descriptor_at(uint64_t matrices, uint32_t bytes) {
  return (matrices & ~uint64_t{0xffffffff}) |
         static_cast<uint32_t>(static_cast<uint32_t>(matrices) + (bytes >> 4));
}

#if defined(VLLM_KERNELS_HAS_WGMMA)

// Registers, or arrays of them, that wgmma groups in flight read or write. Name them before
// wgmma_fence() and after wgmma_wait(). The compiler only sees the instruction that starts a wgmma.
// Without this it may write them after the fence, or read them before the wait.
__device__ __forceinline__ void warpgroup_fence_operand(uint32_t& x) {
  asm volatile("" : "+r"(x)::"memory");
}
__device__ __forceinline__ void warpgroup_fence_operand(float& x) {
  asm volatile("" : "+f"(x)::"memory");
}
template <typename T, int kCount>
__device__ __forceinline__ void warpgroup_fence_operand(T (&array)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) warpgroup_fence_operand(array[i]);
}

// Before the first wgmma after writes to its registers.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most `pending` committed groups are in flight.
template <int pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

#define VLLM_KERNELS_WGMMA(columns, dtype, registers, a0, a1, a2, a3, b, keep, ...)   \
  asm volatile("{\n.reg .pred keep;\nsetp.ne.b32 keep, %" keep                        \
               ", 0;\n"                                                               \
               "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." dtype "." dtype \
               " {" registers                                                         \
               "}, "                                                                  \
               "{%" a0 ", %" a1 ", %" a2 ", %" a3 "}, %" b ", keep, 1, 1, 0;\n}"      \
               : __VA_ARGS__                                                          \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(columns_of_b), "r"(keeps))
#define VLLM_KERNELS_FOUR(c) "+f"((c)[0]), "+f"((c)[1]), "+f"((c)[2]), "+f"((c)[3])
#define VLLM_KERNELS_OUT16 VLLM_KERNELS_FOUR(c[0]), VLLM_KERNELS_FOUR(c[1])
#define VLLM_KERNELS_OUT32 VLLM_KERNELS_OUT16, VLLM_KERNELS_FOUR(c[2]), VLLM_KERNELS_FOUR(c[3])
#define VLLM_KERNELS_OUT64                                                                       \
  VLLM_KERNELS_OUT32, VLLM_KERNELS_FOUR(c[4]), VLLM_KERNELS_FOUR(c[5]), VLLM_KERNELS_FOUR(c[6]), \
      VLLM_KERNELS_FOUR(c[7])
#define VLLM_KERNELS_REGISTERS8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define VLLM_KERNELS_REGISTERS16 VLLM_KERNELS_REGISTERS8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define VLLM_KERNELS_REGISTERS32 \
  VLLM_KERNELS_REGISTERS16       \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"

// c = a b, or c += a b if `keep`, for N = kTiles * 8 columns. c[i] is the m16n8k16 fragment of
// columns 8i .. 8i + 7.
template <typename T, int kTiles, int kMaxTiles>
__device__ __forceinline__ void wgmma(float (&c)[kMaxTiles][4], const uint32_t (&a)[4],
                                      uint64_t columns_of_b, bool keep) {
  static_assert((kTiles == 2 || kTiles == 4 || kTiles == 8) && kTiles <= kMaxTiles);
  constexpr bool kHalf = std::is_same_v<T, __half>;
  const int keeps = keep;
  if constexpr (kTiles == 2 && kHalf) {
    VLLM_KERNELS_WGMMA("16", "f16", VLLM_KERNELS_REGISTERS8, "8", "9", "10", "11", "12", "13",
                       VLLM_KERNELS_OUT16);
  } else if constexpr (kTiles == 2) {
    VLLM_KERNELS_WGMMA("16", "bf16", VLLM_KERNELS_REGISTERS8, "8", "9", "10", "11", "12", "13",
                       VLLM_KERNELS_OUT16);
  } else if constexpr (kTiles == 4 && kHalf) {
    VLLM_KERNELS_WGMMA("32", "f16", VLLM_KERNELS_REGISTERS16, "16", "17", "18", "19", "20", "21",
                       VLLM_KERNELS_OUT32);
  } else if constexpr (kTiles == 4) {
    VLLM_KERNELS_WGMMA("32", "bf16", VLLM_KERNELS_REGISTERS16, "16", "17", "18", "19", "20", "21",
                       VLLM_KERNELS_OUT32);
  } else if constexpr (kHalf) {
    VLLM_KERNELS_WGMMA("64", "f16", VLLM_KERNELS_REGISTERS32, "32", "33", "34", "35", "36", "37",
                       VLLM_KERNELS_OUT64);
  } else {
    VLLM_KERNELS_WGMMA("64", "bf16", VLLM_KERNELS_REGISTERS32, "32", "33", "34", "35", "36", "37",
                       VLLM_KERNELS_OUT64);
  }
}

#undef VLLM_KERNELS_WGMMA
#undef VLLM_KERNELS_FOUR
#undef VLLM_KERNELS_OUT16
#undef VLLM_KERNELS_OUT32
#undef VLLM_KERNELS_OUT64
#undef VLLM_KERNELS_REGISTERS8
#undef VLLM_KERNELS_REGISTERS16
#undef VLLM_KERNELS_REGISTERS32

#endif

// Stores four 8x8 matrices of 16-bit elements, each transposed. Lane l gives the address of row l %
// 8 of matrix l / 8, as it lies in memory after the transpose.
__device__ __forceinline__ void store_transposed(uint32_t row_address, uint32_t m0, uint32_t m1,
                                                 uint32_t m2, uint32_t m3) {
#if defined(VLLM_KERNELS_HAS_SM90)
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address),
      "r"(m0), "r"(m1), "r"(m2), "r"(m3)
      : "memory");
#endif
}

}  // namespace vllm_kernels::cuda
