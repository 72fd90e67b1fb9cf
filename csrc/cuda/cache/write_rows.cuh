// The device body that writes rows (layout NHD: K, V [num_blocks, block_size, num_kv_heads,
// head_size]). reshape_and_cache_flash (kernel in reshape_and_cache_flash.cu) and rope_and_cache
// (cuda/rope/rope_and_cache_writers.cu) share it. RowsShape has grid and block. Before the PDL wait
// nothing is read; addresses are only prefetched into L2.
#pragma once
#include <algorithm>
#include <cstdint>

#include "cuda/base/fast_divmod.cuh"
#include "cuda/base/kv_element.cuh"
#include "cuda/base/launch.cuh"
#include "cuda/base/prefetch.cuh"
#include "cuda/base/types.cuh"
#include "cuda/base/vec.cuh"
#include "cuda/cache/duplicate_slots.cuh"
#include "cuda/cache/heuristics.h"
#include "cuda/cache/kv_writer.cuh"
#include "ops/reshape_and_cache.h"

namespace vllm_kernels::cuda {

// Where all heads of a token are contiguous, they count as one row of `row_size` elements.
struct RowsWrite : CacheWrite {
  FastDivisor by_head_size;
  FastDivisor by_lanes;
  int32_t row_size;
  int32_t lanes;  // threads of a token
  int32_t rows;   // tokens that the CTA moves at once

  using CacheWrite::CacheWrite;
};

// CTA (group, head) writes the group-th kEach * p.rows tokens, at most kOwn. A chunk is 16
// bytes of the cache. Thread (x, y) moves chunks x, x + p.lanes, ... of K and V. Its tokens are y,
// y + p.rows, ... of the CTA, kEach of them.
template <typename T, typename C, int kThreads, int kEach, int kOwn, typename Keys>
__device__ __forceinline__ void write_rows(const RowsWrite& p, const Keys& given, int group) {
  constexpr int kWidth = kVecWidth<C>;
  constexpr int kVectors = kWidth / kVecWidth<T>;
  constexpr uint32_t kWarp = 0xffffffffu;
  const int tokens = kOwn == 1 ? 1 : kEach * p.rows;
  const int first = group * tokens;  // relative to this launch
  const int head = blockIdx.y;
  const int thread = threadIdx.x;
  const int y = kOwn == 1 ? 0 : p.by_lanes.divide(thread);
  const int x = thread - y * p.lanes;

  Keys keys[kEach];
#pragma unroll
  for (Keys& key : keys) key = given;
  Elements16<T> k[kEach][kVectors], v[kEach][kVectors];
  // The KV head of element d of the row.
  const auto head_of = [&](int d) { return head + static_cast<int>(p.by_head_size.divide(d)); };
  // Head and element by which the keys address element d: within its head, or within the row.
  const auto key_head = [&](int d) { return Keys::kByHead ? head_of(d) : head; };
  const auto key_element = [&](int d) {
    return Keys::kByHead ? d - (head_of(d) - head) * p.head_size : d;
  };
  const int num_tokens = p.num_tokens;
  const auto value_at = [&](int token, int d) {
    return reinterpret_cast<const Elements16<T>*>(p.value_at<T>(token, head, d));
  };
  const auto token_of = [&](int j) { return min(first + j * p.rows + y, num_tokens - 1); };
  // Clamped instead of branching, so that all loads of the prologue are in flight together.
  const auto fetch = [&](int d) {
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const Elements16<T>* value = value_at(token_of(j), d);
      keys[j].load(token_of(j), key_head(d), key_element(d), k[j]);
#pragma unroll
      for (int i = 0; i < kVectors; ++i) v[j][i] = value[i];
    }
  };
  int d = x * kWidth;
  const bool inside = d < p.row_size && y < p.rows;
  const int first_d = min(d, p.row_size - kWidth);
  // A few own slots are kept one a lane, more of them in shared memory.
  constexpr bool kFew = kOwn <= 4;
  const int own_index = kFew ? threadIdx.x % kOwn : thread;
  const int64_t* own_slot_at = p.slot_mapping + min(first + own_index, num_tokens - 1);
  // Prefetch before the PDL wait.
  if constexpr (kEach == 1) {
    keys[0].prefetch(token_of(0), key_head(first_d), key_element(first_d));
    prefetch_l2(value_at(token_of(0), first_d));
    prefetch_l2(p.slot_mapping + min(first + thread, num_tokens - 1));
  }
  wait_for_primary_kernel();
  const int64_t own_slot_read = *own_slot_at;
  fetch(first_d);
  // Keeps these loads first: the compiler would delay them behind those of the later slots.
  __syncwarp();
  const int from = first + tokens + thread;
  constexpr int kLater = kOwn == 1 ? 4 : Keys::kByHead ? 6 : kEach > 1 ? 16 : 8;
  LaterSlots<kLater> later;
  later.load(p, from, kThreads);
  const bool own = own_index < tokens && first + own_index < num_tokens;
  const int32_t own_slot = own ? p.usable(own_slot_read) : -1;
  Divisor k_scale, v_scale;
  const auto fetch_scales = [&](int d) {
    k_scale = divisor_of<C>(p.k_scale, p.scale_stride, head_of(d));
    v_scale = divisor_of<C>(p.v_scale, p.scale_stride, head_of(d));
  };
  fetch_scales(first_d);
  const auto rotate = [&](int d) {
#pragma unroll
    for (int j = 0; j < kEach; ++j) keys[j].rotate(key_element(d), k[j]);
  };
  if constexpr (kOwn == 1) rotate(first_d);  // else later, for fewer registers

  uint32_t duplicates;
  int32_t slot[kEach];
  if constexpr (kOwn == 1) {
    const OwnRange range{.start = own_slot, .count = own_slot >= 0};
    duplicates = find_duplicates<kOwn>(p, from, kThreads, later, range);
    slot[0] = own_slot;
  } else if constexpr (kFew) {
    const int lane = thread % 32;
    OwnFew<kOwn> few;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) few.slots[i] = __shfl_sync(kWarp, own_slot, i);
#pragma unroll
    for (int j = 0; j < kEach; ++j) slot[j] = __shfl_sync(kWarp, own_slot, j * p.rows + y);
    duplicates = find_duplicates<kOwn>(p, from, kThreads, later, few);
    duplicates |= duplicates_in_warp(lane, lane < tokens ? own_slot : -1);
  } else {
    __shared__ int32_t own_slots[kOwn];
    __shared__ SlotFilter filter;
    __shared__ uint32_t own_duplicates;
    if (thread < 32) list_own(thread, own_slot, own_slots, filter, own_duplicates);
    __syncthreads();
    const OwnFiltered filtered{.filter = &filter, .list = {.slots = own_slots, .end = tokens}};
    duplicates = find_duplicates<kOwn>(p, from, kThreads, later, filtered) | own_duplicates;
#pragma unroll
    for (int j = 0; j < kEach; ++j) slot[j] = own_slots[min(j * p.rows + y, kOwn - 1)];
  }
  if (!inside) return;
  if constexpr (kOwn > 1) rotate(first_d);

#pragma unroll 1
  while (true) {
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      if (slot[j] < 0 || (duplicates >> (j * p.rows + y) & 1)) continue;
      const Slot at = p.place(slot[j]);
      C* key = p.key_row<C>(at, head, d);
      C* value = p.value_row<C>(at, head, d);
      if (keys[j].valid()) *reinterpret_cast<Elements16<C>*>(key) = quantize<T, C>(k[j], k_scale);
      *reinterpret_cast<Elements16<C>*>(value) = quantize<T, C>(v[j], v_scale);
    }
    d += p.lanes * kWidth;
    if (d >= p.row_size) break;
    fetch(d);
    fetch_scales(d);
    rotate(d);
  }
}

// Grid and block of write_rows. Few tokens: a CTA takes one token, or as many short rows as fill
// two warps. Many tokens: a CTA takes two or more, and a thread `each` of them. So more loads are
// in flight, and fewer CTAs scan for duplicate slots.
struct RowsShape {
  int threads;
  int each;
  dim3 grid;
  RowsWrite write;

  // `max_each`: tokens a thread may move. 0: wide rows are one token a CTA, however many tokens
  // there are.
  RowsShape(const ReshapeAndCacheParams& p, int max_each) : write(p) {
    const PagedKv& kv = p.kv;
    const bool one_row = p.key_head_stride == kv.head_size && p.value_head_stride == kv.head_size &&
                         kv.key_head_stride == kv.head_size && kv.value_head_stride == kv.head_size;
    write.row_size = one_row ? kv.num_kv_heads * kv.head_size : kv.head_size;
    const int chunks = write.row_size / kv.x;
    const bool many = p.num_tokens > kManyTokens && max_each > 0;
    threads = many || chunks > kLongRowChunks ? 256 : chunks > kShortRowChunks ? 128 : 64;
    write.lanes = std::min(chunks, threads);
    write.by_lanes = FastDivisor(write.lanes);
    write.by_head_size = FastDivisor(kv.head_size);
    const bool single = !many && chunks > kShortRowChunks;
    write.rows = single ? 1 : std::min(threads / write.lanes, 32);
    each = many && write.rows <= 2 ? std::min(2, max_each) : 1;
    grid = dim3(static_cast<unsigned>(ceil_div(p.num_tokens, each * write.rows)),
                one_row ? 1 : kv.num_kv_heads);
  }
};

// Whether every 16-byte access of write_rows is aligned.
inline bool rows_aligned(const ReshapeAndCacheParams& p) {
  const PagedKv& kv = p.kv;
  return kv.num_kv_heads <= 65535 && CacheWrite::fits(p) && inputs_aligned(p) &&
         aligned16(kv.key) && aligned16(kv.value) &&
         multiples(kv.x,
                   {kv.head_size, kv.key_block_stride, kv.key_token_stride, kv.key_head_stride,
                    kv.value_block_stride, kv.value_token_stride, kv.value_head_stride});
}

}  // namespace vllm_kernels::cuda
