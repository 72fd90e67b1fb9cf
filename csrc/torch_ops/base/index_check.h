// Checks of index tensors (slots, positions, lengths, block tables) and of scales: one call per
// argument.
#pragma once
#include <optional>

#include "ops/index_check.h"
#include "torch_ops/base/check.h"

namespace vllm_kernels {

// Limits a check to the columns of some tokens of each row. Block tables hold garbage in the
// others.
//   row_lengths         tokens visible to any query token of the row, also in a sliding window
//   cumulative_lengths  tokens that a gather reads
// Without both, all columns are checked.
struct UsedColumns {
  std::optional<int64_t> rows = std::nullopt;   // the table may have more; none: all
  int32_t tokens_per_column = 1;                // block_size
  const int32_t* row_lengths = nullptr;         // [rows] tokens
  const int32_t* query_start_loc = nullptr;     // [rows + 1], or null: one query token a row
  int32_t sliding_window = 0;                   // 0: none
  const int32_t* cumulative_lengths = nullptr;  // [rows + 1] tokens
  const int32_t* row_starts = nullptr;          // [rows], or null; with cumulative_lengths
  Stripe stripe = {};                           // with row_lengths: tokens of a shard
};

// Checks `values`: [n] or [rows, columns], int32 or int64, stride 1 in the last dimension. Meta
// tensors have no values and pass.
//   CPU   scans on every call and throws before anything is written:
//         reshape_and_cache: slot_mapping[5] = 999: expected -1 (skipped) or a slot in [0, 512)
//   CUDA  does nothing: the kernel contains bad values. With VLLM_KERNELS_CHECK=1 it enqueues a
//         scan. Its finding is thrown in the same words when the next call of an op makes its
//         Expect, or by vllm_kernels.check().
void check_index(const Expect& expect, const Argument& values, const IndexBounds& bounds,
                 const UsedColumns& used = {});

// The same for lengths of sequences, int32, of which a shard has at least shard_lens tokens.
void check_total_lens(const Expect& expect, const Argument& lens, const Stripe& stripe,
                      const int32_t* shard_lens);

// The same for a contiguous float32 tensor of any shape: finite numbers > 0.
//   reshape_and_cache: k_scale[0] = nan: expected a finite number > 0
void check_scale(const Expect& expect, const Argument& scale);

// CUDA, check mode: no value >= 0 may occur twice in column `column` of [rows, columns].
void check_unique(const Expect& expect, const Argument& values, int64_t column,
                  const IndexBounds& bounds);

// A list of block ids in CSR form: the ids of sequence i are those from indptr[i] to indptr[i + 1].
// Others are not checked.
void check_page_ids(const Expect& expect, const Argument& ids, const Argument& indptr,
                    int64_t num_blocks);

}  // namespace vllm_kernels
