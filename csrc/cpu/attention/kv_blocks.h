// Loads KV blocks of kKvBlockTokens tokens into buffers of floats or packed words. They come from
// pages of any layout or from contiguous keys. See cpu/base/vec.h for the anonymous namespace.
#pragma once
#include <cstring>
#include <type_traits>

#include "cpu/attention/epilogue.h"
#include "cpu/attention/packed_gemm.h"
#include "cpu/attention/paged_attention.h"
#include "cpu/base/int4.h"
#include "cpu/base/int8.h"
#include "cpu/base/vec.h"

namespace vllm_kernels::cpu {
namespace {

constexpr int kKvBlockTokens = 128;

struct KvBlock {
  int32_t first;  // token of the sequence
  int count;
};

// The size of the next KV block if `tokens` tokens remain.
inline int kv_block_size(int64_t tokens) {
  return tokens < 0 ? 0 : min_int32(kKvBlockTokens, tokens);
}

// The buffers of one task: K or V of the current KV block.
template <typename Cache>
class KvBlockLoader {
 public:
  static constexpr int kWords =
      kPairs<Cache> ? kKvBlockTokens / 2 : kKvBlockTokens;  // of a column of V

  explicit KvBlockLoader(const PagedAttentionParams& params)
      : stride((params.head_size() + kLanes - 1) / kLanes * kLanes), p_(params), kv_(params.kv) {
    for (float& element : staged) element = 0.0f;
  }

  // A packed tile uses pack_keys() and pack_values(). Another one uses row_pointers(), or in layout
  // vllm upcast_keys() and upcast_values().
  void begin_tile(bool is_packed) {
    is_packed_ = is_packed;
    words = is_packed && kPairs<Cache> ? (kv_.head_size / 2 + 15) / 16 * 16 : stride;
  }

  template <bool keys>
  void prefetch(const QueryTile& tile, KvBlock kv_block) {
    const int64_t row_bytes = kv_.head_size * int64_t{sizeof(Cache)};
    for_each_address<keys>(tile, kv_block, [&](const Cache* page, int slots, int) {
      const char* from = reinterpret_cast<const char*>(page);
      if (kv_.layout == KvLayout::kVllm) {
        if (slots == kv_.block_size) prefetch_span(from, row_bytes * slots);
        return;
      }
      const int64_t stride = token_stride<keys>() * int64_t{sizeof(Cache)};
      for (int i = 0; i < slots; ++i) prefetch_span(from + i * stride, row_bytes);
    });
  }

  // Calls body(page, first slot, number of slots, first token in the KV block). Contiguous keys are
  // slots of page 0.
  template <typename Body>
  void for_each_page(const QueryTile& tile, KvBlock kv_block, Body&& body) const {
    if (p_.key_start_loc != nullptr) {
      if (kv_block.count > 0) body(0, tile.keys.first + kv_block.first, kv_block.count, 0);
      return;
    }
    const int32_t* table = p_.block_tables + tile.seq * p_.block_table_stride;
    for (int done = 0; done < kv_block.count;) {
      const int32_t token = kv_block.first + done, slot = token % kv_.block_size;
      const int slots = min_int32(kv_.block_size - slot, kv_block.count - done);
      body(table[token / kv_.block_size], slot, slots, done);
      done += slots;
    }
  }

  // Pointers to the KV block's rows of K or V, padded with the last one to whole vectors. Not for
  // layout vllm.
  template <bool keys>
  void row_pointers(const QueryTile& tile, KvBlock kv_block, const char** rows) const {
    for_each_address<keys>(tile, kv_block, [&](const Cache* from, int slots, int at) {
      for (int i = 0; i < slots; ++i) {
        rows[at + i] = reinterpret_cast<const char*>(from + i * token_stride<keys>());
      }
    });
    const int last = (kv_block.count + kLanes - 1) / kLanes * kLanes;
    for (int i = kv_block.count; i < last; ++i) rows[i] = rows[kv_block.count - 1];
  }

  // Copies a row of the query or of K, padded with zeros to `words`.
  template <typename T>
  void copy_row(const T* from, float* to) const {
    if constexpr (std::is_same_v<T, Cache> && kPairs<T>) {
      if (is_packed_) {
        for (int i = kv_.head_size / 2; i < words; ++i) to[i] = 0.0f;
        copy_elements(reinterpret_cast<T*>(to), from, kv_.head_size);
        return;
      }
    }
    upcast(from, kv_.head_values() / kValues<T>, to);
  }

  // K as [words][kKvBlockTokens].
  void pack_keys(const QueryTile& tile, KvBlock kv_block) {
    upcast_keys(tile, kv_block);
    transpose(staged, words, kKvBlockTokens, words, packed, kKvBlockTokens);
  }

  // V as [kWords][stride] in `staged`, zeros past the KV block's last token.
  void pack_values(const QueryTile& tile, KvBlock kv_block) {
    if (kv_.layout == KvLayout::kVllm) {
      copy_columns(tile, kv_block);
      transpose(packed, kWords, stride, kWords, staged, stride);
    } else if constexpr (kPairs<Cache>) {
      copy_pairs(tile, kv_block);
    } else {
      upcast_values(tile, kv_block);
    }
    for (int token = kv_block.count; token < kKvBlockTokens; ++token) {
      const int word = kPairs<Cache> ? token / 2 : token;
      const uint32_t keep = kPairs<Cache> && token % 2 != 0 ? 0xffffu : 0u;
      float* to = staged + word * stride;
      for (int d = 0; d < stride; d += kLanes) {
        store(to + d, as_float(as_bits(load(to + d)) & keep));
      }
    }
  }

  void upcast_keys(const QueryTile& tile, KvBlock kv_block) {
    for_each_address<true>(tile, kv_block, [&](const Cache* key, int slots, int at) {
      float* to = staged + at * words;
      for (int i = 0; i < slots; ++i, key += kv_.key_token_stride, to += words) {
        if (kv_.layout != KvLayout::kVllm) {
          copy_row(key, to);
          continue;
        }
        Cache row[kMaxHeadSize];  // from chunks of 16 bytes
        for (int d = 0, chunk = 0; d < kv_.head_size; d += kv_.x, ++chunk) {
          std::memcpy(row + d, key + chunk * kv_.key_chunk_stride, 16);
        }
        copy_row(row, to);
      }
    });
  }

  // V as rows [token][stride]; in layout vllm as columns [head_size][kKvBlockTokens].
  void upcast_values(const QueryTile& tile, KvBlock kv_block) {
    for_each_address<false>(tile, kv_block, [&](const Cache* value, int slots, int at) {
      if (kv_.layout != KvLayout::kVllm) {
        for (int i = 0; i < slots; ++i) {
          upcast(value + i * kv_.value_token_stride, kv_.head_size, staged + (at + i) * stride);
        }
        return;
      }
      for (int d = 0; d < kv_.head_size; ++d, value += kv_.value_dim_stride) {
        upcast_column(value, slots, staged + d * kKvBlockTokens + at, kKvBlockTokens);
      }
    });
  }

  const int stride;  // words of a row of V: head_size rounded up to whole vectors
  int words = 0;     // of a row of K, and of query
  alignas(64) float staged[kKvBlockTokens * kMaxHeadSize];  // upcast K, or V
  alignas(64) float packed[kKvBlockTokens * kMaxHeadSize];  // packed K

 private:
  template <bool keys>
  int64_t token_stride() const {
    return keys ? kv_.key_token_stride : kv_.value_token_stride;
  }

  // Calls body(address, number of slots, first token in the KV block) page by page. The address is
  // that of K or V of the first slot.
  template <bool keys, typename Body>
  void for_each_address(const QueryTile& tile, KvBlock kv_block, Body&& body) const {
    for_each_page(tile, kv_block, [&](int64_t page, int slot, int slots, int at) {
      const int64_t offset = keys ? kv_.key_offset(page, tile.kv_head, slot, 0)
                                  : kv_.value_offset(page, tile.kv_head, slot, 0);
      body(static_cast<const Cache*>(keys ? kv_.key : kv_.value) + offset, slots, at);
    });
  }

  // A std::memcpy that is inlined.
  template <typename T>
  static void copy_elements(T* to, const T* from, int count) {
    constexpr int kStep = 16 / sizeof(T);
    int i = 0;
    for (; i + kStep <= count; i += kStep) std::memcpy(to + i, from + i, 16);
    for (; i < count; ++i) to[i] = from[i];
  }

  // Layout vllm: V's columns as [stride][kWords] in `packed`.
  void copy_columns(const QueryTile& tile, KvBlock kv_block) {
    for (int i = kv_.head_values() * kWords; i < stride * kWords; ++i) packed[i] = 0.0f;
    for_each_address<false>(tile, kv_block, [&](const Cache* value, int slots, int at) {
      for (int d = 0; d < kv_.head_size; ++d, value += kv_.value_dim_stride) {
        float* to = packed + d * kWords;
        if constexpr (kPairs<Cache>) {
          copy_elements(reinterpret_cast<Cache*>(to) + at, value, slots);
        } else {
          upcast_column(value, slots, to + at, kWords);
        }
      }
    });
  }

  // NHD and HND: interleaves the rows of tokens 2i and 2i + 1 into row i of pairs.
  void copy_pairs(const QueryTile& tile, KvBlock kv_block) {
    // An odd last token is paired with itself. pack_values() zeroes the second one.
    const char* rows[kKvBlockTokens];
    row_pointers<false>(tile, kv_block, rows);
    for (int token = 0; token < kv_block.count; token += 2) {
      const Cache* first = reinterpret_cast<const Cache*>(rows[token]);
      const Cache* second = reinterpret_cast<const Cache*>(rows[token + 1]);
      float* to = staged + token / 2 * stride;
      for_each_vector(0, kv_.head_size, [&](int64_t d, auto count) {
        store(to + d, join_pair(load(first + d, count), load(second + d, count)));
      });
    }
  }

  // Two vectors of bfloat16 values, held as floats, become one vector of pairs.
  static Vec join_pair(Vec low, Vec high) { return as_float(as_bits(low) >> 16 | as_bits(high)); }

  // One dimension of V. `column_stride`: between dimensions.
  void upcast_column(const Cache* from, int slots, float* to, int column_stride) const {
    for_each_vector(0, slots, [&](int64_t i, auto n) {
      if constexpr (kValues<Cache> == 2) {  // two dimensions, head_size apart
        const VecPair values = load_values(from + i, n);
        store(to + i, values.a, n);
        store(to + kv_.head_size * column_stride + i, values.b, n);
      } else {
        store(to + i, load(from + i, n), n);
      }
    });
  }

  const PagedAttentionParams& p_;
  const PagedKv& kv_;
  bool is_packed_ = false;
};

}  // namespace
}  // namespace vllm_kernels::cpu
