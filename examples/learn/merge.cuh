// Results of splits, and the kernel that merges them. Introduced by step 5.
//
// A split has the softmax of its tokens only: an output o, and the log-sum-exp of its scores, lse =
// log(sum of exp(S[t])). The whole output is the mean of the o with weights exp(lse).
#pragma once
#include "common.cuh"

// Place of a split's result among all. scratch: first the o [..][kHeadSize], then the lse.
__device__ inline int64_t split_index(const Attention<bf16>& a, int seq, int head, int split) {
  return (int64_t{seq} * a.num_heads + head) * a.num_splits + split;
}
__device__ inline float* split_lse(const Attention<bf16>& a) {
  return a.scratch + int64_t{a.num_seqs} * a.num_heads * a.num_splits * kHeadSize;
}

// Stores dimension d of a split's output. A single split is the result.
__device__ inline void store_split(const Attention<bf16>& a, int seq, int head, int split, int d,
                                   float out, float lse) {
  if (a.num_splits == 1) {
    a.out[query_row(a, seq, head) + d] = __float2bfloat16(out);
    return;
  }
  const int64_t index = split_index(a, seq, head, split);
  a.scratch[index * kHeadSize + d] = out;
  if (d == 0) split_lse(a)[index] = lse;
}

// A block per query head, a thread per dimension.
static __global__ void merge_kernel(Attention<bf16> a) {
  const int d = threadIdx.x, head = blockIdx.x, seq = blockIdx.y;
  const int64_t first = split_index(a, seq, head, 0);
  const float* lse = split_lse(a) + first;
  float max = -INFINITY, sum = 0, out = 0;
  for (int split = 0; split < a.num_splits; ++split) max = fmaxf(max, lse[split]);
  for (int split = 0; split < a.num_splits; ++split) {
    if (lse[split] == -INFINITY) continue;  // no tokens
    const float weight = __expf(lse[split] - max);
    sum += weight;
    out += weight * a.scratch[(first + split) * kHeadSize + d];
  }
  a.out[query_row(a, seq, head) + d] = __float2bfloat16(sum > 0 ? out / sum : 0);
}

static inline cudaError_t merge(const Attention<bf16>& a, cudaStream_t stream) {
  if (a.num_splits > 1) {
    merge_kernel<<<dim3(a.num_heads, a.num_seqs), kHeadSize, 0, stream>>>(a);
  }
  return cudaGetLastError();
}
