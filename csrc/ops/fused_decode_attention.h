// fused_decode_attention: a decode step from the QKV GEMM's output to the output of attention, one
// token a sequence:
//   q, k, v = heads of qkv with bias, RMS norm and rotation              (rope_and_cache.h)
//   k, v    are written to the token's slot of the paged cache           (rope_and_cache.h)
//   out     = attention of q over the sequence, this token included      (paged_attention.h)
#pragma once
#include "ops/paged_attention.h"
#include "ops/rope_and_cache.h"

namespace vllm_kernels {

// `rope` and `attention` have the same tokens and the same `kv`. Token i belongs to sequence i. The
// heads of `rope` are slices of qkv [num_seqs, (num_heads + 2 * num_kv_heads) * head_size].
// attention.query is rope.query.data, which is rotated in place.
struct FusedDecodeAttentionParams {
  RopeAndCacheParams rope;
  PagedAttentionParams attention;  // one query token a sequence, no lse
};

}  // namespace vllm_kernels
