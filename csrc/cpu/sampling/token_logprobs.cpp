// token_logprobs and softmax (ops/sampling/sample.h). A task is a row: the highest logit, the sum
// of weights, then the results. token_logprobs reads it where it is (direct.h), but for small rows
// and rows that are not finite, which it keeps as ordered bits in scratch. So does softmax, which
// keeps e^(x - max) in its result in between.
#include "cpu/sampling/direct.h"

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
  const Vec divisors = splat(divisor);
  return to_ordered(n, ordered, [&](int64_t i, auto count) {
    const Vec x = load(data + i, count);
    return divisor == 1.0f ? x : x / divisors;
  });
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

// The highest logits in order, of equals the first token first. Tokens come in index order, all of
// the `num_top` highest among them.
class TopTokens {
 public:
  TopTokens(const TokenLogprobsParams& p, int64_t sample, uint32_t* list)
      : num_top_(std::min<int64_t>(p.num_top, p.logits.vocab_size)),
        logprobs_(p.logprobs + sample * (1 + p.num_top) + 1),
        ids_(p.ids + sample * (1 + p.num_top) + 1),
        list_(list) {}

  void add(int64_t token, uint32_t ordered) {
    if (count_ == num_top_ && (count_ == 0 || list_[count_ - 1] >= ordered)) return;
    int64_t place = count_ < num_top_ ? count_++ : num_top_ - 1;
    for (; place > 0 && list_[place - 1] < ordered; --place) {
      list_[place] = list_[place - 1];
      ids_[place] = ids_[place - 1];
    }
    list_[place] = ordered;
    ids_[place] = token;
  }
  void write(const TokenLogprobsParams& p, const RowLogprobs& row) {
    for (int64_t i = 0; i < p.num_top; ++i) {
      logprobs_[i] = i < count_ ? row.of(list_[i]) : -__builtin_inff();
      if (i >= count_) ids_[i] = -1;
    }
  }

 private:
  int64_t num_top_, count_ = 0;
  float* logprobs_;
  int64_t* ids_;
  uint32_t* list_;
};

void write_token(const TokenLogprobsParams& p, int64_t sample, float logprob, int64_t rank) {
  p.logprobs[sample * (1 + p.num_top)] = logprob;
  p.ids[sample * (1 + p.num_top)] = p.tokens[sample];
  p.ranks[sample] = rank;
}

// A row whose highest logit is finite, with at least num_top groups.
template <typename T>
void logprobs_of_logits(const TokenLogprobsParams& p, int64_t sample,
                        const LogitsOfSample<T>& logits, float highest, const uint32_t* groups) {
  const int64_t n = logits.size(), token = p.tokens[sample];
  const uint32_t mine =
      vllm_kernels::ordered_bits(logits.at(token / kLanes * kLanes)[token % kLanes]);
  const float logit = vllm_kernels::from_ordered_bits(mine);
  RowLogprobs row{highest + 0.0f, 0.0f};
  WeightSum sum;
  VecInt reach = {};
  for (int64_t i = 0; i < n; i += kLanes) {
    const Vec x = logits.at(i);
    sum.add(to_weights(exp_of_difference<VecMath>(x + splat(-row.max))));
    reach -= (VecInt)(x >= splat(logit));
  }
  row.log_sum = log_of(static_cast<float>(sum.total()), 40);
  int64_t rank = std::isinf(logit) ? n - padded(n) : 0;  // padding is -inf
  for (int lane = 0; lane < kLanes; ++lane) rank += reach[lane];
  write_token(p, sample, row.of(mine), rank);
  if (p.num_top == 0) return;
  TopTokens top(p, sample, p.scratch);
  const uint32_t edge =
      select_by_count(groups, num_groups(n), p.num_top, p.scratch + n + 64).prefix;
  const float lowest = std::max(vllm_kernels::from_ordered_bits(edge), -FLT_MAX);
  int64_t listed = 0;
  for_each_reaching(logits, groups, lowest, [&](int64_t at, float x) {
    top.add(at, vllm_kernels::ordered_bits(x));
    ++listed;
    return true;
  });
  for (int64_t i = 0; i < n && listed < p.num_top; ++i) {  // then come those of -inf
    if (logits.at(i / kLanes * kLanes)[i % kLanes] != -__builtin_inff()) continue;
    top.add(i, kOrderedMinusInfinity);
    ++listed;
  }
  top.write(p, row);
}

// Any row.
template <typename T>
void logprobs_of_ordered(const TokenLogprobsParams& p, int64_t sample) {
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
  write_token(p, sample, row.of(mine), rank);
  if (p.num_top == 0) return;
  uint32_t* list = ordered + n + 64;
  const uint32_t lowest = select_by_count(ordered, n, std::min<int64_t>(p.num_top, n), list).prefix;
  TopTokens top(p, sample, list);
  for (int64_t i = 0; i < n; ++i) {
    if (ordered[i] >= lowest) top.add(i, ordered[i]);
  }
  top.write(p, row);
}

template <typename T>
void logprobs_of_sample(const TokenLogprobsParams& p, int64_t sample) {
  const int64_t n = p.logits.vocab_size;
  if (p.num_top <= num_groups(n)) {
    const T* row = static_cast<const T*>(p.logits.data) + p.row_of(sample) * p.logits.stride;
    const LogitsOfSample<T> logits(row, n);
    uint32_t* groups = p.scratch + 2 * (n + 64);
    const float highest = find_highest(logits, groups);
    if (std::isfinite(highest)) {
      return logprobs_of_logits(p, sample, logits, highest, groups);
    }
  }
  logprobs_of_ordered<T>(p, sample);
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
