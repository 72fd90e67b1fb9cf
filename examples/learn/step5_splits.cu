// Step 5: a sequence is split over several blocks, so that a batch of one fills the GPU. A second
// kernel merges their results (merge.cuh).
#include "merge.cuh"
#include "tile_attention.cuh"

namespace {

__global__ void __launch_bounds__(kThreads) splits_kernel(Attention<bf16> a) {
  __shared__ Tile tile;
  const int kv_head = blockIdx.x, seq = blockIdx.y, split = blockIdx.z;
  // Splits get whole tiles, as equal as possible. A split of a short sequence may have none.
  const int len = a.seq_lens[seq], tiles = (len + kTile - 1) / kTile;
  const int begin = tiles * split / a.num_splits * kTile;
  const int end = min(len, tiles * (split + 1) / a.num_splits * kTile);
  TileAttention attention{tile};
  attention.load_query(a, seq, kv_head);
  attention.attend(a, begin, end, [&](int t) { return paged_row(a, seq, kv_head, t, kPageSize); });
  float lse[kGroup];
  attention.finish(lse);
  for (int i = 0; i < kGroup; ++i) {
    const int head = kv_head * kGroup + i;
    store_split(a, seq, head, split, threadIdx.x, attention.out[i], lse[i]);
  }
}

}  // namespace

extern "C" int step5_splits(const Attention<bf16>* attention, cudaStream_t stream) {
  const Attention<bf16>& a = *attention;
  if (!is_supported(a)) return cudaErrorInvalidValue;
  const dim3 blocks(a.num_kv_heads, a.num_seqs, a.num_splits);
  splits_kernel<<<blocks, kThreads, 0, stream>>>(a);
  return merge(a, stream);
}
