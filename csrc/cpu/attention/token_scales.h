// The scales, and for int4 the zeros, of a block of tokens of a cache that has one a token and KV
// head (TokenScales in ops/paged_kv.h). See cpu/base/vec.h for the anonymous namespace.
#pragma once
#include <type_traits>

#include "cpu/base/dispatch.h"
#include "cpu/base/int4.h"
#include "cpu/base/int8.h"
#include "cpu/base/vec.h"
#include "ops/paged_attention.h"

namespace vllm_kernels::cpu {
namespace {

// Calls body(C{}) with the storage type of a cache, which may be int4.
template <typename Body>
inline void dispatch_attention_cache(DType cache, Body&& body) {
  if (cache == DType::kInt4x2) return body(Int4x2{});
  dispatch_cache(cache, body);
}

// Caches of this type always have a scale and a zero a token.
template <typename Cache>
constexpr bool kHasTokenZeros = std::is_same_v<Cache, Int4x2>;
// Only caches of this type may have a scale a token.
template <typename Cache>
constexpr bool kMayHaveTokenScales = std::is_same_v<Cache, Int8> || kHasTokenZeros<Cache>;

// Up to kTokens tokens. A cache of another type has none of it.
template <typename Cache, int kTokens>
class BlockScales {
 public:
  explicit BlockScales(const PagedAttentionParams& params) : p_(params) {}

  // False at compile time for other caches, so their code does not change.
  bool any() const {
    if constexpr (kMayHaveTokenScales<Cache>) return p_.token_scales.any();
    return false;
  }
  // Scores of tokens from q . k. `query_sum`: the sum of q, times the softmax scale.
  Vec score(int token, Vec dot, float query_sum) const {
    const Vec scaled = dot * load(key_ + token);
    if constexpr (!kHasTokenZeros<Cache>) return scaled;
    return fma(load(key_zero_ + token), splat(query_sum), scaled);
  }
  Vec value(int token) const { return load(value_ + token); }
  Vec value_zero(int token) const { return load(value_zero_ + token); }

  // Reads those of slots [slot, slot + count) of a page: of tokens `at`, at + 1, ... of the block.
  void read(int64_t page, int64_t head, int slot, int count, int at) {
    for_each_array(page, head, slot, [&](const float* from, float* to) {
      for_each_vector(0, count,
                      [&](int64_t i, auto n) { store(to + at + i, load(from + i, n), n); });
    });
  }
  // Tokens from `count` up to `end`, rounded up to a whole vector, become 0.
  void clear(int count, int end) {
    for (int i = count; i < (end + kLanes - 1) / kLanes * kLanes; ++i) {
      key_[i] = value_[i] = 0.0f;
      if constexpr (kHasTokenZeros<Cache>) key_zero_[i] = value_zero_[i] = 0.0f;
    }
  }
  void prefetch(int64_t page, int64_t head, int slot, int count) {
    for_each_array(page, head, slot, [&](const float* from, float*) {
      for (int i = 0; i < count; i += kLineFloats) __builtin_prefetch(from + i, 0, 2);
    });
  }

 private:
  static constexpr int kLineFloats = 16;
  static constexpr int kFloats = kMayHaveTokenScales<Cache> ? kTokens + kLanes : 1;
  static constexpr int kZeros = kHasTokenZeros<Cache> ? kFloats : 1;

  // Calls body(from, to) for scales and zeros. `from` are those of a page and head, from `slot` on.
  template <typename Body>
  void for_each_array(int64_t page, int64_t head, int slot, const Body& body) {
    const TokenScales& from = p_.token_scales;
    const int64_t keys = from.key_offset(page, head) + slot;
    const int64_t values = from.value_offset(page, head) + slot;
    body(from.key + keys, key_);
    body(from.value + values, value_);
    if constexpr (kHasTokenZeros<Cache>) {
      body(from.key_zero + keys, key_zero_);
      body(from.value_zero + values, value_zero_);
    }
  }

  const PagedAttentionParams& p_;
  alignas(64) float key_[kFloats];
  alignas(64) float value_[kFloats];
  alignas(64) float key_zero_[kZeros];
  alignas(64) float value_zero_[kZeros];
};

}  // namespace
}  // namespace vllm_kernels::cpu
