// Looks at a row of logits where it is, without a copy as ordered bits.
//   highest  one pass: the highest logit, and that of each group of 16 tokens
//   few      if `count` groups have a token at or above an edge, so has the row at least `count`
//            tokens. Only groups that reach the edge are looked at again
//   all      one more pass: the weights of all tokens, per block
#pragma once
#include <algorithm>
#include <cfloat>
#include <cmath>

#include "cpu/sampling/vec_sampling.h"

namespace vllm_kernels::cpu {
namespace {

// The logits of a sample in float32. Those of forbidden tokens are -inf, and those past the end.
template <typename T>
class LogitsOfSample {
 public:
  LogitsOfSample(const T* row, int64_t size, const Bitmask& bitmask = {},
                 const int32_t* words = nullptr)
      : row_(row), size_(size), bitmask_(bitmask), words_(words) {}

  int64_t size() const { return size_; }
  // Those of kLanes tokens from a multiple of kLanes on.
  Vec at(int64_t token) const {
    const int64_t left = size_ - token;
    if (left >= kLanes) return masked(load(row_ + token, WholeVector{}), bitmask_, words_, token);
    Vec some = load(row_ + token, left);
    for (int64_t lane = left; lane < kLanes; ++lane) some[lane] = -__builtin_inff();
    return masked(some, bitmask_, words_, token);
  }

 private:
  const T* row_;
  int64_t size_;
  Bitmask bitmask_;
  const int32_t* words_;
};

// --- the highest logits of groups ----------------------------------------------------------------

// A chunk of neighbouring vectors has a group of tokens per lane.
constexpr int64_t kGroupTokens = 16;
constexpr int64_t kChunkTokens = kGroupTokens * kLanes;

inline int64_t num_groups(int64_t n) {
  return ceil_div(n, kChunkTokens) * kLanes;
}

// groups[i] = ordered bits of the highest logit of a group. Returns the highest of the row, or NaN
// if there is one.
template <typename T>
float find_highest(const LogitsOfSample<T>& logits, uint32_t* groups) {
  Vec highest = splat(-__builtin_inff());
  VecInt is_nan = {};
  for (int64_t begin = 0; begin < logits.size(); begin += kChunkTokens) {
    const int64_t end = std::min(begin + kChunkTokens, padded(logits.size()));
    Vec of_chunk = splat(-__builtin_inff());
    for (int64_t token = begin; token < end; token += kLanes) {
      const Vec x = logits.at(token);
      is_nan |= (VecInt)(x != x);
      of_chunk = maximum(of_chunk, x);
    }
    store_raw(groups + begin / kGroupTokens, ordered_bits(of_chunk));
    highest = maximum(highest, of_chunk);
  }
  float most = highest[0];
  for (int lane = 1; lane < kLanes; ++lane) most = std::max(most, highest[lane]);
  return any(is_nan) ? __builtin_nanf("") : most;
}

// body(token, logit) for the tokens of at least `lowest` > -inf, in index order. It returns whether
// to go on.
template <typename T, typename Body>
void for_each_reaching(const LogitsOfSample<T>& logits, const uint32_t* groups, float lowest,
                       const Body& body) {
  const uint32_t edge = vllm_kernels::ordered_bits(lowest);
  for (int64_t begin = 0; begin < logits.size(); begin += kChunkTokens) {
    const VecUint of_chunk = load_ordered(groups + begin / kGroupTokens);
    if (!any(not_below_mask(of_chunk, edge))) continue;
    const int64_t end = std::min(begin + kChunkTokens, padded(logits.size()));
    for (int64_t token = begin; token < end; token += kLanes) {
      const Vec x = logits.at(token);
      const VecInt reaches = (VecInt)(x >= splat(lowest));
      if (!any(reaches)) continue;
      for (int lane = 0; lane < kLanes; ++lane) {
        if (reaches[lane] != 0 && !body(token + lane, x[lane])) return;
      }
    }
  }
}

// --- the weights of all tokens -------------------------------------------------------------------

constexpr int64_t kMaxBlocks = 512;

inline int64_t block_tokens(int64_t n) {
  return padded(ceil_div(n, kMaxBlocks));
}

// Draws from all tokens. `max` is the highest quotient.
template <typename T>
int64_t draw_from_all(const LogitsOfSample<T>& logits, float temperature, float max,
                      uint64_t random) {
  const int64_t n = logits.size(), block = block_tokens(n);
  const auto weights_at = [&](int64_t token) {
    const Vec x = temperature == 1.0f ? logits.at(token) : logits.at(token) / splat(temperature);
    return to_weights(exp_of_difference<VecMath>(x + splat(-max)));
  };
  uint64_t sums[kMaxBlocks], all = 0;
  for (int64_t begin = 0; begin < n; begin += block) {
    WeightSum sum;
    const int64_t end = std::min(begin + block, padded(n));
    for (int64_t token = begin; token < end; token += kLanes) sum.add(weights_at(token));
    all += sums[begin / block] = sum.total();
  }
  const uint64_t target = high_product(all, random);
  uint64_t before = 0;
  int64_t i = 0;
  while (before + sums[i] <= target) before += sums[i++];
  for (int64_t token = i * block;; token += kLanes) {
    const Vec weights = weights_at(token);
    for (int lane = 0; lane < kLanes; ++lane) {
      before += static_cast<uint64_t>(weights[lane]);
      if (before > target) return token + lane;
    }
  }
}

}  // namespace
}  // namespace vllm_kernels::cpu
