// The PTX instructions of steps 6 and 7, a function each. "PTX ISA" is NVIDIA's manual of them.
#pragma once
#include "common.cuh"

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// --- tensor cores, called by all lanes of a warp ---
//
// "Fragment" means: how a matrix is spread over the registers of a warp. With g = lane / 4 and
// i = lane % 4, an 8x8 matrix of 16-bit elements has elements [g][2i] and [g][2i + 1] in a register
// of the lane.

// Loads four 8x8 matrices. Lane l gives the address of row l % 8 of matrix l / 8: 16 bytes.
__device__ inline void load_matrices(uint32_t (&matrix)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrix[0]), "=r"(matrix[1]), "=r"(matrix[2]), "=r"(matrix[3])
               : "r"(shared_address(row))
               : "memory");
}

// The same, and transposes each of them.
__device__ inline void load_transposed(uint32_t (&matrix)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrix[0]), "=r"(matrix[1]), "=r"(matrix[2]), "=r"(matrix[3])
               : "r"(shared_address(row))
               : "memory");
}

// Transposes an 8x8 matrix in registers.
__device__ inline uint32_t transpose(uint32_t matrix) {
  uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(matrix));
  return transposed;
}

// c [16, 8] += a [16, 16] * b [16, 8]. Fragments, by 8x8 matrices:
//   a: a[0] rows 0-7, columns 0-7; a[1] rows 8-15, columns 0-7; a[2], a[3] columns 8-15
//   b: transposed, so a register has b[2i][g] and b[2i + 1][g]; b[0] rows 0-7, b[1] rows 8-15
//   c: float32. c[0], c[1] are [g][2i], [g][2i + 1]; c[2], c[3] are those of row g + 8
__device__ inline void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Rounds two floats to bf16 in one register; `low` is element 0.
__device__ inline uint32_t pack(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// --- bulk copies, sm_90 and newer: one thread starts a copy and goes on ---
//
// An mbarrier is 8 bytes of shared memory that counts. A phase of it ends when its arrivals have
// come and its expected bytes have landed; then the next phase begins. Phases alternate in parity.

__device__ inline void barrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
}

// Makes initialised barriers visible to bulk copies.
__device__ inline void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives once, and adds `bytes` to what must land in this phase.
__device__ inline void barrier_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(bytes)
               : "memory");
}

// Waits until the phase of this parity has ended.
__device__ inline void barrier_wait(uint64_t* barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "WAIT%=:\n"
      "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      "@!done bra WAIT%=;\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// Copies from global to shared memory. `bytes` and both addresses are multiples of 16.
__device__ inline void bulk_copy(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}
