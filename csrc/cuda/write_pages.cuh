// The writer of layout vllm: the body that reshape_and_cache and rope_and_cache share.
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

// Up to here a block writes its part of scattered tokens from what it has loaded. So that enough
// blocks write, a part is at most kFewChunks, and kFewBlocks blocks share its tokens.
constexpr int kFewTokens = 64;
constexpr int kFewChunks = 4;
constexpr int kFewBlocks = 4;

// Blocks of 256 threads that a multiprocessor is to hold; from float32 to 8 bits more would spill.
template <typename T, typename C, bool kMany>
constexpr int kResident = kMany && kVectorWidth<C> <= 2 * kVectorWidth<T> ? 4 : 2;

// Layout vllm, one token, all heads: neighbouring threads on neighbouring values of V, each of
// which lies in a sector of its own, seldom touched again.
template <typename T, typename C, typename Keys>
__device__ __forceinline__ void write_token(const ReshapeAndCacheParams& p, Keys keys,
                                            FastDivisor head_size, int token, Place at, int thread,
                                            int threads) {
  const PagedKv& kv = p.kv;
  const T* value = static_cast<const T*>(p.value) + token * p.value_token_stride;
  C* key_cache = static_cast<C*>(kv.key) + at.block * kv.key_block_stride + at.token * kv.x;
  C* values = static_cast<C*>(kv.value) + at.block * kv.value_block_stride + at.token;
  const int count = kv.num_kv_heads * kv.head_size;
  constexpr int kBatch = 4;  // loads in flight
#pragma unroll 1
  for (int from = thread; from < count; from += kBatch * threads) {
    T loaded[kBatch];
    C* to[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int i = min(from + j * threads, count - 1);
      const int head = head_size.divide(i), d = i - head * kv.head_size;
      loaded[j] = value[head * p.value_head_stride + d];
      to[j] = values + head * kv.value_head_stride + d * kv.value_dim_stride;
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (from + j * threads < count) {
        const int head = head_size.divide(from + j * threads);
        const Divisor scale = divisor_of<C>(kv.v_scale, kv.scale_stride, head);
        store_streaming(to[j], to_cache<C>(loaded[j], scale));
      }
    }
  }
  if (p.values_only) return;
  constexpr int kWidth = kVectorWidth<C>;
  constexpr int kVectors = kWidth / kVectorWidth<T>;
#pragma unroll 1
  for (int i = thread * kWidth; i < count; i += threads * kWidth) {
    const int head = head_size.divide(i), d = i - head * kv.head_size;
    Vector<T> k[kVectors];
    keys.load(token, head, d, k);
    keys.turn(d, k);
    if (!keys.known()) return;
    C* to = key_cache + head * kv.key_head_stride + d / kWidth * kv.key_chunk_stride;
    store_streaming(reinterpret_cast<Vector<C>*>(to),
                    narrow<T, C>(k, divisor_of<C>(kv.k_scale, kv.scale_stride, head)));
  }
}

// Layout vllm. A block looks after kRun neighbouring tokens and a part of a head's chunks (a chunk
// is 16 bytes of the cache); thread (x, y) loads the part's chunk x of token y. K is stored chunk
// by chunk; V goes through shared memory, and how it is stored depends on the tokens' slots:
//   an aligned run of kRun neighbours    16 bytes a store
//   few neighbourhoods                   neighbouring threads on neighbouring slots of one value
//   scattered                            neighbouring threads on neighbouring values of one slot;
//                                        the block then writes some tokens: with kMany their
//                                        whole rows, otherwise its part of every kFewBlocks-th
// blockDim = (chunks of a part, kRun), gridDim.y = heads * parts, gridDim.z = 1 with kMany, else
// kFewBlocks. blockIdx.x: which kRun tokens.
template <typename T, typename C, int kRun, bool kMany, typename Keys>
__device__ __forceinline__ void write_pages(const ReshapeAndCacheParams& p, Keys keys,
                                            FastDivisor block_size, FastDivisor parts,
                                            FastDivisor head_size) {
  constexpr int kWidth = kVectorWidth<C>;                // elements of a chunk
  constexpr int kVectors = kWidth / kVectorWidth<T>;     // of T that make a chunk
  constexpr int kStore = kWidth < kRun ? kWidth : kRun;  // tokens of one store of V
  constexpr uint32_t kAll = (1u << kRun) - 1;
  extern __shared__ __align__(16) char tile_bytes[];
  __shared__ int32_t own_slots[kRun];
  __shared__ SlotFilter filter;

  const PagedKv& kv = p.kv;
  const int head = parts.divide(blockIdx.y);
  const int num_parts = gridDim.y / kv.num_kv_heads;
  const int first = blockIdx.x * kRun;  // within this launch
  const int first_chunk = (blockIdx.y - head * num_parts) * blockDim.x;
  const int chunk = first_chunk + threadIdx.x;
  const int row = threadIdx.y;
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  const int threads = kRun * blockDim.x;
  const int lane = thread % 32;
  const int pitch = (blockDim.x + 1) * kWidth;  // of the tile's rows: spreads a column over banks
  C* tile = reinterpret_cast<C*>(tile_bytes);

  // Without a branch, so that all loads of the prologue are under way at once.
  const int num_tokens = static_cast<int>(p.num_tokens);
  const bool has_chunk = chunk * kWidth < kv.head_size && first + row < num_tokens;
  Vector<T> k[kVectors], v[kVectors];
  int32_t lane_slot;
  {
    const int token = min(first + row, num_tokens - 1);
    const int d = min(chunk * kWidth, kv.head_size - kWidth);
    const auto* value = reinterpret_cast<const Vector<T>*>(static_cast<const T*>(p.value) +
                                                           token * p.value_token_stride +
                                                           head * p.value_head_stride + d);
    if (num_tokens <= 1024) {  // few: under way before the wait
      keys.prefetch(token, head, d);
      prefetch_l2(value);
      prefetch_l2(p.slot_mapping + min(first + thread, num_tokens - 1));
    }
    wait_for_predecessor();
    lane_slot = lane < kRun ? slot_of(p, first + lane) : -1;  // every warp finds out for itself
    keys.load(token, head, d, k);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) v[i] = value[i];
    __syncwarp();  // these loads first: the compiler would have them wait for those of later slots
  }
  const int from = first + kRun + thread;
  LaterSlots<kMany ? Keys::kLater : 1> later;
  later.load(p, from, threads);
  keys.turn(min(chunk * kWidth, kv.head_size - kWidth), k);
  const int32_t next = __shfl_down_sync(0xffffffffu, lane_slot, 1);
  const uint32_t follows =
      __ballot_sync(0xffffffffu, lane_slot >= 0 && next == lane_slot + 1) & (kAll >> 1);
  const int32_t start = __shfl_sync(0xffffffffu, lane_slot, 0);
  const bool neighbours = follows == kAll >> 1;
  const bool scattered = __popc(follows) < kRun - 4;
  if (!kMany && !scattered && blockIdx.z > 0) return;

  OwnList own{.slots = own_slots, .end = kRun};
  if (scattered) {  // this block's tokens only
    own.from = kMany ? blockIdx.y : blockIdx.z;
    own.step = kMany ? gridDim.y : kFewBlocks;
  }
  if (thread < kRun) own_slots[thread] = lane_slot;
  if (kMany && !neighbours && thread < 32) filter.fill(lane, lane_slot);
  __syncthreads();
  uint32_t repeated;
  if (neighbours) {
    const OwnRange range{.start = start, .count = kRun};
    repeated = find_repeated<kRun>(p, from, threads, later, range);
  } else if constexpr (kMany) {
    const OwnFiltered filtered{.filter = &filter, .list = own};
    repeated = find_repeated<kRun>(p, from, threads, later, filtered);
  } else {
    repeated = find_repeated<kRun>(p, from, threads, later, own);
  }
  repeated |= repeated_in_warp(lane, lane_slot);
  if constexpr (kMany) {
    // Around the loop a branch, in which k and v need no registers: 8 bits spill without.
    if (!kIs8Bit<C> || scattered) {
#pragma unroll 1
      for (int r = scattered ? blockIdx.y : kRun; r < kRun; r += gridDim.y) {
        const int32_t slot = own_slots[r];
        if (slot < 0 || (repeated >> r & 1)) continue;
        write_token<T, C>(p, keys, head_size, first + r, place_of(slot, block_size, kv.block_size),
                          thread, threads);
      }
      if (scattered) return;
    }
  }

  const Divisor k_scale = divisor_of<C>(kv.k_scale, kv.scale_stride, head);
  const Divisor v_scale = divisor_of<C>(kv.v_scale, kv.scale_stride, head);
  const int32_t slot = own_slots[row];
  const bool own_row = !scattered || row % kFewBlocks == own.from;
  if (own_row && has_chunk && slot >= 0 && (repeated >> row & 1) == 0) {
    const Place at = place_of(slot, block_size, kv.block_size);
    C* to = static_cast<C*>(kv.key) + at.block * kv.key_block_stride + head * kv.key_head_stride +
            chunk * kv.key_chunk_stride + at.token * kWidth;
    if (!p.values_only && keys.known()) {
      *reinterpret_cast<Vector<C>*>(to) = narrow<T, C>(k, k_scale);
    }
    *reinterpret_cast<Vector<C>*>(tile + row * pitch + threadIdx.x * kWidth) =
        narrow<T, C>(v, v_scale);
  }
  __syncthreads();

  const int first_d = first_chunk * kWidth;
  const int dims = min(static_cast<int>(blockDim.x) * kWidth, kv.head_size - first_d);
  C* values =
      static_cast<C*>(kv.value) + head * kv.value_head_stride + first_d * kv.value_dim_stride;
  if (neighbours && start % kRun == 0 && repeated == 0) {
    constexpr int kStores = kRun / kStore;  // of one value index
    const Place at = place_of(start, block_size, kv.block_size);
    C* to = values + at.block * kv.value_block_stride + at.token;
#pragma unroll 1
    for (int i = thread; i < dims * kStores; i += threads) {
      const int d = i / kStores, token = i % kStores * kStore;
      struct alignas(kStore * sizeof(C)) Tokens {
        C data[kStore];
      } gathered;
#pragma unroll
      for (int j = 0; j < kStore; ++j) gathered.data[j] = tile[(token + j) * pitch + d];
      *reinterpret_cast<Tokens*>(to + d * kv.value_dim_stride + token) = gathered;
    }
    return;
  }
  // That divide the work on one row of the tile's: at most as many as it has values.
  const int lanes = scattered ? min(32, static_cast<int>(blockDim.x) * kWidth) : kRun;
  const int outer = thread / lanes, inner = thread % lanes, step = threads / lanes;
#pragma unroll 1
  for (int r = scattered ? own.from + outer * own.step : inner; r < kRun;
       r += scattered ? step * own.step : kRun) {
    const int32_t to_slot = own_slots[r];
    if (to_slot < 0 || (repeated >> r & 1)) continue;
    const Place at = place_of(to_slot, block_size, kv.block_size);
    C* to = values + at.block * kv.value_block_stride + at.token;
#pragma unroll 2
    for (int d = scattered ? inner : outer; d < dims; d += scattered ? lanes : step) {
      to[d * kv.value_dim_stride] = tile[r * pitch + d];
    }
  }
}

// Block shape: whole warps, at most 16 chunks a token, fewer where that leaves multiprocessors
// idle. For few tokens 2 or 4 chunks: a power of two, as the kernel divides warps by it.
struct PagesShape {
  int lanes;
  int parts;
  int64_t tile_bytes;
  dim3 grid;
};

inline PagesShape shape_of(const ReshapeAndCacheParams& p, int run) {
  const int chunks = p.kv.head_size / p.kv.x;
  const int step = 32 / run;
  const int64_t groups = ceil_div(p.num_tokens, run);
  const bool few = p.num_tokens <= kFewTokens;
  int64_t parts = ceil_div(chunks, few ? kFewChunks : 16);
  while (groups * p.kv.num_kv_heads * parts < current_device_info().multiprocessors &&
         chunks >= 16 * parts) {
    parts *= 2;
  }
  const auto lanes = static_cast<int>(ceil_div(ceil_div(chunks, parts), step) * step);
  parts = ceil_div(chunks, lanes);
  return {.lanes = lanes,
          .parts = static_cast<int>(parts),
          .tile_bytes = int64_t{run} * (lanes + 1) * 16,
          .grid = dim3(static_cast<unsigned>(groups),
                       static_cast<unsigned>(p.kv.num_kv_heads * parts), few ? kFewBlocks : 1)};
}

// Every 16-byte access of write_pages is aligned, and its grid can be launched.
inline bool pages_aligned(const ReshapeAndCacheParams& p) {
  const PagedKv& kv = p.kv;
  return kv.block_size % 8 == 0 && kv.head_size % kv.x == 0 && inputs_aligned(p) &&
         aligned16(kv.key) && aligned16(kv.value) && kv.key_block_stride % kv.x == 0 &&
         kv.key_head_stride % kv.x == 0 && kv.value_block_stride % kv.x == 0 &&
         kv.value_head_stride % kv.x == 0 &&
         int64_t{kv.num_kv_heads} * (kv.head_size / kv.x) <= 65535;
}

}  // namespace vllm_kernels::cuda
