// merge_attn_states: combines two attention results over disjoint sets of keys.
//   lse = log(exp(p) + exp(s))      output = (exp(p) prefix + exp(s) suffix) / (exp(p) + exp(s))
// p and s are the lse of prefix and suffix, natural logarithms. An lse of +inf counts as -inf: a
// state without keys, whose output is ignored. Where both are empty, output is 0 and lse is -inf.
//
// combine_attn_partials: combines any number of attention results over disjoint sets of keys.
//   lse = log(sum_i exp(l_i))      output = sum_i exp(l_i) out_partial[i] / sum_i exp(l_i)
// l_i = lse_partial[i], a natural logarithm. An l_i of +inf counts as -inf: a partial without keys,
// whose output is ignored. Where all partials are empty, output is 0 and lse is -inf.
#pragma once
#include "ops/dtype.h"
#include "ops/rows.h"

namespace vllm_kernels {

struct StateRows {  // [tokens, heads, head_size]
  const void* data;
  int64_t token_stride;  // elements
  int64_t head_stride;   // elements
};

struct MergeAttnStatesParams {
  void* output;  // [tokens, heads, head_size]; may be prefix or suffix
  int64_t output_token_stride;
  int64_t output_head_stride;
  float* output_lse;  // [heads, tokens], contiguous, or null; may be prefix_lse or suffix_lse
  StateRows prefix;
  StateRows suffix;
  const float* prefix_lse;  // [heads, tokens], contiguous
  const float* suffix_lse;  // [heads, tokens], contiguous
  int64_t num_tokens;
  int32_t num_heads;
  int32_t head_size;
  DType dtype;  // of output, prefix and suffix
};

struct CombineAttnPartialsParams {
  void* output;  // [tokens, heads, head_size]
  int64_t output_token_stride;
  int64_t output_head_stride;
  float* output_lse;         // [tokens, heads], contiguous, or null
  const void* out_partial;   // [num_partials, tokens, heads, head_size]
  int64_t partial_stride;    // elements
  int64_t token_stride;      // elements
  int64_t head_stride;       // elements
  const float* lse_partial;  // [num_partials, tokens, heads], contiguous
  int64_t num_tokens;
  int32_t num_partials;
  int32_t num_heads;
  int32_t head_size;
  DType dtype;  // of output and out_partial
};

}  // namespace vllm_kernels
