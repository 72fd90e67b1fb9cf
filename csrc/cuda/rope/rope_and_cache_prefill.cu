// rope_and_cache for many tokens (prefill), without bias and norm. A thread holds both sides of the
// pairs that it rotates.
//
//   rope_and_heads_kernel   layout NHD; body write_heads.cuh; grid.x = CTAs of HeadsShape and of
//                           queries
//   rope_and_run_kernel     layout vllm; body write_run.cuh, and write_pages.cuh for slots that
//                           are no run; grid (groups of kRun tokens and queries, KV head)
//
// Queries (rope_queries.cuh) interleaves CTAs that rotate the query with CTAs that store. Before
// the PDL wait nothing is read; addresses are only prefetched into L2. rope_and_cache.cu chooses
// between these kernels and the others.
#include "cuda/base/launch.cuh"
#include "cuda/rope/rope_rows.cuh"
#include "cuda/rope/rotated_keys.cuh"
#include "cuda/rope/write_heads.cuh"
#include "cuda/rope/write_run.cuh"

namespace vllm_kernels::cuda {
namespace {

constexpr int kRun = 16;     // of a CTA that stores
constexpr int kChunks = 16;  // of a head

// Resident CTAs an SM (of kThreads), for __launch_bounds__. With one more, conversions or float32
// angles would spill.
template <typename T, typename C, typename A>
constexpr int kResidentHeads = kIs8Bit<C> || sizeof(A) > sizeof(T) ? 4
                               : sizeof(T) == 4                    ? sm90a_or(5, 4)
                                                                   : 5;

template <typename T, typename C, typename A, int kOwn>
__global__ void __launch_bounds__(HeadsShape::kThreads, kResidentHeads<T, C, A>)
    rope_and_heads_kernel(Queries queries, HeadsWrite write) {
  launch_dependents();
  const int group = queries.group();
  if (group < 0) return rotate_query<T, A>(queries);
  write_heads<T, C, A, HeadsShape::kThreads, kOwn>(write, queries.angles, group);
}

template <typename T, typename A>
__global__ void __launch_bounds__(kRun* kChunks / 2, sizeof(A) > 2 ? 8 : sm90a_or(10, 9))
    rope_and_run_kernel(Queries queries, PagesWrite write) {
  launch_dependents();
  int group = queries.group();
  if (group < 0) return rotate_query<T, A>(queries);
  if (write_run<T, A, kRun, kChunks>(write, queries.angles, group, blockIdx.y)) return;
  // Makes `group` opaque. Otherwise values derived from it below would hold registers above.
  asm volatile("" : "+r"(group));
  const RotatedKeys<T, 1, A> keys(queries.angles, write);
#pragma unroll 1
  for (int head_split = 0; head_split < 2; ++head_split) {
    __syncthreads();
    if (write_pages<T, T, kRun, kChunks / 2, true, true>(write, keys, group, blockIdx.y, head_split,
                                                         blockIdx.y, gridDim.y)) {
      return;
    }
  }
}

// Calls body(T{}, A{}) with the device types of the heads and of the angles.
template <typename Body>
void dispatch_angles(const RopeAndCacheParams& p, Body&& body) {
  dispatch_float(p.dtype, [&](auto model) {
    using T = decltype(model);
    if (p.cos_sin_dtype == p.dtype) {
      body(model, T{});
    } else {
      body(model, float{});
    }
  });
}

}  // namespace

bool fits_runs(const RopeAndCacheParams& p) {
  return p.kv.layout == KvLayout::kVllm && p.kv.dtype == p.dtype && p.is_neox &&
         p.head_size == kChunks * p.kv.x && p.rotary_size == p.head_size;
}

void launch_many(const RopeAndCacheParams& p, Stream stream) {
  const ReshapeAndCacheParams write = as_write(p);
  const auto run = [&](auto kernel, int threads, dim3 grid, const auto& plan) {
    const Queries queries(p, threads, true, grid);
    launch_kernel(p.op, kernel, grid, dim3(threads), 0, stream, queries, plan);
  };
  dispatch_angles(p, [&](auto model, auto angle) {
    using T = decltype(model);
    using A = decltype(angle);
    if (p.kv.layout == KvLayout::kVllm) {
      const PagesShape shape(write, kRun, false);
      run(rope_and_run_kernel<T, A>, kRun * kChunks / 2, shape.grid, shape.write);
      return;
    }
    dispatch_cache<T>(p.kv.dtype, [&](auto stored) {
      using C = decltype(stored);
      const HeadsShape shape(write);
      run(shape.few ? rope_and_heads_kernel<T, C, A, 4> : rope_and_heads_kernel<T, C, A, 32>,
          HeadsShape::kThreads, dim3(static_cast<unsigned>(shape.blocks)), shape.write);
    });
  });
}

}  // namespace vllm_kernels::cuda
