// The functions of examples/learn/ptx.cuh, on the host. Fragments follow the PTX ISA's text, not
// the code that uses them.
#pragma once
#include "common.cuh"

namespace emulator {

// Elements of 16 bits, [row][column], of the 8x8 matrix that a warp holds in one register per lane.
struct Matrix {
  uint16_t element[8][8];
  explicit Matrix(const uint32_t (&of_lane)[32]) {
    for (int lane = 0; lane < 32; ++lane) {
      element[lane / 4][lane % 4 * 2] = static_cast<uint16_t>(of_lane[lane]);
      element[lane / 4][lane % 4 * 2 + 1] = static_cast<uint16_t>(of_lane[lane] >> 16);
    }
  }
};

// All lanes' registers `x`.
template <int n>
void gather(const char* name, const uint32_t (&x)[n], uint32_t (&all)[n][32]) {
  for (int i = 0; i < n; ++i) {
    const uint64_t* slots = exchange(name, x[i]);
    for (int lane = 0; lane < 32; ++lane) all[i][lane] = static_cast<uint32_t>(slots[lane]);
  }
}

inline uint16_t read16(uint64_t row, int column) {
  return reinterpret_cast<const uint16_t*>(row)[column];
}

inline void check_shared(const char* name, const void* at, size_t bytes, size_t alignment) {
  const char* from = static_cast<const char*>(at);
  const bool is_static = from >= __start_emulated_shared && from + bytes <= __stop_emulated_shared;
  const bool is_dynamic = from >= dynamic_shared && from + bytes <= dynamic_shared + allowed_shared;
  if (!is_static && !is_dynamic) fail(std::string(name) + ": not in shared memory");
  if (reinterpret_cast<uintptr_t>(at) % alignment) fail(std::string(name) + ": alignment");
}

inline Barrier& barrier_at(uint64_t* barrier) {
  check_shared("mbarrier", barrier, 8, 8);
  const auto found = barriers.find(barrier);
  if (found == barriers.end()) fail("an mbarrier that is not initialised");
  return found->second;
}

}  // namespace emulator

inline void load_matrices(uint32_t (&matrix)[4], const void* row) {
  emulator::check_shared("ldmatrix", row, 16, 16);
  const int lane = emulator::current->lane;
  const uint64_t* rows = emulator::exchange("ldmatrix", reinterpret_cast<uint64_t>(row));
  for (int m = 0; m < 4; ++m) {
    const uint64_t from = rows[8 * m + lane / 4];
    matrix[m] = emulator::read16(from, lane % 4 * 2) |
                static_cast<uint32_t>(emulator::read16(from, lane % 4 * 2 + 1)) << 16;
  }
  emulator::exchange("ldmatrix, read", 0);
}

inline void load_transposed(uint32_t (&matrix)[4], const void* row) {
  emulator::check_shared("ldmatrix.trans", row, 16, 16);
  const int lane = emulator::current->lane;
  const uint64_t* rows = emulator::exchange("ldmatrix.trans", reinterpret_cast<uint64_t>(row));
  for (int m = 0; m < 4; ++m) {
    matrix[m] = emulator::read16(rows[8 * m + lane % 4 * 2], lane / 4) |
                static_cast<uint32_t>(emulator::read16(rows[8 * m + lane % 4 * 2 + 1], lane / 4))
                    << 16;
  }
  emulator::exchange("ldmatrix.trans, read", 0);
}

inline uint32_t transpose(uint32_t x) {
  const int lane = emulator::current->lane;
  uint32_t all[1][32];
  emulator::gather("movmatrix", {x}, all);
  const emulator::Matrix matrix(all[0]);
  return matrix.element[lane % 4 * 2][lane / 4] |
         static_cast<uint32_t>(matrix.element[lane % 4 * 2 + 1][lane / 4]) << 16;
}

inline void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  const int lane = emulator::current->lane;
  uint32_t all_a[4][32], all_b[2][32];
  emulator::gather("mma", a, all_a);
  emulator::gather("mma", b, all_b);
  const emulator::Matrix a_of[4] = {emulator::Matrix(all_a[0]), emulator::Matrix(all_a[1]),
                                    emulator::Matrix(all_a[2]), emulator::Matrix(all_a[3])};
  const emulator::Matrix b_of[2] = {emulator::Matrix(all_b[0]), emulator::Matrix(all_b[1])};
  for (int j = 0; j < 4; ++j) {
    const int row = lane / 4 + j / 2 * 8, column = lane % 4 * 2 + j % 2;
    for (int k = 0; k < 16; ++k) {
      const uint16_t x = a_of[row / 8 + k / 8 * 2].element[row % 8][k % 8];
      const uint16_t y = b_of[k / 8].element[column][k % 8];
      c[j] += __bfloat162float({x}) * __bfloat162float({y});
    }
  }
}

inline uint32_t pack(float low, float high) {
  return __float2bfloat16(low).bits | static_cast<uint32_t>(__float2bfloat16(high).bits) << 16;
}

inline void barrier_init(uint64_t* barrier, int arrivals) {
  emulator::check_shared("mbarrier.init", barrier, 8, 8);
  emulator::barriers[barrier] = {arrivals, arrivals};
}
inline void fence_barrier_init() {}
inline void barrier_expect(uint64_t* barrier, uint32_t bytes) {
  emulator::Barrier& at = emulator::barrier_at(barrier);
  if (at.pending == 0) emulator::fail("more arrivals than an mbarrier has");
  at.bytes += bytes;
  --at.pending;
  at.check();
}
inline void barrier_wait(uint64_t* barrier, int parity) {
  emulator::Barrier& at = emulator::barrier_at(barrier);
  emulator::wait_until([&at, parity] { return at.parity != parity; });
}
inline void bulk_copy(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
  emulator::check_shared("bulk copy", to, bytes, 16);
  emulator::barrier_at(barrier);
  if (bytes % 16 || reinterpret_cast<uintptr_t>(from) % 16) emulator::fail("bulk copy: alignment");
  emulator::copies.push_back({to, from, bytes, barrier});
}
