// The sampling ops: from logits [num_rows, vocab_size] to tokens. docs/sampling.md has the rules,
// vllm_kernels/reference/sampling.py the exact meaning, ops/sampling/sampling_math.h the
// arithmetic.
#pragma once
#include <cstdint>

#include "ops/dtype.h"
#include "ops/rows.h"
#include "ops/sampling/sampling_math.h"
#include "ops/sampling/spec_verify.h"

namespace vllm_kernels {

// Words of SampleParams::scratch and the like on a CPU, for one thread. Three parts, each padded to
// whole vectors: a row, a list of its values, their weights. Groups and listed tokens (direct.h),
// and a row with its bias and penalties, take the place of these.
constexpr int64_t sampling_scratch_words(int64_t vocab_size) {
  return 3 * (vocab_size + 64);
}

// Rows of float32, float16 or bfloat16 logits.
struct LogitRows {
  const void* data;  // [num_rows, vocab_size]
  int64_t stride;    // elements
  int64_t num_rows;
  int32_t vocab_size;
  DType dtype;
};

// A list of tokens per sample. Sample i has entries [indptr[i], indptr[i + 1]); their tokens are
// distinct.
template <typename Value>
struct TokenLists {
  const int32_t* indptr = nullptr;  // [num_samples + 1], or null: no lists
  const int32_t* tokens = nullptr;  // [size], -1: an entry to skip
  const Value* values = nullptr;    // [size]
  int64_t size = 0;

  // The entries of a sample. Bad ends are cut to the list.
  struct Range {
    int64_t begin, end;
  };
  VLLM_KERNELS_INLINE Range of(int64_t sample) const {
    if (indptr == nullptr) return {0, 0};
    const int64_t begin = indptr[sample], end = indptr[sample + 1];
    return {begin < 0 ? 0 : begin, end > size ? size : end};
  }
};

struct Bitmask {
  const int32_t* words = nullptr;  // [num_rows, num_words], or null: all tokens are allowed
  int64_t stride = 0;              // elements
  int64_t num_rows = 0;
  int64_t num_words = 0;          // tokens past the last word are allowed
  const int32_t* rows = nullptr;  // [num_samples], the mask's row (-1: none), or null: i

  // The words of a sample; null: all tokens are allowed.
  VLLM_KERNELS_INLINE const int32_t* of(int64_t sample) const {
    if (words == nullptr) return nullptr;
    const int64_t row = rows == nullptr ? sample : rows[sample];
    return row < 0 || row >= num_rows ? nullptr : words + row * stride;
  }
  // Bit i: whether `token` + i is allowed, for the tokens of the same word.
  VLLM_KERNELS_INLINE uint32_t bits_from(const int32_t* of_sample, int32_t token) const {
    if (of_sample == nullptr || token / 32 >= num_words) return 0xffffffffu;
    return static_cast<uint32_t>(of_sample[token / 32]) >> (token % 32);
  }
  VLLM_KERNELS_INLINE bool allows(const int32_t* of_sample, int32_t token) const {
    return (bits_from(of_sample, token) & 1) != 0;
  }
};

// sample: one token per sample. top_k_top_p_mask_: `masked` gets -inf where a token is not kept.
struct SampleParams {
  const char* op;
  int64_t* tokens;  // [num_samples], or null: write `masked`
  void* masked;     // logits.data, or null
  LogitRows logits;
  int64_t num_samples;
  const int32_t* rows;       // [num_samples] rows of logits, or null: i
  const float* temperature;  // [num_samples]; null: greedy, for a mask 1
  const int32_t* top_k;      // [num_samples], <= 0: all; or null
  const float* top_p;        // [num_samples], or null: 1
  const float* min_p;        // [num_samples], or null: 0
  const float* uniforms;     // [num_samples] in [0, 1], or null
  const int64_t* seeds;      // [num_samples] with `offsets`, or null
  const int64_t* offsets;
  Bitmask bitmask;
  TokenLists<float> bias;
  TokenLists<int32_t> counts;  // of output tokens; 0: in the prompt only
  const float* repetition;     // [num_samples], or null: 1
  const float* frequency;      // [num_samples], or null: 0
  const float* presence;       // [num_samples], or null: 0
  uint32_t* scratch;           // CPU: sampling_scratch_words(); CUDA: sampling_scratch_bytes()

  VLLM_KERNELS_INLINE int64_t row_of(int64_t sample) const {
    return rows == nullptr ? sample : rows[sample];
  }
  VLLM_KERNELS_INLINE bool has_lists() const {
    return bias.indptr != nullptr || counts.indptr != nullptr;
  }
};

// The parameters of one sample.
struct SampleRow {
  float temperature;
  bool greedy;
  int32_t top_k;  // vocab_size: all
  float top_p;    // 1: all
  float min_p;    // 0: all

  // The first of the highest tokens.
  VLLM_KERNELS_INLINE static SampleRow greedy_row(int32_t vocab_size) {
    return {1.0f, true, vocab_size, 1.0f, 0.0f};
  }
  VLLM_KERNELS_INLINE static SampleRow read(const SampleParams& p, int64_t sample) {
    SampleRow row;
    const float none = p.tokens != nullptr ? 0.0f : 1.0f;
    row.temperature = p.temperature == nullptr ? none : p.temperature[sample];
    row.greedy = !(row.temperature >= kMinTemperature);
    if (row.greedy) row.temperature = 1.0f;
    const int32_t k = p.top_k == nullptr ? 0 : p.top_k[sample];
    row.top_k = k <= 0 || k > p.logits.vocab_size ? p.logits.vocab_size : k;
    const float top_p = p.top_p == nullptr ? 1.0f : p.top_p[sample];
    row.top_p = top_p < 1.0f ? top_p : 1.0f;
    const float min_p = p.min_p == nullptr ? 0.0f : p.min_p[sample];
    row.min_p = min_p > 0.0f ? min_p : 0.0f;
    return row;
  }

  // Uniform in [0, 2^64).
  VLLM_KERNELS_INLINE static uint64_t random(const SampleParams& p, int64_t sample) {
    if (p.uniforms != nullptr) return fixed_point(p.uniforms[sample]);
    if (p.seeds == nullptr) return 0;
    return philox(static_cast<uint64_t>(p.seeds[sample]), static_cast<uint64_t>(p.offsets[sample]));
  }

  // Whether top-k leaves out tokens.
  VLLM_KERNELS_INLINE bool counts(int32_t vocab_size) const {
    return !greedy && top_k < vocab_size;
  }

  // Ordered bits of the lowest logit that min_p keeps.
  VLLM_KERNELS_INLINE uint32_t min_p_cut(float max) const {
    if (min_p < 0x1p-126f) return 0;
    const float cut = ScalarMath::add(max, log_of(min_p < 1.0f ? min_p : 1.0f));
    return ordered_bits(cut < max ? cut : max);
  }
};

// The penalties of one sample: repetition for every listed token, the others by its count.
struct Penalties {
  float repetition, frequency, presence;

  VLLM_KERNELS_INLINE static Penalties read(const SampleParams& p, int64_t sample) {
    return {p.repetition == nullptr ? 1.0f : p.repetition[sample],
            p.frequency == nullptr ? 0.0f : p.frequency[sample],
            p.presence == nullptr ? 0.0f : p.presence[sample]};
  }
  VLLM_KERNELS_INLINE float apply(float logit, int32_t count) const {
    using M = ScalarMath;
    logit = logit > 0.0f ? logit / repetition : M::multiply(logit, repetition);
    if (count <= 0) return logit;
    logit = M::add(logit, -M::multiply(frequency, static_cast<float>(count)));
    return M::add(logit, -presence);
  }
};

// The entries that change single logits of one sample.
struct Changes {
  TokenLists<float>::Range bias;
  TokenLists<int32_t>::Range counts;

  VLLM_KERNELS_INLINE static Changes of(const SampleParams& p, int64_t sample) {
    return {p.bias.of(sample), p.counts.of(sample)};
  }
  VLLM_KERNELS_INLINE bool any() const {
    return bias.begin < bias.end || counts.begin < counts.end;
  }
};

// The kept tokens: ordered bits above `threshold`, and the first `ties` tokens equal to it.
struct Kept {
  uint32_t threshold;
  uint32_t ties;
};

// token_logprobs: log_softmax of raw logits at one token per sample, and the `num_top` highest.
struct TokenLogprobsParams {
  float* logprobs;  // [num_samples, 1 + num_top]
  int64_t* ids;     // [num_samples, 1 + num_top], the given token first; -1: none
  int64_t* ranks;   // [num_samples], the number of logits >= the token's
  LogitRows logits;
  int64_t num_samples;
  const int32_t* rows;    // [num_samples] rows of logits, or null: i
  const int64_t* tokens;  // [num_samples]
  int32_t num_top;        // <= kMaxTopLogprobs
  uint32_t* scratch;      // as SampleParams::scratch

  VLLM_KERNELS_INLINE int64_t row_of(int64_t sample) const {
    return rows == nullptr ? sample : rows[sample];
  }
};
constexpr int kMaxTopLogprobs = 128;

// sample, with log-probabilities of the tokens that it draws. `logprobs` has the same rows, and
// these tokens.
struct SampleLogprobsParams : SampleParams {
  TokenLogprobsParams logprobs;
};

// softmax: probabilities of logits / temperature.
struct SoftmaxParams {
  float* out;  // [num_rows, vocab_size]; may be logits.data
  int64_t out_stride;
  LogitRows logits;
  const float* temperature;  // [num_rows]; null: 1
  uint32_t* scratch;         // as SampleParams::scratch
};

// apply_token_bitmask_: logits of tokens that the mask forbids become -inf.
struct TokenBitmaskParams {
  void* out;  // logits.data
  LogitRows logits;
  Bitmask bitmask;
};

// apply_repetition_penalties: tokens of prompt or output are penalized once, in place.
struct RepetitionPenaltiesParams {
  void* out;  // logits.data
  LogitRows logits;
  const uint8_t* prompt_mask;  // [num_rows, vocab_size] bool, whose bytes may be any but 0
  const uint8_t* output_mask;  // [num_rows, vocab_size]
  int64_t prompt_stride, output_stride;
  const float* penalties;  // [num_rows]
};

// append_token_counts: counts the new token of each row in the row's list of tokens and counts.
struct AppendTokenCountsParams {
  const int32_t* indptr;      // [num_rows + 1]
  int32_t* tokens;            // [size]
  int32_t* counts;            // [size]
  int32_t* lengths;           // [num_rows], entries of a row that are in use
  const int64_t* new_tokens;  // [num_rows], below 0: none
  // [num_rows], or null: every token is counted
  const int64_t* positions = nullptr;
  // [num_rows], with positions: tokens at lower positions are counted
  int64_t* next_positions = nullptr;
  int64_t num_rows, size;

  struct Row {
    int64_t begin, room;
    int32_t length;  // entries in use
    int32_t token;   // below 0: there is nothing to count
  };
  // Ends and lengths may be any number; none leads out of the list.
  VLLM_KERNELS_INLINE Row of(int64_t row) const {
    int64_t begin = indptr[row], end = indptr[row + 1];
    begin = begin < 0 ? 0 : begin;
    end = end > size ? size : end;
    const int64_t room = end > begin ? end - begin : 0, used = lengths[row];
    const bool is_new = positions == nullptr || positions[row] >= next_positions[row];
    const int64_t token = room > 0 && is_new ? new_tokens[row] : -1;
    return {begin, room,
            static_cast<int32_t>(used < 0      ? 0
                                 : used > room ? room
                                               : used),
            token < 0 || token > INT32_MAX ? -1 : static_cast<int32_t>(token)};
  }
  // After the row's token, or nothing, was counted.
  VLLM_KERNELS_INLINE void finish(int64_t row) const {
    if (positions != nullptr && positions[row] >= next_positions[row]) {
      next_positions[row] = positions[row] + 1;
    }
  }
};

}  // namespace vllm_kernels
