// merge_attn_states: combines two attention results over disjoint sets of keys.
//   lse = log(exp(p) + exp(s))      output = (exp(p) prefix + exp(s) suffix) / (exp(p) + exp(s))
// p and s are the lse of prefix and suffix, natural logarithms. An lse of +inf counts as -inf: a
// state without keys, whose output is ignored. Where both are empty, output is 0 and lse is -inf.
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

}  // namespace vllm_kernels
