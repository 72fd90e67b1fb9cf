// Hopper's wgmma: 64 rows times N = 16 to 256 columns, with float32 accumulators. A [64, 16] is in
// shared memory, or in the registers of 4 warps as four m16n8k16 fragments. B [16, N] is in shared
// memory. e4m3 operands have k = 32 for 16, and B is contiguous along k. The instructions are
// asynchronous: operands and accumulators must not be touched before wgmma_wait().
#pragma once
#include <type_traits>

#include "cuda/base/fp8.cuh"
#include "cuda/base/ptx.cuh"

namespace vllm_kernels::cuda {

// Swizzle mode of an operand in shared memory, with the descriptor's encoding. Operand addresses
// must be multiples of the pattern's period: 256 (k32), 512 (k64) or 1024 (k128) bytes.
enum class Swizzle : uint64_t { kNone = 0, k128 = 1, k64 = 2, k32 = 3 };

// Shared-memory descriptor of an operand. `at`: its address / 16. `stride`: bytes from 8 rows to
// the next 8. `leading`: without swizzle, bytes to the next core matrix along k; where columns are
// contiguous, bytes to the next 64 columns; else unused.
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t at, uint32_t leading,
                                                      uint32_t stride, Swizzle swizzle) {
  return static_cast<uint64_t>(at) | static_cast<uint64_t>(leading >> 4) << 16 |
         static_cast<uint64_t>(stride >> 4) << 32 | static_cast<uint64_t>(swizzle) << 62;
}
// The descriptor of the operand `bytes` later. The address field does not overflow into the next
// field.
__device__ __forceinline__ uint64_t descriptor_at(uint64_t matrices, uint32_t bytes) {
  return (matrices & ~uint64_t{0xffffffff}) |
         static_cast<uint32_t>(static_cast<uint32_t>(matrices) + (bytes >> 4));
}

// The same in two halves: many wgmmas of one operand then take fewer instructions.
struct DescriptorHalves {
  uint32_t low, high;

  __device__ __forceinline__ explicit DescriptorHalves(uint64_t matrices)
      : low(static_cast<uint32_t>(matrices)), high(static_cast<uint32_t>(matrices >> 32)) {}
  __device__ __forceinline__ uint64_t at(uint32_t bytes) const {
    return static_cast<uint64_t>(high) << 32 | low + (bytes >> 4);
  }
};

#if defined(VLLM_KERNELS_HAS_WGMMA)

// Registers, or arrays of them, that wgmma groups in flight read or write. Name them before
// wgmma_fence() and after wgmma_wait(). The compiler takes a wgmma for complete once it has
// started. Without this it may write them after the fence, or read them before the wait.
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

// VLLM_KERNELS_C<n>: n accumulators as asm operands. VLLM_KERNELS_D<n>: their numbers in the asm
// text.
#define VLLM_KERNELS_C4(i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
#define VLLM_KERNELS_FOUR(i) \
  VLLM_KERNELS_C4(i), VLLM_KERNELS_C4(i + 1), VLLM_KERNELS_C4(i + 2), VLLM_KERNELS_C4(i + 3)
#define VLLM_KERNELS_C8 VLLM_KERNELS_C4(0), VLLM_KERNELS_C4(1)
#define VLLM_KERNELS_C16 VLLM_KERNELS_FOUR(0)
#define VLLM_KERNELS_C32 VLLM_KERNELS_C16, VLLM_KERNELS_FOUR(4)
#define VLLM_KERNELS_C40 VLLM_KERNELS_C32, VLLM_KERNELS_C4(8), VLLM_KERNELS_C4(9)
#define VLLM_KERNELS_C48 VLLM_KERNELS_C32, VLLM_KERNELS_FOUR(8)
#define VLLM_KERNELS_C64 VLLM_KERNELS_C48, VLLM_KERNELS_FOUR(12)
#define VLLM_KERNELS_C96 VLLM_KERNELS_C64, VLLM_KERNELS_FOUR(16), VLLM_KERNELS_FOUR(20)
#define VLLM_KERNELS_C128 VLLM_KERNELS_C96, VLLM_KERNELS_FOUR(24), VLLM_KERNELS_FOUR(28)

#define VLLM_KERNELS_D8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define VLLM_KERNELS_D16 VLLM_KERNELS_D8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define VLLM_KERNELS_D32 \
  VLLM_KERNELS_D16       \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define VLLM_KERNELS_D40 VLLM_KERNELS_D32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define VLLM_KERNELS_D48 VLLM_KERNELS_D40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define VLLM_KERNELS_D64 \
  VLLM_KERNELS_D48       \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define VLLM_KERNELS_D96                                                                    \
  VLLM_KERNELS_D64                                                                          \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, " \
  "%81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define VLLM_KERNELS_D128                                                                      \
  VLLM_KERNELS_D96                                                                             \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, "   \
  "%111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, " \
  "%126, %127"

// The asm operands after c: A, B, whether to accumulate, and B's major-ness, which e4m3 has not.
#define VLLM_KERNELS_ASM(n, shape, dtype, a, b, keep, order, ...)                      \
  asm volatile("{\n.reg .pred keep;\nsetp.ne.b32 keep, %" keep                         \
               ", 0;\nwgmma.mma_async.sync.aligned.m64n" shape ".f32." dtype "." dtype \
               " {" VLLM_KERNELS_D##n "}, " a ", %" b ", keep, 1, 1" order ";\n}"      \
               : VLLM_KERNELS_C##n                                                     \
               : __VA_ARGS__, "l"(b_matrix), "r"(keeps), "n"(kColumnsContiguous))
#define VLLM_KERNELS_WGMMA(n, columns, a, b, keep, order, ...)                       \
  if constexpr (std::is_same_v<T, Fp8E4M3>) {                                        \
    VLLM_KERNELS_ASM(n, columns "k32", "e4m3", a, b, keep, "", __VA_ARGS__);         \
  } else if constexpr (std::is_same_v<T, __half>) {                                  \
    VLLM_KERNELS_ASM(n, columns "k16", "f16", a, b, keep, ", " order, __VA_ARGS__);  \
  } else {                                                                           \
    VLLM_KERNELS_ASM(n, columns "k16", "bf16", a, b, keep, ", " order, __VA_ARGS__); \
  }
#define VLLM_KERNELS_SHARED(n, columns, a, b, keep, order) \
  VLLM_KERNELS_WGMMA(n, columns, "%" a, b, keep, "0, %" order, "l"(a_matrix))
#define VLLM_KERNELS_REGISTERS(n, columns, a0, a1, a2, a3, b, keep, order)                   \
  VLLM_KERNELS_WGMMA(n, columns, "{%" a0 ", %" a1 ", %" a2 ", %" a3 "}", b, keep, "%" order, \
                     "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]))

// c = a b, or c += a b if `keep`, for N = 8 kTiles columns. c[i] is the m16n8k16 fragment of
// columns 8i .. 8i + 7. kColumnsContiguous: B is contiguous along its columns (MN-major), else
// along k (K-major).
template <typename T, bool kColumnsContiguous, int kTiles>
__device__ __forceinline__ void wgmma(float (&c)[kTiles][4], uint64_t a_matrix, uint64_t b_matrix,
                                      bool keep) {
  static_assert(!(kColumnsContiguous && kIsFp8<T>));
  const int keeps = keep;
  if constexpr (kTiles == 8) {
    VLLM_KERNELS_SHARED(32, "64", "32", "33", "34", "35")
  } else if constexpr (kTiles == 10) {
    VLLM_KERNELS_SHARED(40, "80", "40", "41", "42", "43")
  } else if constexpr (kTiles == 12) {
    VLLM_KERNELS_SHARED(48, "96", "48", "49", "50", "51")
  } else if constexpr (kTiles == 16) {
    VLLM_KERNELS_SHARED(64, "128", "64", "65", "66", "67")
  } else if constexpr (kTiles == 24) {
    VLLM_KERNELS_SHARED(96, "192", "96", "97", "98", "99")
  } else if constexpr (kTiles == 32) {
    VLLM_KERNELS_SHARED(128, "256", "128", "129", "130", "131")
  } else {
    static_assert(kTiles == 8, "not compiled for this width");
  }
}
// The same, with A in registers. kUsed: tiles of c that are used, or 0 for all.
template <typename T, bool kColumnsContiguous, int kUsed = 0, int kMaxTiles>
__device__ __forceinline__ void wgmma(float (&c)[kMaxTiles][4], const uint32_t (&a)[4],
                                      uint64_t b_matrix, bool keep) {
  constexpr int kTiles = kUsed > 0 ? kUsed : kMaxTiles;
  static_assert(kTiles <= kMaxTiles);
  static_assert(!(kColumnsContiguous && kIsFp8<T>));
  const int keeps = keep;
  if constexpr (kTiles == 2) {
    VLLM_KERNELS_REGISTERS(8, "16", "8", "9", "10", "11", "12", "13", "14")
  } else if constexpr (kTiles == 4) {
    VLLM_KERNELS_REGISTERS(16, "32", "16", "17", "18", "19", "20", "21", "22")
  } else if constexpr (kTiles == 8) {
    VLLM_KERNELS_REGISTERS(32, "64", "32", "33", "34", "35", "36", "37", "38")
  } else if constexpr (kTiles == 10) {
    VLLM_KERNELS_REGISTERS(40, "80", "40", "41", "42", "43", "44", "45", "46")
  } else if constexpr (kTiles == 12) {
    VLLM_KERNELS_REGISTERS(48, "96", "48", "49", "50", "51", "52", "53", "54")
  } else if constexpr (kTiles == 16) {
    VLLM_KERNELS_REGISTERS(64, "128", "64", "65", "66", "67", "68", "69", "70")
  } else if constexpr (kTiles == 24) {
    VLLM_KERNELS_REGISTERS(96, "192", "96", "97", "98", "99", "100", "101", "102")
  } else if constexpr (kTiles == 32) {
    VLLM_KERNELS_REGISTERS(128, "256", "128", "129", "130", "131", "132", "133", "134")
  } else {
    static_assert(kTiles == 8, "not compiled for this width");
  }
}

#undef VLLM_KERNELS_ASM
#undef VLLM_KERNELS_C128
#undef VLLM_KERNELS_C16
#undef VLLM_KERNELS_C32
#undef VLLM_KERNELS_C4
#undef VLLM_KERNELS_C40
#undef VLLM_KERNELS_C48
#undef VLLM_KERNELS_C64
#undef VLLM_KERNELS_C8
#undef VLLM_KERNELS_C96
#undef VLLM_KERNELS_D128
#undef VLLM_KERNELS_D16
#undef VLLM_KERNELS_D32
#undef VLLM_KERNELS_D40
#undef VLLM_KERNELS_D48
#undef VLLM_KERNELS_D64
#undef VLLM_KERNELS_D8
#undef VLLM_KERNELS_D96
#undef VLLM_KERNELS_FOUR
#undef VLLM_KERNELS_REGISTERS
#undef VLLM_KERNELS_SHARED
#undef VLLM_KERNELS_WGMMA

#endif

// Stores four 8x8 matrices of 16-bit elements, each transposed. Lane l gives the address of row l %
// 8 of matrix l / 8. Rows count after the transpose.
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
