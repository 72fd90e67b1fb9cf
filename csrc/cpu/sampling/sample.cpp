// sample and top_k_top_p_mask_ (ops/sampling/sample.h). A task is a row.
//   1. the row as ordered bits of its final logits, in scratch
//   2. top-k: one histogram; only the tokens of its border bin and above are looked at again
//   3. top-p: weights of what is left, and a radix selection by weight
//   4. the draw: weights of the kept tokens per block, then the block that holds the random place
#include "cpu/sampling/vec_sampling.h"

namespace vllm_kernels::cpu {
namespace {

constexpr int64_t kMaxBlocks = 512;
constexpr uint32_t kAllTies = 0xffffffffu;

Loop loop_of(const SampleParams& p) {
  return {.count = p.num_samples};
}

void penalize(const SampleParams& p, int64_t sample, uint32_t* ordered) {
  const auto bias = p.bias.of(sample);
  for (int64_t i = bias.begin; i < bias.end; ++i) {
    if (p.bias.tokens[i] < 0) continue;
    uint32_t& logit = ordered[p.bias.tokens[i]];
    logit = vllm_kernels::ordered_bits(vllm_kernels::from_ordered_bits(logit) + p.bias.values[i]);
  }
  const auto counts = p.counts.of(sample);
  const Penalties penalties = Penalties::read(p, sample);
  for (int64_t i = counts.begin; i < counts.end; ++i) {
    if (p.counts.tokens[i] < 0) continue;
    uint32_t& logit = ordered[p.counts.tokens[i]];
    logit = vllm_kernels::ordered_bits(
        penalties.apply(vllm_kernels::from_ordered_bits(logit), p.counts.values[i]));
  }
}

// Returns the highest ordered bits.
template <typename T>
uint32_t load_row(const SampleParams& p, int64_t sample, float temperature, uint32_t* ordered) {
  const T* row = static_cast<const T*>(p.logits.data) + p.row_of(sample) * p.logits.stride;
  const int64_t n = p.logits.vocab_size;
  const int32_t* words = p.bitmask.of(sample);
  const auto has_tokens = [](auto range) { return range.begin < range.end; };
  const bool sparse = has_tokens(p.bias.of(sample)) || has_tokens(p.counts.of(sample));
  const auto allowed = [&](Vec logits, int64_t token) {
    return masked(logits, p.bitmask, words, token);
  };
  const Vec divisor = splat(temperature);
  if (!sparse && temperature != 1.0f) {
    return to_ordered(row, n, ordered,
                      [&](Vec logits, int64_t token) { return allowed(logits, token) / divisor; });
  }
  const uint32_t most = to_ordered(row, n, ordered, allowed);
  if (!sparse) return most;
  penalize(p, sample, ordered);
  Highest highest;
  for (int64_t i = 0; i < n; i += kLanes) {
    VecUint bits = load_ordered(ordered + i);
    if (temperature != 1.0f) {  // padding stays below every logit: 0 stands for a NaN
      bits = (VecUint)(bits != 0) & ordered_bits(from_ordered_bits(bits) / divisor);
      store_raw(ordered + i, bits);
    }
    highest.add(bits);
  }
  return highest.get();
}

// `list` has two thirds of the scratch.
Kept choose(const SampleRow& request, const uint32_t* ordered, int64_t n, float max,
            uint32_t* list) {
  Kept kept{0, 0};
  uint64_t left_out = 0;  // tokens equal to the threshold that are not kept
  if (request.top_k < n) {
    const Radix found = select_by_count(ordered, n, request.top_k, list);
    kept = {found.prefix, static_cast<uint32_t>(request.top_k - found.before)};
    left_out = found.inside - kept.ties;
  }
  const uint32_t cut = request.min_p_cut(max);
  if (cut > kept.threshold) {
    kept = {cut, kAllTies};
    left_out = 0;
  }
  if (request.top_p >= 1.0f) return kept;
  const int64_t count = compact(ordered, n, kept.threshold > 0 ? kept.threshold : 1, list);
  for (int64_t i = count; i < padded(count); ++i) list[i] = kOrderedMinusInfinity;
  float* weights = reinterpret_cast<float*>(list + n + 64);
  WeightSum sum;
  for (int64_t i = 0; i < count; i += kLanes) {
    const Vec some = weights_of(load_ordered(list + i), max);
    store(weights + i, some);
    sum.add(some);
  }
  uint64_t all = sum.total();
  if (left_out > 0) all -= left_out * weight_of(kept.threshold, max);
  const uint64_t limit = top_p_limit(request.top_p, all);
  const Radix found = select<true>(list, weights, count, limit);
  uint32_t ties = number_to_reach(limit - found.before, weight_of(found.prefix, max));
  if (found.prefix == kept.threshold && ties > kept.ties) ties = kept.ties;
  return {found.prefix, ties};
}

uint32_t number_kept(uint32_t equal, const Kept& kept) {
  return equal < kept.ties ? equal : kept.ties;
}

// The token of [begin, end) where the cumulated weight passes `target`.
int64_t draw_in_block(const uint32_t* ordered, int64_t begin, int64_t end, const Kept& kept,
                      float max, uint64_t target, uint64_t before, uint32_t equal) {
  int64_t last = begin;
  for (int64_t i = begin; i < end; ++i) {
    const bool is_equal = ordered[i] == kept.threshold;
    if (ordered[i] > kept.threshold || (is_equal && equal < kept.ties)) {
      before += weight_of(ordered[i], max);
      last = i;
      if (before > target) return i;
    }
    equal += is_equal;
  }
  return last;
}

int64_t draw(const uint32_t* ordered, int64_t n, const Kept& kept, float max, uint64_t random) {
  const int64_t block = padded(ceil_div(n, kMaxBlocks));
  KeptSums blocks[kMaxBlocks];
  uint64_t above = 0;
  uint32_t equal = 0;
  for (int64_t i = 0; i * block < n; ++i) {
    const int64_t begin = i * block, end = begin + block < padded(n) ? begin + block : padded(n);
    blocks[i] = kept_sums(ordered + begin, end - begin, kept.threshold, max);
    above += blocks[i].above;
    equal += blocks[i].equal;
  }
  const uint64_t tie_weight = kept.ties > 0 ? weight_of(kept.threshold, max) : 0;
  const uint64_t target = high_product(above + number_kept(equal, kept) * tie_weight, random);
  above = 0;
  equal = 0;
  for (int64_t i = 0;; ++i) {
    const uint64_t before = above + number_kept(equal, kept) * tie_weight;
    above += blocks[i].above;
    const uint32_t equal_before = equal;
    equal += blocks[i].equal;
    const int64_t begin = i * block, end = begin + block < n ? begin + block : n;
    if (above + number_kept(equal, kept) * tie_weight > target || end == n) {
      return draw_in_block(ordered, begin, end, kept, max, target, before, equal_before);
    }
  }
}

template <typename T>
void write_mask(T* row, const uint32_t* ordered, int64_t n, const Kept& kept) {
  T infinity[kLanes];
  store(infinity, splat(-__builtin_inff()));
  uint32_t equal = 0;
  for (int64_t i = 0; i < n; ++i) {
    const bool is_equal = ordered[i] == kept.threshold;
    const bool is_kept = ordered[i] > kept.threshold || (is_equal && equal < kept.ties);
    if (!is_kept) row[i] = infinity[0];
    equal += is_equal;
  }
}

template <typename T>
void sample_row(const SampleParams& p, int64_t sample) {
  const int64_t n = p.logits.vocab_size;
  const SampleRow request = SampleRow::read(p, sample);
  uint32_t* ordered = p.scratch;
  const uint32_t most = load_row<T>(p, sample, request.temperature, ordered);
  if (request.greedy || !is_finite_ordered(most)) {
    if (p.tokens != nullptr) p.tokens[sample] = first_equal(ordered, n, most);
    return;
  }
  const float max = vllm_kernels::from_ordered_bits(most);
  const Kept kept = choose(request, ordered, n, max, ordered + n + 64);
  if (p.tokens != nullptr) {
    p.tokens[sample] = draw(ordered, n, kept, max, SampleRow::random(p, sample));
  } else if (kept.threshold > 0) {
    T* row = static_cast<T*>(p.masked) + p.row_of(sample) * p.logits.stride;
    write_mask(row, ordered, n, kept);
  }
}

void run(const SampleParams& p, int64_t first, int64_t last) {
  dispatch_float(p.logits.dtype, [&](auto tag) {
    for (int64_t sample = first; sample < last; ++sample) sample_row<decltype(tag)>(p, sample);
  });
}

}  // namespace

VLLM_KERNELS_CPU_KERNEL(SampleParams, loop_of, run)

}  // namespace vllm_kernels::cpu
