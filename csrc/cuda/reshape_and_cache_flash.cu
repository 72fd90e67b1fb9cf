#include <algorithm>

#include "cuda/fp8.cuh"
#include "cuda/launch.cuh"
#include "cuda/launchers.h"
#include "cuda/slots.cuh"
#include "cuda/types.cuh"
#include "cuda/write_rows.cuh"
#include "ops/reshape_and_cache.h"

namespace vllm_kernels::cuda {
namespace {

// A block's tokens are kPerThread * blockDim.y neighbours, at most 32; thread (x, y) moves chunk x,
// and x + blockDim.x and so on, of K and V of every blockDim.y-th of them. A chunk is 16 bytes of
// the cache. Where all heads of a token lie in one row, `heads` is 1 and `head_size` that of the
// whole row.
template <typename T, typename C, int kPerThread>
__global__ void __launch_bounds__(256, 1)
    write_rows_kernel(ReshapeAndCacheParams p, int heads, int head_size) {
  launch_dependents();
  wait_for_predecessor();
  constexpr int kWidth = kVectorWidth<C>;
  constexpr int kParts = kWidth / kVectorWidth<T>;
  __shared__ OwnSlots own;
  const PagedKv& kv = p.kv;
  const int first = blockIdx.x * kPerThread * blockDim.y;  // within this launch
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  const int threads = blockDim.x * blockDim.y;
  const int head_chunks = head_size / kWidth;
  const int chunks = heads * head_chunks;

  Vector<T> k[kPerThread][kParts], v[kPerThread][kParts];
  const auto fetch = [&](int chunk) {
    const int head = heads == 1 ? 0 : chunk / head_chunks;
    const int d = (chunk - head * head_chunks) * kWidth;
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      const int64_t token = first + j * blockDim.y + threadIdx.y;
      if (token >= p.num_tokens) break;
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
  LaterSlots later;
  later.load(p, first + 1 + thread, threads);
  if (threadIdx.x < chunks) fetch(threadIdx.x);
  const Divisor k_scale = kIsFp8<C> ? Divisor::of(*kv.k_scale) : Divisor{};
  const Divisor v_scale = kIsFp8<C> ? Divisor::of(*kv.v_scale) : Divisor{};

  if (thread < 32) {
    const bool mine = thread < kPerThread * blockDim.y && first + thread < p.num_tokens;
    put_own_slot(own, thread, mine ? p.usable(p.slot_mapping[first + thread]) : -1);
  }
  __syncthreads();
  const uint32_t repeated = find_repeated(own, p, first, thread, threads, later);

  for (int chunk = threadIdx.x; chunk < chunks; chunk += blockDim.x) {
    if (chunk != threadIdx.x) fetch(chunk);
    const int head = heads == 1 ? 0 : chunk / head_chunks;
    const int d = (chunk - head * head_chunks) * kWidth;
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      const int i = j * blockDim.y + threadIdx.y;
      const int32_t slot = own.slot[i];
      if (slot < 0 || (repeated >> i & 1)) continue;
      const int64_t block = slot / kv.block_size, token = slot % kv.block_size;
      C* key = static_cast<C*>(kv.key) + block * kv.key_block_stride + token * kv.key_token_stride +
               head * kv.key_head_stride + d;
      C* value = static_cast<C*>(kv.value) + block * kv.value_block_stride +
                 token * kv.value_token_stride + head * kv.value_head_stride + d;
      *reinterpret_cast<Vector<C>*>(key) = narrow<T, C>(k[j], k_scale);
      *reinterpret_cast<Vector<C>*>(value) = narrow<T, C>(v[j], v_scale);
    }
  }
}

// One token a block.
template <typename T, typename C>
__global__ void __launch_bounds__(256) write_elements_kernel(ReshapeAndCacheParams p) {
  launch_dependents();
  wait_for_predecessor();
  __shared__ OwnSlots own;
  const PagedKv& kv = p.kv;
  const int first = blockIdx.x;
  if (threadIdx.x < 32) {
    put_own_slot(own, threadIdx.x, threadIdx.x == 0 ? p.usable(p.slot_mapping[first]) : -1);
  }
  __syncthreads();
  LaterSlots later;
  later.load(p, first + 1 + threadIdx.x, blockDim.x);
  const uint32_t repeated = find_repeated(own, p, first, threadIdx.x, blockDim.x, later);
  const int32_t slot = own.slot[0];
  if (slot < 0 || repeated != 0) return;
  const int64_t block = slot / kv.block_size, token = slot % kv.block_size;
  const Divisor k_scale = kIsFp8<C> ? Divisor::of(*kv.k_scale) : Divisor{};
  const Divisor v_scale = kIsFp8<C> ? Divisor::of(*kv.v_scale) : Divisor{};
  for (int i = threadIdx.x; i < kv.num_kv_heads * kv.head_size; i += blockDim.x) {
    const int64_t head = i / kv.head_size, d = i % kv.head_size;
    const T k =
        static_cast<const T*>(p.key)[first * p.key_token_stride + head * p.key_head_stride + d];
    const T v = static_cast<const T*>(
        p.value)[first * p.value_token_stride + head * p.value_head_stride + d];
    C& key = static_cast<C*>(kv.key)[kv.key_offset(block, head, token, d)];
    C& value = static_cast<C*>(kv.value)[kv.value_offset(block, head, token, d)];
    if constexpr (kIsFp8<C>) {
      key = from_float<C>(k_scale.divide(to_float(k)));
      value = from_float<C>(v_scale.divide(to_float(v)));
    } else {
      key = k;
      value = v;
    }
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
  const int x = static_cast<int>(std::min<int64_t>(row / kv.x, 256));

  // Few tokens: a block each. Many: enough loads in flight, and few blocks that look for
  // repetitions.
  const bool many = p.num_tokens > 1024;
  const int whole_warp = (32 + x - 1) / x;
  const int y = std::max(whole_warp, many ? std::min(256 / x, 8) : 1);
  dispatch_float(p.dtype, [&](auto model) {
    using T = decltype(model);
    dispatch_cache<T>(kv.dtype, [&](auto stored) {
      using C = decltype(stored);
      constexpr int kMany = 4 * sizeof(C) / sizeof(T);  // 64 bytes of K and of V in registers
      const bool several = many && y <= 8;
      const int per_block = y * (several ? kMany : 1);
      const dim3 grid(static_cast<unsigned>((p.num_tokens + per_block - 1) / per_block));
      launch_kernel(p.op(), several ? write_rows_kernel<T, C, kMany> : write_rows_kernel<T, C, 1>,
                    grid, dim3(x, y), 0, stream, p, heads, head_size);
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
