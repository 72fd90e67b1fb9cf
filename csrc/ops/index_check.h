// Which values an index argument may hold, and where its first bad one was found.
// On the CPU every call scans its index tensors and throws. On CUDA the kernels skip bad values;
// with VLLM_KERNELS_CHECK=1 a small kernel scans as well and the next op, or vllm_kernels.check(),
// throws.
#pragma once
#include <cstdint>

#include "ops/rows.h"

namespace vllm_kernels {

// Good: low <= value < high, and -1 where `skip` says that it means "leave this one out".
struct IndexBounds {
  const char* noun;  // "a slot", for the message
  int64_t low = 0;
  int64_t high = 0;
  bool skip = false;
  bool unique = false;  // one-dimensional: no value >= 0 may come up twice; looked at on CUDA only
  int64_t most_rise =
      -1;  // one-dimensional, where >= 0: of a value over the one before, at least 0

  VLLM_KERNELS_HOST_DEVICE IndexBounds after(int64_t previous) const {
    IndexBounds bounds = *this;
    if (most_rise < 0) return bounds;
    if (previous > low) bounds.low = previous;
    if (previous + most_rise + 1 < high) bounds.high = previous + most_rise + 1;
    return bounds;
  }
};

// The columns of a row that an op reads.
struct ColumnRange {
  int64_t begin = 0;
  int64_t end = 0;
};

// Pointers to names are host pointers to string literals; a kernel only carries them around.
struct IndexCheckParams {
  const char* op;
  const char* argument;
  IndexBounds bounds;
  const void* values;  // [rows, columns], int32 or int64; one dimension is columns = 1
  bool is_int64;
  bool one_dimensional;
  int64_t rows;
  int64_t columns;
  int64_t row_stride;  // elements

  // Only the columns of tokens that a query token of the row sees are looked at.
  const int32_t* row_lengths = nullptr;  // [rows] tokens, or null: all columns
  int32_t tokens_per_column = 1;
  const int32_t* query_start_loc = nullptr;  // [rows + 1], or null: one query token a row
  int32_t sliding_window = 0;                // tokens a query token sees; 0: all

  // Or those of a row's tokens row_starts[row] and on, of which there are
  // cumulative_lengths[row + 1] - cumulative_lengths[row].
  const int32_t* cumulative_lengths = nullptr;  // [rows + 1], or null
  const int32_t* row_starts = nullptr;          // [rows], or null: 0

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
    const int64_t unseen = sliding_window > 0 ? length - queries + 1 - sliding_window : 0;
    if (unseen > 0) used.begin = unseen / tokens_per_column;
    return used;
  }
};

struct BadIndex {
  const char* op;
  const char* argument;
  IndexBounds bounds;
  bool one_dimensional;
  bool repeated;  // within bounds, but the value of an earlier element
  int64_t row;
  int64_t column;
  int64_t value;
};

}  // namespace vllm_kernels
