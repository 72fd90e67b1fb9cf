// Writes key and value into caches of layout NHD (reshape_and_cache_flash), and into any cache that
// no vectorised kernel can address.
//
//   write_rows_kernel       16-byte accesses; body and grid in write_rows.cuh
//   write_elements_kernel   grid: tokens; one element a thread; any layout, alignment and size
//
// Before the PDL wait write_rows_kernel only prefetches into L2. write_elements_kernel reads
// nothing.
#include <algorithm>

#include "cuda/base/kv_element.cuh"
#include "cuda/base/launch.cuh"
#include "cuda/base/types.cuh"
#include "cuda/cache/duplicate_slots.cuh"
#include "cuda/cache/write_rows.cuh"
#include "cuda/cache/writers.h"
#include "cuda/launchers.h"
#include "ops/reshape_and_cache.h"

namespace vllm_kernels::cuda {
namespace {

// Resident threads an SM, for __launch_bounds__: as many as registers allow. kOwn == 1 is one token
// a CTA. kCrowd means hundreds of CTAs; then CTAs of the next launch fit on the SM at the same
// time.
template <typename T, typename C, int kEach, int kOwn, bool kCrowd>
constexpr int kResidentThreads = kIs8Bit<C>  ? (kEach > 1 || sizeof(T) == 4 ? 512 : 1024)
                                 : kEach > 1 ? 1024
                                 : kOwn > 4  ? 1536
                                 : kOwn > 1  ? 1280
                                 : kCrowd    ? 2048
                                             : 1536;

template <typename T, typename C, int kThreads, int kEach, int kOwn, bool kCrowd = true>
__global__ void __launch_bounds__(kThreads, kResidentThreads<T, C, kEach, kOwn, kCrowd> / kThreads)
    write_rows_kernel(RowsWrite p) {
  launch_dependents();
  const GivenKeys<T, kVecWidth<C> / kVecWidth<T>> keys(p);
  write_rows<T, C, kThreads, kEach, kOwn>(p, keys, blockIdx.x);
}

// One token a CTA.
template <typename T, typename C>
__global__ void __launch_bounds__(256) write_elements_kernel(ReshapeAndCacheParams p) {
  launch_dependents();
  wait_for_primary_kernel();
  const PagedKv& kv = p.kv;
  const int first = blockIdx.x;
  const int32_t slot = slot_of(p, first);
  const int from = first + 1 + threadIdx.x;
  LaterSlots<4> later;
  later.load(p, from, blockDim.x);
  const OwnRange own{.start = slot, .count = slot >= 0};
  if (find_duplicates<1>(p, from, blockDim.x, later, own) != 0 || slot < 0) return;
  const int64_t block = slot / kv.block_size, token = slot % kv.block_size;
  for (int i = threadIdx.x; i < kv.num_kv_heads * kv.head_size; i += blockDim.x) {
    const int64_t head = i / kv.head_size, d = i % kv.head_size;
    const Divisor k_scale = divisor_of<C>(kv.k_scale, kv.scale_stride, head);
    const Divisor v_scale = divisor_of<C>(kv.v_scale, kv.scale_stride, head);
    const T k =
        static_cast<const T*>(p.key)[first * p.key_token_stride + head * p.key_head_stride + d];
    const T v = static_cast<const T*>(
        p.value)[first * p.value_token_stride + head * p.value_head_stride + d];
    if (!p.values_only) {
      static_cast<C*>(kv.key)[kv.key_offset(block, head, token, d)] = to_cache<C>(k, k_scale);
    }
    static_cast<C*>(kv.value)[kv.value_offset(block, head, token, d)] = to_cache<C>(v, v_scale);
  }
}

}  // namespace

void launch_rows(const ReshapeAndCacheParams& p, Stream stream) {
  if (!rows_aligned(p)) return launch_elements(p, stream);
  dispatch_float(p.dtype, [&](auto model) {
    using T = decltype(model);
    dispatch_cache<T>(p.kv.dtype, [&](auto stored) {
      using C = decltype(stored);
      constexpr int kEach = std::min<int>(2, 4 * sizeof(C) / sizeof(T));  // limited by registers
      const RowsShape shape(p, kEach);
      const int rows = shape.write.rows;
      auto kernel = shape.threads == 128  ? p.num_tokens > kFewRowTokens
                                                ? write_rows_kernel<T, C, 128, 1, 1>
                                                : write_rows_kernel<T, C, 128, 1, 1, kIs8Bit<C>>
                    : shape.threads == 64 ? rows > 4 ? write_rows_kernel<T, C, 64, 1, 32>
                                                     : write_rows_kernel<T, C, 64, 1, 4>
                    : rows > 4            ? write_rows_kernel<T, C, 256, 1, 32>
                    : rows > 1            ? write_rows_kernel<T, C, 256, 1, 4>
                                          : write_rows_kernel<T, C, 256, 1, 1>;
      if constexpr (kEach > 1) {
        if (shape.each > 1) kernel = write_rows_kernel<T, C, 256, kEach, 4>;
      }
      launch_kernel(p.op, kernel, shape.grid, dim3(shape.threads), 0, stream, shape.write);
    });
  });
}

void launch_elements(const ReshapeAndCacheParams& p, Stream stream) {
  dispatch_float(p.dtype, [&](auto model) {
    using T = decltype(model);
    dispatch_cache<T>(p.kv.dtype, [&](auto stored) {
      launch_kernel(p.op, write_elements_kernel<T, decltype(stored)>,
                    dim3(static_cast<unsigned>(p.num_tokens)), dim3(256), 0, stream, p);
    });
  });
}

}  // namespace vllm_kernels::cuda
