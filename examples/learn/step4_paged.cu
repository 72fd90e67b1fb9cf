// Step 4: K and V lie in pages of 16 tokens, anywhere in memory. A block table has the number of
// each page. The only change from step 3 is paged_row() in place of contiguous_row().
#include "tile_attention.cuh"

namespace {

__global__ void __launch_bounds__(kThreads) paged_kernel(Attention<bf16> a) {
  __shared__ Tile tile;
  const int kv_head = blockIdx.x, seq = blockIdx.y;
  TileAttention attention{tile};
  attention.load_query(a, seq, kv_head);
  attention.attend(a, 0, a.seq_lens[seq],
                   [&](int t) { return paged_row(a, seq, kv_head, t, kPageSize); });
  float lse[kGroup];
  attention.finish(lse);  // only step 5 uses lse
  for (int head = 0; head < kGroup; ++head) {
    const int64_t row = query_row(a, seq, kv_head * kGroup + head);
    a.out[row + threadIdx.x] = __float2bfloat16(attention.out[head]);
  }
}

}  // namespace

extern "C" int step4_paged(const Attention<bf16>* attention, cudaStream_t stream) {
  const Attention<bf16>& a = *attention;
  if (!is_supported(a)) return cudaErrorInvalidValue;
  paged_kernel<<<dim3(a.num_kv_heads, a.num_seqs), kThreads, 0, stream>>>(a);
  return cudaGetLastError();
}
