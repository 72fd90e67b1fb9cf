// The device body that rotates keys and writes runs of slots in layout vllm, for many tokens. Its
// kernel, rope_and_run_kernel, is in rope_and_cache_prefill.cu. Before the PDL wait nothing is
// read; for up to 1024 tokens addresses are prefetched into L2.
#pragma once
#include <cstdint>

#include "cuda/base/prefetch.cuh"
#include "cuda/base/vec.cuh"
#include "cuda/cache/duplicate_slots.cuh"
#include "cuda/cache/write_pages.cuh"
#include "cuda/rope/rope_queries.cuh"

namespace vllm_kernels::cuda {

// Writes the group-th kRun tokens of one head, if their slots are consecutive and none is a
// duplicate. Otherwise it stores nothing and returns false. A head has kChunks chunks, all rotated,
// in Neox style. A thread has two chunks of K, which are rotated together, and the same two of V.
template <typename T, typename A, int kRun, int kChunks>
__device__ __forceinline__ bool write_run(const PagesWrite& p, const Angles& angles, int group,
                                          int head) {
  constexpr int kWidth = kVecWidth<T>;
  constexpr int kLanes = kChunks / 2;
  constexpr int kThreads = kRun * kLanes;
  constexpr int kHalf = kLanes * kWidth;  // elements
  constexpr uint32_t kWarp = 0xffffffffu;
  __shared__ ValueTile<T, kRun, kChunks> tile;
  const int first = group * kRun;  // relative to this launch
  const int thread = threadIdx.x;
  const int x = thread % kLanes, row = thread / kLanes, slot_lane = thread % kRun;
  const int num_tokens = p.num_tokens;
  const int token = min(first + row, num_tokens - 1);
  const auto* key = stepped(stepped(static_cast<const T*>(p.key) + x * kWidth, token, p.key_token),
                            head, p.key_head);
  const auto* value = p.value_at<T>(token, head, x * kWidth);
  const int64_t* slot_at = p.slot_mapping + min(first + slot_lane, num_tokens - 1);
  if (num_tokens <= kPrefetchTokens) {  // few tokens: prefetch before the PDL wait
    prefetch_l2(key);
    prefetch_l2(key + kHalf);
    prefetch_l2(value);
    prefetch_l2(value + kHalf);
    prefetch_l2(slot_at);
    prefetch_l2(angles.positions + token);
  }
  wait_for_primary_kernel();
  const int64_t slot_read = *slot_at;
  const int64_t position = angles.positions[token];
  const auto load = [](const T* at) { return *reinterpret_cast<const Vec16<T>*>(at); };
  Vec16<T> k[2] = {load(key), load(key + kHalf)};
  const Vec16<T> v[2] = {load(value), load(value + kHalf)};
  // Keeps these loads first: the compiler would delay them behind those of the later slots.
  __syncwarp();
  const int from = first + kRun + thread;
  LaterSlots<8> later;
  later.load(p, from, kThreads);
  const int32_t slot = first + slot_lane < num_tokens ? p.usable(slot_read) : -1;
  const int32_t start = __shfl_sync(kWarp, slot, 0);
  if (!__all_sync(kWarp, start >= 0 && slot == start + slot_lane)) return false;

#pragma unroll
  for (int i = 0; i < 2; ++i) tile.put(row, x + i * kLanes, bits_as<Elements16<T>>(v[i]));
  const bool valid = angles.valid(position);
  AngleVecs<A, kWidth> angle;  // loaded while the later slots are scanned
  if (valid) angle = angles.of<A, kWidth>(position, x * kWidth);
  const OwnRange range{.start = start, .count = kRun};
  if (__syncthreads_or(duplicates_later(p, from, kThreads, later, range) != 0) != 0) return false;
  if (valid) {
    rotate_vecs<true>(k, angle.cosines, angle.sines);
    const Slot at = p.place(start + row);
    T* to = stepped(p.key_page<T>(at.block, head), x, p.to_key_chunk) +
            static_cast<uint32_t>(at.token * kWidth);
    *reinterpret_cast<Vec16<T>*>(to) = k[0];
    *reinterpret_cast<Vec16<T>*>(stepped(to, kLanes, p.to_key_chunk)) = k[1];
  }
  const auto values_of = [&](Slot at) {
    return p.value_page<T>(at.block, head) + static_cast<uint32_t>(at.token);
  };
  if (start % kRun == 0) {
    tile.template store_run<kThreads>(values_of(p.place(start)), p.to_value_dim, 2 * kHalf, thread);
  } else {
    T* to = values_of(p.place(start + slot_lane));
#pragma unroll
    for (int i = 0; i < 2 * kWidth; ++i) {
      const int d = i * kLanes + thread / kRun;
      *stepped(to, d, p.to_value_dim) = tile.get(slot_lane, d);
    }
  }
  return true;
}

}  // namespace vllm_kernels::cuda
