#include <algorithm>

#include "cuda/cache_element.cuh"
#include "cuda/fast_divisor.cuh"
#include "cuda/launch.cuh"
#include "cuda/launchers.h"
#include "cuda/pack.cuh"
#include "cuda/slots.cuh"
#include "cuda/types.cuh"
#include "cuda/write_rows.cuh"
#include "ops/reshape_and_cache.h"

namespace vllm_kernels::cuda {
namespace {

// A block's tokens are kPerThread * blockDim.y neighbours, at most kOwn, of head blockIdx.y; thread
// (x, y) moves chunk x, and x + blockDim.x and so on, of K and V of every blockDim.y-th of them. A
// chunk is 16 bytes of the cache. Where all heads of a token lie in one row they count as one head
// of `head_size` elements; `scaled_head` is the size of a KV head all the same.
template <typename T, typename C, int kPerThread, int kOwn>
__global__ void __launch_bounds__(256, kPerThread == 1 ? 3 : 2)
    write_rows_kernel(ReshapeAndCacheParams p, FastDivisor block_size, int head_size,
                      FastDivisor scaled_head) {
  launch_dependents();
  constexpr int kWidth = kVectorWidth<C>;
  constexpr int kParts = kWidth / kVectorWidth<T>;
  const PagedKv& kv = p.kv;
  const int tokens = kPerThread * blockDim.y;
  const int first = blockIdx.x * tokens;  // within this launch
  const int head = blockIdx.y;
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  const int threads = blockDim.x * blockDim.y;

  Vector<T> k[kPerThread][kParts], v[kPerThread][kParts];
  const int num_tokens = static_cast<int>(p.num_tokens);
  // Without a branch, so that all loads of the prologue are under way at once.
  const auto fetch = [&](int d) {
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      const int token = min(static_cast<int>(first + j * blockDim.y + threadIdx.y), num_tokens - 1);
      const auto* key = reinterpret_cast<const Vector<T>*>(
          static_cast<const T*>(p.key) + token * p.key_token_stride + head * p.key_head_stride + d);
      const auto* value = reinterpret_cast<const Vector<T>*>(static_cast<const T*>(p.value) +
                                                             token * p.value_token_stride +
                                                             head * p.value_head_stride + d);
#pragma unroll
      for (int part = 0; part < kParts; ++part) k[j][part] = key[part];
#pragma unroll
      for (int part = 0; part < kParts; ++part) v[j][part] = value[part];
    }
  };
  int d = threadIdx.x * kWidth;
  if constexpr (kPerThread == 1) {  // few tokens: under way before the wait
    const int token = min(first + static_cast<int>(threadIdx.y), num_tokens - 1);
    prefetch_l2(static_cast<const T*>(p.key) + token * p.key_token_stride +
                head * p.key_head_stride + d);
    prefetch_l2(static_cast<const T*>(p.value) + token * p.value_token_stride +
                head * p.value_head_stride + d);
    prefetch_l2(p.slot_mapping + min(first + thread, num_tokens - 1));
  }
  wait_for_predecessor();
  fetch(d);
  __shared__ int32_t own_slots[kOwn];
  __shared__ uint32_t repeated_here;
  int32_t only_slot = -1;
  if constexpr (kOwn == 1) {
    only_slot = slot_of(p, first);
  } else if (thread < 32) {
    const int32_t slot = thread < tokens ? slot_of(p, first + thread) : -1;
    if (thread < tokens) own_slots[thread] = slot;
    const uint32_t repeated = repeated_in_warp(thread, slot);
    if (thread == 0) repeated_here = repeated;
  }
  const int from = first + tokens + thread;
  LaterSlots later;
  later.load(p, from, threads);
  Divisor k_scale, v_scale;
  const auto fetch_scales = [&](int d) {
    const int scale_head = head + static_cast<int>(scaled_head.divide(d));
    k_scale = divisor_of<C>(kv.k_scale, kv.scale_stride, scale_head);
    v_scale = divisor_of<C>(kv.v_scale, kv.scale_stride, scale_head);
  };
  fetch_scales(d);
  OwnSlots own{.start = only_slot, .count = only_slot >= 0};
  uint32_t repeated = 0;
  if constexpr (kOwn > 1) {
    own = {.list = own_slots, .end = tokens};
    __syncthreads();
    repeated = repeated_here;
  }
  repeated |= find_repeated<kOwn>(p, from, threads, later, own);

#pragma unroll 1
  while (true) {
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      const int i = j * blockDim.y + threadIdx.y;
      const int32_t slot = kOwn == 1 ? only_slot : own_slots[i];
      if (slot < 0 || (repeated >> i & 1)) continue;
      const Place at = place_of(slot, block_size, kv.block_size);
      C* key = static_cast<C*>(kv.key) + at.block * kv.key_block_stride +
               at.token * kv.key_token_stride + head * kv.key_head_stride + d;
      C* value = static_cast<C*>(kv.value) + at.block * kv.value_block_stride +
                 at.token * kv.value_token_stride + head * kv.value_head_stride + d;
      *reinterpret_cast<Vector<C>*>(key) = narrow<T, C>(k[j], k_scale);
      *reinterpret_cast<Vector<C>*>(value) = narrow<T, C>(v[j], v_scale);
    }
    d += blockDim.x * kWidth;
    if (d >= head_size) break;
    fetch(d);
    fetch_scales(d);
  }
}

// One token a block.
template <typename T, typename C>
__global__ void __launch_bounds__(256) write_elements_kernel(ReshapeAndCacheParams p) {
  launch_dependents();
  wait_for_predecessor();
  const PagedKv& kv = p.kv;
  const int first = blockIdx.x;
  const int32_t slot = slot_of(p, first);
  const int from = first + 1 + threadIdx.x;
  LaterSlots later;
  later.load(p, from, blockDim.x);
  const OwnSlots own{.start = slot, .count = slot >= 0};
  if (find_repeated<1>(p, from, blockDim.x, later, own) != 0 || slot < 0) return;
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

// Every 16-byte access of write_rows_kernel is aligned.
bool rows_aligned(const ReshapeAndCacheParams& p) {
  const PagedKv& kv = p.kv;
  const auto aligned = [&](int64_t block, int64_t token, int64_t head) {
    return block % kv.x == 0 && token % kv.x == 0 && head % kv.x == 0;
  };
  return kv.head_size % kv.x == 0 && inputs_aligned(p) && aligned16(kv.key) &&
         aligned16(kv.value) &&
         aligned(kv.key_block_stride, kv.key_token_stride, kv.key_head_stride) &&
         aligned(kv.value_block_stride, kv.value_token_stride, kv.value_head_stride);
}

}  // namespace

void launch_rows(const ReshapeAndCacheParams& p, Stream stream) {
  if (!rows_aligned(p)) return launch_elements(p, stream);
  const PagedKv& kv = p.kv;
  const int64_t row = int64_t{kv.num_kv_heads} * kv.head_size;
  const bool one_row = p.key_head_stride == kv.head_size && p.value_head_stride == kv.head_size &&
                       kv.key_head_stride == kv.head_size && kv.value_head_stride == kv.head_size;
  const int heads = one_row ? 1 : kv.num_kv_heads;
  const int head_size = one_row ? static_cast<int>(row) : kv.head_size;
  const int x = std::min(head_size / kv.x, 256);

  // Few tokens: a block each. Many: four, for enough loads in flight and fewer blocks that look for
  // repetitions. Narrow rows: what fills a warp.
  const int warp_tokens = (32 + x - 1) / x;
  const int y = std::max(warp_tokens, p.num_tokens > 1024 ? std::min(4, 256 / x) : 1);
  const int wanted = p.num_tokens > 1024 ? std::max(1, 4 / y) : 1;
  dispatch_float(p.dtype, [&](auto model) {
    using T = decltype(model);
    dispatch_cache<T>(kv.dtype, [&](auto stored) {
      using C = decltype(stored);
      constexpr int kMost = 4 * sizeof(C) / sizeof(T);  // 64 bytes of K and of V in registers
      const int each = std::min(wanted, kMost);
      const int tokens = y * each;
      const auto kernel = tokens > 4   ? write_rows_kernel<T, C, 1, 32>
                          : each == 4  ? write_rows_kernel<T, C, kMost, 4>
                          : each == 2  ? write_rows_kernel<T, C, std::min(2, kMost), 4>
                          : tokens > 1 ? write_rows_kernel<T, C, 1, 4>
                                       : write_rows_kernel<T, C, 1, 1>;
      const dim3 grid(static_cast<unsigned>((p.num_tokens + tokens - 1) / tokens), heads);
      launch_kernel(p.op(), kernel, grid, dim3(x, y), 0, stream, p, FastDivisor(kv.block_size),
                    head_size, FastDivisor(kv.head_size));
    });
  });
}

void launch_elements(const ReshapeAndCacheParams& p, Stream stream) {
  dispatch_float(p.dtype, [&](auto model) {
    using T = decltype(model);
    dispatch_cache<T>(p.kv.dtype, [&](auto stored) {
      launch_kernel(p.op(), write_elements_kernel<T, decltype(stored)>,
                    dim3(static_cast<unsigned>(p.num_tokens)), dim3(256), 0, stream, p);
    });
  });
}

}  // namespace vllm_kernels::cuda
