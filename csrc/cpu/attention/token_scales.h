// The scales of a block of tokens of an int8 cache that has one a token and KV head (TokenScales in
// ops/paged_kv.h). See cpu/base/vec.h for the anonymous namespace.
#pragma once
#include <type_traits>

#include "cpu/base/int8.h"
#include "cpu/base/vec.h"
#include "ops/paged_attention.h"

namespace vllm_kernels::cpu {
namespace {

// Only caches of this type may have a scale a token.
template <typename Cache>
constexpr bool kMayHaveTokenScales = std::is_same_v<Cache, Int8>;

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
  Vec key(int token) const { return load(key_ + token); }
  Vec value(int token) const { return load(value_ + token); }

  // Reads those of slots [slot, slot + count) of a page: of tokens `at`, at + 1, ... of the block.
  void read(int64_t page, int64_t head, int slot, int count, int at) {
    const TokenScales& from = p_.token_scales;
    const float* keys = from.key + from.key_offset(page, head) + slot;
    const float* values = from.value + from.value_offset(page, head) + slot;
    for_each_vector(0, count, [&](int64_t i, auto n) {
      store(key_ + at + i, load(keys + i, n), n);
      store(value_ + at + i, load(values + i, n), n);
    });
  }
  // Tokens from `count` up to `end`, rounded up to a whole vector, become 0.
  void clear(int count, int end) {
    for (int i = count; i < (end + kLanes - 1) / kLanes * kLanes; ++i) key_[i] = value_[i] = 0.0f;
  }
  void prefetch(int64_t page, int64_t head, int slot, int count) const {
    const TokenScales& from = p_.token_scales;
    const float* keys = from.key + from.key_offset(page, head) + slot;
    const float* values = from.value + from.value_offset(page, head) + slot;
    for (int i = 0; i < count; i += kLineFloats) {
      __builtin_prefetch(keys + i, 0, 2);
      __builtin_prefetch(values + i, 0, 2);
    }
  }

 private:
  static constexpr int kLineFloats = 16;
  static constexpr int kFloats = kMayHaveTokenScales<Cache> ? kTokens + kLanes : 1;

  const PagedAttentionParams& p_;
  alignas(64) float key_[kFloats];
  alignas(64) float value_[kFloats];
};

}  // namespace
}  // namespace vllm_kernels::cpu
