// Hopper's wgmma with 64 to 256 columns, for full tiles of query rows. A [64, 16] is in shared
// memory or in registers, B [16, N] in shared memory. wgmma.cuh has the fences and waits of these
// asynchronous instructions.
#pragma once
#include "cuda/attention/common/wgmma.cuh"

namespace vllm_kernels::cuda {

// Swizzle mode of an operand in shared memory, with the descriptor's encoding. Operand addresses
// must be multiples of the pattern's period: 256 (k32), 512 (k64) or 1024 (k128) bytes.
enum class Swizzle : uint64_t { kNone = 0, k128 = 1, k64 = 2, k32 = 3 };

// Shared-memory descriptor of an operand.
struct MatrixDescriptor {
  uint32_t address, strides;

  // `stride`: bytes from 8 rows to the next 8. `leading`: without swizzle, bytes to the next core
  // matrix along k; where columns are contiguous, bytes to the next 64 columns; else unused.
  __device__ __forceinline__ MatrixDescriptor(uint32_t at, uint32_t leading, uint32_t stride,
                                              Swizzle swizzle)
      : address(at >> 4 | leading >> 4 << 16),
        strides(stride >> 4 | static_cast<uint32_t>(swizzle) << 30) {}

  // The descriptor of the operand that begins `bytes` after this one.
  __device__ __forceinline__ uint64_t offset_by(uint32_t bytes) const {
    return static_cast<uint64_t>(strides) << 32 | address + (bytes >> 4);
  }
};

#if defined(VLLM_KERNELS_HAS_WGMMA)

#define VLLM_KERNELS_C4(i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
#define VLLM_KERNELS_C16(i) \
  VLLM_KERNELS_C4(i), VLLM_KERNELS_C4(i + 1), VLLM_KERNELS_C4(i + 2), VLLM_KERNELS_C4(i + 3)
#define VLLM_KERNELS_C32 VLLM_KERNELS_C16(0), VLLM_KERNELS_C16(4)
#define VLLM_KERNELS_C40 VLLM_KERNELS_C32, VLLM_KERNELS_C4(8), VLLM_KERNELS_C4(9)
#define VLLM_KERNELS_C48 VLLM_KERNELS_C32, VLLM_KERNELS_C16(8)
#define VLLM_KERNELS_C64 VLLM_KERNELS_C48, VLLM_KERNELS_C16(12)
#define VLLM_KERNELS_C96 VLLM_KERNELS_C64, VLLM_KERNELS_C16(16), VLLM_KERNELS_C16(20)
#define VLLM_KERNELS_C128 VLLM_KERNELS_C96, VLLM_KERNELS_C16(24), VLLM_KERNELS_C16(28)

#define VLLM_KERNELS_D32                                                                       \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
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

#define VLLM_KERNELS_PRODUCT(n, columns, dtype, keep)                          \
  "{\n.reg .pred keep;\nsetp.ne.b32 keep, %" keep                              \
  ", 0;\nwgmma.mma_async.sync.aligned.m64n" columns "k16.f32." dtype "." dtype \
  " {" VLLM_KERNELS_D##n "}, "
// The asm operands after c: A, B, whether to accumulate, and B's major-ness.
#define VLLM_KERNELS_FROM_SHARED(n, columns, dtype, a, b, keep, order)                         \
  asm volatile(VLLM_KERNELS_PRODUCT(n, columns, dtype, keep) "%" a ", %" b                     \
                                                             ", keep, 1, 1, 0, %" order ";\n}" \
               : VLLM_KERNELS_C##n                                                             \
               : "l"(a_matrix), "l"(b_matrix), "r"(keeps), "n"(kColumnsContiguous))
#define VLLM_KERNELS_FROM_REGISTERS(n, columns, dtype, a0, a1, a2, a3, b, keep, order)          \
  asm volatile(VLLM_KERNELS_PRODUCT(n, columns, dtype, keep) "{%" a0 ", %" a1 ", %" a2 ", %" a3 \
                                                             "}, %" b ", keep, 1, 1, %" order   \
                                                             ";\n}"                             \
               : VLLM_KERNELS_C##n                                                              \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_matrix), "r"(keeps),         \
                 "n"(kColumnsContiguous))
#define VLLM_KERNELS_SHARED(n, columns, ...)                   \
  if constexpr (std::is_same_v<T, __half>) {                   \
    VLLM_KERNELS_FROM_SHARED(n, columns, "f16", __VA_ARGS__);  \
  } else {                                                     \
    VLLM_KERNELS_FROM_SHARED(n, columns, "bf16", __VA_ARGS__); \
  }
#define VLLM_KERNELS_REGISTERS(n, columns, ...)                   \
  if constexpr (std::is_same_v<T, __half>) {                      \
    VLLM_KERNELS_FROM_REGISTERS(n, columns, "f16", __VA_ARGS__);  \
  } else {                                                        \
    VLLM_KERNELS_FROM_REGISTERS(n, columns, "bf16", __VA_ARGS__); \
  }

// c = a b, or c += a b if `keep`, for N = kTiles * 8 columns. c[i] is the m16n8k16 fragment of
// columns 8i .. 8i + 7. kColumnsContiguous: B is contiguous along its columns (MN-major), else
// along k (K-major).
template <typename T, bool kColumnsContiguous, int kTiles>
__device__ __forceinline__ void wgmma_shared(float (&c)[kTiles][4], uint64_t a_matrix,
                                             uint64_t b_matrix, bool keep) {
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
template <typename T, bool kColumnsContiguous, int kTiles>
__device__ __forceinline__ void wgmma_registers(float (&c)[kTiles][4], const uint32_t (&a)[4],
                                                uint64_t b_matrix, bool keep) {
  const int keeps = keep;
  if constexpr (kTiles == 8) {
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

#undef VLLM_KERNELS_C128
#undef VLLM_KERNELS_C16
#undef VLLM_KERNELS_C32
#undef VLLM_KERNELS_C4
#undef VLLM_KERNELS_C40
#undef VLLM_KERNELS_C48
#undef VLLM_KERNELS_C64
#undef VLLM_KERNELS_C96
#undef VLLM_KERNELS_D128
#undef VLLM_KERNELS_D32
#undef VLLM_KERNELS_D40
#undef VLLM_KERNELS_D48
#undef VLLM_KERNELS_D64
#undef VLLM_KERNELS_D96
#undef VLLM_KERNELS_FROM_REGISTERS
#undef VLLM_KERNELS_FROM_SHARED
#undef VLLM_KERNELS_PRODUCT
#undef VLLM_KERNELS_REGISTERS
#undef VLLM_KERNELS_SHARED

#endif

}  // namespace vllm_kernels::cuda
