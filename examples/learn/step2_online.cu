// Step 2: one kernel with the online softmax. S and P are never written.
//
// A warp has one query head and takes the tokens one after the other. A lane has 4 of the 128
// dimensions of q, k, v and the output. The 4 warps of a block are the 4 query heads of one KV
// head: they read the same rows at about the same time, so three of four reads hit the L1 cache.
#include "common.cuh"

namespace {

__global__ void online_kernel(Attention<bf16> a) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int kv_head = blockIdx.x, head = kv_head * kGroup + warp, seq = blockIdx.y;
  const int len = a.seq_lens[seq];
  const int64_t first = contiguous_row(a, seq, kv_head, 0) + lane * 4;
  const float4 query = load4(a.query + query_row(a, seq, head) + lane * 4);

  float max = -INFINITY, sum = 0;  // of the tokens so far; equal in all lanes
  float4 out = {0, 0, 0, 0};       // the sum of p * v so far, not divided by `sum`
  for (int t = 0; t < len; ++t) {
    const float4 key = load4(a.key + first + int64_t{t} * kHeadSize);
    const float4 value = load4(a.value + first + int64_t{t} * kHeadSize);
    const float score = a.scale * warp_sum(dot4(query, key));
    const float new_max = fmaxf(max, score);
    const float factor = __expf(max - new_max);  // corrects what was added under the old maximum
    const float p = __expf(score - new_max);
    sum = sum * factor + p;
    out.x = out.x * factor + p * value.x;
    out.y = out.y * factor + p * value.y;
    out.z = out.z * factor + p * value.z;
    out.w = out.w * factor + p * value.w;
    max = new_max;
  }
  const float inverse = sum > 0 ? 1 / sum : 0;  // an empty sequence gives 0
  bf16* to = a.out + query_row(a, seq, head) + lane * 4;
  to[0] = __float2bfloat16(out.x * inverse);
  to[1] = __float2bfloat16(out.y * inverse);
  to[2] = __float2bfloat16(out.z * inverse);
  to[3] = __float2bfloat16(out.w * inverse);
}

}  // namespace

extern "C" int step2_online(const Attention<bf16>* attention, cudaStream_t stream) {
  const Attention<bf16>& a = *attention;
  if (!is_supported(a)) return cudaErrorInvalidValue;
  online_kernel<<<dim3(a.num_kv_heads, a.num_seqs), kGroup * 32, 0, stream>>>(a);
  return cudaGetLastError();
}
