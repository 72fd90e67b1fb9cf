// How a page of the cache falls into vectors: which token and which dimension a lane stands for.
// Layout vllm keeps 16 bytes (a chunk of x dimensions) of a token together in K and the tokens of a
// dimension together in V, so K is multiplied with lanes over (token, dimension) and V with lanes
// over tokens. See cpu/base/vec.h for the anonymous namespace.
#pragma once
#include "cpu/base/fp8.h"
#include "cpu/base/vec.h"

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
// Quads as units: {a0 + a1, (a2 + a3,) b0 + b1 (, b2 + b3)}.
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

// v[i] holds kLanes / width tokens of `width` lanes each, for `width` vectors: lane t is the sum of
// token t, tokens counted through the vectors in order.
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

// Products in the order of the source where that was found faster: float and bfloat16.
template <typename T>
inline Vec multiply_add_as(Vec a, Vec b, Vec c) {
  return std::is_same_v<T, float> ? fma_in_order(a, b, c) : fma(a, b, c);
}

// One load of K covers kTokens tokens of a chunk, kWidth lanes each, in kParts vectors. pack()
// brings a chunk of the query into the lanes of one token in one part. Parts are to be multiplied
// with kScale, which is left to the score's own scale.
template <typename T>
struct KeyLanes {
  static constexpr float kScale = 1.0f;
  static constexpr int kChunk = 16 / sizeof(T);  // x
  static constexpr int kWidth = kChunk < kLanes ? kChunk : kLanes;
  static constexpr int kTokens = kLanes / kWidth;
  static constexpr int kParts = kChunk / kWidth;
  using Part = Vec;

  static void pack(const float* chunk, int part, float* packed) {
    for (int lane = 0; lane < kWidth; ++lane) packed[lane] = chunk[part * kWidth + lane];
  }
  static void load_parts(const T* from, Part* parts) {
    for (int i = 0; i < kParts; ++i) parts[i] = load(from + i * kLanes);
  }
  static Part query(const float* packed) { return broadcast<kWidth>(packed); }
  static Vec multiply_add(Part key, Part query, Vec sum) {
    return multiply_add_as<T>(key, query, sum);
  }
};

// bfloat16 in pairs: the even one of a 32-bit word is widened by a shift, the odd one by a mask.
inline void widen_pairs(VecUint words, Vec* parts) {
  parts[0] = as_float(words << 16);
  parts[1] = as_float(words & 0xffff0000u);
}

#if !defined(__AVX512BF16__)
template <>
struct KeyLanes<BFloat16> {
  static constexpr float kScale = 1.0f;
  static constexpr int kChunk = 8;
  static constexpr int kWidth = 4;
  static constexpr int kTokens = kLanes / kWidth;
  static constexpr int kParts = 2;
  using Part = Vec;

  static void pack(const float* chunk, int part, float* packed) {
    for (int lane = 0; lane < kWidth; ++lane) packed[lane] = chunk[2 * lane + part];
  }
  static void load_parts(const BFloat16* from, Part* parts) {
    widen_pairs(load_raw<VecUint>(from), parts);
  }
  static Part query(const float* packed) { return broadcast<kWidth>(packed); }
  static Vec multiply_add(Part key, Part query, Vec sum) { return fma_in_order(key, query, sum); }
};
#else
// Dot products of bfloat16 pairs. The packed query holds a pair in the bits of one float.
template <>
struct KeyLanes<BFloat16> {
  static constexpr float kScale = 1.0f;
  static constexpr int kChunk = 8;
  static constexpr int kWidth = 4;
  static constexpr int kTokens = 4;
  static constexpr int kParts = 1;
  using Part = __m512i;

  static void pack(const float* chunk, int, float* packed) {  // exact: the query was bfloat16
    BFloat16 row[kLanes];
    store(row, load_partial(chunk, kChunk));
    store_raw(packed, load_raw<__m128i>(row));
  }
  static void load_parts(const BFloat16* from, Part* parts) { parts[0] = _mm512_loadu_si512(from); }
  static Part query(const float* packed) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(packed)));
  }
  static Vec multiply_add(Part key, Part query, Vec sum) {
    return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)key, (__m512bh)query);
  }
};
#endif

#if defined(__AVX2__)
// 16 elements of 8 bits by way of fp16, without cpu/base/fp8.h's final scaling.
template <typename T>
struct WideFp8;
template <>
struct WideFp8<Fp8E5M2> {
  static constexpr float kScale = 1.0f;
  static __m256i half_bits(__m128i bytes) {  // the upper byte of an fp16
    return _mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 8);
  }
};
template <>
struct WideFp8<Fp8E4M3> {
  static constexpr float kScale = 256.0f;  // between the exponents' biases, 15 and 7
  static __m256i half_bits(__m128i bytes) {
    // The sign fills the upper byte, so that one shift brings sign, exponent and mantissa home.
    const __m256i keep = _mm256_set1_epi16(static_cast<int16_t>(0xbf80));
    const __m256i bits = _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7), keep);
    const __m256i sign = _mm256_set1_epi16(static_cast<int16_t>(0x8000));
    return _mm256_or_si256(bits, _mm256_cmpeq_epi16(_mm256_or_si256(bits, sign), keep));  // NaN
  }
};

template <typename T>
inline void widen_fp8(__m128i bytes, Vec* parts) {
  const __m256i bits = WideFp8<T>::half_bits(bytes);
#if defined(__AVX512F__)
  parts[0] = (Vec)_mm512_cvtph_ps(bits);
#else
  parts[0] = (Vec)_mm256_cvtph_ps(_mm256_castsi256_si128(bits));
  parts[1] = (Vec)_mm256_cvtph_ps(_mm256_extracti128_si256(bits, 1));
#endif
}

template <typename T>
struct Fp8KeyLanes {
  static constexpr float kScale = WideFp8<T>::kScale;
  static constexpr int kChunk = 16;
  static constexpr int kWidth = kLanes;
  static constexpr int kTokens = 1;
  static constexpr int kParts = 16 / kLanes;
  using Part = Vec;

  static void pack(const float* chunk, int part, float* packed) {
    store(packed, load(chunk + part * kLanes));
  }
  static void load_parts(const T* from, Part* parts) {
    widen_fp8<T>(load_raw<__m128i>(from), parts);
  }
  static Part query(const float* packed) { return load(packed); }
  static Vec multiply_add(Part key, Part query, Vec sum) { return fma(key, query, sum); }
};
template <>
struct KeyLanes<Fp8E4M3> : Fp8KeyLanes<Fp8E4M3> {};
template <>
struct KeyLanes<Fp8E5M2> : Fp8KeyLanes<Fp8E5M2> {};
#endif

// --- V -------------------------------------------------------------------------------------------

// A vector of so many bytes. (GCC drops a vector_size that depends on a template parameter.)
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

// `bytes` bytes of V's tokens, put together from the rows of 1, 2 or 4 pages.
template <int bytes, int pieces>
inline Raw<bytes> load_joined(const char* const* rows, int64_t offset) {
  if constexpr (pieces == 1) {
    return load_raw<Raw<bytes>>(rows[0] + offset);
  } else {
    return join(load_joined<bytes / 2, pieces / 2>(rows, offset),
                load_joined<bytes / 2, pieces / 2>(rows + pieces / 2, offset));
  }
}

// One load of V covers kTokens tokens of one dimension in kParts vectors. pack() brings kTokens
// weights, in the order of the tokens, into the same lanes. Results are to be multiplied with
// kScale.
template <typename T>
struct ValueLanes {
  static constexpr float kScale = 1.0f;
  static constexpr int kTokens = kLanes;
  static constexpr int kParts = 1;
  static constexpr int kBytes = kTokens * sizeof(T);
  using Part = Vec;

  static void widen(Raw<kBytes> raw, Part* parts) {
    T elements[kLanes];
    store_raw(elements, raw);
    parts[0] = load(elements);
  }
  static void pack(const Vec* weights, Part* parts) { parts[0] = weights[0]; }
  static Vec round(Vec weight) { return weight; }
  static Vec multiply_add(Part value, Part weight, Vec sum) {
    return multiply_add_as<T>(value, weight, sum);
  }
};

#if !defined(__AVX512BF16__)
template <>
struct ValueLanes<BFloat16> {
  static constexpr float kScale = 1.0f;
  static constexpr int kTokens = 2 * kLanes;
  static constexpr int kParts = 2;
  static constexpr int kBytes = 2 * kTokens;
  using Part = Vec;

  static void widen(Raw<kBytes> raw, Part* parts) { widen_pairs((VecUint)raw, parts); }
  static void pack(const Vec* weights, Part* parts) {
    const Vec a = weights[0], b = weights[1];
#if defined(__AVX512F__)
    parts[0] =
        __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    parts[1] =
        __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#elif defined(__AVX2__)
    parts[0] = __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14);
    parts[1] = __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
#else
    parts[0] = __builtin_shufflevector(a, b, 0, 2, 4, 6);
    parts[1] = __builtin_shufflevector(a, b, 1, 3, 5, 7);
#endif
  }
  static Vec round(Vec weight) { return weight; }
  static Vec multiply_add(Part value, Part weight, Vec sum) {
    return fma_in_order(value, weight, sum);
  }
};
#else
// Weights are rounded to bfloat16, and summed as rounded, so that the result stays a mean.
template <>
struct ValueLanes<BFloat16> {
  static constexpr float kScale = 1.0f;
  static constexpr int kTokens = 2 * kLanes;
  static constexpr int kParts = 1;
  static constexpr int kBytes = 2 * kTokens;
  using Part = __m512i;

  static void widen(Raw<kBytes> raw, Part* parts) { parts[0] = (__m512i)raw; }
  static void pack(const Vec* weights, Part* parts) {
    parts[0] = (__m512i)_mm512_cvtne2ps_pbh((__m512)weights[1], (__m512)weights[0]);
  }
  static Vec round(Vec weight) { return round_to<BFloat16>(weight); }
  static Vec multiply_add(Part value, Part weight, Vec sum) {
    return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)value, (__m512bh)weight);
  }
};
#endif

#if defined(__AVX2__)
template <typename T>
struct Fp8ValueLanes {
  static constexpr float kScale = WideFp8<T>::kScale;
  static constexpr int kTokens = 16;
  static constexpr int kParts = 16 / kLanes;
  static constexpr int kBytes = 16;
  using Part = Vec;

  static void widen(Raw<kBytes> raw, Part* parts) { widen_fp8<T>((__m128i)raw, parts); }
  static void pack(const Vec* weights, Part* parts) {
    for (int i = 0; i < kParts; ++i) parts[i] = weights[i];
  }
  static Vec round(Vec weight) { return weight; }
  static Vec multiply_add(Part value, Part weight, Vec sum) { return fma(value, weight, sum); }
};
template <>
struct ValueLanes<Fp8E4M3> : Fp8ValueLanes<Fp8E4M3> {};
template <>
struct ValueLanes<Fp8E5M2> : Fp8ValueLanes<Fp8E5M2> {};
#endif

#undef VLLM_KERNELS_SHUFFLE_QUADS

}  // namespace
}  // namespace vllm_kernels::cpu
