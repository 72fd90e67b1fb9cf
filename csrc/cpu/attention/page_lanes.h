// How the elements of a page in layout vllm map to vector lanes, for each cache dtype.
//   K: 16 bytes (a chunk of x dimensions) of a token are contiguous; lanes are (token, dimension)
//   V: the tokens of a dimension are contiguous; lanes are tokens
// A new cache dtype that needs its own conversion specialises KeyLanes and ValueLanes. See
// cpu/base/vec.h for the anonymous namespace.
#pragma once
#include "cpu/base/fp8.h"
#include "cpu/base/int4.h"
#include "cpu/base/vec_pairs.h"

namespace vllm_kernels::cpu {
namespace {

// --- sums across lanes ---------------------------------------------------------------------------

#if defined(__AVX512F__)
#define VLLM_KERNELS_SHUFFLE_QUADS(a, b, i, j, k, l)                                              \
  __builtin_shufflevector(a, b, i, j, 16 + k, 16 + l, 4 + i, 4 + j, 20 + k, 20 + l, 8 + i, 8 + j, \
                          24 + k, 24 + l, 12 + i, 12 + j, 28 + k, 28 + l)
#elif defined(__AVX2__)
#define VLLM_KERNELS_SHUFFLE_QUADS(a, b, i, j, k, l) \
  __builtin_shufflevector(a, b, i, j, 8 + k, 8 + l, 4 + i, 4 + j, 12 + k, 12 + l)
#else
#define VLLM_KERNELS_SHUFFLE_QUADS(a, b, i, j, k, l) \
  __builtin_shufflevector(a, b, i, j, 4 + k, 4 + l)
#endif

// In each quad of lanes: {a0 + a1, a2 + a3, b0 + b1, b2 + b3}.
inline Vec fold_pairs(Vec a, Vec b) {
  return VLLM_KERNELS_SHUFFLE_QUADS(a, b, 0, 2, 0, 2) +
         VLLM_KERNELS_SHUFFLE_QUADS(a, b, 1, 3, 1, 3);
}

// In each quad of lanes: the sums of that quad of a, b, c and d.
inline Vec fold_quads(const Vec* v) {
  return fold_pairs(fold_pairs(v[0], v[1]), fold_pairs(v[2], v[3]));
}

#if defined(__AVX2__)
// Adds neighbouring quads: {a0 + a1, (a2 + a3,) b0 + b1 (, b2 + b3)}.
inline Vec fold_halves(Vec a, Vec b) {
#if defined(__AVX512F__)
  return (Vec)_mm512_add_ps(_mm512_shuffle_f32x4((__m512)a, (__m512)b, 0x88),
                            _mm512_shuffle_f32x4((__m512)a, (__m512)b, 0xdd));
#else
  return (Vec)_mm256_add_ps(_mm256_permute2f128_ps((__m256)a, (__m256)b, 0x20),
                            _mm256_permute2f128_ps((__m256)a, (__m256)b, 0x31));
#endif
}
#endif

// Lane i: the sum of v[i], for kLanes vectors.
inline Vec sum_each(const Vec* v) {
#if defined(__AVX512F__)
  return fold_halves(fold_halves(fold_quads(v), fold_quads(v + 4)),
                     fold_halves(fold_quads(v + 8), fold_quads(v + 12)));
#elif defined(__AVX2__)
  return fold_halves(fold_quads(v), fold_quads(v + 4));
#else
  return fold_quads(v);
#endif
}

// Each of `width` vectors holds kLanes / width tokens with `width` lanes each. Lane t of the result
// is the sum of token t.
template <int width>
inline Vec sum_tokens(const Vec* v) {
  if constexpr (width == kLanes) {
    return sum_each(v);
#if defined(__AVX512F__)
  } else if constexpr (width == 8) {
    const Vec sums = fold_halves(fold_quads(v), fold_quads(v + 4));
    return __builtin_shufflevector(sums, sums, 0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11,
                                   15);
  } else {
    static_assert(width == 4);
    const Vec sums = fold_quads(v);
    return __builtin_shufflevector(sums, sums, 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11,
                                   15);
#elif defined(__AVX2__)
  } else {
    static_assert(width == 4);
    const Vec sums = fold_quads(v);
    return __builtin_shufflevector(sums, sums, 0, 4, 1, 5, 2, 6, 3, 7);
#endif
  }
}

// The first `width` floats, repeated through the vector.
template <int width>
inline Vec broadcast(const float* from) {
  if constexpr (width == kLanes) {
    return load(from);
#if defined(__AVX512F__)
  } else if constexpr (width == 8) {
    return (Vec)_mm512_broadcast_f32x8(_mm256_loadu_ps(from));
  } else {
    static_assert(width == 4);
    return (Vec)_mm512_broadcast_f32x4(_mm_loadu_ps(from));
#elif defined(__AVX2__)
  } else {
    static_assert(width == 4);
    return (Vec)_mm256_broadcast_ps(reinterpret_cast<const __m128*>(from));
#endif
  }
}

// --- K -------------------------------------------------------------------------------------------

// fma(), in source order for float, where that was measured to be faster.
template <typename T>
inline Vec multiply_add_as(Vec a, Vec b, Vec c) {
  return std::is_same_v<T, float> ? fma_in_order(a, b, c) : fma(a, b, c);
}

// One load of K covers kTokens tokens of a chunk with kWidth lanes each, in kOperands vectors.
// pack() arranges a chunk of the query like one token of one operand. Scores must be multiplied
// with kScale, which the caller folds into the softmax scale.
template <typename T, int width = (16 / sizeof(T) < kLanes ? 16 / sizeof(T) : kLanes)>
struct FloatKeyLanes {
  static constexpr float kScale = 1.0f;
  static constexpr int kChunk = 16 / sizeof(T);  // x
  static constexpr int kWidth = width;
  static constexpr int kTokens = kLanes / kWidth;
  static constexpr int kOperands = kChunk / kWidth;
  using Operand = Vec;

  static void pack(const float* chunk, int operand, float* packed) {
    for (int lane = 0; lane < kWidth; ++lane) packed[lane] = chunk[operand * kWidth + lane];
  }
  static void load_operands(const T* from, Operand* operands) {
    for (int i = 0; i < kOperands; ++i) operands[i] = load(from + i * kLanes);
  }
  static Operand query(const float* packed) { return broadcast<kWidth>(packed); }
  static Vec multiply_add(Operand key, Operand query, Vec sum) {
    return multiply_add_as<T>(key, query, sum);
  }
};

template <typename T>
struct KeyLanes : FloatKeyLanes<T> {};

// bfloat16 pairs: a shift upcasts the even element of a 32-bit word, a mask the odd one.
inline void upcast_pairs(VecUint words, Vec* operands) {
  operands[0] = as_float(words << 16);
  operands[1] = as_float(words & 0xffff0000u);
}

#if !defined(__AVX512BF16__)
template <>
struct KeyLanes<BFloat16> : FloatKeyLanes<BFloat16, 4> {
  static void pack(const float* chunk, int operand, float* packed) {
    for (int lane = 0; lane < kWidth; ++lane) packed[lane] = chunk[2 * lane + operand];
  }
  static void load_operands(const BFloat16* from, Operand* operands) {
    upcast_pairs(load_raw<VecUint>(from), operands);
  }
  static Vec multiply_add(Operand key, Operand query, Vec sum) {
    return fma_in_order(key, query, sum);
  }
};
#else
// Dot products of bfloat16 pairs. The packed query holds a pair in the bits of one float.
template <>
struct KeyLanes<BFloat16> : FloatKeyLanes<BFloat16, 4> {
  static constexpr int kOperands = 1;
  using Operand = __m512i;

  static void pack(const float* chunk, int, float* packed) {  // exact: the query was bfloat16
    BFloat16 row[kLanes];
    store(row, load(chunk, kChunk));
    store_raw(packed, load_raw<__m128i>(row));
  }
  static void load_operands(const BFloat16* from, Operand* operands) {
    operands[0] = _mm512_loadu_si512(from);
  }
  static Operand query(const float* packed) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(packed)));
  }
  static Vec multiply_add(Operand key, Operand query, Vec sum) {
    return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)key, (__m512bh)query);
  }
};
#endif

#if defined(__AVX2__)
// 16 fp8 elements, without the final scaling of cpu/base/fp8.h.
template <typename T>
inline void upcast_fp8(__m128i bytes, Vec* operands) {
  typedef uint16_t HalfBits __attribute__((vector_size(32)));
  const auto bits = (__m256i)to_half_bits<T>((HalfBits)_mm256_cvtepi8_epi16(bytes));
#if defined(__AVX512F__)
  operands[0] = (Vec)_mm512_cvtph_ps(bits);
#else
  operands[0] = (Vec)_mm256_cvtph_ps(_mm256_castsi256_si128(bits));
  operands[1] = (Vec)_mm256_cvtph_ps(_mm256_extracti128_si256(bits, 1));
#endif
}

template <typename T>
struct Fp8KeyLanes : FloatKeyLanes<T> {
  static constexpr float kScale = kHalfScale<T>;

  static void load_operands(const T* from, Vec* operands) {
    upcast_fp8<T>(load_raw<__m128i>(from), operands);
  }
};
template <>
struct KeyLanes<Fp8E4M3> : Fp8KeyLanes<Fp8E4M3> {};
template <>
struct KeyLanes<Fp8E5M2> : Fp8KeyLanes<Fp8E5M2> {};
#endif

// The low bits of a vector of elements come first, then the high bits.
template <>
struct KeyLanes<Int4x2> : FloatKeyLanes<Int4x2> {
  static constexpr int kOperands = 2 * FloatKeyLanes<Int4x2>::kOperands;

  static void load_operands(const Int4x2* from, Vec* operands) {
    for (int i = 0; i < kOperands; i += 2) {
      const VecPair values = load_values(from + i / 2 * kLanes);
      operands[i] = values.a;
      operands[i + 1] = values.b;
    }
  }
  static Vec multiply_add(Vec key, Vec query, Vec sum) { return fma_in_order(key, query, sum); }
};

// --- V -------------------------------------------------------------------------------------------

// A vector of `bytes` bytes. GCC ignores a vector_size that depends on a template parameter.
template <int bytes>
struct RawVector;
#define VLLM_KERNELS_RAW_VECTOR(bytes)                         \
  template <>                                                  \
  struct RawVector<bytes> {                                    \
    typedef uint32_t type __attribute__((vector_size(bytes))); \
  };
VLLM_KERNELS_RAW_VECTOR(4)
VLLM_KERNELS_RAW_VECTOR(8)
VLLM_KERNELS_RAW_VECTOR(16)
VLLM_KERNELS_RAW_VECTOR(32)
VLLM_KERNELS_RAW_VECTOR(64)
#undef VLLM_KERNELS_RAW_VECTOR
template <int bytes>
using Raw = typename RawVector<bytes>::type;

inline Raw<16> join(Raw<8> low, Raw<8> high) {
  return __builtin_shufflevector(low, high, 0, 1, 2, 3);
}
inline Raw<32> join(Raw<16> low, Raw<16> high) {
  return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7);
}
inline Raw<64> join(Raw<32> low, Raw<32> high) {
  return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}

// `bytes` bytes of V's tokens, joined from 1, 2 or 4 pages.
template <int bytes, int pages>
inline Raw<bytes> load_joined(const char* const* rows, int64_t offset) {
  if constexpr (pages == 1) {
    return load_raw<Raw<bytes>>(rows[0] + offset);
  } else {
    return join(load_joined<bytes / 2, pages / 2>(rows, offset),
                load_joined<bytes / 2, pages / 2>(rows + pages / 2, offset));
  }
}

// One load of V covers kTokens tokens of one dimension in kOperands vectors. pack() arranges p of
// kTokens tokens in the same lanes. Results must be multiplied with kScale.
template <typename T, int tokens = kLanes>
struct FloatValueLanes {
  static constexpr float kScale = 1.0f;
  static constexpr int kTokens = tokens;
  static constexpr int kOperands = kTokens / kLanes;
  static constexpr int kBytes = kTokens * sizeof(T);
  using Operand = Vec;

  static void upcast(Raw<kBytes> raw, Operand* operands) {
    T elements[kTokens];
    store_raw(elements, raw);
    for (int i = 0; i < kOperands; ++i) operands[i] = load(elements + i * kLanes);
  }
  static void pack(const Vec* probs, Operand* operands) {
    for (int i = 0; i < kOperands; ++i) operands[i] = probs[i];
  }
  static Vec round(Vec prob) { return prob; }
  static Vec multiply_add(Operand value, Operand prob, Vec sum) {
    return multiply_add_as<T>(value, prob, sum);
  }
};
template <typename T>
struct ValueLanes : FloatValueLanes<T> {};

#if !defined(__AVX512BF16__)
template <>
struct ValueLanes<BFloat16> : FloatValueLanes<BFloat16, 2 * kLanes> {
  static void upcast(Raw<kBytes> raw, Operand* operands) { upcast_pairs((VecUint)raw, operands); }
  static void pack(const Vec* probs, Operand* operands) {
    split_pairs(probs[0], probs[1], operands[0], operands[1]);
  }
  static Vec multiply_add(Operand value, Operand prob, Vec sum) {
    return fma_in_order(value, prob, sum);
  }
};
#else
// p is rounded to bfloat16. row_sum adds the rounded values, so the weights of V add up to 1.
template <>
struct ValueLanes<BFloat16> : FloatValueLanes<BFloat16, 2 * kLanes> {
  static constexpr int kOperands = 1;
  using Operand = __m512i;

  static void upcast(Raw<kBytes> raw, Operand* operands) { operands[0] = (__m512i)raw; }
  static void pack(const Vec* probs, Operand* operands) {
    operands[0] = (__m512i)_mm512_cvtne2ps_pbh((__m512)probs[1], (__m512)probs[0]);
  }
  static Vec round(Vec prob) { return round_to<BFloat16>(prob); }
  static Vec multiply_add(Operand value, Operand prob, Vec sum) {
    return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)value, (__m512bh)prob);
  }
};
#endif

#if defined(__AVX2__)
template <typename T>
struct Fp8ValueLanes : FloatValueLanes<T, 16> {
  static constexpr float kScale = kHalfScale<T>;

  static void upcast(Raw<16> raw, Vec* operands) { upcast_fp8<T>((__m128i)raw, operands); }
};
template <>
struct ValueLanes<Fp8E4M3> : Fp8ValueLanes<Fp8E4M3> {};
template <>
struct ValueLanes<Fp8E5M2> : Fp8ValueLanes<Fp8E5M2> {};
#endif

// One half of the elements: 0 for the low bits, 1 for the high ones.
template <>
struct ValueLanes<Int4x2> : FloatValueLanes<Int4x2> {
  static void upcast(Raw<kBytes> raw, int half, Vec* operands) {
    Int4x2 elements[kLanes];
    store_raw(elements, raw);
    operands[0] = int4_values(load_bits(elements) >> (4 * half));
  }
};

#undef VLLM_KERNELS_SHUFFLE_QUADS

}  // namespace
}  // namespace vllm_kernels::cpu
