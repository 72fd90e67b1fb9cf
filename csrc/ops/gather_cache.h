// Gathers tokens of paged sequences into rows, sequence after sequence:
//   cp_gather_cache                  one cache of entries, copied
//   gather_and_maybe_dequant_cache   the same, or multiplied by a scale
//   gather_paged_kv                  K and V of a cache of any layout
//
// Row r of the destination belongs to sequence s if cu_seq_lens[s] <= r < cu_seq_lens[s + 1]. It
// gets token seq_starts[s] + r - cu_seq_lens[s] of that sequence. A row of no sequence is not
// written. A row is filled with zeros if its token is past the block table or its page is invalid.
#pragma once
#include "ops/paged_kv.h"

namespace vllm_kernels {

struct TokenLocation {
  int32_t block;  // page, or one of:
  int32_t token;  // in the page

  static constexpr int32_t kZeros = -1;      // the row is filled with zeros
  static constexpr int32_t kUnwritten = -2;  // the row belongs to no sequence
};

struct PagedTokens {
  const int32_t* block_table = nullptr;  // [>= num_seqs, blocks_per_seq]
  int64_t block_table_stride = 0;        // elements
  int32_t blocks_per_seq = 0;
  const int32_t* cu_seq_lens = nullptr;   // [num_seqs + 1]
  const int32_t* seq_starts = nullptr;    // [num_seqs], or null: 0
  const int32_t* token_to_seq = nullptr;  // [num_rows], or null: found in cu_seq_lens
  int32_t num_seqs = 0;
  int32_t num_rows = 0;  // of the destination
  int64_t num_blocks = 0;
  int32_t block_size = 0;

  // Locates row `row` of sequence `seq` < 2^31. Any value of `seq` is safe.
  VLLM_KERNELS_HOST_DEVICE TokenLocation locate(int32_t row, int32_t seq) const {
    constexpr TokenLocation zeros{TokenLocation::kZeros, 0},
        unwritten{TokenLocation::kUnwritten, 0};
    if (seq < 0 || seq >= num_seqs) return token_to_seq == nullptr ? unwritten : zeros;
    const int32_t first = cu_seq_lens[seq];
    if (row < first || row >= cu_seq_lens[seq + 1]) return unwritten;
    int64_t position = int64_t{row} - first;
    if (seq_starts != nullptr) position += seq_starts[seq];
    if (position < 0 || position >= int64_t{blocks_per_seq} * block_size) return zeros;
    const auto column = static_cast<int32_t>(position / block_size);
    const int32_t block = block_table[seq * block_table_stride + column];
    if (block < 0 || block >= num_blocks) return zeros;
    return {block, static_cast<int32_t>(position - int64_t{column} * block_size)};
  }
};

struct GatherCacheParams {
  const char* op = nullptr;
  PagedTokens tokens{};
  // The source. cp_gather_cache and gather_and_maybe_dequant_cache pass entries as the K of one
  // head in layout NHD. Without scales the elements are bytes.
  PagedKv kv{};
  void* key = nullptr;             // [num_rows, num_kv_heads, kv.head_values()]
  void* value = nullptr;           // the same, or null
  int64_t key_row_stride = 0;      // elements
  int64_t key_head_stride = 0;     // elements
  int64_t value_row_stride = 0;    // elements
  int64_t value_head_stride = 0;   // elements
  DType dtype = DType::kFloat32;   // of key and value: kv.dtype, or float32, float16, bfloat16
  int64_t scale_block_stride = 0;  // of kv.k_scale and kv.v_scale; replaces kv.scale_stride
  int64_t scale_head_stride = 0;
  int64_t scale_token_stride = 0;
  // gather_paged_kv of an int4 cache: [num_blocks, num_kv_heads, block_size], as the scales.
  // A value is scale * (n - 8) + zero, each operation rounded by itself, then rounded to `dtype`.
  const float* k_zero = nullptr;
  const float* v_zero = nullptr;

  VLLM_KERNELS_HOST_DEVICE int64_t scale_offset(TokenLocation at, int64_t head) const {
    return at.block * scale_block_stride + head * scale_head_stride + at.token * scale_token_stride;
  }
  VLLM_KERNELS_HOST_DEVICE float scale(const float* scales, TokenLocation at, int64_t head) const {
    return scales == nullptr ? 1.0f : scales[scale_offset(at, head)];
  }
};

}  // namespace vllm_kernels
