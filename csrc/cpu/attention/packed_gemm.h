// A GEMM for many query rows and one packed KV block:
//   C [rows][columns] = A [rows][words] * B [words][columns]        (+ C)
//   scores:  A = query, B = K transposed        out:  A = p, B = V
// A word has 32 bits: a float, or two bfloat16 that are neighbours in the summed dimension. See
// cpu/base/vec.h for the anonymous namespace.
#pragma once
#include <utility>

#include "cpu/base/vec.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace vllm_kernels::cpu {
namespace {

// C is computed in blocks of rows and columns. So the buffers of A and C must hold whole blocks of
// rows. The contents of the extra rows do not matter.
constexpr int kBlockRows = 6;
constexpr int kBlockVectors = kLanes == 16 ? 4 : 2;  // columns
constexpr int kAmxTileRows = 16;
constexpr int kMaxBlockRows = 2 * kAmxTileRows;  // of gemm_block() and gemm_amx()

// Whether a word is a pair of T.
template <typename T>
constexpr bool kPairs = false;
#if defined(__AVX512BF16__)
template <>
constexpr bool kPairs<BFloat16> = true;
#endif

// --- packing -------------------------------------------------------------------------------------

template <int h, int... lane>
inline void swap_halves(Vec& a, Vec& b, std::integer_sequence<int, lane...>) {
  const Vec low = __builtin_shufflevector(a, b, ((lane & h) == 0 ? lane : kLanes + lane - h)...);
  b = __builtin_shufflevector(a, b, ((lane & h) == 0 ? lane + h : kLanes + lane)...);
  a = low;
}

template <int h>
inline void transpose_stage(Vec* v) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if ((i & h) == 0) {
      swap_halves<h>(v[i], v[i + h], std::make_integer_sequence<int, kLanes>{});
    }
  }
}

// [rows][from_stride] -> [columns][to_stride] of words. Rows and columns are whole vectors.
inline void transpose(const float* from, int from_stride, int rows, int columns, float* to,
                      int to_stride) {
  for (int row = 0; row < rows; row += kLanes) {
    for (int column = 0; column < columns; column += kLanes) {
      Vec v[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) v[i] = load(from + (row + i) * from_stride + column);
      if (kLanes > 8) transpose_stage<8 % kLanes>(v);
      if (kLanes > 4) transpose_stage<4 % kLanes>(v);
      transpose_stage<2>(v);
      transpose_stage<1>(v);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) store(to + (column + i) * to_stride + row, v[i]);
    }
  }
}

// Whether no element is infinite or NaN, for `count` words (whole vectors).
template <typename T>
inline bool all_finite(const float* words, int count) {
  VecInt bad = {};
  for (int i = 0; i < count; i += kLanes) {
    const VecUint bits = as_bits(load(words + i));
    bad |= (VecInt)((bits & 0x7f800000u) == VecUint{} + 0x7f800000u);
    if constexpr (kPairs<T>) bad |= (VecInt)((bits & 0x7f80u) == VecUint{} + 0x7f80u);
  }
  int any = 0;
  for (int i = 0; i < kLanes; ++i) any |= bad[i];
  return any == 0;
}

// --- across lanes --------------------------------------------------------------------------------

template <int distance, int... lane>
inline Vec rotated(Vec v, std::integer_sequence<int, lane...>) {
  return __builtin_shufflevector(v, v, ((lane + distance) % kLanes)...);
}

// Reduces all lanes with `op`. Every lane gets the result.
template <typename Op>
inline Vec reduce_lanes(Vec v, Op&& op) {
  constexpr std::make_integer_sequence<int, kLanes> kSequence;
  if constexpr (kLanes > 8) v = op(v, rotated<kLanes / 2>(v, kSequence));
  if constexpr (kLanes > 4) v = op(v, rotated<4>(v, kSequence));
  v = op(v, rotated<2>(v, kSequence));
  return op(v, rotated<1>(v, kSequence));
}

// --- gemm ----------------------------------------------------------------------------------------

// Strides in words.
struct Gemm {
  const float* a;
  int a_stride;
  const float* b;
  int b_stride;
  int words;
  float* c;
  int c_stride;
};

// By its bits: two bfloat16 may look like a signalling NaN.
inline Vec splat_word(float a) {
  uint32_t bits;
  std::memcpy(&bits, &a, sizeof bits);
  return as_float(VecUint{} + bits);
}

// sum + a * b in every lane. Pairs add both products.
template <typename T>
inline Vec multiply_words(Vec b, float a, Vec sum) {
#if defined(__AVX512BF16__)
  if constexpr (kPairs<T>) {
    return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)b, (__m512bh)splat_word(a));
  }
#endif
  return fma(b, splat_word(a), sum);
}

template <typename T, int kVectors, bool kAccumulate>
inline void gemm_block(const Gemm& p, int row, int column) {
  const float* a = p.a + row * p.a_stride;
  const float* b = p.b + column;
  float* c = p.c + row * p.c_stride + column;
  Vec sums[kBlockRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kBlockRows; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) {
      sums[r][i] = kAccumulate ? load(c + r * p.c_stride + i * kLanes) : Vec{};
    }
  }
  for (int word = 0; word < p.words; ++word, b += p.b_stride) {
    Vec vectors[kVectors];
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) vectors[i] = load(b + i * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kBlockRows; ++r) {
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; ++i) {
        sums[r][i] = multiply_words<T>(vectors[i], a[r * p.a_stride + word], sums[r][i]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kBlockRows; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) store(c + r * p.c_stride + i * kLanes, sums[r][i]);
  }
}

#if defined(__AMX_BF16__)
// Tile registers 0 .. 3 hold C: 2 x 2 (kColumns = 2) or 2 x 1 blocks of 16 x 16. Registers 4 and 5
// hold rows of A, and 6 and 7 columns of B.
template <int kColumns, bool kAccumulate>
inline void gemm_amx(const Gemm& p, int row, int column) {
  const float* a = p.a + row * p.a_stride;
  const float* b = p.b + column;
  float* c = p.c + row * p.c_stride + column;
  const int64_t a_bytes = int64_t{4} * p.a_stride, b_bytes = int64_t{4} * p.b_stride;
  const int64_t c_bytes = int64_t{4} * p.c_stride;
  if constexpr (kAccumulate) {
    _tile_loadd(0, c, c_bytes);
    _tile_loadd(2, c + 16 * p.c_stride, c_bytes);
    if constexpr (kColumns == 2) {
      _tile_loadd(1, c + 16, c_bytes);
      _tile_loadd(3, c + 16 * p.c_stride + 16, c_bytes);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int word = 0; word < p.words; word += 16, a += 16, b += 16 * p.b_stride) {
    _tile_loadd(4, a, a_bytes);
    _tile_loadd(5, a + 16 * p.a_stride, a_bytes);
    _tile_loadd(6, b, b_bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(2, 5, 6);
    if constexpr (kColumns == 2) {
      _tile_loadd(7, b + 16, b_bytes);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c, c_bytes);
  _tile_stored(2, c + 16 * p.c_stride, c_bytes);
  if constexpr (kColumns == 2) {
    _tile_stored(1, c + 16, c_bytes);
    _tile_stored(3, c + 16 * p.c_stride + 16, c_bytes);
  }
}

// Configures this thread's tile registers: 16 rows of 64 bytes each. A task calls it before gemm()
// of pairs and releases the registers afterwards. A destructor cannot do it: its exception tables
// would be code that all levels share.
inline void configure_amx_tiles() {
  alignas(64) uint8_t config[64] = {1};  // palette
  for (int tile = 0; tile < 8; ++tile) {
    config[16 + 2 * tile] = 64;
    config[48 + tile] = kAmxTileRows;
  }
  asm volatile("" ::: "memory");
  _tile_loadconfig(config);
}
inline void release_amx_tiles() {
  _tile_release();
}
#else
inline void configure_amx_tiles() {}
inline void release_amx_tiles() {}
#endif

// C = A B, or C += A B if kAccumulate. `columns` is whole vectors. Pairs need words in multiples of
// 16.
template <typename T, bool kAccumulate>
inline void gemm(const Gemm& p, int rows, int columns) {
#if defined(__AMX_BF16__)
  if constexpr (kPairs<T>) {
    asm volatile("" ::: "memory");  // tile loads read memory, which GCC does not know
    for (int row = 0; row < rows; row += 2 * kAmxTileRows) {
      int column = 0;
      for (; column + 32 <= columns; column += 32) gemm_amx<2, kAccumulate>(p, row, column);
      if (column < columns) gemm_amx<1, kAccumulate>(p, row, column);
    }
    return;
  }
#endif
  int column = 0;
  for (; column + kBlockVectors * kLanes <= columns; column += kBlockVectors * kLanes) {
    for (int row = 0; row < rows; row += kBlockRows) {
      gemm_block<T, kBlockVectors, kAccumulate>(p, row, column);
    }
  }
  for (; column < columns; column += kLanes) {
    for (int row = 0; row < rows; row += kBlockRows) gemm_block<T, 1, kAccumulate>(p, row, column);
  }
}

}  // namespace
}  // namespace vllm_kernels::cpu
