// reshape_and_cache: writes key and value [num_tokens, num_kv_heads, head_size] to slot_mapping's
// slots of a paged cache. This file has the launcher of all layouts and the kernel of layout vllm.
//
//   layouts NHD and HND    launch_rows(), reshape_and_cache_flash.cu
//   layout vllm, aligned   write_pages_kernel; body and grid in write_pages.cuh
//   anything else          launch_elements(), reshape_and_cache_flash.cu
//
// Before the PDL wait nothing is read; addresses are only prefetched into L2. At most
// kTokensPerLaunch tokens a launch, which duplicate_slots.cuh explains.
#include "ops/reshape_and_cache.h"

#include <algorithm>

#include "cuda/base/launch.cuh"
#include "cuda/cache/write_pages.cuh"
#include "cuda/cache/writers.h"
#include "cuda/launchers.h"

namespace vllm_kernels::cuda {
namespace {

// Resident CTAs an SM, for __launch_bounds__. With an idle SM (kIdle) more registers for loads in
// flight are worth more than more CTAs an SM.
template <typename T, typename C, bool kMany, bool kIdle>
constexpr int kBlocks = kIdle ? 4 : kResident<T, C, kMany>;  // of 256 threads

template <typename T, typename C, int kRun, int kLanes, bool kMany, bool kIdle = false>
__global__ void __launch_bounds__(kRun* kLanes, kBlocks<T, C, kMany, kIdle> * 256 / (kRun * kLanes))
    write_pages_kernel(PagesWrite p) {
  launch_dependents();
  const GivenKeys<T, kVecWidth<C> / kVecWidth<T>> keys(p);
  write_pages<T, C, kRun, kLanes, kMany>(p, keys, blockIdx.x);
}

template <int kRun>
void launch_pages(const ReshapeAndCacheParams& p, Stream stream) {
  const PagesShape shape(p, kRun, true);
  dispatch_float(p.dtype, [&](auto model) {
    using T = decltype(model);
    dispatch_cache<T>(p.kv.dtype, [&](auto stored) {
      using C = decltype(stored);
      auto kernel = shape.lanes == kFewChunks ? write_pages_kernel<T, C, kRun, kFewChunks, false>
                                              : write_pages_kernel<T, C, kRun, 16, true>;
      if constexpr (kRun == 16) {
        if (shape.lanes == 8) {
          constexpr bool kIdle = kBlocks<T, C, true, false> > kBlocks<T, C, true, true>;
          kernel = shape.idle ? write_pages_kernel<T, C, kRun, 8, true, kIdle>
                              : write_pages_kernel<T, C, kRun, 8, true>;
        }
      }
      launch_kernel(p.op, kernel, shape.grid, dim3(kRun * shape.lanes), 0, stream, shape.write);
    });
  });
}

void launch_once(const ReshapeAndCacheParams& p, Stream stream) {
  if (p.kv.layout != KvLayout::kVllm) return launch_rows(p, stream);
  if (!pages_aligned(p)) return launch_elements(p, stream);
  p.kv.block_size % 16 == 0 ? launch_pages<16>(p, stream) : launch_pages<8>(p, stream);
}

}  // namespace

void launch(const ReshapeAndCacheParams& params, Stream stream) {
  for (int64_t done = 0; done < params.num_tokens; done += kTokensPerLaunch) {
    launch_once(slice_of(params, done), stream);
  }
}

}  // namespace vllm_kernels::cuda
