// Step 3: tiles in shared memory. A block has one KV head of one sequence, and its 4 query heads.
// It reads K and V once for all of them. tile_attention.cuh has the work on a tile.
#include "tile_attention.cuh"

namespace {

__global__ void __launch_bounds__(kThreads) tiles_kernel(Attention<bf16> a) {
  __shared__ Tile tile;
  const int kv_head = blockIdx.x, seq = blockIdx.y;
  TileAttention attention{tile};
  attention.load_query(a, seq, kv_head);
  attention.attend(a, 0, a.seq_lens[seq],
                   [&](int t) { return contiguous_row(a, seq, kv_head, t); });
  float lse[kGroup];
  attention.finish(lse);  // only step 5 uses lse
  for (int head = 0; head < kGroup; ++head) {
    const int64_t row = query_row(a, seq, kv_head * kGroup + head);
    a.out[row + threadIdx.x] = __float2bfloat16(attention.out[head]);
  }
}

}  // namespace

extern "C" int step3_tiles(const Attention<bf16>* attention, cudaStream_t stream) {
  const Attention<bf16>& a = *attention;
  if (!is_supported(a)) return cudaErrorInvalidValue;
  tiles_kernel<<<dim3(a.num_kv_heads, a.num_seqs), kThreads, 0, stream>>>(a);
  return cudaGetLastError();
}
