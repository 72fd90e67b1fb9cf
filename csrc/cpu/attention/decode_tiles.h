// Which pages a task of paged attention visits, in order: rows, segments, tiles.
#pragma once
#include "cpu/attention/paged_attention_decode.h"

namespace vllm_kernels::cpu {
namespace {

constexpr int kTileTokens = 256;  // at most: the largest page; scores are kept while V is read
constexpr int kMinBlockSize = 8;
constexpr int kMostRowTokens = 128;  // of a tile of token rows
constexpr int kMaxTilePages = kMostRowTokens;
static_assert(kMaxTilePages >= kTileTokens / kMinBlockSize);
constexpr int kOpenTokens = 512;  // pages of 16: 1% faster than 128 to 256, as fast as 1024
constexpr int kMemoryPage = 4096;

inline int32_t least(int64_t a, int64_t b) {
  return static_cast<int32_t>(a < b ? a : b);
}

// The part of a row that one task computes.
struct Segment {
  int32_t seq;
  int32_t kv_head;  // the first of them
  int32_t kv_heads;
  int32_t first_head;
  int32_t heads;
  int32_t seq_len;
  int32_t begin, end;  // tokens
  bool starts_row, ends_row;
};

// The segments of units [begin, end), in order.
class Segments {
 public:
  Segments(const PagedAttentionWork& work, int64_t begin, int64_t end)
      : work_(work), at_(begin), end_(end) {
    while (at_ < end_ && at_ >= row_unit_ + seq_units()) next_seq();
  }

  bool next(Segment& segment) {
    if (at_ >= end_) return false;
    while (at_ >= row_unit_ + seq_units()) next_seq();
    const PagedAttentionParams& p = work_.params;
    const int32_t group = p.num_heads / p.kv.num_kv_heads;
    const int64_t row = (at_ - row_unit_) / units_;
    const int64_t unit = (at_ - row_unit_) % units_;
    const int64_t last = least(units_, unit + (end_ - at_));
    segment.seq = seq_;
    segment.kv_head = static_cast<int32_t>(row / work_.chunks) * work_.kv_heads_per_row;
    segment.kv_heads = least(work_.kv_heads_per_row, p.kv.num_kv_heads - segment.kv_head);
    const int32_t skipped = static_cast<int32_t>(row % work_.chunks) * work_.heads_per_row;
    segment.first_head = segment.kv_head * group + skipped;
    segment.heads = least(work_.heads_per_row, segment.kv_heads * group - skipped);
    segment.seq_len = seen_.end;
    segment.begin = seen_.begin + static_cast<int32_t>(unit * work_.unit_tokens);
    segment.end = least(seen_.end, seen_.begin + last * work_.unit_tokens);
    segment.starts_row = unit == 0;
    segment.ends_row = last == units_;
    at_ += last - unit;
    return true;
  }

 private:
  int64_t seq_units() {
    if (units_ == 0) {
      seen_ = row_tokens(work_.params, seq_);
      const int64_t count = seen_.end - seen_.begin;
      units_ = count == 0 ? 1 : (count + work_.unit_tokens - 1) / work_.unit_tokens;
    }
    return units_ * work_.rows_per_seq();
  }
  void next_seq() {
    row_unit_ += seq_units();
    ++seq_;
    units_ = 0;
  }

  const PagedAttentionWork& work_;
  int64_t at_, end_;
  int64_t row_unit_ = 0;  // the first unit of sequence seq_
  int32_t seq_ = 0;
  VisibleTokens seen_;
  int32_t units_ = 0;  // a row of this sequence has so many; 0: not looked at
};

// Pages whose scores are computed together, all of one segment. In layouts NHD and HND every
// token is a page of its own here.
struct Tile {
  Segment segment{};
  int32_t pages;
  int32_t tokens;  // of these pages; only the last one may be partly used
  bool starts_segment, ends_segment;
  int32_t position[kMaxTilePages];      // of a page's first token in the sequence
  const char* key[kMaxTilePages + 16];  // and the last again, up to whole vectors
  const char* value[kMaxTilePages + 16];
};

// Whether any head of the segment sees the block-sparse block that the token is in.
inline bool any_head_sees(const PagedAttentionParams& p, const Segment& segment, int32_t token) {
  const int32_t different = p.sparse.head_sliding_step > 0 ? segment.heads : 1;
  for (int32_t i = 0; i < different; ++i) {
    const int32_t offset = p.sparse.head_offset(segment.first_head + i, segment.kv_head,
                                                p.num_heads, p.kv.num_kv_heads);
    if (p.sparse.is_visible(token, segment.seq_len, offset)) return true;
  }
  return false;
}

// The tiles of units [begin, end), in order. Every segment has at least one tile, which
// may be empty.
class Tiles {
 public:
  Tiles(const PagedAttentionWork& work, int64_t begin, int64_t end, int32_t tile_tokens)
      : p_(work.params), segments_(work, begin, end), tile_tokens_(tile_tokens) {
    more_ = segments_.next(segment_);
    token_ = segment_.begin;
  }

  bool next(Tile& tile) {
    if (!more_) return false;
    const PagedKv& kv = p_.kv;
    const int64_t element = size_of(kv.dtype);
    tile.segment = segment_;
    tile.starts_segment = token_ == segment_.begin;
    const int32_t end_token = segment_.end;
    const int32_t* table = p_.block_tables + segment_.seq * p_.block_table_stride;
    if (tile.starts_segment || token_ >= opened_) open_pages(table);
    const int32_t most = kv.layout == KvLayout::kVllm ? tile_tokens_ / kv.block_size : tile_tokens_;
    int32_t pages = 0, tokens = 0;
    while (token_ < end_token && pages < most) {
      if (kv.layout != KvLayout::kVllm) {
        const int32_t end = least(end_token, int64_t{token_} + most - pages);
        pages = add_token_rows(table, end, pages, tile);
        tokens = pages;
        continue;
      }
      const int32_t count = least(kv.block_size, end_token - token_);
      if (!p_.sparse.on() || any_head_sees(p_, segment_, token_)) {
        const int64_t block = table[token_ / kv.block_size];
        tile.position[pages] = token_;
        tile.key[pages] = static_cast<const char*>(kv.key) +
                          element * kv.key_offset(block, segment_.kv_head, 0, 0);
        tile.value[pages] = static_cast<const char*>(kv.value) +
                            element * kv.value_offset(block, segment_.kv_head, 0, 0);
        ++pages;
        tokens += count;
      }
      token_ += count;
    }
    // What a vector over several pages reads past the end; its weights are 0.
    for (int i = 0; i < 16 && pages > 0; ++i) {
      tile.key[pages + i] = tile.key[pages - 1];
      tile.value[pages + i] = tile.value[pages - 1];
    }
    tile.pages = pages;
    tile.tokens = tokens;
    tile.ends_segment = token_ >= segment_.end;
    if (tile.ends_segment) {
      more_ = segments_.next(segment_);
      token_ = segment_.begin;
    }
    return true;
  }

 private:
  // Asks for a line of each of the segment's next pages. Every one misses the TLB; in a burst these
  // misses are served side by side, where the products' own prefetches would meet them one by one.
  void open_pages(const int32_t* table) {
    const PagedKv& kv = p_.kv;
    const int64_t element = size_of(kv.dtype);
    opened_ = least(segment_.end, int64_t{token_} + kOpenTokens);
    if (kv.layout != KvLayout::kVllm) return;
    const int64_t bytes = element * kv.head_size * kv.block_size;
    for (int32_t token = token_; token < opened_; token += kv.block_size) {
      const int64_t block = table[token / kv.block_size];
      const char* key =
          static_cast<const char*>(kv.key) + element * kv.key_offset(block, segment_.kv_head, 0, 0);
      const char* value = static_cast<const char*>(kv.value) +
                          element * kv.value_offset(block, segment_.kv_head, 0, 0);
      for (int64_t at = 0; at < bytes; at += kMemoryPage) {
        __builtin_prefetch(key + at, 0, 2);
        __builtin_prefetch(value + at, 0, 2);
      }
    }
  }

  // The tokens of token_'s page up to `end`.
  int32_t add_token_rows(const int32_t* table, int32_t end, int32_t pages, Tile& tile) {
    const PagedKv& kv = p_.kv;
    const int64_t element = size_of(kv.dtype);
    const int32_t slot = token_ % kv.block_size;
    const int64_t block = table[token_ / kv.block_size];
    end = least(end, int64_t{token_} - slot + kv.block_size);
    const char* key = static_cast<const char*>(kv.key) +
                      element * kv.key_offset(block, segment_.kv_head, slot, 0);
    const char* value = static_cast<const char*>(kv.value) +
                        element * kv.value_offset(block, segment_.kv_head, slot, 0);
    for (; token_ < end; ++token_, ++pages) {
      tile.position[pages] = token_;
      tile.key[pages] = key;
      tile.value[pages] = value;
      key += element * kv.key_token_stride;
      value += element * kv.value_token_stride;
    }
    return pages;
  }

  const PagedAttentionParams& p_;
  Segments segments_;
  int32_t tile_tokens_;
  int32_t opened_ = 0;  // of the segment, tokens whose pages were asked for (layout vllm)
  Segment segment_{};
  int32_t token_ = 0;
  bool more_ = false;
};

}  // namespace
}  // namespace vllm_kernels::cpu
