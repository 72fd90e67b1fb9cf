// select_pages (ops/pages/select_pages.h), one launch: scores of all pages, then the best ones.
//
//   grid     (chunks of a row's pages, rows)
//   weights  of the row's components, in shared memory: the whole query group is one vector
//   scores   a warp takes kWarpPages pages at a time; its lanes read their bounds by 16 bytes. The
//            dot products go to scratch in global memory, as ordered bits
//   choice   the row's last CTA (choose_pages.cuh): one round over bins for up to 2048 pages, else
//            radix selection (cuda/sampling/row_select.cuh), then the kept pages in order. Counters
//            of the stream's workspace elect it; they are 0 again after it
//
// b8 x 32k, 32/8 heads of 128, bf16, pages of 16: 16384 pages of 4 KB of bounds are 67 MB, 15.5 us
// at 4.34 TB/s. A page is 2048 products, 33.6 million in all (fp32: 0.5 million warp instructions
// with conversions 2.5 million, 3 us of all SMs). 132 SMs need 26 to 35 KB in flight each, at 0.8
// to 1 us; two CTAs of 16 warps with 4 accesses a lane have up to 64 KB. Each score is 4 more
// bytes. A sequence within its budget reads no bounds. Nothing is read before the PDL wait.
#include "ops/pages/select_pages.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "cuda/attention/common/workspace.h"
#include "cuda/base/launch.cuh"
#include "cuda/base/vec.cuh"
#include "cuda/launchers.h"
#include "cuda/pages/choose_pages.cuh"

namespace vllm_kernels::cuda {
namespace {

constexpr int kWarpPages = 4;  // accesses in flight a lane
constexpr int kStepPages = kRowWarps * kWarpPages;
constexpr int kMaxChunkPages = 4 * kStepPages;
constexpr int kCtasPerSm = 2;  // loads by elements take more registers: one

// One row, and what a CTA knows of it.
struct PageRow {
  int seq, head;              // head: of KV, the first one
  int length = 0, pages = 0;  // once read
  const int32_t* ids;
  int32_t* table;
  uint32_t* scores;

  __device__ __forceinline__ PageRow(const SelectPagesParams& p, int64_t row) {
    seq = static_cast<int>(row / p.num_row_heads);
    head = static_cast<int>(row - int64_t{seq} * p.num_row_heads);
    ids = p.block_tables + seq * p.block_tables_stride;
    table = p.tables + seq * p.tables_seq_stride + head * p.tables_head_stride;
    scores = p.scores + row * p.score_words();
  }
  __device__ __forceinline__ int64_t query_start(const SelectPagesParams& p) const {
    return seq * p.query_seq_stride +
           int64_t{head} * (p.num_heads / p.num_kv_heads) * p.query_head_stride;
  }
  __device__ __forceinline__ void read_length(const SelectPagesParams& p) {
    length = static_cast<int>(p.length_of(seq));
    pages = static_cast<int>((static_cast<uint32_t>(length) + p.block_size - 1) / p.block_size);
  }
};

// weights[component], in the order of the bounds and padded with zeros to whole accesses.
template <typename T>
__device__ __forceinline__ void fill_weights(const SelectPagesParams& p, const PageRow& row,
                                             float* weights) {
  const int group = p.num_heads / p.num_kv_heads, size = p.head_size;
  const T* query = static_cast<const T*>(p.query) + row.seq * p.query_seq_stride;
  for (int i = threadIdx.x; i < p.heads_of_row() * size; i += kRowThreads) {
    const int head = i / size, d = i - head * size;
    const T* from = query + int64_t{row.head + head} * group * p.query_head_stride + d;
    float low = 0.0f, high = 0.0f;
#pragma unroll 4
    for (int j = 0; j < group; ++j) {
      const float q = to_float(from[j * p.query_head_stride]);
      low += q < 0.0f ? q : 0.0f;  // 0 for NaN
      high += q > 0.0f ? q : 0.0f;
    }
    weights[2 * head * size + d] = low;
    weights[(2 * head + 1) * size + d] = high;
  }
  const int64_t components = p.row_components();
  if (threadIdx.x < kVecWidth<T>) weights[components + threadIdx.x] = 0.0f;
}

// Dot products of the bounds of up to kWarpPages pages with the weights. A null row counts as 0.
// All lanes of the warp call it, and get the sums.
template <typename T, bool kAligned>
__device__ __forceinline__ void score(const T* const (&rows)[kWarpPages], const float* weights,
                                      int components, float (&sums)[kWarpPages]) {
  constexpr int kWidth = kVecWidth<T>;
  const int vecs = (components + kWidth - 1) / kWidth;
#pragma unroll
  for (int j = 0; j < kWarpPages; ++j) sums[j] = 0.0f;
#pragma unroll 1
  for (int vec = threadIdx.x % kWarpSize; vec < vecs; vec += kWarpSize) {
    Vec16<T> loaded[kWarpPages];
#pragma unroll
    for (int j = 0; j < kWarpPages; ++j) {
      loaded[j] = {};
      if (rows[j] != nullptr) loaded[j] = load_vec<kAligned, kWidth>(rows[j], vec, components);
    }
    float factors[kWidth];
#pragma unroll
    for (int i = 0; i < kWidth; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(weights + vec * kWidth + i);
      factors[i] = four.x;
      factors[i + 1] = four.y;
      factors[i + 2] = four.z;
      factors[i + 3] = four.w;
    }
#pragma unroll
    for (int j = 0; j < kWarpPages; ++j) {
      float bounds[kWidth];
      upcast(loaded[j], bounds);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) sums[j] = fmaf(bounds[i], factors[i], sums[j]);
    }
  }
#pragma unroll
  for (int j = 0; j < kWarpPages; ++j) sums[j] = warp_sum(sums[j]);
}

// Scores of the pages [first, last).
template <typename T, bool kAligned>
__device__ __forceinline__ void score_pages(const SelectPagesParams& p, const PageRow& row,
                                            int first, int last, const float* weights) {
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int components = static_cast<int>(p.row_components());
  const T* bounds = static_cast<const T*>(p.bounds) + int64_t{2} * row.head * p.head_size;
#pragma unroll 1
  for (int page = first + warp * kWarpPages; page < last; page += kStepPages) {
    const T* rows[kWarpPages];
#pragma unroll
    for (int j = 0; j < kWarpPages; ++j) {
      const int id = page + j < last ? row.ids[page + j] : -1;
      const bool good = id >= 0 && id < p.num_blocks;
      rows[j] = good ? bounds + id * p.bounds_block_stride : nullptr;
    }
    float sums[kWarpPages];
    score<T, kAligned>(rows, weights, components, sums);
#pragma unroll
    for (int j = 0; j < kWarpPages; ++j) {
      if (lane != j || page + j >= last) continue;
      uint32_t order = rows[j] != nullptr ? p.order_of(sums[j]) : SelectPagesParams::kBadBlock;
      if (p.always_kept(page + j, row.pages)) order = SelectPagesParams::kAlwaysKept;
      row.scores[page + j] = order;
    }
  }
}

template <typename T, bool kAligned>
__global__ void __launch_bounds__(kRowThreads, kAligned ? kCtasPerSm : 1)
    select_pages_kernel(const __grid_constant__ SelectPagesParams p, int64_t first_row,
                        int chunk_pages, uint32_t* counters) {
  // The weights, then what the selection needs.
  extern __shared__ __align__(16) char pages_shared[];
  launch_dependents();
  PageRow row(p, first_row + blockIdx.y);
  float* weights = reinterpret_cast<float*>(pages_shared);
  wait_for_primary_kernel();
  if (p.query_head_stride == p.head_size) {
    const int heads = p.heads_of_row() * (p.num_heads / p.num_kv_heads);
    prefetch_rows(p.query, sizeof(T), row.query_start(p), heads * p.head_size);
  }
  row.read_length(p);
  if (blockIdx.x == 0 && threadIdx.x == 0 && row.head == 0) {
    p.lens[row.seq] = p.kept_length(row.length, row.pages);
  }
  if (row.pages <= p.budget) {  // all are kept
    if (blockIdx.x > 0) return;
    for (int i = threadIdx.x; i < p.budget; i += kRowThreads) {
      row.table[i] = i < row.pages ? row.ids[i] : 0;
    }
    return;
  }
  const int64_t begin = int64_t{blockIdx.x} * chunk_pages;
  if (begin >= row.pages) return;
  const int first = static_cast<int>(begin);
  fill_weights<T>(p, row, weights);
  __syncthreads();
  score_pages<T, kAligned>(p, row, first, min(row.pages - first, chunk_pages) + first, weights);
  const int ctas = (row.pages - 1) / chunk_pages + 1;
  if (!comes_last(counters + blockIdx.y, ctas)) return;
  choose_pages<true>(
      row.scores, row.pages, p.budget, *reinterpret_cast<ChoiceShared*>(pages_shared),
      [&](int page) { return row.ids[page]; },
      [&](int, int number, int32_t id) {
        if (number >= 0) row.table[number] = id;
      });
}

template <typename T, bool kAligned>
void launch_rows(const SelectPagesParams& p, Stream stream) {
  const int64_t rows = p.num_rows(), slots = int64_t{kCtasPerSm} * current_device_model().num_sms;
  const int64_t share = ceil_div(rows * p.max_pages, slots);
  const int chunk = static_cast<int>(
      std::clamp<int64_t>(ceil_div(share, kStepPages) * kStepPages, kStepPages, kMaxChunkPages));
  const int64_t bytes =
      std::max<int64_t>(sizeof(float) * (p.row_components() + kVecWidth<T>), sizeof(ChoiceShared));
  const int limit = dynamic_shared_memory<select_pages_kernel<T, kAligned>>("select_pages");
  if (bytes > limit) {
    throw std::runtime_error("select_pages: expected bounds of a page of at most " +
                             std::to_string(limit / 4 - kVecWidth<T>) + " components, got " +
                             std::to_string(p.row_components()));
  }
  const unsigned chunks =
      grid_size("select_pages", std::max<int64_t>(ceil_div(p.max_pages, chunk), 1));
  uint32_t* counters = decode_workspace(nullptr, stream).semaphores;
  for (int64_t first = 0; first < rows; first += kMaxDecodeSlots) {
    const int64_t count = std::min<int64_t>(rows - first, kMaxDecodeSlots);
    launch_kernel("select_pages", select_pages_kernel<T, kAligned>,
                  dim3(chunks, static_cast<unsigned>(count)), dim3(kRowThreads), bytes, stream, p,
                  first, chunk, counters);
  }
}

}  // namespace

void launch(const SelectPagesParams& p, Stream stream) {
  dispatch_float(p.dtype, [&](auto model) {
    using T = decltype(model);
    const bool aligned = aligned16(p.bounds) &&
                         multiples(kVecWidth<T>, {p.bounds_block_stride, int64_t{2} * p.head_size});
    aligned ? launch_rows<T, true>(p, stream) : launch_rows<T, false>(p, stream);
  });
}

}  // namespace vllm_kernels::cuda
