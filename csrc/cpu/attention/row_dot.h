// Layouts NHD and HND and contiguous keys: multiplies few query rows with rows of K and V in place.
// A row is one head of one token, with contiguous elements. It is loaded and upcast once for up to
// 4 query rows. See cpu/base/vec.h for the anonymous namespace.
#pragma once
#include "cpu/attention/page_lanes.h"
#include "cpu/base/int4.h"
#include "cpu/base/int8.h"

namespace vllm_kernels::cpu {
namespace {

// --- prefetch -----------------------------------------------------------------------------------

// Prefetches the cache lines of `count` spans of `bytes` bytes. It alternates between kStreams
// groups of spans, so page walks and DRAM row activations overlap.
class LinePrefetcher {
 public:
  LinePrefetcher(const char* const* spans, int count, int bytes)
      : spans_(spans),
        stream_spans_(count / kStreams),
        bytes_(bytes),
        remaining_(count % kStreams) {
    if (stream_spans_ == 0) next_spans();
  }

  template <int lines>
  void next() {
#pragma GCC unroll 4
    for (int i = 0; i < lines; ++i) {
      if (streams_ == 0) return;
      __builtin_prefetch(spans_[stream_ * stream_spans_] + at_, 0, 2);
      if (++stream_ < streams_) continue;
      stream_ = 0;
      at_ += 64;
      if (at_ < bytes_) continue;
      at_ = 0;
      ++spans_;
      if (++done_ == stream_spans_) next_spans();
    }
  }
  void finish() {
    while (streams_ > 0) next<1>();
  }

 private:
  static constexpr int kStreams = 8;

  // First kStreams streams of stream_spans_ spans, then remaining_ streams of one span, then none.
  void next_spans() {
    spans_ += (kStreams - 1) * stream_spans_;
    streams_ = remaining_;
    remaining_ = stream_spans_ = done_ = 0;
    if (streams_ > 0) stream_spans_ = 1;
  }

  const char* const* spans_;  // the first stream's next span
  int stream_spans_;          // spans of a stream
  int bytes_;
  int remaining_;  // spans
  int streams_ = kStreams;
  int stream_ = 0, at_ = 0, done_ = 0;
};

// --- lanes ---------------------------------------------------------------------------------------

// How a row of K or V maps to vector lanes. A load covers kStep elements. Scores and sums over
// tokens must be multiplied with kScale. pack_query() pads a query row with zeros to whole steps.
// pack() takes p of kTokens tokens, already rounded by round(). out_offset() says which dimensions
// a load's sums are of. head_size counts elements.
template <typename T>
struct FloatTokenLanes : FloatValueLanes<T> {
  using Element = T;
  using Operand = Vec;
  using Key = Operand;
  static constexpr int kStep = kLanes;
  static constexpr int kPair = 1;  // tokens of V that one multiply_add() takes
  static constexpr int kSums = 1;  // of a load of V

  static Operand load(const T* from) { return cpu::load(from); }
  static Operand load(const T* from, int count) { return cpu::load(from, count); }
  static void split(Operand value, Operand* operands) { *operands = value; }
  static Key query(const float* row, int d, int) { return cpu::load(row + d); }
  static Operand prob(const float* probs, int token) { return splat(probs[token]); }
  static void pack_query(const float* row, int count, float* to) { upcast(row, count, to); }
  static int out_offset(int sum, int) { return sum * kLanes; }
};

// A load has the values of two vectors of dimensions, head_size apart.
template <>
struct FloatTokenLanes<Int4x2> : FloatValueLanes<Int4x2> {
  using Element = Int4x2;
  using Key = VecPair;
  static constexpr int kStep = kLanes;
  static constexpr int kPair = 1;
  static constexpr int kSums = 2;

  static VecPair load(const Int4x2* from) { return load_values(from); }
  static VecPair load(const Int4x2* from, int count) { return load_values(from, int64_t{count}); }
  static void split(VecPair values, Vec* operands) {
    operands[0] = values.a;
    operands[1] = values.b;
  }
  static Key query(const float* row, int d, int head_size) {
    return {cpu::load(row + d), cpu::load(row + head_size + d)};
  }
  static Vec prob(const float* probs, int token) { return splat(probs[token]); }
  static void pack_query(const float* row, int count, float* to) { cpu::upcast(row, count, to); }
  static int out_offset(int sum, int head_size) { return sum / 2 * kLanes + sum % 2 * head_size; }
  using FloatValueLanes<Int4x2>::multiply_add;
  static Vec multiply_add(VecPair key, VecPair query, Vec sum) {
    return fma(key.a, query.a, fma(key.b, query.b, sum));
  }
};

template <typename T>
struct TokenLanes : FloatTokenLanes<T> {};

#if defined(__AVX2__)
template <typename T>
struct Fp8TokenLanes : FloatTokenLanes<T> {
  static constexpr float kScale = kHalfScale<T>;

  static Vec load(const T* from) { return load_unscaled(from); }
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
// Dot products of bfloat16 pairs: neighbouring dimensions of K, neighbouring tokens of V. An
// operand of p is a pair of tokens, too.
template <>
struct TokenLanes<BFloat16> : ValueLanes<BFloat16> {
  using Element = BFloat16;
  using Key = Operand;
  static constexpr int kStep = 2 * kLanes;
  static constexpr int kPair = 2;
  static constexpr int kSums = 2;

  static Operand load(const BFloat16* from) { return _mm512_loadu_si512(from); }
  static Operand load(const BFloat16* from, int count) {
    return _mm512_maskz_loadu_epi16((__mmask32{1} << count) - 1, from);
  }
  static Key query(const float* row, int d, int) { return _mm512_loadu_si512(row + d / 2); }
  static int out_offset(int sum, int) { return sum * kLanes; }
  static Operand prob(const float* probs, int token) {
    return _mm512_set1_epi32(load_raw<int>(probs + token / 2));
  }

  // Pairs of two tokens: dimensions 0 - 3, 8 - 11, .. and 4 - 7, 12 - 15, ..
  static void interleave(Operand token, Operand next, Operand* operands) {
    operands[0] = _mm512_unpacklo_epi16(token, next);
    operands[1] = _mm512_unpackhi_epi16(token, next);
  }
  // Puts the sums of interleaved operands in the order of the dimensions.
  static void reorder(Vec* sums) {
    const Vec a = sums[0], b = sums[1];
    sums[0] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    sums[1] =
        __builtin_shufflevector(a, b, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  }

  static void pack_query(const float* row, int count, float* to) {  // exact: query is bfloat16
    auto* elements = reinterpret_cast<BFloat16*>(to);
    for (int d = 0; d < (count + kStep - 1) / kStep * kStep; d += kLanes) {
      const int64_t rest = count - d < 0 ? 0 : count - d < kLanes ? count - d : kLanes;
      store(elements + d, cpu::load(row + d, rest));
    }
  }
};
#endif

// --- scores, out ---------------------------------------------------------------------------------

// A loop step that reads `bytes` bytes prefetches as many. `at` is the number of bytes read before.
template <bool kPrefetch, int bytes>
inline void prefetch_step(LinePrefetcher& ahead, int at) {
  if constexpr (kPrefetch && bytes >= 64) {
    ahead.next<bytes / 64>();
  } else if constexpr (kPrefetch) {
    if (at % 64 == 0) ahead.next<1>();
  }
}

// scores[h][token] = scale * q . k for tokens [0, tokens). `rows` must be readable up to whole
// vectors of tokens.
//   rows: pointers, to which `offset` bytes are added; query: [H][query_stride], pack_query()'s
//   scores: [H][score_stride], whole vectors
template <typename Lanes, int H, bool kPrefetch>
inline void score_token_rows(const char* const* rows, int64_t offset, int tokens, int head_size,
                             const float* query, int query_stride, float scale,
                             LinePrefetcher& ahead, float* scores, int score_stride) {
  using T = typename Lanes::Element;
  using Key = typename Lanes::Key;
  constexpr int kTokens = kLanes / H;  // at once, in kLanes sums
  constexpr int kBytes = kTokens * Lanes::kStep * static_cast<int>(sizeof(T));
  const int whole = head_size / Lanes::kStep * Lanes::kStep;
  for (int token = 0; token < tokens; token += kTokens) {
    const T* from[kTokens];
#pragma GCC unroll 16
    for (int i = 0; i < kTokens; ++i) {
      from[i] = reinterpret_cast<const T*>(rows[token + i] + offset);
    }
    Vec sums[kLanes] = {};
    const auto add = [&](int d, const Key* keys) {
#pragma GCC unroll 4
      for (int head = 0; head < H; ++head) {
        const Key q = Lanes::query(query + head * query_stride, d, head_size);
#pragma GCC unroll 16
        for (int i = 0; i < kTokens; ++i) {
          Vec& sum = sums[head * kTokens + i];
          sum = Lanes::multiply_add(keys[i], q, sum);
        }
      }
    };
    Key keys[kTokens];
    for (int d = 0; d < whole; d += Lanes::kStep) {
      prefetch_step<kPrefetch, kBytes>(ahead, d / Lanes::kStep * kBytes);
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

// out[h] = out[h] * rescales[h] + sum over tokens of p[h][token] * V[token]. It covers kVectors
// loads from element d on, or the last, partial load if kPartial. `rows` and `offset` are as in
// score_token_rows().
template <typename Lanes, int H, int kVectors, bool kPartial, bool kPrefetch>
inline void add_token_rows(const char* const* rows, int64_t offset, int tokens, int head_size,
                           int d, const float* probs, int prob_stride, const float* rescales,
                           LinePrefetcher& ahead, float* out, int out_stride) {
  using T = typename Lanes::Element;
  using Operand = typename Lanes::Operand;
  constexpr int kPair = Lanes::kPair, kSums = kVectors * Lanes::kSums;
  constexpr int kBytes = kVectors * kPair * Lanes::kStep * static_cast<int>(sizeof(T));
  Vec sums[H][kSums] = {};
  const auto load = [&](int token, int i) {
    const T* from = reinterpret_cast<const T*>(rows[token] + offset) + d + i * Lanes::kStep;
    return kPartial ? Lanes::load(from, head_size - d) : Lanes::load(from);
  };
  const auto add = [&](int token, auto has_next) {
    Operand operands[kSums];
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) {
      if constexpr (kPair == 1) {
        Lanes::split(load(token, i), operands + i * Lanes::kSums);
      } else {
        Operand next = {};
        if constexpr (has_next) next = load(token + 1, i);
        Lanes::interleave(load(token, i), next, operands + 2 * i);
      }
    }
#pragma GCC unroll 4
    for (int head = 0; head < H; ++head) {
      const Operand prob = Lanes::prob(probs + head * prob_stride, token);
#pragma GCC unroll 8
      for (int i = 0; i < kSums; ++i) {
        sums[head][i] = Lanes::multiply_add(operands[i], prob, sums[head][i]);
      }
    }
  };
  int token = 0;
  for (; token + kPair <= tokens; token += kPair) {
    prefetch_step<kPrefetch, kBytes>(ahead, token / kPair * kBytes);
    add(token, std::true_type{});
  }
  if (token < tokens) add(token, std::false_type{});
#pragma GCC unroll 4
  for (int head = 0; head < H; ++head) {
#pragma GCC unroll 8
    for (int i = 0; i < kSums; ++i) {
      float* to = out + head * out_stride + d + Lanes::out_offset(i, head_size);
      if constexpr (kPair == 2) {
        if (i % 2 == 0) Lanes::reorder(sums[head] + i);
      }
      store(to, fma(cpu::load(to), splat(rescales[head]), sums[head][i]));
    }
  }
}

// The same for all dimensions. Rows of out hold whole steps.
template <typename Lanes, int H, bool kPrefetch>
inline void add_token_rows(const char* const* rows, int64_t offset, int tokens, int head_size,
                           const float* probs, int prob_stride, const float* rescales,
                           LinePrefetcher& ahead, float* out, int out_stride) {
  constexpr int kMaxVectors = kLanes / H / Lanes::kSums;  // H * kMaxVectors * kSums sums
  constexpr int kVectors = kMaxVectors < 1 ? 1 : kMaxVectors > 8 ? 8 : kMaxVectors;
  constexpr int kStep = Lanes::kStep;
  int d = 0;
  for (; d + kVectors * kStep <= head_size; d += kVectors * kStep) {
    add_token_rows<Lanes, H, kVectors, false, kPrefetch>(
        rows, offset, tokens, head_size, d, probs, prob_stride, rescales, ahead, out, out_stride);
  }
  for (; d + kStep <= head_size; d += kStep) {
    add_token_rows<Lanes, H, 1, false, kPrefetch>(rows, offset, tokens, head_size, d, probs,
                                                  prob_stride, rescales, ahead, out, out_stride);
  }
  if (d < head_size) {
    add_token_rows<Lanes, H, 1, true, kPrefetch>(rows, offset, tokens, head_size, d, probs,
                                                 prob_stride, rescales, ahead, out, out_stride);
  }
}

// Calls body(integral_constant of 4, 2 or 1 rows, row) for blocks of rows that cover [begin, end).
template <typename Body>
inline void for_row_blocks(int begin, int end, Body&& body) {
  int row = begin;
  for (; row + 4 <= end; row += 4) body(std::integral_constant<int, 4>{}, row);
  if (row + 2 <= end) {
    body(std::integral_constant<int, 2>{}, row);
    row += 2;
  }
  if (row < end) body(std::integral_constant<int, 1>{}, row);
}

// The same with body(rows, std::true_type{}, row) for row 0, which prefetches, and
// std::false_type{} for others.
template <typename Body>
inline void for_prefetching_row_blocks(int begin, int end, Body&& body) {
  for_row_blocks(begin, end, [&](auto rows, int row) {
    row == 0 ? body(rows, std::true_type{}, row) : body(rows, std::false_type{}, row);
  });
}

}  // namespace
}  // namespace vllm_kernels::cpu
