// The values that an index argument or a scale may hold, and the first bad value found. On the CPU
// every call scans them and throws. On CUDA the kernels skip bad values. With
// VLLM_KERNELS_CHECK=1 a small kernel scans them, too; the next op, or vllm_kernels.check(),
// throws.
#pragma once
#include <bit>
#include <cstdint>

#include "ops/paged_kv.h"

namespace vllm_kernels {

// Valid: low <= value < high. With `skip`, -1 is valid, too: it leaves the element out.
struct IndexBounds {
  const char* noun;  // "a slot", for the error message
  int64_t low = 0;
  int64_t high = 0;
  bool skip = false;
  // One-dimensional tensors: no value >= 0 may occur twice. Checked on CUDA only.
  bool unique = false;
  // One-dimensional tensors, if >= 0: a value must not be less than the one before it, nor exceed
  // it by more than this.
  int64_t max_increase = -1;
  // Lengths, if not null, [n + 1]: one that is not 0 must not be less than its row's query tokens.
  const int32_t* query_start_loc = nullptr;
  // float32: the bounds are those of the bits. Bits of finite numbers > 0 are in [1,
  // kInfinityBits).
  bool is_scale = false;
  static constexpr int64_t kInfinityBits = 0x7f800000;

  VLLM_KERNELS_HOST_DEVICE IndexBounds after(int64_t previous) const {
    IndexBounds bounds = *this;
    if (max_increase < 0) return bounds;
    if (previous > low) bounds.low = previous;
    if (previous + max_increase + 1 < high) bounds.high = previous + max_increase + 1;
    return bounds;
  }
  VLLM_KERNELS_HOST_DEVICE IndexBounds for_length(int64_t row, int64_t length) const {
    IndexBounds bounds = *this;
    if (query_start_loc == nullptr || length <= 0 || length >= high) return bounds;
    const int64_t queries = int64_t{query_start_loc[row + 1]} - query_start_loc[row];
    if (queries > low) bounds.low = queries;
    return bounds;
  }
};

// The columns of a row that the op reads.
struct ColumnRange {
  int64_t begin = 0;
  int64_t end = 0;
};

// `op`, `argument` and `noun` are host pointers to string literals. A kernel only passes them
// through.
struct IndexCheckParams {
  const char* op;
  const char* argument;
  IndexBounds bounds;
  const void* values;  // [rows, columns], int32, int64 or scales; one-dimensional: columns = 1
  bool is_int64;
  bool one_dimensional;
  int64_t rows;
  int64_t columns;
  int64_t row_stride;        // elements; one-dimensional and 0: the rows are parts of one list
  int64_t first_column = 0;  // of the tensor, for the message

  // With row_lengths, a column is checked only if some query token of the row may read it.
  const int32_t* row_lengths = nullptr;  // [rows] tokens, or null: all columns
  int32_t tokens_per_column = 1;
  const int32_t* query_start_loc = nullptr;  // [rows + 1], or null: one query token a row
  int32_t sliding_window = 0;                // visible tokens of a query token; 0: all

  // With cumulative_lengths, only columns of the tokens that a gather reads are checked. They start
  // at row_starts[row]; their number is cumulative_lengths[row + 1] - cumulative_lengths[row].
  const int32_t* cumulative_lengths = nullptr;  // [rows + 1], or null
  const int32_t* row_starts = nullptr;          // [rows], or null: 0

  // With shard_lens, [rows], the values are lengths of sequences, of which the stripe's shard must
  // have at least so many tokens. With row_lengths, these count the tokens of the stripe's shard.
  const int32_t* shard_lens = nullptr;
  Stripe stripe = {};

  // Of the tensor, for the message.
  VLLM_KERNELS_HOST_DEVICE int64_t row_of_tensor(int64_t row) const {
    return one_dimensional && row_stride == 0 ? 0 : row;
  }

  // The bounds of an element. `previous` is the one before it; unused in row 0.
  VLLM_KERNELS_HOST_DEVICE IndexBounds bounds_of(int64_t row, int64_t value,
                                                 int64_t previous) const {
    IndexBounds of_row = (row > 0 ? bounds.after(previous) : bounds).for_length(row, value);
    if (shard_lens == nullptr) return of_row;
    const int64_t stored = shard_lens[row];
    if (stored > 0) of_row.low = stripe.position_of(stored - 1) + 1;
    return of_row;
  }

  VLLM_KERNELS_HOST_DEVICE ColumnRange used_columns(int64_t row) const {
    if (cumulative_lengths != nullptr) {
      const int64_t start = row_starts == nullptr ? 0 : row_starts[row];
      const int64_t length = int64_t{cumulative_lengths[row + 1]} - cumulative_lengths[row];
      if (start < 0 || length <= 0) return {};
      const int64_t end = (start + length + tokens_per_column - 1) / tokens_per_column;
      return {.begin = start / tokens_per_column, .end = end < columns ? end : columns};
    }
    if (row_lengths == nullptr) return {.begin = 0, .end = columns};
    const int64_t length = row_lengths[row];
    int64_t queries = 1;
    if (query_start_loc != nullptr) queries = query_start_loc[row + 1] - query_start_loc[row];
    if (queries <= 0) return {};
    ColumnRange used{.begin = 0, .end = (length + tokens_per_column - 1) / tokens_per_column};
    if (used.end > columns) used.end = columns;
    if (sliding_window <= 0) return used;
    const int64_t whole = stripe.any() ? stripe.total_lens[row] : length;
    int64_t unseen = whole - queries + 1 - sliding_window;
    if (stripe.any()) unseen = stripe.count_before(static_cast<int32_t>(unseen));
    if (unseen > 0) used.begin = unseen / tokens_per_column;
    return used;
  }
};

struct BadIndex {
  const char* op;
  const char* argument;
  IndexBounds bounds;
  bool one_dimensional;
  bool repeated;  // valid, but equal to an earlier element
  int64_t row;
  int64_t column;
  int64_t value;

  float scale() const { return std::bit_cast<float>(static_cast<int32_t>(value)); }
};

}  // namespace vllm_kernels
