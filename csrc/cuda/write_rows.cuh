// The writer of rows (layout NHD): the body that reshape_and_cache_flash and rope_and_cache share.
#pragma once
#include <algorithm>
#include <cstdint>

#include "cuda/cache_element.cuh"
#include "cuda/fast_divisor.cuh"
#include "cuda/launch.cuh"
#include "cuda/pack.cuh"
#include "cuda/slots.cuh"
#include "cuda/types.cuh"
#include "cuda/writer_keys.cuh"
#include "ops/reshape_and_cache.h"

namespace vllm_kernels::cuda {

// A block's tokens are kPerThread * blockDim.y neighbours, at most kOwn, of head blockIdx.y; thread
// (x, y) moves chunk x, and x + blockDim.x and so on, of K and V of every blockDim.y-th of them. A
// chunk is 16 bytes of the cache. Where all heads of a token lie in one row they count as one head
// of `head_size` elements; `scaled_head` is the size of a KV head all the same.
template <typename T, typename C, int kPerThread, int kOwn, typename Keys>
__device__ __forceinline__ void write_rows(const ReshapeAndCacheParams& p, const Keys& given,
                                           FastDivisor block_size, int head_size,
                                           FastDivisor scaled_head) {
  constexpr int kWidth = kVectorWidth<C>;
  constexpr int kParts = kWidth / kVectorWidth<T>;
  const PagedKv& kv = p.kv;
  const int tokens = kPerThread * blockDim.y;
  const int first = blockIdx.x * tokens;  // within this launch
  const int head = blockIdx.y;
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  const int threads = blockDim.x * blockDim.y;

  Keys keys[kPerThread];
#pragma unroll
  for (Keys& key : keys) key = given;
  Vector<T> k[kPerThread][kParts], v[kPerThread][kParts];
  // The KV head of the row's element d.
  const auto head_of = [&](int d) { return head + static_cast<int>(scaled_head.divide(d)); };
  // Where keys look for element d: head and element of it, or of the row.
  const auto key_head = [&](int d) { return Keys::kByHead ? head_of(d) : head; };
  const auto key_element = [&](int d) {
    return Keys::kByHead ? d - (head_of(d) - head) * kv.head_size : d;
  };
  const int num_tokens = static_cast<int>(p.num_tokens);
  // Without a branch, so that all loads of the prologue are under way at once.
  const auto fetch = [&](int d) {
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      const int token = min(static_cast<int>(first + j * blockDim.y + threadIdx.y), num_tokens - 1);
      const auto* value = reinterpret_cast<const Vector<T>*>(static_cast<const T*>(p.value) +
                                                             token * p.value_token_stride +
                                                             head * p.value_head_stride + d);
      keys[j].load(token, key_head(d), key_element(d), k[j]);
#pragma unroll
      for (int part = 0; part < kParts; ++part) v[j][part] = value[part];
    }
  };
  int d = threadIdx.x * kWidth;
  if constexpr (kPerThread == 1) {  // few tokens: under way before the wait
    const int token = min(first + static_cast<int>(threadIdx.y), num_tokens - 1);
    keys[0].prefetch(token, key_head(d), key_element(d));
    prefetch_l2(static_cast<const T*>(p.value) + token * p.value_token_stride +
                head * p.value_head_stride + d);
    prefetch_l2(p.slot_mapping + min(first + thread, num_tokens - 1));
  }
  wait_for_predecessor();
  const int own_thread = kOwn == 1 ? 0 : thread;
  const int32_t own_slot = own_thread < tokens ? slot_of(p, first + own_thread) : -1;
  fetch(d);
  __syncwarp();  // these loads first: the compiler would have them wait for those of later slots
  __shared__ int32_t own_slots[kOwn];
  __shared__ SlotFilter filter;
  __shared__ uint32_t repeated_here;
  const int from = first + tokens + thread;
  LaterSlots<kOwn == 1 ? 4 : Keys::kLater> later;
  later.load(p, from, threads);
  if (kOwn > 1 && thread < 32) {
    if (thread < tokens) own_slots[thread] = own_slot;
    if constexpr (kOwn > 4) filter.fill(thread, own_slot);
    const uint32_t repeated = repeated_in_warp(thread, own_slot);
    if (thread == 0) repeated_here = repeated;
  }
  Divisor k_scale, v_scale;
  const auto fetch_scales = [&](int d) {
    k_scale = divisor_of<C>(kv.k_scale, kv.scale_stride, head_of(d));
    v_scale = divisor_of<C>(kv.v_scale, kv.scale_stride, head_of(d));
  };
  fetch_scales(d);
  const auto turn = [&](int d) {
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) keys[j].turn(key_element(d), k[j]);
  };
  turn(d);
  uint32_t repeated;
  if constexpr (kOwn == 1) {
    const OwnRange own{.start = own_slot, .count = own_slot >= 0};
    repeated = find_repeated<kOwn>(p, from, threads, later, own);
  } else {
    __syncthreads();
    const OwnList list{.slots = own_slots, .end = tokens};
    if constexpr (kOwn <= 4) {
      repeated = find_repeated<kOwn>(p, from, threads, later, list);
    } else {
      const OwnFiltered own{.filter = &filter, .list = list};
      repeated = find_repeated<kOwn>(p, from, threads, later, own);
    }
    repeated |= repeated_here;
  }

#pragma unroll 1
  while (true) {
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      const int i = j * blockDim.y + threadIdx.y;
      const int32_t slot = kOwn == 1 ? own_slot : own_slots[i];
      if (slot < 0 || (repeated >> i & 1)) continue;
      const Place at = place_of(slot, block_size, kv.block_size);
      C* key = static_cast<C*>(kv.key) + at.block * kv.key_block_stride +
               at.token * kv.key_token_stride + head * kv.key_head_stride + d;
      C* value = static_cast<C*>(kv.value) + at.block * kv.value_block_stride +
                 at.token * kv.value_token_stride + head * kv.value_head_stride + d;
      if (keys[j].known()) *reinterpret_cast<Vector<C>*>(key) = narrow<T, C>(k[j], k_scale);
      *reinterpret_cast<Vector<C>*>(value) = narrow<T, C>(v[j], v_scale);
    }
    d += blockDim.x * kWidth;
    if (d >= head_size) break;
    fetch(d);
    fetch_scales(d);
    turn(d);
  }
}

// Block shape: y tokens of a head's x chunks, `each` times. Where all heads of a token lie in one
// row they count as one of `head_size` elements.
struct RowsShape {
  int heads;
  int head_size;
  int x;
  int y;
  int each;
};

inline RowsShape rows_shape(const ReshapeAndCacheParams& p) {
  const PagedKv& kv = p.kv;
  const int64_t row = int64_t{kv.num_kv_heads} * kv.head_size;
  const bool one_row = p.key_head_stride == kv.head_size && p.value_head_stride == kv.head_size &&
                       kv.key_head_stride == kv.head_size && kv.value_head_stride == kv.head_size;
  const int heads = one_row ? 1 : kv.num_kv_heads;
  const int head_size = one_row ? static_cast<int>(row) : kv.head_size;
  const int x = std::min(head_size / kv.x, 256);

  // Few tokens: a block each. Many: four or more, for enough loads in flight and fewer blocks that
  // look for repetitions. Narrow rows: what fills a warp.
  const int warp_tokens = (32 + x - 1) / x;
  const int y = std::max(warp_tokens, p.num_tokens > 1024 ? std::min(16, 256 / x) : 1);
  const int each = p.num_tokens > 1024 ? std::max(1, 4 / y) : 1;
  return {.heads = heads, .head_size = head_size, .x = x, .y = y, .each = each};
}

// Every 16-byte access of write_rows is aligned.
inline bool rows_aligned(const ReshapeAndCacheParams& p) {
  const PagedKv& kv = p.kv;
  const auto aligned = [&](int64_t block, int64_t token, int64_t head) {
    return block % kv.x == 0 && token % kv.x == 0 && head % kv.x == 0;
  };
  return kv.head_size % kv.x == 0 && inputs_aligned(p) && aligned16(kv.key) &&
         aligned16(kv.value) &&
         aligned(kv.key_block_stride, kv.key_token_stride, kv.key_head_stride) &&
         aligned(kv.value_block_stride, kv.value_token_stride, kv.value_head_stride);
}

}  // namespace vllm_kernels::cuda
