// rope_and_cache in the cache writers' bodies, without bias and norm. RotatedKeys rotates the keys
// that the body loads.
//
//   rope_and_pages_kernel   layout vllm; body and grid in cuda/cache/write_pages.cuh
//   rope_and_rows_kernel    layout NHD; body and grid in cuda/cache/write_rows.cuh
//
// Queries (rope_queries.cuh) adds CTAs that rotate the query in place. Before the PDL wait nothing
// is read; addresses are only prefetched into L2. rope_and_cache.cu chooses between these kernels
// and the others.
#include <algorithm>

#include "cuda/base/launch.cuh"
#include "cuda/cache/write_pages.cuh"
#include "cuda/cache/write_rows.cuh"
#include "cuda/rope/heuristics.h"
#include "cuda/rope/rope_queries.cuh"
#include "cuda/rope/rope_rows.cuh"
#include "cuda/rope/rotated_keys.cuh"

namespace vllm_kernels::cuda {
namespace {

constexpr int kRun = 16;  // of a CTA that stores

template <typename T, typename C, int kLanes, bool kMany>
__global__ void __launch_bounds__(kRun* kLanes, std::min(kResident<T, C, kMany>,
                                                         kIs8Bit<C> ? 2 : sm90a_or(4, 3)) *
                                                    16 / kLanes)
    rope_and_pages_kernel(Queries queries, PagesWrite write) {
  launch_dependents();
  const int group = queries.group();
  if (group < 0) return rotate_query<T, void>(queries);
  const RotatedKeys<T, kVecWidth<C> / kVecWidth<T>> keys(queries.angles, write);
  write_pages<T, C, kRun, kLanes, kMany>(write, keys, group);
}

template <typename T, typename C, int kThreads, int kOwn>
__global__ void __launch_bounds__(kThreads, (kIs8Bit<C> ? 512
                                             : kOwn > 1 ? 1024
                                                        : 1280) /
                                                kThreads)
    rope_and_rows_kernel(Queries queries, RowsWrite write) {
  launch_dependents();
  const int group = queries.group();
  if (group < 0) return rotate_query<T, void>(queries);
  const RotatedKeys<T, kVecWidth<C> / kVecWidth<T>> keys(queries.angles, write);
  write_rows<T, C, kThreads, 1, kOwn>(write, keys, group);
}

}  // namespace

bool fits_writers(const RopeAndCacheParams& p) {
  const bool plain = p.query.bias == nullptr && p.key.bias == nullptr && p.value.bias == nullptr &&
                     p.query.weight == nullptr && p.key.weight == nullptr;
  const auto small = [](int64_t stride) { return stride < (1ll << 32) / 4; };
  if (!plain || !vecs_fit(p) || !small(p.query.token_stride) || !small(p.query.head_stride) ||
      !small(p.cos_sin_stride) || p.max_position > INT32_MAX) {
    return false;
  }
  const ReshapeAndCacheParams write = as_write(p);
  if (p.kv.layout == KvLayout::kVllm) return p.kv.block_size % kRun == 0 && pages_aligned(write);
  return p.kv.layout == KvLayout::kNHD && rows_aligned(write);
}

void launch_writers(const RopeAndCacheParams& p, Stream stream) {
  const ReshapeAndCacheParams write = as_write(p);
  // `threads` and `grid` are the writer's.
  const auto run = [&](auto kernel, int threads, dim3 grid, const auto& plan) {
    const Queries queries(p, threads, p.num_tokens > kManyRopeTokens, grid);
    launch_kernel(p.op, kernel, grid, dim3(threads), 0, stream, queries, plan);
  };
  const PagesShape pages(write, kRun, true);
  dispatch_float(p.dtype, [&](auto model) {
    using T = decltype(model);
    dispatch_cache<T>(p.kv.dtype, [&](auto stored) {
      using C = decltype(stored);
      if (p.kv.layout == KvLayout::kVllm) {
        run(pages.lanes == kFewChunks ? rope_and_pages_kernel<T, C, kFewChunks, false>
            : pages.lanes == 8        ? rope_and_pages_kernel<T, C, 8, true>
                                      : rope_and_pages_kernel<T, C, 16, true>,
            kRun * pages.lanes, pages.grid, pages.write);
      } else {
        const RowsShape rows(write, 0);
        run(rows.threads == 64    ? rope_and_rows_kernel<T, C, 64, 32>
            : rows.threads == 128 ? rope_and_rows_kernel<T, C, 128, 1>
                                  : rope_and_rows_kernel<T, C, 256, 1>,
            rows.threads, rows.grid, rows.write);
      }
    });
  });
}

}  // namespace vllm_kernels::cuda
