// Products of many query rows with a piece of K or V, packed for them:
//   C [rows][columns] = A [rows][words] * B [words][columns]        (+ C)
// A word is a float; in bf16 products it is two neighbours of the dimension that is summed.
#pragma once
#include <utility>

#include "cpu/base/vec.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace vllm_kernels::cpu {
namespace {

// Rows and columns of C are computed in blocks, so buffers of A and C hold whole blocks of rows;
// what lies in the rows past those asked for is of no meaning.
constexpr int kBlockRows = 6;
constexpr int kBlockVectors = kLanes == 16 ? 4 : 2;
constexpr int kTileRegisterRows = 16;
constexpr int kMostBlockRows = 2 * kTileRegisterRows;  // of any kernel

// Whether products of T are of pairs, two elements a word.
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

// [rows][from_stride] -> [columns][to_stride] of words; whole vectors of both.
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

// Whether no element of `count` words (whole vectors) is infinite or NaN.
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

// In every lane what `combine` makes of all of them.
template <typename Combine>
inline Vec combine_lanes(Vec v, Combine&& combine) {
  constexpr std::make_integer_sequence<int, kLanes> kSequence;
  if constexpr (kLanes > 8) v = combine(v, rotated<kLanes / 2>(v, kSequence));
  if constexpr (kLanes > 4) v = combine(v, rotated<4>(v, kSequence));
  v = combine(v, rotated<2>(v, kSequence));
  return combine(v, rotated<1>(v, kSequence));
}

// --- products ------------------------------------------------------------------------------------

// Strides in words.
struct Product {
  const float* a;
  int a_stride;
  const float* b;
  int b_stride;
  int words;
  float* c;
  int c_stride;
};

// The bits as they are: two bf16 may look like a signalling NaN.
inline Vec splat_word(float a) {
  uint32_t bits;
  std::memcpy(&bits, &a, sizeof bits);
  return as_float(VecUint{} + bits);
}

// sum + the word `a` times every lane of `b`.
template <typename T>
inline Vec multiply_words(Vec b, float a, Vec sum) {
#if defined(__AVX512BF16__)
  if constexpr (kPairs<T>) {
    return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)b, (__m512bh)splat_word(a));
  }
#endif
  return fma(b, splat_word(a), sum);
}

template <typename T, int kVectors, bool kAdds>
inline void multiply_block(const Product& p, int row, int column) {
  const float* a = p.a + row * p.a_stride;
  const float* b = p.b + column;
  float* c = p.c + row * p.c_stride + column;
  Vec sums[kBlockRows][kVectors];
#pragma GCC unroll 8
  for (int r = 0; r < kBlockRows; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) {
      sums[r][i] = kAdds ? load(c + r * p.c_stride + i * kLanes) : Vec{};
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
// Tile registers 0 .. 3 are C of 2 x 2 (kColumns = 2) or 2 x 1 blocks of 16 x 16, 4 and 5 rows of
// A, 6 and 7 columns of B.
template <int kColumns, bool kAdds>
inline void multiply_tiles(const Product& p, int row, int column) {
  const float* a = p.a + row * p.a_stride;
  const float* b = p.b + column;
  float* c = p.c + row * p.c_stride + column;
  const int64_t a_bytes = int64_t{4} * p.a_stride, b_bytes = int64_t{4} * p.b_stride;
  const int64_t c_bytes = int64_t{4} * p.c_stride;
  if constexpr (kAdds) {
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

// This thread's tile registers, all of 16 rows of 64 bytes; taken before products of pairs and
// given back after them. (No destructor does it: that would be code for exceptions, which all
// levels would share.)
inline void take_tile_registers() {
  alignas(64) uint8_t config[64] = {1};  // palette
  for (int tile = 0; tile < 8; ++tile) {
    config[16 + 2 * tile] = 64;
    config[48 + tile] = kTileRegisterRows;
  }
  asm volatile("" ::: "memory");
  _tile_loadconfig(config);
}
inline void release_tile_registers() {
  _tile_release();
}
#else
inline void take_tile_registers() {}
inline void release_tile_registers() {}
#endif

// The product of T's words, for `rows` rows and `columns` columns (whole vectors; of pairs, whole
// 16 words).
template <typename T, bool kAdds>
inline void multiply(const Product& p, int rows, int columns) {
#if defined(__AMX_BF16__)
  if constexpr (kPairs<T>) {
    asm volatile("" ::: "memory");  // GCC does not know that tile loads read memory
    for (int row = 0; row < rows; row += 2 * kTileRegisterRows) {
      int column = 0;
      for (; column + 32 <= columns; column += 32) multiply_tiles<2, kAdds>(p, row, column);
      if (column < columns) multiply_tiles<1, kAdds>(p, row, column);
    }
    return;
  }
#endif
  int column = 0;
  for (; column + kBlockVectors * kLanes <= columns; column += kBlockVectors * kLanes) {
    for (int row = 0; row < rows; row += kBlockRows) {
      multiply_block<T, kBlockVectors, kAdds>(p, row, column);
    }
  }
  for (; column < columns; column += kLanes) {
    for (int row = 0; row < rows; row += kBlockRows) multiply_block<T, 1, kAdds>(p, row, column);
  }
}

}  // namespace
}  // namespace vllm_kernels::cpu
