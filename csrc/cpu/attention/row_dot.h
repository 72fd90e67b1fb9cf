// Products of few query rows with rows of K and V where they lie: a row is one head of a token, its
// elements next to each other (layouts NHD and HND, contiguous keys). It is read, and widened, once
// for up to 4 query rows. See cpu/base/vec.h for the anonymous namespace.
#pragma once
#include "cpu/attention/page_lanes.h"
#include "cpu/base/int8.h"

namespace vllm_kernels::cpu {
namespace {

// --- what is needed next -------------------------------------------------------------------------

// The lines of `count` spans of `bytes` bytes, in turns from kStreams places, so that address
// translations and rows of DRAM are opened side by side.
class LineFetch {
 public:
  LineFetch(const char* const* spans, int count, int bytes)
      : spans_(spans), each_(count / kStreams), bytes_(bytes), left_(count % kStreams) {
    if (each_ == 0) next_spans();
  }

  template <int lines>
  void next() {
#pragma GCC unroll 4
    for (int i = 0; i < lines; ++i) {
      if (streams_ == 0) return;
      __builtin_prefetch(spans_[stream_ * each_] + at_, 0, 2);
      if (++stream_ < streams_) continue;
      stream_ = 0;
      at_ += 64;
      if (at_ < bytes_) continue;
      at_ = 0;
      ++spans_;
      if (++done_ == each_) next_spans();
    }
  }
  void rest() {
    while (streams_ > 0) next<1>();
  }

 private:
  static constexpr int kStreams = 8;

  // From kStreams streams of each_ spans to left_ streams of one, to none.
  void next_spans() {
    spans_ += (kStreams - 1) * each_;
    streams_ = left_;
    left_ = each_ = done_ = 0;
    if (streams_ > 0) each_ = 1;
  }

  const char* const* spans_;  // the first stream's next
  int each_;                  // spans of a stream
  int bytes_;
  int left_;
  int streams_ = kStreams;
  int stream_ = 0, at_ = 0, done_ = 0;
};

// --- lanes ---------------------------------------------------------------------------------------

// A load covers kStep dimensions of a row of K or V. Scores and sums over tokens are to be
// multiplied with kScale. Packed: a query row of count elements, with zeros up to whole steps;
// kTokens weights, rounded to what packing leaves of them.
template <typename T>
struct FloatTokenLanes {
  using Element = T;
  using Part = Vec;
  static constexpr float kScale = 1.0f;
  static constexpr int kTokens = kLanes;
  static constexpr int kParts = 1;
  static constexpr int kStep = kLanes;
  static constexpr int kPair = 1;  // tokens of V that a product takes

  static Part load(const T* from) { return cpu::load(from); }
  static Part load(const T* from, int count) { return load_partial(from, count); }
  static Part query(const float* row, int d) { return cpu::load(row + d); }
  static Part weight(const float* weights, int token) { return splat(weights[token]); }
  static Vec multiply_add(Part key, Part query, Vec sum) {
    return multiply_add_as<T>(key, query, sum);
  }

  static void pack_query(const float* row, int count, float* to) {
    int d = 0;
    for (; d + kLanes <= count; d += kLanes) store(to + d, cpu::load(row + d));
    if (d < count) store(to + d, load_partial(row + d, count - d));
  }
  static Vec round(Vec weight) { return weight; }
  static void pack(const Vec* weights, Part* to) { to[0] = weights[0]; }
};

template <typename T>
struct TokenLanes : FloatTokenLanes<T> {};

#if defined(__AVX2__)
template <typename T>
struct Fp8TokenLanes : FloatTokenLanes<T> {
  static constexpr float kScale = WideFp8<T>::kScale;

  static Vec load(const T* from) {
#if defined(__AVX512F__)
    return (Vec)_mm512_cvtph_ps(WideFp8<T>::half_bits(load_raw<__m128i>(from)));
#else
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
    return (Vec)_mm256_cvtph_ps(_mm256_castsi256_si128(WideFp8<T>::half_bits(bytes)));
#endif
  }
  static Vec load(const T* from, int count) {
    T elements[kLanes] = {};
    std::memcpy(elements, from, count);
    return load(elements);
  }
};
template <>
struct TokenLanes<Fp8E4M3> : Fp8TokenLanes<Fp8E4M3> {};
template <>
struct TokenLanes<Fp8E5M2> : Fp8TokenLanes<Fp8E5M2> {};
#endif

#if defined(__AVX512BF16__)
// Dot products of bfloat16 pairs: of neighbouring dimensions of K, of neighbouring tokens of V. A
// weight is a pair of weights.
template <>
struct TokenLanes<BFloat16> {
  using Element = BFloat16;
  using Part = __m512i;
  static constexpr float kScale = 1.0f;
  static constexpr int kStep = 2 * kLanes;
  static constexpr int kPair = 2;
  static constexpr int kTokens = 2 * kLanes;
  static constexpr int kParts = 1;

  static Part load(const BFloat16* from) { return _mm512_loadu_si512(from); }
  static Part load(const BFloat16* from, int count) {
    return _mm512_maskz_loadu_epi16((__mmask32{1} << count) - 1, from);
  }
  static Part query(const float* row, int d) { return _mm512_loadu_si512(row + d / 2); }
  static Part weight(const float* weights, int token) {
    return _mm512_set1_epi32(load_raw<int>(weights + token / 2));
  }
  static Vec multiply_add(Part key, Part query, Vec sum) {
    return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)key, (__m512bh)query);
  }

  // Pairs of dimensions 0 - 3, 8 - 11, .. and 4 - 7, 12 - 15, ..
  static void join(Part token, Part next, Part* parts) {
    parts[0] = _mm512_unpacklo_epi16(token, next);
    parts[1] = _mm512_unpackhi_epi16(token, next);
  }
  static void in_order(Vec* sums) {
    const Vec a = sums[0], b = sums[1];
    sums[0] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    sums[1] =
        __builtin_shufflevector(a, b, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  }

  static void pack_query(const float* row, int count, float* to) {  // exact: it was bfloat16
    auto* elements = reinterpret_cast<BFloat16*>(to);
    for (int d = 0; d < (count + kStep - 1) / kStep * kStep; d += kLanes) {
      const int rest = count - d;
      store(elements + d, rest >= kLanes ? cpu::load(row + d)
                          : rest > 0     ? load_partial(row + d, rest)
                                         : Vec{});
    }
  }
  static Vec round(Vec weight) { return round_to<BFloat16>(weight); }
  static void pack(const Vec* weights, Part* to) {
    to[0] = (__m512i)_mm512_cvtne2ps_pbh((__m512)weights[1], (__m512)weights[0]);
  }
};
#endif

// --- products ------------------------------------------------------------------------------------

// A loop's step that reads `bytes` bytes asks for as many, at `at` of every 64 where that is less.
template <bool kFetch, int bytes>
inline void fetch_step(LineFetch& ahead, int at) {
  if constexpr (kFetch && bytes >= 64) {
    ahead.next<bytes / 64>();
  } else if constexpr (kFetch) {
    if (at % 64 == 0) ahead.next<1>();
  }
}

// scores[h][token] = scale * q . k of rows[0 .. tokens), which are readable up to whole vectors of
// tokens.
//   rows: at `offset` bytes from the pointers; query: [H][query_stride], packed, zeros up to whole
//   steps; scores: [H][score_stride], whole vectors
template <typename Lanes, int H, bool kFetch>
inline void score_token_rows(const char* const* rows, int64_t offset, int tokens, int head_size,
                             const float* query, int query_stride, float scale, LineFetch& ahead,
                             float* scores, int score_stride) {
  using T = typename Lanes::Element;
  using Part = typename Lanes::Part;
  constexpr int kTokens = kLanes / H;  // at once; kLanes sums
  constexpr int kBytes = kTokens * Lanes::kStep * static_cast<int>(sizeof(T));
  const int whole = head_size / Lanes::kStep * Lanes::kStep;
  for (int token = 0; token < tokens; token += kTokens) {
    const T* from[kTokens];
#pragma GCC unroll 16
    for (int i = 0; i < kTokens; ++i) {
      from[i] = reinterpret_cast<const T*>(rows[token + i] + offset);
    }
    Vec sums[kLanes] = {};
    const auto add = [&](int d, const Part* keys) {
#pragma GCC unroll 4
      for (int head = 0; head < H; ++head) {
        const Part q = Lanes::query(query + head * query_stride, d);
#pragma GCC unroll 16
        for (int i = 0; i < kTokens; ++i) {
          Vec& sum = sums[head * kTokens + i];
          sum = Lanes::multiply_add(keys[i], q, sum);
        }
      }
    };
    Part keys[kTokens];
    for (int d = 0; d < whole; d += Lanes::kStep) {
      fetch_step<kFetch, kBytes>(ahead, d / Lanes::kStep * kBytes);
#pragma GCC unroll 16
      for (int i = 0; i < kTokens; ++i) keys[i] = Lanes::load(from[i] + d);
      add(d, keys);
    }
    if (whole < head_size) {
#pragma GCC unroll 16
      for (int i = 0; i < kTokens; ++i) keys[i] = Lanes::load(from[i] + whole, head_size - whole);
      add(whole, keys);
    }
    alignas(64) float all[kLanes];
    store(all, sum_each(sums) * scale);
#pragma GCC unroll 4
    for (int head = 0; head < H; ++head) {
      std::memcpy(scores + head * score_stride + token, all + head * kTokens,
                  sizeof(float) * kTokens);
    }
  }
}

// out[h] = out[h] * factors[h] + sum over tokens of weights[h][token] * V[token], for the
// dimensions d .. d + kVectors loads, or `count` of one load. The arguments as in score_token_rows.
template <typename Lanes, int H, int kVectors, bool kPartial, bool kFetch>
inline void add_token_rows(const char* const* rows, int64_t offset, int tokens, int d, int count,
                           const float* weights, int weight_stride, const float* factors,
                           LineFetch& ahead, float* out, int out_stride) {
  using T = typename Lanes::Element;
  using Part = typename Lanes::Part;
  constexpr int kPair = Lanes::kPair, kSums = kVectors * kPair;
  constexpr int kBytes = kVectors * kPair * Lanes::kStep * static_cast<int>(sizeof(T));
  Vec sums[H][kSums] = {};
  const auto load = [&](int token, int i) {
    const T* from = reinterpret_cast<const T*>(rows[token] + offset) + d + i * Lanes::kStep;
    return kPartial ? Lanes::load(from, count) : Lanes::load(from);
  };
  const auto add = [&](int token, auto has_next) {
    Part parts[kSums];
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) {
      if constexpr (kPair == 1) {
        parts[i] = load(token, i);
      } else {
        Part next = {};
        if constexpr (has_next) next = load(token + 1, i);
        Lanes::join(load(token, i), next, parts + 2 * i);
      }
    }
#pragma GCC unroll 4
    for (int head = 0; head < H; ++head) {
      const Part weight = Lanes::weight(weights + head * weight_stride, token);
#pragma GCC unroll 8
      for (int i = 0; i < kSums; ++i) {
        sums[head][i] = Lanes::multiply_add(parts[i], weight, sums[head][i]);
      }
    }
  };
  int token = 0;
  for (; token + kPair <= tokens; token += kPair) {
    fetch_step<kFetch, kBytes>(ahead, token / kPair * kBytes);
    add(token, std::true_type{});
  }
  if (token < tokens) add(token, std::false_type{});
#pragma GCC unroll 4
  for (int head = 0; head < H; ++head) {
    float* to = out + head * out_stride + d;
#pragma GCC unroll 8
    for (int i = 0; i < kSums; ++i, to += kLanes) {
      if constexpr (kPair == 2) {
        if (i % 2 == 0) Lanes::in_order(sums[head] + i);
      }
      store(to, fma(cpu::load(to), splat(factors[head]), sums[head][i]));
    }
  }
}

// The same for all dimensions; rows of out hold whole steps.
template <typename Lanes, int H, bool kFetch>
inline void add_token_rows(const char* const* rows, int64_t offset, int tokens, int head_size,
                           const float* weights, int weight_stride, const float* factors,
                           LineFetch& ahead, float* out, int out_stride) {
  constexpr int kMost = kLanes / H / Lanes::kPair;  // H * kMost * kPair sums
  constexpr int kVectors = kMost < 1 ? 1 : kMost > 8 ? 8 : kMost;
  constexpr int kStep = Lanes::kStep;
  int d = 0;
  for (; d + kVectors * kStep <= head_size; d += kVectors * kStep) {
    add_token_rows<Lanes, H, kVectors, false, kFetch>(
        rows, offset, tokens, d, 0, weights, weight_stride, factors, ahead, out, out_stride);
  }
  for (; d + kStep <= head_size; d += kStep) {
    add_token_rows<Lanes, H, 1, false, kFetch>(rows, offset, tokens, d, 0, weights, weight_stride,
                                               factors, ahead, out, out_stride);
  }
  if (d < head_size) {
    add_token_rows<Lanes, H, 1, true, kFetch>(rows, offset, tokens, d, head_size - d, weights,
                                              weight_stride, factors, ahead, out, out_stride);
  }
}

}  // namespace
}  // namespace vllm_kernels::cpu
