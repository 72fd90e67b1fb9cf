// Pieces of K and V, from pages of any layout or from contiguous keys, as rows of floats to
// multiply. See cpu/base/vec.h for the anonymous namespace.
#pragma once
#include <cstring>
#include <type_traits>

#include "cpu/attention/epilogue.h"
#include "cpu/attention/packed_gemm.h"
#include "cpu/attention/paged_attention.h"
#include "cpu/base/int8.h"
#include "cpu/base/vec.h"

namespace vllm_kernels::cpu {
namespace {

constexpr int kPieceTokens = 128;

struct Piece {
  int32_t first;  // token of the sequence
  int count;
};

inline int piece_size(int64_t tokens) {
  return tokens < 0 ? 0 : smaller(kPieceTokens, tokens);
}

template <typename T>
inline void widen(const T* from, int count, float* to) {  // to whole vectors
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, load(from + i));
  if (i < count) store(to + i, load_partial(from + i, count - i));
}

// The piece at work of one task.
template <typename Cache>
class AttentionPieces {
 public:
  static constexpr int kWords = kPairs<Cache> ? kPieceTokens / 2 : kPieceTokens;  // a column of V

  explicit AttentionPieces(const PagedAttentionParams& params)
      : stride((params.kv.head_size + kLanes - 1) / kLanes * kLanes), p_(params), kv_(params.kv) {
    for (float& element : wide) element = 0.0f;
  }

  // For tiles that are packed (pack_keys, pack_values), or not (widen_keys, widen_values; in other
  // layouts than vllm find_rows).
  void begin_tile(bool packs) {
    packs_ = packs;
    words = packs && kPairs<Cache> ? (kv_.head_size / 2 + 15) / 16 * 16 : stride;
  }

  template <bool keys>
  void prefetch(const AttentionTile& tile, Piece piece) {
    for_each_page(tile, piece.first, piece.count, [&](int64_t block, int slot, int slots, int) {
      const int64_t at = keys ? kv_.key_offset(block, tile.kv_head, slot, 0)
                              : kv_.value_offset(block, tile.kv_head, slot, 0);
      const char* from =
          reinterpret_cast<const char*>(static_cast<const Cache*>(keys ? kv_.key : kv_.value) + at);
      const int64_t row = kv_.head_size * static_cast<int64_t>(sizeof(Cache));
      if (kv_.layout == KvLayout::kVllm) {
        if (slots == kv_.block_size) prefetch_span(from, row * slots);
        return;
      }
      const int64_t token_stride =
          (keys ? kv_.key_token_stride : kv_.value_token_stride) * int64_t{sizeof(Cache)};
      for (int i = 0; i < slots; ++i) prefetch_span(from + i * token_stride, row);
    });
  }

  // The rows of a piece's tokens, K's or V's, and the last again up to whole vectors. Not of layout
  // vllm.
  template <bool keys>
  void find_rows(const AttentionTile& tile, Piece piece, const char** rows) const {
    const Cache* all = static_cast<const Cache*>(keys ? kv_.key : kv_.value);
    const int64_t token_stride = keys ? kv_.key_token_stride : kv_.value_token_stride;
    for_each_page(tile, piece.first, piece.count, [&](int64_t block, int slot, int slots, int at) {
      const Cache* from = all + (keys ? kv_.key_offset(block, tile.kv_head, slot, 0)
                                      : kv_.value_offset(block, tile.kv_head, slot, 0));
      for (int i = 0; i < slots; ++i)
        rows[at + i] = reinterpret_cast<const char*>(from + i * token_stride);
    });
    const int last = (piece.count + kLanes - 1) / kLanes * kLanes;
    for (int i = piece.count; i < last; ++i) rows[i] = rows[piece.count - 1];
  }

  // A row of the query or of K, with zeros up to words. (wide has had none but such rows.)
  template <typename T>
  void copy_row(const T* from, float* to) const {
    if constexpr (std::is_same_v<T, Cache> && kPairs<T>) {
      if (packs_) {
        for (int i = kv_.head_size / 2; i < words; ++i) to[i] = 0.0f;
        copy_elements(reinterpret_cast<T*>(to), from, kv_.head_size);
        return;
      }
    }
    widen(from, kv_.head_size, to);
  }

  // K as [words][kPieceTokens].
  void pack_keys(const AttentionTile& tile, Piece piece) {
    widen_keys(tile, piece.first, piece.count);
    transpose(wide, words, kPieceTokens, words, packed, kPieceTokens);
  }

  // V as [kWords][stride] in wide, zeros behind the piece's last token.
  void pack_values(const AttentionTile& tile, Piece piece) {
    if (kv_.layout == KvLayout::kVllm) {
      copy_columns(tile, piece);
      transpose(packed, kWords, stride, kWords, wide, stride);
    } else if constexpr (kPairs<Cache>) {
      copy_pairs(tile, piece);
    } else {
      widen_values(tile, piece.first, piece.count);
    }
    for (int token = piece.count; token < kPieceTokens; ++token) {
      const int word = kPairs<Cache> ? token / 2 : token;
      const uint32_t keep = kPairs<Cache> && token % 2 != 0 ? 0xffffu : 0u;
      float* to = wide + word * stride;
      for (int d = 0; d < stride; d += kLanes) {
        store(to + d, as_float(as_bits(load(to + d)) & keep));
      }
    }
  }

  void widen_keys(const AttentionTile& tile, int32_t first, int count) {
    const Cache* keys = static_cast<const Cache*>(kv_.key);
    for_each_page(tile, first, count, [&](int64_t block, int slot, int slots, int at) {
      const Cache* key = keys + kv_.key_offset(block, tile.kv_head, slot, 0);
      float* to = wide + at * words;
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

  // Rows [token][stride] as K's, or with layout vllm columns [head_size][kPieceTokens].
  void widen_values(const AttentionTile& tile, int32_t first, int count) {
    const Cache* values = static_cast<const Cache*>(kv_.value);
    for_each_page(tile, first, count, [&](int64_t block, int slot, int slots, int at) {
      const Cache* value = values + kv_.value_offset(block, tile.kv_head, slot, 0);
      if (kv_.layout != KvLayout::kVllm) {
        for (int i = 0; i < slots; ++i) {
          widen(value + i * kv_.value_token_stride, kv_.head_size, wide + (at + i) * stride);
        }
        return;
      }
      for (int d = 0; d < kv_.head_size; ++d, value += kv_.value_dim_stride) {
        widen_column(value, slots, wide + d * kPieceTokens + at);
      }
    });
  }

  const int stride;  // words of a row of V: head_size in whole vectors
  int words = 0;     // of a row of K, and of a query
  alignas(64) float wide[kPieceTokens * kMaxHeadSize];    // widen_keys()'s, and V
  alignas(64) float packed[kPieceTokens * kMaxHeadSize];  // pack_keys()'s

 private:
  // Calls body(block, first slot, number of slots, first token of the piece), page by page.
  template <typename Body>
  void for_each_page(const AttentionTile& tile, int32_t first, int count, Body&& body) const {
    if (p_.key_start_loc != nullptr) {
      if (count > 0) body(int64_t{0}, tile.keys.first + first, count, 0);
      return;
    }
    const int32_t* table = p_.block_tables + tile.seq * p_.block_table_stride;
    for (int done = 0; done < count;) {
      const int32_t page = (first + done) / kv_.block_size, slot = (first + done) % kv_.block_size;
      const int slots = smaller(kv_.block_size - slot, count - done);
      body(static_cast<int64_t>(table[page]), slot, slots, done);
      done += slots;
    }
  }

  // std::memcpy without a call.
  template <typename T>
  static void copy_elements(T* to, const T* from, int count) {
    constexpr int kStep = 16 / sizeof(T);
    int i = 0;
    for (; i + kStep <= count; i += kStep) std::memcpy(to + i, from + i, 16);
    for (; i < count; ++i) to[i] = from[i];
  }

  // Layout vllm: V's columns, [stride][kWords] in packed.
  void copy_columns(const AttentionTile& tile, Piece piece) {
    const Cache* values = static_cast<const Cache*>(kv_.value);
    for (int i = kv_.head_size * kWords; i < stride * kWords; ++i) packed[i] = 0.0f;
    for_each_page(tile, piece.first, piece.count, [&](int64_t block, int slot, int slots, int at) {
      const Cache* value = values + kv_.value_offset(block, tile.kv_head, slot, 0);
      for (int d = 0; d < kv_.head_size; ++d, value += kv_.value_dim_stride) {
        float* to = packed + d * kWords;
        if constexpr (kPairs<Cache>) {
          copy_elements(reinterpret_cast<Cache*>(to) + at, value, slots);
        } else {
          widen_column(value, slots, to + at);
        }
      }
    });
  }

  // NHD and HND: the rows of tokens 2i and 2i + 1 as row i of pairs.
  void copy_pairs(const AttentionTile& tile, Piece piece) {
    const Cache* values = static_cast<const Cache*>(kv_.value);
    const Cache* rows[kPieceTokens + 1];
    for_each_page(tile, piece.first, piece.count, [&](int64_t block, int slot, int slots, int at) {
      for (int i = 0; i < slots; ++i) {
        rows[at + i] = values + kv_.value_offset(block, tile.kv_head, slot + i, 0);
      }
    });
    rows[piece.count] = rows[piece.count - 1];  // the pair of an odd last token, not to be used
    for (int token = 0; token < piece.count; token += 2) {
      const Cache *first = rows[token], *second = rows[token + 1];
      float* to = wide + token / 2 * stride;
      int d = 0;
      for (; d + kLanes <= kv_.head_size; d += kLanes) {
        store(to + d, join_pair(load(first + d), load(second + d)));
      }
      const int rest = kv_.head_size - d;
      if (rest > 0) {
        store(to + d, join_pair(load_partial(first + d, rest), load_partial(second + d, rest)));
      }
    }
  }

  // Words of two bf16, each given as the float that it is.
  static Vec join_pair(Vec low, Vec high) { return as_float(as_bits(low) >> 16 | as_bits(high)); }

  static void widen_column(const Cache* from, int slots, float* to) {
    int i = 0;
    for (; i + kLanes <= slots; i += kLanes) store(to + i, load(from + i));
    if (i < slots) store_partial(to + i, load_partial(from + i, slots - i), slots - i);
  }

  const PagedAttentionParams& p_;
  const PagedKv& kv_;
  bool packs_ = false;
};

}  // namespace
}  // namespace vllm_kernels::cpu
