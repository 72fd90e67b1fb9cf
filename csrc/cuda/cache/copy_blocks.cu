// copy_blocks: within every cache, page pairs[i][0] is copied to page pairs[i][1].
//
// Grid (pair, slice of the page, cache). A CTA copies kThreads * kUnroll accesses of a page at a
// time. A pair out of range is skipped. Nothing is read before the PDL wait. ops/copy_blocks.h has
// the contract; swap_blocks.cu copies between two tensors.
#include "ops/copy_blocks.h"

#include <algorithm>

#include "cuda/base/launch.cuh"
#include "cuda/base/types.cuh"
#include "cuda/launchers.h"

namespace vllm_kernels::cuda {
namespace {

// Caches, and pairs that lie on the host, travel as kernel parameters, in portions. A launch uses
// about 3 KB of the 4 KB allowed. So no table is uploaded, and a CUDA graph holds all it needs.
constexpr int kCopiesPerLaunch = 128;
constexpr int kPairsPerLaunch = 64;
constexpr int kThreads = 256;
constexpr int kUnroll = 4;  // accesses in flight a thread

struct Caches {
  char* start[kCopiesPerLaunch];
  int64_t stride[kCopiesPerLaunch];  // bytes between pages
};

struct HostPairs {
  int64_t block[2 * kPairsPerLaunch];
  __device__ int64_t at(int64_t i) const { return block[i]; }
};

struct DevicePairs {
  const int64_t* block;
  __device__ int64_t at(int64_t i) const { return block[i]; }
};

// Grid (pair, slice of the page, cache). V is the type of one access.
template <typename V, typename Pairs>
__global__ void __launch_bounds__(kThreads)
    copy_blocks_kernel(const __grid_constant__ Caches caches, const __grid_constant__ Pairs pairs,
                       int64_t num_blocks, int64_t block_bytes) {
  launch_dependents();
  wait_for_primary_kernel();
  const int64_t from = pairs.at(2 * int64_t{blockIdx.x});
  const int64_t to = pairs.at(2 * int64_t{blockIdx.x} + 1);
  if (from < 0 || from >= num_blocks || to < 0 || to >= num_blocks || from == to) return;
  const int64_t stride = caches.stride[blockIdx.z];
  const V* source = reinterpret_cast<const V*>(caches.start[blockIdx.z] + from * stride);
  V* target = reinterpret_cast<V*>(caches.start[blockIdx.z] + to * stride);
  const int64_t count = block_bytes / sizeof(V);
  constexpr int kStep = kThreads * kUnroll;
  for (int64_t base = int64_t{blockIdx.y} * kStep; base < count;
       base += int64_t{gridDim.y} * kStep) {
    V moved[kUnroll];
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      const int64_t i = base + j * kThreads + threadIdx.x;
      if (i < count) moved[j] = source[i];
    }
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      const int64_t i = base + j * kThreads + threadIdx.x;
      if (i < count) target[i] = moved[j];
    }
  }
}

template <typename V, typename Pairs>
void launch_copies(const CopyBlocksParams& p, const Caches& caches, int64_t num_caches,
                   const Pairs& pairs, int64_t num_pairs, Stream stream) {
  const int64_t pieces =
      (p.block_bytes / sizeof(V) + kThreads * kUnroll - 1) / (kThreads * kUnroll);
  const dim3 grid(grid_size("copy_blocks", num_pairs),
                  static_cast<unsigned>(std::min<int64_t>(pieces, 64)),
                  static_cast<unsigned>(num_caches));
  launch_kernel("copy_blocks", copy_blocks_kernel<V, Pairs>, grid, dim3(kThreads), 0, stream,
                caches, pairs, p.num_blocks, p.block_bytes);
}

template <typename V>
void launch_all(const CopyBlocksParams& p, Stream stream) {
  for (int64_t done = 0; done < p.num_copies; done += kCopiesPerLaunch) {
    const int64_t count = std::min<int64_t>(kCopiesPerLaunch, p.num_copies - done);
    Caches caches{};
    for (int64_t i = 0; i < count; ++i) {
      caches.start[i] = p.copies[done + i].to;
      caches.stride[i] = p.copies[done + i].to_stride;
    }
    if (!p.pairs_on_host) {
      launch_copies<V>(p, caches, count, DevicePairs{p.pairs}, p.num_pairs, stream);
      continue;
    }
    for (int64_t first = 0; first < p.num_pairs; first += kPairsPerLaunch) {
      const int64_t part = std::min<int64_t>(kPairsPerLaunch, p.num_pairs - first);
      HostPairs pairs{};
      std::copy_n(p.pairs + 2 * first, 2 * part, pairs.block);
      launch_copies<V>(p, caches, count, pairs, part, stream);
    }
  }
}

}  // namespace

void launch(const CopyBlocksParams& p, Stream stream) {
  bool aligned = p.block_bytes % 16 == 0;
  for (int64_t i = 0; i < p.num_copies; ++i) {
    aligned = aligned && aligned16(p.copies[i].to) && p.copies[i].to_stride % 16 == 0;
  }
  aligned ? launch_all<uint4>(p, stream) : launch_all<char>(p, stream);
}

}  // namespace vllm_kernels::cuda
