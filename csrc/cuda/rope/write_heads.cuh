// The device body that rotates keys and writes rows of layout NHD, for many tokens. Its kernel is
// in rope_and_cache_prefill.cu; HeadsShape has the grid. Before the PDL wait nothing is read;
// addresses are only prefetched into L2.
#pragma once
#include <algorithm>
#include <cstdint>

#include "cuda/base/kv_element.cuh"
#include "cuda/base/prefetch.cuh"
#include "cuda/cache/duplicate_slots.cuh"
#include "cuda/cache/kv_writer.cuh"
#include "cuda/rope/rope_queries.cuh"
#include "cuda/rope/rope_rows.cuh"

namespace vllm_kernels::cuda {

struct HeadsWrite : CacheWrite {
  FastDivisor by_lanes;
  FastDivisor by_heads;
  FastDivisor by_tiles;
  int32_t lanes;   // threads of a head
  int32_t heads;   // of a token in one CTA
  int32_t tiles;   // CTAs of a token
  int32_t tokens;  // of a CTA

  using CacheWrite::CacheWrite;
};

// A CTA writes p.tokens <= kOwn tokens, from group / p.tiles * p.tokens on. A thread has two Vecs
// of a head's K, which are rotated together, and the same two of V.
template <typename T, typename C, typename A, int kThreads, int kOwn>
__device__ __forceinline__ void write_heads(const HeadsWrite& p, const Angles& angles, int group) {
  constexpr int kWidth = kVecWidth<T>;
  constexpr uint32_t kWarp = 0xffffffffu;
  const int thread = threadIdx.x;
  const int row = p.by_lanes.divide(thread), lane = thread - row * p.lanes;
  const int own = p.by_heads.divide(row);
  const int token_group = p.by_tiles.divide(group);
  const int head = (group - token_group * p.tiles) * p.heads + row - own * p.heads;
  const int first = token_group * p.tokens;  // relative to this launch
  const bool inside = own < p.tokens && first + own < p.num_tokens && head < p.num_kv_heads;
  const HeadVecPairs<kWidth, 1> vec_pairs(p.head_size, 2 * angles.half, angles.is_neox, lane,
                                          p.lanes, inside);
  const int token = min(first + own, p.num_tokens - 1);
  const T* key =
      stepped(stepped(static_cast<const T*>(p.key), token, p.key_token), head, p.key_head);
  const T* value = p.value_at<T>(token, head, 0);
  // A few own slots are kept one a lane, more of them in shared memory.
  constexpr bool kFew = kOwn <= 4;
  const int own_index = kFew ? thread % kOwn : thread;
  const int64_t* own_slot_at = p.slot_mapping + min(first + own_index, p.num_tokens - 1);
  HeadVecs<T, kWidth, 1> k, v;
  k.prefetch(vec_pairs, key);
  v.prefetch(vec_pairs, value);
  prefetch_l2(angles.positions + token);
  prefetch_l2(own_slot_at);
  wait_for_primary_kernel();
  const int64_t position = angles.positions[token];
  const int64_t own_slot_read = *own_slot_at;
  k.load(vec_pairs, key);
  v.load(vec_pairs, value);
  // Keeps these loads first: the compiler would delay them behind those of the later slots.
  __syncwarp();
  const int from = first + p.tokens + thread;
  LaterSlots<kFew ? 4 : 8> later;
  later.load(p, from, kThreads);
  const bool is_own = own_index < p.tokens && first + own_index < p.num_tokens;
  const int32_t own_slot = is_own ? p.usable(own_slot_read) : -1;
  const int scaled_head = min(head, p.num_kv_heads - 1);
  const Divisor k_scale = divisor_of<C>(p.k_scale, p.scale_stride, scaled_head);
  const Divisor v_scale = divisor_of<C>(p.v_scale, p.scale_stride, scaled_head);

  // The angles are loaded while the later slots are scanned.
  const bool valid = inside && angles.valid(position);
  const bool rotated = valid && vec_pairs.pair[0] >= 0;
  AngleVecs<A, kWidth> angle;
  const auto fetch_angles = [&] {
    if (rotated) angle = angles.of<A, kWidth>(position, vec_pairs.pair[0]);
  };
  uint32_t duplicates = 0, mine;
  int32_t slot;
  if constexpr (kFew) {
    const int lane_of_warp = thread % 32;
    slot = __shfl_sync(kWarp, own_slot, own);
    OwnFew<kOwn> few;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) few.slots[i] = __shfl_sync(kWarp, own_slot, i);
    const bool neighbours = __all_sync(
        kWarp, own_index >= p.tokens || (own_slot >= 0 && own_slot == few.slots[0] + own_index));
    if (neighbours) {
      const OwnRange range{.start = few.slots[0], .count = static_cast<uint32_t>(p.tokens)};
      mine = duplicates_later(p, from, kThreads, later, range);
    } else {
      mine = duplicates_later(p, from, kThreads, later, few);
      duplicates = duplicates_in_warp(lane_of_warp, lane_of_warp < p.tokens ? own_slot : -1);
    }
    fetch_angles();
  } else {
    __shared__ int32_t own_slots[kOwn];
    __shared__ SlotFilter filter;
    __shared__ uint32_t own_duplicates;
    if (thread < 32) list_own(thread, own_slot, own_slots, filter, own_duplicates);
    __syncthreads();
    const OwnFiltered filtered{.filter = &filter, .list = {.slots = own_slots, .end = p.tokens}};
    mine = duplicates_later(p, from, kThreads, later, filtered);
    fetch_angles();
    duplicates = own_duplicates;
    slot = own_slots[min(own, kOwn - 1)];
  }
  duplicates |= any_of_block<kOwn>(mine);
  if (!inside || slot < 0 || (duplicates >> own & 1)) return;
  if (rotated) rotate_by(angles.is_neox, k.vecs[0], angle);
  const Slot at = p.place(slot);
  C* key_to = p.key_row<C>(at, head, 0);
  C* value_to = p.value_row<C>(at, head, 0);
  if (valid) {
    k.each(vec_pairs, [&](const Vec<T, kWidth>& vec, int d) {
      *reinterpret_cast<Elements<C, kWidth>*>(key_to + d) = round_to<C>(vec, k_scale);
    });
  }
  v.each(vec_pairs, [&](const Vec<T, kWidth>& vec, int d) {
    *reinterpret_cast<Elements<C, kWidth>*>(value_to + d) = round_to<C>(vec, v_scale);
  });
}

// Grid and block of write_heads.
struct HeadsShape {
  static constexpr int kThreads = 256;
  bool few;  // few tokens a CTA; selects write_heads' kOwn
  int64_t blocks;
  HeadsWrite write;

  explicit HeadsShape(const ReshapeAndCacheParams& p) : write(p) {
    const int width = 16 / size_of(p.dtype);
    write.lanes = static_cast<int>(ceil_div(p.kv.head_size, 2 * width));
    const int rows = kThreads / write.lanes;
    write.heads = std::min(p.kv.num_kv_heads, rows);
    write.tiles = static_cast<int>(ceil_div(p.kv.num_kv_heads, write.heads));
    write.tokens = std::min(rows / write.heads, 32);
    write.by_lanes = FastDivisor(write.lanes);
    write.by_heads = FastDivisor(write.heads);
    write.by_tiles = FastDivisor(write.tiles);
    few = write.tokens <= 4;
    blocks = ceil_div(p.num_tokens, write.tokens) * write.tiles;
  }
};

}  // namespace vllm_kernels::cuda
