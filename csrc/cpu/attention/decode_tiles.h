// The pages that a decode task visits, in order. SplitIterator gives the task's splits, and
// PageBlockIterator cuts each split into blocks of pages. See cpu/base/vec.h for the anonymous
// namespace.
#pragma once
#include "cpu/attention/paged_attention_decode.h"

namespace vllm_kernels::cpu {
namespace {

constexpr int kMaxBlockTokens = 256;  // the largest page; scores of a block are in a buffer
constexpr int kMinBlockSize = 8;      // of pages in layout vllm
constexpr int kMaxTokenRows = 128;    // tokens of a block in layouts NHD and HND
constexpr int kMaxBlockPages = kMaxTokenRows;
static_assert(kMaxBlockPages >= kMaxBlockTokens / kMinBlockSize);
// Tokens whose TLB entries are loaded at once. Pages of 16: 1% faster than 128 to 256, as fast as
// 1024.
constexpr int kTlbTokens = 512;
constexpr int kVirtualPageBytes = 4096;

// The share of a tile's KV range that one task computes.
struct Split {
  int32_t seq;
  int32_t kv_head;  // the first one
  int32_t kv_heads;
  int32_t first_head;
  int32_t heads;
  int32_t seq_len;
  int32_t begin, end;            // tokens
  int64_t tile_begin, tile_end;  // grains
  bool starts_tile, ends_tile;

  // None if the sequence has no query token.
  TileRows rows(const PagedAttentionParams& p) const {
    const int32_t token = query_token(p, seq);
    return {token, first_head, heads, token < 0 ? 0 : heads};
  }
};

// The splits of grains [begin, end), in order.
class SplitIterator {
 public:
  SplitIterator(const DecodePlan& plan, int64_t begin, int64_t end)
      : plan_(plan), grain_(begin), end_(end) {
    while (grain_ < end_ && grain_ >= seq_first_grain_ + seq_grains()) next_seq();
  }

  bool next(Split& split) {
    if (grain_ >= end_) return false;
    while (grain_ >= seq_first_grain_ + seq_grains()) next_seq();
    const PagedAttentionParams& p = plan_.params;
    const int32_t group = p.num_heads / p.kv.num_kv_heads;
    const int64_t tile = (grain_ - seq_first_grain_) / tile_grains_;
    const int64_t grain = (grain_ - seq_first_grain_) % tile_grains_;
    const int64_t last = min_int32(tile_grains_, grain + (end_ - grain_));
    split.seq = seq_;
    split.kv_head = static_cast<int32_t>(tile / plan_.tiles_per_kv_head) * plan_.kv_heads_per_tile;
    split.kv_heads = min_int32(plan_.kv_heads_per_tile, p.kv.num_kv_heads - split.kv_head);
    const int32_t skipped =
        static_cast<int32_t>(tile % plan_.tiles_per_kv_head) * plan_.heads_per_tile;
    split.first_head = split.kv_head * group + skipped;
    split.heads = min_int32(plan_.heads_per_tile, split.kv_heads * group - skipped);
    split.seq_len = visible_.end;
    split.begin = visible_.begin + static_cast<int32_t>(grain * plan_.grain_tokens);
    split.end = min_int32(visible_.end, visible_.begin + last * plan_.grain_tokens);
    split.tile_begin = seq_first_grain_ + tile * tile_grains_;
    split.tile_end = split.tile_begin + tile_grains_;
    split.starts_tile = grain == 0;
    split.ends_tile = last == tile_grains_;
    grain_ += last - grain;
    return true;
  }

 private:
  int64_t seq_grains() {  // of all tiles of the sequence
    if (tile_grains_ == 0) {
      visible_ = decode_visible_tokens(plan_.params, seq_);
      const int64_t count = visible_.end - visible_.begin;
      tile_grains_ = count == 0 ? 1 : (count + plan_.grain_tokens - 1) / plan_.grain_tokens;
    }
    return tile_grains_ * plan_.tiles_per_seq();
  }
  void next_seq() {
    seq_first_grain_ += seq_grains();
    ++seq_;
    tile_grains_ = 0;
  }

  const DecodePlan& plan_;
  int64_t grain_, end_;
  int64_t seq_first_grain_ = 0;  // the first grain of sequence seq_
  int32_t seq_ = 0;
  VisibleTokens visible_;
  int32_t tile_grains_ = 0;  // grains of one tile of this sequence; 0: not yet computed
};

// Pages of one split whose scores are computed together. In layouts NHD and HND each token counts
// as a page here.
struct PageBlock {
  Split split{};
  int32_t pages;
  int32_t tokens;  // of these pages; only the last page may be partly valid
  bool starts_split, ends_split;
  int32_t position[kMaxBlockPages];      // of a page's first token in the sequence
  const char* key[kMaxBlockPages + 16];  // padded with the last page
  const char* value[kMaxBlockPages + 16];
};

// Whether the block-sparse pattern makes the token visible to any head of the split.
inline bool visible_to_any_head(const PagedAttentionParams& p, const Split& split, int32_t token) {
  const int32_t num_patterns = p.sparse.head_sliding_step > 0 ? split.heads : 1;
  for (int32_t i = 0; i < num_patterns; ++i) {
    const int32_t offset =
        p.sparse.head_offset(split.first_head + i, split.kv_head, p.num_heads, p.kv.num_kv_heads);
    if (p.sparse.is_visible(token, split.seq_len, offset)) return true;
  }
  return false;
}

// The page blocks of grains [begin, end), in order. Every split has at least one block, which may
// be empty.
class PageBlockIterator {
 public:
  PageBlockIterator(const DecodePlan& plan, int64_t begin, int64_t end, int32_t block_tokens)
      : p_(plan.params), splits_(plan, begin, end), block_tokens_(block_tokens) {
    more_ = splits_.next(split_);
    token_ = split_.begin;
  }

  bool next(PageBlock& block) {
    if (!more_) return false;
    const PagedKv& kv = p_.kv;
    block.split = split_;
    block.starts_split = token_ == split_.begin;
    const int32_t* table = p_.block_tables + split_.seq * p_.block_table_stride;
    if (block.starts_split || token_ >= warmed_) warm_tlb(table);
    const int32_t max_pages =
        kv.layout == KvLayout::kVllm ? block_tokens_ / kv.block_size : block_tokens_;
    const int32_t end_token = split_.end;
    int32_t pages = 0, tokens = 0;
    while (token_ < end_token && pages < max_pages) {
      if (kv.layout != KvLayout::kVllm) {
        const int32_t end = min_int32(end_token, int64_t{token_} + max_pages - pages);
        pages = append_tokens(table, end, pages, block);
        tokens = pages;
        continue;
      }
      const int32_t count = min_int32(kv.block_size, end_token - token_);
      if (!p_.sparse.on() || visible_to_any_head(p_, split_, token_)) {
        const KvAddress page = address(table, token_, 0);
        block.position[pages] = token_;
        block.key[pages] = page.key;
        block.value[pages] = page.value;
        ++pages;
        tokens += count;
      }
      token_ += count;
    }
    // A vector over several pages may read past the last page. p is 0 for those tokens.
    for (int i = 0; i < 16 && pages > 0; ++i) {
      block.key[pages + i] = block.key[pages - 1];
      block.value[pages + i] = block.value[pages - 1];
    }
    block.pages = pages;
    block.tokens = tokens;
    block.ends_split = token_ >= end_token;
    if (block.ends_split) {
      more_ = splits_.next(split_);
      token_ = split_.begin;
    }
    return true;
  }

 private:
  struct KvAddress {
    const char *key, *value;
  };
  // Of a slot of the page that has `token`.
  KvAddress address(const int32_t* table, int32_t token, int32_t slot) const {
    const PagedKv& kv = p_.kv;
    const int64_t page = table[token / kv.block_size], element = size_of(kv.dtype);
    return {
        static_cast<const char*>(kv.key) + element * kv.key_offset(page, split_.kv_head, slot, 0),
        static_cast<const char*>(kv.value) +
            element * kv.value_offset(page, split_.kv_head, slot, 0)};
  }

  // Prefetches one line of each virtual page that the split reads next. All of them miss the TLB.
  // Issued in a burst, the page walks overlap. Later prefetches would pay for them one by one.
  void warm_tlb(const int32_t* table) {
    const PagedKv& kv = p_.kv;
    warmed_ = min_int32(split_.end, int64_t{token_} + kTlbTokens);
    if (kv.layout != KvLayout::kVllm) return;
    const int64_t bytes = size_of(kv.dtype) * kv.head_size * kv.block_size;
    for (int32_t token = token_; token < warmed_; token += kv.block_size) {
      const KvAddress page = address(table, token, 0);
      for (int64_t at = 0; at < bytes; at += kVirtualPageBytes) {
        __builtin_prefetch(page.key + at, 0, 2);
        __builtin_prefetch(page.value + at, 0, 2);
      }
    }
  }

  // Appends the tokens of token_'s page up to `end`. Returns the new number of pages.
  int32_t append_tokens(const int32_t* table, int32_t end, int32_t pages, PageBlock& block) {
    const PagedKv& kv = p_.kv;
    const int64_t element = size_of(kv.dtype);
    const int32_t slot = token_ % kv.block_size;
    end = min_int32(end, int64_t{token_} - slot + kv.block_size);
    KvAddress at = address(table, token_, slot);
    for (; token_ < end; ++token_, ++pages) {
      block.position[pages] = token_;
      block.key[pages] = at.key;
      block.value[pages] = at.value;
      at.key += element * kv.key_token_stride;
      at.value += element * kv.value_token_stride;
    }
    return pages;
  }

  const PagedAttentionParams& p_;
  SplitIterator splits_;
  int32_t block_tokens_;
  int32_t warmed_ = 0;  // end of the split's tokens whose TLB entries were loaded
  Split split_{};
  int32_t token_ = 0;
  bool more_ = false;
};

}  // namespace
}  // namespace vllm_kernels::cpu
