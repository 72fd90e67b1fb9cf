// Step 7: bulk copies in a ring. Each warp has a ring of stages in shared memory. While it works on
// a page, the copies of its next pages are under way. Needs sm_90.
#include "warp_attention.cuh"

namespace {

constexpr int kStages = 3;  // pages of a warp in flight
constexpr uint32_t kRowBytes = kHeadSize * sizeof(bf16);

struct Rings {
  Page stage[kWarps][kStages];
  uint64_t landed[kWarps][kStages];  // an mbarrier per stage
};

// Starts the copies of a page. A row of it is a bulk copy of 256 bytes into a padded row: lanes 0
// to 15 copy keys, lanes 16 to 31 values. Values of absent tokens become zeros.
__device__ void start_page(Page& page, uint64_t* landed, const Attention<bf16>& a, int64_t row,
                           int present) {
  const int lane = threadIdx.x % 32, t = lane % kPageSize;
  const bool is_value = lane >= kPageSize;
  bf16* to = is_value ? page.value[t] : page.key[t];
  if (lane == 0) barrier_expect(landed, 2 * present * kRowBytes);
  if (is_value && t >= present) {
    for (int d = 0; d < kHeadSize; d += kVec) {
      *reinterpret_cast<uint4*>(to + d) = uint4{0, 0, 0, 0};
    }
  }
  __syncwarp();  // bytes are expected before they land, and all lanes see the zeros
  if (t < present) {
    bulk_copy(to, (is_value ? a.value : a.key) + row + t * kHeadSize, kRowBytes, landed);
  }
}

__global__ void __launch_bounds__(kThreads) bulk_copy_kernel(Attention<bf16> a) {
  extern __shared__ __align__(128) char dynamic_shared[];
  Rings& rings = *reinterpret_cast<Rings*>(dynamic_shared);
  __shared__ WarpResults results;
  const int kv_head = blockIdx.x, seq = blockIdx.y, split = blockIdx.z;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int len = a.seq_lens[seq], pages = (len + kPageSize - 1) / kPageSize;
  const int begin = pages * split / a.num_splits + warp;
  const int end = pages * (split + 1) / a.num_splits;

  if (lane == 0) {
    for (int i = 0; i < kStages; ++i) barrier_init(&rings.landed[warp][i], 1);
    fence_barrier_init();
  }
  __syncwarp();
  const auto present_of = [&](int page) { return min(kPageSize, len - page * kPageSize); };
  const auto start = [&](int page, int stage) {
    if (page >= end) return;
    const int64_t row = paged_row(a, seq, kv_head, page * kPageSize, kPageSize);
    start_page(rings.stage[warp][stage], &rings.landed[warp][stage], a, row, present_of(page));
  };
  for (int i = 0; i < kStages; ++i) start(begin + i * kWarps, i);  // fill the ring

  WarpAttention attention{lane, a.scale * kLog2E};
  attention.load_query(a, seq, kv_head);
  int stage = 0, parity = 0;
  for (int page = begin; page < end; page += kWarps) {
    barrier_wait(&rings.landed[warp][stage], parity);
    attention.attend(rings.stage[warp][stage], present_of(page));
    __syncwarp();  // no lane reads the stage any more: the next page may overwrite it
    start(page + kStages * kWarps, stage);
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;  // the second round of the ring waits for the barriers' second phase
    }
  }
  attention.store(a, seq, kv_head, split, results);
}

}  // namespace

extern "C" int step7_bulk_copies(const Attention<bf16>* attention, cudaStream_t stream) {
  const Attention<bf16>& a = *attention;
  if (!is_supported(a)) return cudaErrorInvalidValue;
  constexpr int kBytes = sizeof(Rings);  // more than the 48 KiB that need no permission
  cudaFuncSetAttribute(bulk_copy_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  const dim3 blocks(a.num_kv_heads, a.num_seqs, a.num_splits);
  bulk_copy_kernel<<<blocks, kThreads, kBytes, stream>>>(a);
  return merge(a, stream);
}
