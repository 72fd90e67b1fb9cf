// A vector of floats at this object file's instruction-set level, and its conversions to and from
// the storage types. It uses GCC/Clang vector extensions, and intrinsics for conversions that have
// an instruction.
//
// Everything is in an anonymous namespace. The linker would merge functions with external linkage
// across levels, and the baseline would call AVX-512 code.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace vllm_kernels::cpu {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;  // SSE2, NEON
#endif

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int32_t VecInt __attribute__((vector_size(4 * kLanes)));
typedef uint32_t VecUint __attribute__((vector_size(4 * kLanes)));
typedef uint16_t VecHalfBits __attribute__((vector_size(2 * kLanes)));
typedef uint8_t VecByte __attribute__((vector_size(kLanes)));

// Storage types hold bits only, so they mean the same on every compiler.
struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};
struct Fp8E4M3 {
  uint8_t bits;
};
struct Fp8E5M2 {
  uint8_t bits;
};

inline Vec splat(float value) {
  return value - Vec{};  // keeps the sign of -0, which + would lose
}
inline VecUint as_bits(Vec value) {
  return reinterpret_cast<VecUint>(value);
}
inline Vec as_float(VecUint bits) {
  return reinterpret_cast<Vec>(bits);
}
inline Vec as_float(VecInt bits) {
  return reinterpret_cast<Vec>(bits);
}

// Lanes of the mask are all ones or all zeros.
inline Vec select(VecInt mask, Vec yes, Vec no) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  return (Vec)_mm256_blendv_ps((__m256)no, (__m256)yes, (__m256)mask);
#else
  return as_float((reinterpret_cast<VecInt>(yes) & mask) | (reinterpret_cast<VecInt>(no) & ~mask));
#endif
}
// maximum() and minimum() return b if either is NaN.
inline Vec maximum(Vec a, Vec b) {
#if defined(__AVX512F__)
  return (Vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (Vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return select(a > b, a, b);
#endif
}
inline Vec minimum(Vec a, Vec b) {
#if defined(__AVX512F__)
  return (Vec)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (Vec)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return select(a < b, a, b);
#endif
}

inline Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

// The same, in source order. GCC would reorder the fmas of a block of sums until it spills sums.
inline Vec fma_in_order(Vec a, Vec b, Vec c) {
#if defined(__AVX2__)
  asm volatile("vfmadd231ps %2, %1, %0" : "+v"(c) : "v"(a), "v"(b));
  return c;
#else
  return a * b + c;
#endif
}

template <typename V>
inline V load_raw(const void* from) {
  V value;
  std::memcpy(&value, from, sizeof(V));
  return value;
}
template <typename V>
inline void store_raw(void* to, V value) {
  std::memcpy(to, &value, sizeof(V));
}

// Prefetches into L2.
inline void prefetch_span(const char* from, int64_t bytes) {
  for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(from + line, 0, 2);
}

// --- load: storage type -> float ---------------------------------------------------------------

inline Vec load(const float* from) {
  return load_raw<Vec>(from);
}

inline Vec load(const BFloat16* from) {
#if defined(__AVX512F__)
  const VecUint bits = (VecUint)_mm512_cvtepu16_epi32(load_raw<__m256i>(from));
#elif defined(__AVX2__)
  const VecUint bits = (VecUint)_mm256_cvtepu16_epi32(load_raw<__m128i>(from));
#else
  const VecUint bits = __builtin_convertvector(load_raw<VecHalfBits>(from), VecUint);
#endif
  return as_float(bits << 16);
}

inline Vec load(const Half* from) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtph_ps(load_raw<__m256i>(from));
#elif defined(__AVX2__)
  return (Vec)_mm256_cvtph_ps(load_raw<__m128i>(from));
#else
  const VecUint bits = __builtin_convertvector(load_raw<VecHalfBits>(from), VecUint);
  const VecUint sign = (bits & 0x8000u) << 16;
  const VecUint magnitude = (bits & 0x7fffu) << 13;
  const Vec scaled = as_float(magnitude) * 0x1p112f;  // rebias 15 -> 127, also right for denormals
  const VecInt special = (VecInt)(magnitude >= 0x0f800000u);  // inf, NaN
  return as_float(as_bits(select(special, as_float(magnitude | 0x7f800000u), scaled)) | sign);
#endif
}

// --- store: float -> storage type, to nearest even ---------------------------------------------

inline void store(float* to, Vec value) {
  store_raw(to, value);
}

// A bfloat16 in the upper 16 bits; the lower bits are undefined. A NaN must have 0 in its lower
// bits to stay a NaN. NaNs from bfloat16 and from instructions have that.
inline VecUint bfloat16_bits(Vec value) {
  const VecUint bits = as_bits(value);
  return bits + (((bits >> 16) & 1u) + 0x7fffu);
}

inline void store(BFloat16* to, Vec value) {
  const VecInt is_nan = value != value;
  const Vec nan = as_float(VecUint{} + 0x7fc00000u);
  const VecUint upper = as_bits(select(is_nan, nan, as_float(bfloat16_bits(value)))) >> 16;
#if defined(__AVX512F__)
  store_raw(to, _mm512_cvtepi32_epi16((__m512i)upper));
#elif defined(__AVX2__)
  const __m256i packed = _mm256_packus_epi32((__m256i)upper, (__m256i)upper);
  store_raw(to, _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
#else
  store_raw(to, __builtin_convertvector(upper, VecHalfBits));
#endif
}

inline void store(Half* to, Vec value) {
#if defined(__AVX512F__)
  store_raw(to, _mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__)
  store_raw(to, _mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT));
#else
  const VecUint bits = as_bits(value);
  const VecUint magnitude = bits & 0x7fffffffu;
  const VecUint sign = (bits ^ magnitude) >> 16;
  // Normal: rebias and round at bit 13. Denormal: adding 0.5 aligns and rounds.
  const VecUint normal = (magnitude + 0xc8000fffu + ((magnitude >> 13) & 1u)) >> 13;
  const VecUint denormal = as_bits(as_float(magnitude) + 0.5f) - 0x3f000000u;
  const VecUint is_denormal = (VecUint)(magnitude < 0x38800000u);
  const VecUint is_large = (VecUint)(magnitude >= 0x47800000u);
  const VecUint is_nan = (VecUint)(magnitude > 0x7f800000u);
  VecUint half = (denormal & is_denormal) | (normal & ~is_denormal);
  half = (0x7c00u & is_large) | (half & ~is_large);
  half = (0x7e00u & is_nan) | (half & ~is_nan);
  store_raw(to, __builtin_convertvector(half | sign, VecHalfBits));
#endif
}

// The value after rounding to T.
template <typename T>
inline Vec round_to(Vec value) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return value;
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    return as_float(bfloat16_bits(value) & 0xffff0000u);
  } else {
    T buffer[kLanes];
    store(buffer, value);
    return load(buffer);
  }
}

// --- pairs: 2 * kLanes neighbouring elements, in an order that depends on T
// -----------------------
//
// For loops that treat all elements alike and whose arrays all hold T. For bfloat16, `a` has the
// even elements and `b` the odd ones, which halves the instructions.

struct VecPair {
  Vec a, b;
};

template <typename T>
inline VecPair load_pair(const T* from) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    const VecUint words = load_raw<VecUint>(from);
    return {as_float(words << 16), as_float(words & 0xffff0000u)};
  } else {
    return {load(from), load(from + kLanes)};
  }
}

template <typename T>
inline void store_pair(T* to, VecPair pair) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    store_raw(to, (bfloat16_bits(pair.a) >> 16) | (bfloat16_bits(pair.b) & 0xffff0000u));
  } else {
    store(to, pair.a);
    store(to + kLanes, pair.b);
  }
}

// Stores a result of round_to<T>().
template <typename T>
inline void store_rounded_pair(T* to, VecPair pair) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    store_raw(to, (as_bits(pair.a) >> 16) | as_bits(pair.b));
  } else {
    store_pair(to, pair);
  }
}

// --- the first `count` elements of a vector, the rest as zero ------------------------------------

template <typename T>
inline Vec load(const T* from, int64_t count) {
  T buffer[kLanes] = {};
  std::memcpy(buffer, from, count * sizeof(T));
  return load(buffer);
}
template <typename T>
inline void store(T* to, Vec value, int64_t count) {
  T buffer[kLanes];
  store(buffer, value);
  std::memcpy(to, buffer, count * sizeof(T));
}

// A count of kLanes that is known at compile time.
struct WholeVector {};
template <typename T>
inline Vec load(const T* from, WholeVector) {
  return load(from);
}
template <typename T>
inline void store(T* to, Vec value, WholeVector) {
  store(to, value);
}

// --- loops over elements -------------------------------------------------------------------------

// Calls body(i, count) for the vectors of elements [begin, end). `count` is a WholeVector, or the
// number of elements in the last vector.
template <typename Body>
inline void for_each_vector(int64_t begin, int64_t end, const Body& body) {
  int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) body(i, WholeVector{});
  if (i < end) body(i, end - i);
}

// Upcasts a row, padded with zeros to whole vectors.
template <typename T>
inline void upcast(const T* from, int64_t n, float* to) {
  for_each_vector(0, n, [&](int64_t i, auto count) { store(to + i, load(from + i, count)); });
}

// to[i] = f(from[i]...) for n elements, in pairs of vectors.
template <typename T, typename F, typename... From>
inline void map_elements(T* to, int64_t n, const F& f, const From*... from) {
  static_assert((std::is_same_v<T, From> && ...), "load_pair() must order all alike");
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    store_pair(to + i, {f(load_pair(from + i).a...), f(load_pair(from + i).b...)});
  }
  for (; i < n; i += kLanes) {
    const int64_t count = n - i < kLanes ? n - i : kLanes;
    store(to + i, f(load(from + i, count)...), count);
  }
}

// --- across lanes --------------------------------------------------------------------------------

inline float sum(Vec value) {
  float lanes[kLanes];
  store_raw(lanes, value);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

// The same of whole vectors of floats.
inline float sum_of(const float* from, int count) {
  Vec sums = {};
  for (int i = 0; i < count; i += kLanes) sums += load(from + i);
  return sum(sums);
}

inline float largest(Vec value) {
  float lanes[kLanes];
  store_raw(lanes, value);
  float result = lanes[0];
  for (int lane = 1; lane < kLanes; ++lane) result = lanes[lane] > result ? lanes[lane] : result;
  return result;
}

}  // namespace
}  // namespace vllm_kernels::cpu
