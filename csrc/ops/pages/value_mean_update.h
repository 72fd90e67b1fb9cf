// value_mean_update: the mean of V of each row, over the values of earlier calls and this one.
//   mean[row] = (counts[row] mean[row] + sum over tokens t with rows[t] = row of value[t]) / n
//   counts[row] = n, which is counts[row] + the number of these tokens
// A row without tokens in the call stays as it is. A count of 0 begins anew: its mean is not read.
#pragma once
#include "ops/dtype.h"
#include "ops/rows.h"

namespace vllm_kernels {

struct ValueMeanUpdateParams {
  float* mean;           // [num_rows, num_kv_heads, head_size], contiguous
  int32_t* counts;       // [num_rows]
  const void* value;     // [num_tokens, num_kv_heads, head_size]
  int64_t token_stride;  // elements
  int64_t head_stride;   // elements
  const int64_t* rows;   // [num_tokens], -1: skipped
  int32_t num_rows;
  int32_t num_tokens;
  int32_t num_kv_heads, head_size;
  DType dtype;  // of value
};

}  // namespace vllm_kernels
