// Step 1: three kernels, with S, P and O in memory.
//
//   scores_kernel   a warp per score          S[t] = scale * q . k_t
//   softmax_kernel  a block per row of S      P[t] = exp(S[t] - max) / sum
//   output_kernel   a block per row of P      O = sum of P[t] * v_t
#include "common.cuh"

namespace {

constexpr int kWarps = 8;  // of a block

// One score per warp. A lane has 4 of the 128 elements; the warp adds up its 32 partial products.
__global__ void scores_kernel(Attention<bf16> a, float* s) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int token = blockIdx.x * kWarps + warp, head = blockIdx.y, seq = blockIdx.z;
  if (token >= a.seq_lens[seq]) return;  // all lanes of a warp, so no shuffle misses one
  const float4 query = load4(a.query + query_row(a, seq, head) + lane * 4);
  const float4 key = load4(a.key + contiguous_row(a, seq, head / kGroup, token) + lane * 4);
  const float score = warp_sum(dot4(query, key));
  if (lane == 0) s[(int64_t{seq} * a.num_heads + head) * a.max_len + token] = score * a.scale;
}

// Combines one value per thread to one value that every thread gets: within each warp by shuffles,
// then between the warps through shared memory.
__device__ float block_reduce(float x, bool is_max) {
  __shared__ float of_warp[kWarps];
  x = is_max ? warp_max(x) : warp_sum(x);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
  __syncthreads();  // all warps have written
  x = of_warp[0];
  for (int warp = 1; warp < kWarps; ++warp) {
    x = is_max ? fmaxf(x, of_warp[warp]) : x + of_warp[warp];
  }
  __syncthreads();  // all threads have read, so of_warp may be used again
  return x;
}

__global__ void softmax_kernel(Attention<bf16> a, const float* s, float* p) {
  const int head = blockIdx.x, seq = blockIdx.y, len = a.seq_lens[seq];
  const int64_t row = (int64_t{seq} * a.num_heads + head) * a.max_len;
  float max = -INFINITY, sum = 0;
  for (int t = threadIdx.x; t < len; t += kWarps * 32) max = fmaxf(max, s[row + t]);
  max = block_reduce(max, true);
  for (int t = threadIdx.x; t < len; t += kWarps * 32) sum += __expf(s[row + t] - max);
  sum = block_reduce(sum, false);
  for (int t = threadIdx.x; t < len; t += kWarps * 32) p[row + t] = __expf(s[row + t] - max) / sum;
}

// A thread per dimension: the 128 threads read neighbouring elements of the row of V.
__global__ void output_kernel(Attention<bf16> a, const float* p) {
  const int d = threadIdx.x, head = blockIdx.x, seq = blockIdx.y, len = a.seq_lens[seq];
  const int64_t row = (int64_t{seq} * a.num_heads + head) * a.max_len;
  const bf16* value = a.value + contiguous_row(a, seq, head / kGroup, 0) + d;
  float out = 0;
  for (int t = 0; t < len; ++t) {
    out += p[row + t] * __bfloat162float(value[int64_t{t} * kHeadSize]);
  }
  a.out[query_row(a, seq, head) + d] = __float2bfloat16(out);
}

}  // namespace

extern "C" int step1_naive(const Attention<bf16>* attention, cudaStream_t stream) {
  const Attention<bf16>& a = *attention;
  if (!is_supported(a)) return cudaErrorInvalidValue;
  float* s = a.scratch;                                          // [num_seqs][num_heads][max_len]
  float* p = s + int64_t{a.num_seqs} * a.num_heads * a.max_len;  // the same shape
  const dim3 tiles((a.max_len + kWarps - 1) / kWarps, a.num_heads, a.num_seqs);
  const dim3 rows(a.num_heads, a.num_seqs);
  scores_kernel<<<tiles, kWarps * 32, 0, stream>>>(a, s);
  softmax_kernel<<<rows, kWarps * 32, 0, stream>>>(a, s, p);
  output_kernel<<<rows, kHeadSize, 0, stream>>>(a, p);
  return cudaGetLastError();
}
