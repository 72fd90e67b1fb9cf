// sample and top_k_top_p_mask_ (ops/sampling/sample.h). A task is a row. With a bias or penalties
// it is copied first. Greedy rows, rows with a small top-k and rows without limits are read where
// they are (direct.h). For others:
//   1. the row as ordered bits of its quotients by the temperature, in scratch
//   2. top-k: one histogram; only the tokens of its border bin and above are looked at again
//   3. top-p: weights of what is left, and a radix selection by weight
//   4. the draw: weights of the kept tokens per block, then the block that holds the random place
#include "cpu/sampling/direct.h"

namespace vllm_kernels::cpu {
namespace {

constexpr uint32_t kAllTies = 0xffffffffu;

Loop loop_of(const SampleParams& p) {
  return {.count = p.num_samples};
}

// Copies the logits, with the mask, and adds the bias and the penalties.
template <typename T>
void change_row(const SampleParams& p, int64_t sample, const LogitsOfSample<T>& logits,
                float* changed) {
  for_each_vector(0, logits.size(),
                  [&](int64_t i, auto count) { store(changed + i, logits.at(i), count); });
  const auto& [bias, counts] = Changes::of(p, sample);
  for (int64_t i = bias.begin; i < bias.end; ++i) {
    if (p.bias.tokens[i] >= 0) changed[p.bias.tokens[i]] += p.bias.values[i];
  }
  const Penalties penalties = Penalties::read(p, sample);
  for (int64_t i = counts.begin; i < counts.end; ++i) {
    if (p.counts.tokens[i] < 0) continue;
    float& logit = changed[p.counts.tokens[i]];
    logit = penalties.apply(logit, p.counts.values[i]);
  }
}

// `list` has two thirds of SampleParams::scratch.
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
  const int64_t block = block_tokens(n);
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

// --- rows that are not copied --------------------------------------------------------------------

// A lower bound of the logits whose quotient reaches that of `edge`. Their exact quotients exceed
// the float before it.
float lowest_with_quotient_of(float edge, float temperature) {
  if (temperature == 1.0f) return std::max(edge, -FLT_MAX);
  const float before = std::nextafter(edge / temperature, -__builtin_inff());
  const double product = static_cast<double>(before) * temperature;  // exact
  float lowest = static_cast<float>(product);
  if (lowest > product) lowest = std::nextafter(lowest, -__builtin_inff());
  return std::max(lowest, -FLT_MAX);
}

// Draws from the tokens that may be among the top-k. `max` is the highest quotient. Returns -1 if
// they are not few. The last third of SampleParams::scratch may be the row itself.
template <typename T>
int64_t draw_from_few(const LogitsOfSample<T>& logits, const SampleRow& request,
                      const uint32_t* groups, float max, uint64_t random, uint32_t* scratch) {
  const int64_t n = logits.size(), room = n / 4;
  uint32_t *listed = scratch, *tokens = scratch + room, *rest = scratch + n + 64;
  const uint32_t edge = select_by_count(groups, num_groups(n), request.top_k, rest).prefix;
  const float lowest =
      lowest_with_quotient_of(vllm_kernels::from_ordered_bits(edge), request.temperature);
  int64_t count = 0;
  for_each_reaching(logits, groups, lowest, [&](int64_t token, float logit) {
    tokens[count] = static_cast<uint32_t>(token);
    listed[count++] = vllm_kernels::ordered_bits(logit / request.temperature);
    return count < room - kLanes;
  });
  if (count == room - kLanes) return -1;
  for (int64_t i = count; i < padded(count); ++i) listed[i] = 0;
  const Kept kept = choose(request, listed, count, max, rest);
  return tokens[draw(listed, count, kept, max, random)];
}

// Draws without ordered bits of the whole row. Returns -1 if that does not suffice.
template <typename T>
int64_t draw_directly(const LogitsOfSample<T>& logits, const SampleRow& request, uint64_t random,
                      uint32_t* scratch) {
  const int64_t n = logits.size();
  const bool is_few = n >= 1024 && request.top_k < n && request.top_k <= num_groups(n) / 2;
  const bool is_all = request.top_k == n && request.top_p >= 1.0f && request.min_p == 0.0f;
  if (!request.greedy && !is_few && !is_all) return -1;
  if (std::isinf(request.temperature)) return -1;  // -inf / inf is NaN
  uint32_t* groups = scratch + n / 2;
  const float highest = find_highest(logits, groups), max = highest / request.temperature;
  if (!std::isfinite(max)) return -1;
  if (request.greedy) {
    int64_t first = 0;
    for_each_reaching(logits, groups, highest, [&](int64_t token, float) {
      first = token;
      return false;
    });
    return first;
  }
  if (is_few) return draw_from_few(logits, request, groups, max, random, scratch);
  return draw_from_all(logits, request.temperature, max, random);
}

// --- any row -------------------------------------------------------------------------------------

template <typename T>
void sample_logits(const SampleParams& p, int64_t sample, const LogitsOfSample<T>& logits) {
  const int64_t n = logits.size();
  const SampleRow request = SampleRow::read(p, sample);
  const uint64_t random = SampleRow::random(p, sample);
  if (p.tokens != nullptr) {
    const int64_t token = draw_directly(logits, request, random, p.scratch);
    if (token >= 0) {
      p.tokens[sample] = token;
      return;
    }
  }
  uint32_t* ordered = p.scratch;
  const Vec divisor = splat(request.temperature);
  const uint32_t most = to_ordered(n, ordered, [&](int64_t i, auto) {
    return request.temperature == 1.0f ? logits.at(i) : logits.at(i) / divisor;
  });
  if (request.greedy || !is_finite_ordered(most)) {
    if (p.tokens != nullptr) p.tokens[sample] = first_equal(ordered, n, most);
    return;
  }
  const float max = vllm_kernels::from_ordered_bits(most);
  const Kept kept = choose(request, ordered, n, max, ordered + n + 64);
  if (p.tokens != nullptr) {
    p.tokens[sample] = draw(ordered, n, kept, max, random);
  } else if (kept.threshold > 0) {
    T* row = static_cast<T*>(p.masked) + p.row_of(sample) * p.logits.stride;
    write_mask(row, ordered, n, kept);
  }
}

template <typename T>
void sample_row(const SampleParams& p, int64_t sample) {
  const int64_t n = p.logits.vocab_size;
  const T* row = static_cast<const T*>(p.logits.data) + p.row_of(sample) * p.logits.stride;
  const LogitsOfSample<T> logits(row, n, p.bitmask, p.bitmask.of(sample));
  if (!Changes::of(p, sample).any()) return sample_logits(p, sample, logits);
  float* changed = reinterpret_cast<float*>(p.scratch + 2 * (n + 64));
  change_row(p, sample, logits, changed);
  sample_logits(p, sample, LogitsOfSample<float>(changed, n));
}

void run(const SampleParams& p, int64_t first, int64_t last) {
  dispatch_float(p.logits.dtype, [&](auto tag) {
    for (int64_t sample = first; sample < last; ++sample) sample_row<decltype(tag)>(p, sample);
  });
}

}  // namespace

VLLM_KERNELS_CPU_KERNEL(SampleParams, loop_of, run)

}  // namespace vllm_kernels::cpu
