// Rows of a KV cache: where one head of one token is, and copies to and from contiguous rows. See
// cpu/base/vec.h for the anonymous namespace.
#pragma once
#include "cpu/base/dispatch.h"
#include "ops/reshape_and_cache.h"

namespace vllm_kernels::cpu {
namespace {

constexpr int kBufferElements = 16 * kLanes;  // elements converted at a time

// Copies elements of one type. Divides by the scale towards a smaller type (quantizes), and
// multiplies with it otherwise.
template <typename To, typename From>
inline void convert(To* to, const From* from, int64_t n, float scale) {
  if constexpr (std::is_same_v<To, From>) {
    std::memcpy(to, from, n * sizeof(To));
  } else {
    const Vec factor = splat(scale);
    for_each_vector(0, n, [&](int64_t i, auto count) {
      const Vec value = load(from + i, count);
      store(to + i, sizeof(To) < sizeof(From) ? value / factor : value * factor, count);
    });
  }
}

// One head of one token in the cache.
struct HeadSlot {
  int64_t block, head, token;  // token of the block
};

// Its elements: `run` contiguous ones every `stride` elements. `run` is 1, x or head_size; 1 and x
// divide kBufferElements.
template <typename C>
struct CacheRow {
  C* start;
  int64_t run, stride;
};

template <typename C>
inline CacheRow<C> cache_row(const PagedKv& kv, bool is_key, const HeadSlot& at) {
  const bool vllm = kv.layout == KvLayout::kVllm;
  if (is_key) {
    return {static_cast<C*>(kv.key) + kv.key_offset(at.block, at.head, at.token, 0),
            vllm ? kv.x : kv.head_size, kv.key_chunk_stride};
  }
  return {static_cast<C*>(kv.value) + kv.value_offset(at.block, at.head, at.token, 0),
          vllm ? 1 : kv.head_size, kv.value_dim_stride};
}

template <typename T, typename C>
inline void write_row(const CacheRow<C>& to, const T* from, int64_t n, float scale) {
  if (to.run >= n) return convert(to.start, from, n, scale);
  C buffer[kBufferElements];
  for (int64_t i = 0; i < n; i += kBufferElements) {
    const int64_t count = n - i < kBufferElements ? n - i : kBufferElements;
    convert(buffer, from + i, count, scale);
    C* at = to.start + i / to.run * to.stride;
    if (to.run == 1) {
      for (int64_t j = 0; j < count; ++j) at[j * to.stride] = buffer[j];
    } else {
      for (int64_t j = 0; j < count; j += to.run, at += to.stride) std::memcpy(at, buffer + j, 16);
    }
  }
}

template <typename T, typename C>
inline void read_row(T* to, const CacheRow<C>& from, int64_t n, float scale) {
  if (from.run >= n) return convert(to, from.start, n, scale);
  C buffer[kBufferElements];
  for (int64_t i = 0; i < n; i += kBufferElements) {
    const int64_t count = n - i < kBufferElements ? n - i : kBufferElements;
    const C* at = from.start + i / from.run * from.stride;
    if (from.run == 1) {
      for (int64_t j = 0; j < count; ++j) buffer[j] = at[j * from.stride];
    } else {
      for (int64_t j = 0; j < count; j += from.run, at += from.stride) {
        std::memcpy(buffer + j, at, 16);
      }
    }
    convert(to + i, buffer, count, scale);
  }
}

// Calls body(is_key, slot, row) for the key and value rows of heads [first, last), token by token.
// Tokens without a slot are skipped.
template <typename T, typename Body>
inline void for_each_new_row(const ReshapeAndCacheParams& p, int64_t first, int64_t last,
                             const Body& body) {
  for (int64_t t = 0; t < p.num_tokens; ++t) {
    const int32_t slot = p.usable(p.slot_mapping[t]);
    if (slot < 0) continue;
    const T* keys = static_cast<const T*>(p.key) + t * p.key_token_stride;
    const T* values = static_cast<const T*>(p.value) + t * p.value_token_stride;
    for (int64_t head = first; head < last; ++head) {
      const HeadSlot at = {slot / p.kv.block_size, head, slot % p.kv.block_size};
      body(true, at, keys + head * p.key_head_stride);
      body(false, at, values + head * p.value_head_stride);
    }
  }
}

}  // namespace
}  // namespace vllm_kernels::cpu
