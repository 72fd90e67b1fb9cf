// fused_decode_attention: a decoder layer's step from its QKV product to the result of attention,
// one token a sequence:
//   q, k, v  = the token's heads of qkv with bias, RMS norm and rotation       (rope_and_cache.h)
//   k, v     go to the token's slot of the paged cache                         (rope_and_cache.h)
//   out      = attention of q to the pages of its sequence, the token included (paged_attention.h)
#pragma once
#include "ops/paged_attention.h"
#include "ops/rope_and_cache.h"

namespace vllm_kernels {

// Both parts have the same tokens, sequence i's is token i, and the same `kv`. The heads of `rope`
// are slices of qkv [num_seqs, (num_heads + 2 * num_kv_heads) * head_size]; attention's query is
// where rope.query is turned.
struct FusedDecodeAttentionParams {
  RopeAndCacheParams rope;
  PagedAttentionParams attention;  // one query token a sequence, no lse
};

}  // namespace vllm_kernels
