// Step 6: tensor cores. A warp takes pages 0, 4, 8, ... of its block's split, another 1, 5, 9, ...
// No warp waits for another until the end. warp_attention.cuh has the work on a page.
#include "warp_attention.cuh"

namespace {

// All lanes of a warp copy a page, 16 bytes each time. Absent tokens become zeros.
__device__ void load_page(Page& page, const Attention<bf16>& a, int64_t row, int present) {
  constexpr int kVecs = kHeadSize / kVec;  // of a row
  for (int i = threadIdx.x % 32; i < kPageSize * kVecs; i += 32) {
    const int t = i / kVecs, d = i % kVecs * kVec;
    uint4 key = {0, 0, 0, 0}, value = {0, 0, 0, 0};
    if (t < present) {
      const int64_t at = row + t * kHeadSize + d;
      key = *reinterpret_cast<const uint4*>(a.key + at);
      value = *reinterpret_cast<const uint4*>(a.value + at);
    }
    *reinterpret_cast<uint4*>(&page.key[t][d]) = key;
    *reinterpret_cast<uint4*>(&page.value[t][d]) = value;
  }
}

__global__ void __launch_bounds__(kThreads) tensor_core_kernel(Attention<bf16> a) {
  __shared__ Page of_warp[kWarps];
  __shared__ WarpResults results;
  const int kv_head = blockIdx.x, seq = blockIdx.y, split = blockIdx.z;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int len = a.seq_lens[seq], pages = (len + kPageSize - 1) / kPageSize;
  const int begin = pages * split / a.num_splits, end = pages * (split + 1) / a.num_splits;

  WarpAttention attention{lane, a.scale * kLog2E};
  attention.load_query(a, seq, kv_head);
  for (int i = begin + warp; i < end; i += kWarps) {
    const int token = i * kPageSize, present = min(kPageSize, len - token);
    load_page(of_warp[warp], a, paged_row(a, seq, kv_head, token, kPageSize), present);
    __syncwarp();  // the page is complete
    attention.attend(of_warp[warp], present);
    __syncwarp();  // no lane reads it any more
  }
  attention.store(a, seq, kv_head, split, results);
}

}  // namespace

extern "C" int step6_tensor_cores(const Attention<bf16>* attention, cudaStream_t stream) {
  const Attention<bf16>& a = *attention;
  if (!is_supported(a)) return cudaErrorInvalidValue;
  const dim3 blocks(a.num_kv_heads, a.num_seqs, a.num_splits);
  tensor_core_kernel<<<blocks, kThreads, 0, stream>>>(a);
  return merge(a, stream);
}
