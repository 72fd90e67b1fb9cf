// Which values an index argument may hold, and where its first bad one was found.
// On the CPU every call scans its index tensors and throws. On CUDA the kernels skip bad values;
// with VLLM_KERNELS_CHECK=1 a small kernel scans as well and the next op, or vllm_kernels.check(),
// throws.
#pragma once
#include <cstdint>

namespace vllm_kernels {

// Good: low <= value < high, and -1 where `skip` says that it means "leave this one out".
struct IndexBounds {
  const char* noun;  // "a slot", for the message
  int64_t low = 0;
  int64_t high = 0;
  bool skip = false;
  bool unique = false;  // one-dimensional: no value >= 0 may come up twice; looked at on CUDA only
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
  int64_t row_stride;          // elements
  const int32_t* row_lengths;  // [rows] tokens, or null: only the first
  int32_t tokens_per_column;   //   ceil(length / tokens_per_column) columns of a row are looked at
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
