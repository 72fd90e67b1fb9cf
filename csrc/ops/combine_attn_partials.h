// combine_attn_partials: attention results over any number of disjoint sets of keys become the one
// over all of them.
//   lse = log(sum_i exp(l_i))      output = sum_i exp(l_i) part_i / sum_i exp(l_i)
// with l_i the natural-log sum of part i. An l_i of +inf counts as -inf, a part without keys: its
// output is not looked at. Where all out_partial are empty the output is 0 and the lse -inf.
#pragma once
#include "ops/dtype.h"

namespace vllm_kernels {

struct CombineAttnPartialsParams {
  void* output;  // [tokens, heads, head_size]
  int64_t output_token_stride;
  int64_t output_head_stride;
  float* output_lse;         // [tokens, heads], contiguous, or null
  const void* out_partial;   // [out_partial, tokens, heads, head_size]
  int64_t partial_stride;    // elements
  int64_t token_stride;      // elements
  int64_t head_stride;       // elements
  const float* lse_partial;  // [out_partial, tokens, heads], contiguous
  int64_t num_tokens;
  int32_t num_partials;
  int32_t num_heads;
  int32_t head_size;
  DType dtype;  // of output and out_partial
};

}  // namespace vllm_kernels
