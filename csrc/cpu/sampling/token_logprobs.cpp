// token_logprobs and softmax (ops/sampling/sample.h). A task is a row, which it keeps as ordered
// bits in scratch: the highest logit, the sum of weights, then the results. softmax keeps e^(x -
// max) in its result in between.
#include "cpu/sampling/vec_sampling.h"

namespace vllm_kernels::cpu {
namespace {

Loop loop_of(const TokenLogprobsParams& p) {
  return {.count = p.num_samples};
}
Loop loop_of_softmax(const SoftmaxParams& p) {
  return {.count = p.logits.num_rows};
}

// Loads a row and returns its highest ordered bits.
template <typename T>
uint32_t load_row(const LogitRows& logits, int64_t row, float divisor, uint32_t* ordered) {
  const T* data = static_cast<const T*>(logits.data) + row * logits.stride;
  const int64_t n = logits.vocab_size;
  if (divisor == 1.0f) return to_ordered(data, n, ordered, [](Vec x, int64_t) { return x; });
  const Vec divisors = splat(divisor);
  return to_ordered(data, n, ordered, [&](Vec x, int64_t) { return x / divisors; });
}

// The weights of all tokens.
uint64_t sum_of_weights(const uint32_t* ordered, int64_t n, float max) {
  return kept_sums(ordered, padded(n), 0, max).above;
}

struct RowLogprobs {
  float max;
  float log_sum;  // NaN if the highest logit is not finite

  float of(uint32_t ordered) const {
    return vllm_kernels::from_ordered_bits(ordered) - max - log_sum;
  }
};

// The highest logits in order, of equals the first token first.
void write_top(const TokenLogprobsParams& p, int64_t sample, const uint32_t* ordered,
               const RowLogprobs& row, uint32_t* list) {
  const int64_t n = p.logits.vocab_size;
  const int32_t num_top = p.num_top < n ? p.num_top : static_cast<int32_t>(n);
  float* logprobs = p.logprobs + sample * (1 + p.num_top) + 1;
  int64_t* ids = p.ids + sample * (1 + p.num_top) + 1;
  const Radix found = select_by_count(ordered, n, num_top, list);
  uint64_t ties = num_top - found.before;
  int32_t count = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (ordered[i] < found.prefix || (ordered[i] == found.prefix && ties-- == 0)) {
      ties += ordered[i] == found.prefix;
      continue;
    }
    int32_t place = count++;
    for (; place > 0 && list[place - 1] < ordered[i]; --place) {
      list[place] = list[place - 1];
      ids[place] = ids[place - 1];
    }
    list[place] = ordered[i];
    ids[place] = i;
  }
  for (int32_t i = 0; i < p.num_top; ++i) {
    logprobs[i] = i < count ? row.of(list[i]) : -__builtin_inff();
    if (i >= count) ids[i] = -1;
  }
}

template <typename T>
void logprobs_of_sample(const TokenLogprobsParams& p, int64_t sample) {
  const int64_t n = p.logits.vocab_size;
  uint32_t* ordered = p.scratch;
  const uint32_t most = load_row<T>(p.logits, p.row_of(sample), 1.0f, ordered);
  RowLogprobs row{vllm_kernels::from_ordered_bits(most), __builtin_nanf("")};
  if (is_finite_ordered(most)) {
    row.log_sum = log_of(static_cast<float>(sum_of_weights(ordered, n, row.max)), 40);
  }
  const uint32_t mine = ordered[p.tokens[sample]];
  int64_t rank = 0;
  for (int64_t i = 0; i < n; ++i) rank += ordered[i] >= mine;
  p.logprobs[sample * (1 + p.num_top)] = row.of(mine);
  p.ids[sample * (1 + p.num_top)] = p.tokens[sample];
  p.ranks[sample] = rank;
  if (p.num_top > 0) write_top(p, sample, ordered, row, ordered + n + 64);
}

void run(const TokenLogprobsParams& p, int64_t first, int64_t last) {
  dispatch_float(p.logits.dtype, [&](auto tag) {
    for (int64_t i = first; i < last; ++i) logprobs_of_sample<decltype(tag)>(p, i);
  });
}

template <typename T>
void softmax_row(const SoftmaxParams& p, int64_t row) {
  const int64_t n = p.logits.vocab_size;
  uint32_t* ordered = p.scratch;
  const float divisor = p.temperature == nullptr ? 1.0f : p.temperature[row];
  const uint32_t most = load_row<T>(p.logits, row, divisor, ordered);
  float* out = p.out + row * p.out_stride;
  if (!is_finite_ordered(most)) {
    for (int64_t i = 0; i < n; ++i) out[i] = __builtin_nanf("");
    return;
  }
  const Vec max = splat(vllm_kernels::from_ordered_bits(most));
  WeightSum weights;
  for_each_vector(0, n, [&](int64_t i, auto count) {
    const VecUint bits = load_ordered(ordered + i);
    const Vec d = from_ordered_bits(bits) - max;
    const Vec e = exp_of_difference<VecMath>(d);
    store(out + i, select((VecInt)(d < splat(-87.0f)), Vec{}, e), count);
    weights.add(keep_lanes((VecInt)(bits != 0), to_weights(e)));
  });
  const Vec sum = splat(static_cast<float>(weights.total()) * 0x1p-40f);
  for_each_vector(
      0, n, [&](int64_t i, auto count) { store(out + i, load(out + i, count) / sum, count); });
}

void run_softmax(const SoftmaxParams& p, int64_t first, int64_t last) {
  dispatch_float(p.logits.dtype, [&](auto tag) {
    for (int64_t row = first; row < last; ++row) softmax_row<decltype(tag)>(p, row);
  });
}

}  // namespace

VLLM_KERNELS_CPU_KERNEL(TokenLogprobsParams, loop_of, run)
VLLM_KERNELS_CPU_KERNEL(SoftmaxParams, loop_of_softmax, run_softmax)

}  // namespace vllm_kernels::cpu
