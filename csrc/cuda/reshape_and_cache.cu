#include "ops/reshape_and_cache.h"

#include <algorithm>

#include "cuda/launch.cuh"
#include "cuda/launchers.h"
#include "cuda/write_pages.cuh"
#include "cuda/writers.h"

namespace vllm_kernels::cuda {
namespace {

template <typename T, typename C, int kRun, bool kMany>
__global__ void __launch_bounds__(kRun * 16, kResident<T, C, kMany> * 16 / kRun)
    write_pages_kernel(ReshapeAndCacheParams p, FastDivisor block_size, FastDivisor parts,
                       FastDivisor head_size) {
  launch_dependents();
  const GivenKeys<T, kVectorWidth<C> / kVectorWidth<T>> keys(p);
  write_pages<T, C, kRun, kMany>(p, keys, block_size, parts, head_size);
}

template <int kRun>
void launch_pages(const ReshapeAndCacheParams& p, Stream stream) {
  const PagesShape shape = shape_of(p, kRun);
  dispatch_float(p.dtype, [&](auto model) {
    using T = decltype(model);
    dispatch_cache<T>(p.kv.dtype, [&](auto stored) {
      using C = decltype(stored);
      const auto kernel = p.num_tokens > kFewTokens ? write_pages_kernel<T, C, kRun, true>
                                                    : write_pages_kernel<T, C, kRun, false>;
      launch_kernel(p.op, kernel, shape.grid, dim3(shape.lanes, kRun), shape.tile_bytes, stream, p,
                    FastDivisor(p.kv.block_size), FastDivisor(shape.parts),
                    FastDivisor(p.kv.head_size));
    });
  });
}

void launch_once(const ReshapeAndCacheParams& p, Stream stream) {
  if (p.kv.layout == KvLayout::kNHD) return launch_rows(p, stream);
  if (!pages_aligned(p)) return launch_elements(p, stream);
  p.kv.block_size % 16 == 0 ? launch_pages<16>(p, stream) : launch_pages<8>(p, stream);
}

}  // namespace

void launch(const ReshapeAndCacheParams& params, Stream stream) {
  ReshapeAndCacheParams part = params;
  const int64_t size = size_of(params.dtype);
  for (int64_t done = 0; done < params.num_tokens; done += kTokensPerLaunch) {
    part.num_tokens = std::min(kTokensPerLaunch, params.num_tokens - done);
    part.slot_mapping = params.slot_mapping + done;
    part.key = static_cast<const char*>(params.key) + done * params.key_token_stride * size;
    part.value = static_cast<const char*>(params.value) + done * params.value_token_stride * size;
    launch_once(part, stream);
  }
}

}  // namespace vllm_kernels::cuda
