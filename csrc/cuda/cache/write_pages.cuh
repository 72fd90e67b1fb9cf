// The device body that writes pages of layout vllm. reshape_and_cache (kernel in
// reshape_and_cache.cu) and rope_and_cache (kernels in cuda/rope) share it. PagesShape has grid and
// block.
//
// K [num_blocks, num_kv_heads, head_size / x, block_size, x] is stored by 16-byte chunks. V
// [num_blocks, num_kv_heads, head_size, block_size] has a token's values block_size elements apart,
// so it is transposed in shared memory. Before the PDL wait nothing is read; for few tokens
// addresses are prefetched into L2.
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

// Resident CTAs an SM (of 256 threads), for __launch_bounds__: as many as registers allow. One
// CTA's memory accesses then overlap another's instructions.
template <typename T, typename C, bool kMany>
constexpr int kResident = !kMany || kVecWidth<C> > 2 * kVecWidth<T> ? 2
                          : kIs8Bit<C>                              ? 3
                                                                    : sm90a_or(6, 5);

struct PagesWrite : CacheWrite {
  FastDivisor by_head_size;
  FastDivisor by_head_splits;
  int32_t head_splits;  // CTAs that share the chunks of one head

  using CacheWrite::CacheWrite;
};

// Writes one token, all heads. Neighbouring threads take neighbouring values of V. Each of these
// stores touches a sector of its own that is seldom written again.
template <typename T, typename C, typename Keys>
__device__ __forceinline__ void write_token(const PagesWrite& p, Keys keys, int token, Slot at,
                                            int thread, int threads) {
  constexpr int kWidth = kVecWidth<C>;
  constexpr int kVectors = kWidth / kVecWidth<T>;
  const T* value = stepped(static_cast<const T*>(p.value), token, p.value_token);
  C* key_cache = page(static_cast<C*>(p.key_cache), at.block, p.to_key_block) + at.token * kWidth;
  C* values = page(static_cast<C*>(p.value_cache), at.block, p.to_value_block) + at.token;
  const int count = p.num_kv_heads * p.head_size;
  constexpr int kBatch = 4;  // loads in flight
#pragma unroll 1
  for (int from = thread; from < count; from += kBatch * threads) {
    T loaded[kBatch];
    C* to[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int i = min(from + j * threads, count - 1);
      const int head = p.by_head_size.divide(i), d = i - head * p.head_size;
      loaded[j] = stepped(value, head, p.value_head)[d];
      to[j] = stepped(stepped(values, head, p.to_value_head), d, p.to_value_dim);
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (from + j * threads < count) {
        const int head = p.by_head_size.divide(from + j * threads);
        const Divisor scale = divisor_of<C>(p.v_scale, p.scale_stride, head);
        store_streaming(to[j], to_cache<C>(loaded[j], scale));
      }
    }
  }
  if (p.values_only) return;
#pragma unroll 1
  for (int i = thread * kWidth; i < count; i += threads * kWidth) {
    const int head = p.by_head_size.divide(i), d = i - head * p.head_size;
    Elements16<T> k[kVectors];
    keys.load(token, head, d, k);
    keys.rotate(d, k);
    if (!keys.valid()) return;
    C* to = stepped(stepped(key_cache, head, p.to_key_head), d / kWidth, p.to_key_chunk);
    store_streaming(reinterpret_cast<Elements16<C>*>(to),
                    quantize<T, C>(k, divisor_of<C>(p.k_scale, p.scale_stride, head)));
  }
}

// Transposes the V of a CTA's tokens: filled by rows (tokens), read by columns (value indices).
template <typename C, int kRun, int kLanes>
struct ValueTile {
  static constexpr int kWidth = kVecWidth<C>;                   // elements of a chunk
  static constexpr int kStore = kWidth < kRun ? kWidth : kRun;  // tokens of one store
  static constexpr int kPitch = (kLanes + 1) * kWidth;          // padded against bank conflicts
  // The stores of one value index read from different banks.
  static constexpr int kSkew = kStore < kRun ? 2 * kWidth : 0;
  alignas(16) C data[kRun * kPitch + (kRun / kStore - 1) * kSkew];

  __device__ __forceinline__ static constexpr uint32_t row(uint32_t token) {
    return token * kPitch + token / kStore * kSkew;
  }
  __device__ __forceinline__ void put(int token, int lane, const Elements16<C>& chunk) {
    *reinterpret_cast<uint4*>(data + row(token) + lane * kWidth) = bits_as<uint4>(chunk);
  }
  __device__ __forceinline__ C get(int token, int d) const { return data[row(token) + d]; }

  // Stores V where the own slots are an aligned run of kRun consecutive slots. `to` is value 0 of
  // the first token, `dims` the values of a token. All kThreads threads call it.
  template <int kThreads>
  __device__ __forceinline__ void store_run(C* to, uint32_t dim_stride, uint32_t dims,
                                            uint32_t thread) const {
    constexpr uint32_t kStores = kRun / kStore;  // stores of one value index
    const uint32_t token = thread % kStores * kStore;
#pragma unroll
    for (uint32_t i = 0; i < kLanes * kWidth * kStores; i += kThreads) {
      const uint32_t d = (thread + i) / kStores;
      struct alignas(kStore * sizeof(C)) Tokens {
        C data[kStore];
      } gathered;
      const C* column = data + row(token) + d;
#pragma unroll
      for (int j = 0; j < kStore; ++j) gathered.data[j] = column[j * kPitch];
      if (d < dims) {
        *reinterpret_cast<Tokens*>(stepped(to, d, dim_stride) + token) = gathered;
      }
    }
  }
};

// Addresses of a CTA's chunks of one head in the cache.
template <typename C>
struct PagesTarget {
  const PagesWrite& p;
  int head;
  int first_chunk;

  // Chunk `chunk` of K, for a token.
  __device__ __forceinline__ C* key(Slot at, int chunk) const {
    return stepped(p.key_page<C>(at.block, head), chunk, p.to_key_chunk) +
           static_cast<uint32_t>(at.token * kVecWidth<C>);
  }
  // Value 0 of the CTA's chunks, for a token.
  __device__ __forceinline__ C* values(Slot at) const {
    return stepped(p.value_page<C>(at.block, head), first_chunk * kVecWidth<C>, p.to_value_dim) +
           static_cast<uint32_t>(at.token);
  }
};

// Whether few own slots follow the slot of the token before. All lanes of the warp call it.
template <int kRun>
__device__ __forceinline__ bool is_scattered(int lane, int32_t lane_slot) {
  const int32_t next = __shfl_down_sync(0xffffffffu, lane_slot, 1);
  const uint32_t follows =
      __ballot_sync(0xffffffffu, lane < kRun - 1 && lane_slot >= 0 && next == lane_slot + 1);
  return __popc(follows) < kRun - 4;
}

// Stores a chunk of K. With kMany it is rotated only here, for fewer registers.
template <bool kMany, typename T, typename C, int kVectors, typename Keys>
__device__ __forceinline__ void store_key(const PagesWrite& p, C* to, Keys& keys, int d,
                                          Elements16<T> (&k)[kVectors], const Divisor& k_scale) {
  if constexpr (kMany) keys.rotate(d, k);
  if (!p.values_only && keys.valid()) {
    *reinterpret_cast<Elements16<C>*>(to) = quantize<T, C>(k, k_scale);
  }
}

template <typename T, int kVectors>
__device__ __forceinline__ void load_chunk(Elements16<T> (&chunk)[kVectors],
                                           const Elements16<T>* from) {
#pragma unroll
  for (int i = 0; i < kVectors; ++i) chunk[i] = from[i];
}

// Stores whole rows of own tokens `writer`, writer + num_writers, ... Without `scattered` it stores
// none. `first`: own token 0.
template <typename T, typename C, int kThreads, int kRun, typename Keys>
__device__ __forceinline__ void store_whole_rows(const PagesWrite& p, Keys& keys,
                                                 int32_t (&own_slots)[kRun], int first,
                                                 bool scattered, uint32_t duplicates, int writer,
                                                 int num_writers, int thread) {
#pragma unroll 1
  for (int r = scattered ? writer : kRun; r < kRun; r += num_writers) {
    const int32_t slot = own_slots[r];
    if (slot < 0 || (duplicates >> r & 1)) continue;
    write_token<T, C>(p, keys, first + r, p.place(slot), thread, kThreads);
  }
}

// Stores the V of a CTA whose own slots are consecutive, from `start` on. `dims`: values of a
// token.
template <typename C, int kRun, int kLanes>
__device__ __forceinline__ void store_consecutive_values(const PagesTarget<C>& target,
                                                         const ValueTile<C, kRun, kLanes>& tile,
                                                         int32_t start, int slot_lane, int dims) {
  const PagesWrite& p = target.p;
  if (start % kRun == 0) {
    C* to = target.values(p.place(start));
    tile.template store_run<kRun * kLanes>(to, p.to_value_dim, dims, threadIdx.x);
    return;
  }
  C* to = target.values(p.place(start + slot_lane));
#pragma unroll
  for (int i = 0; i < kVecWidth<C>; ++i) {
    const int d = i * kLanes + threadIdx.x / kRun;
    if (d < dims) *stepped(to, d, p.to_value_dim) = tile.get(slot_lane, d);
  }
}

// Stores the V of any own slots that are no duplicates, token by token.
template <typename C, int kRun, int kLanes>
__device__ __forceinline__ void store_values(const PagesTarget<C>& target,
                                             const ValueTile<C, kRun, kLanes>& tile,
                                             const OwnList& own, uint32_t duplicates,
                                             bool scattered, int dims) {
  const PagesWrite& p = target.p;
  const int thread = threadIdx.x;
  constexpr int kThreads = kRun * kLanes;
  // Threads that share one row of the tile: at most as many as it has values.
  constexpr int kScatterLanes = kLanes * kVecWidth<C> < 32 ? kLanes * kVecWidth<C> : 32;
  const int lanes = scattered ? kScatterLanes : kRun;
  const int outer = thread / lanes, inner = thread % lanes, step = kThreads / lanes;
#pragma unroll 1
  for (int r = scattered ? own.from + outer * own.step : inner; r < kRun;
       r += scattered ? step * own.step : kRun) {
    const int32_t slot = own.slots[r];
    if (slot < 0 || (duplicates >> r & 1)) continue;
    C* to = target.values(p.place(slot));
    for (int d = scattered ? inner : outer; d < dims; d += scattered ? lanes : step) {
      *stepped(to, d, p.to_value_dim) = tile.get(r, d);
    }
  }
}

// A mask of the own tokens whose slot a later token has. All threads of the CTA call it.
// `lane_slot`: the own slot of this lane, in every warp.
template <int kRun, bool kMany, int kThreads, int kBatch>
__device__ __forceinline__ uint32_t find_own_duplicates(const PagesWrite& p, const OwnList& own,
                                                        const SlotFilter& filter, int from,
                                                        const LaterSlots<kBatch>& later, int lane,
                                                        int32_t lane_slot) {
  uint32_t duplicates;
  if constexpr (kMany) {
    const OwnFiltered filtered{.filter = &filter, .list = own};
    duplicates = find_duplicates<kRun>(p, from, kThreads, later, filtered);
  } else {
    duplicates = find_duplicates<kRun>(p, from, kThreads, later, own);
  }
  return duplicates | duplicates_in_warp(lane, lane < kRun ? lane_slot : -1);
}

// A CTA writes kRun consecutive tokens, and kLanes chunks of one head. A chunk is 16 bytes of the
// cache. Thread (x, y) loads chunk x of token y. K is stored by chunks. How V leaves shared memory
// depends on the own slots:
//   an aligned run of kRun slots   16 bytes a store
//   few runs                       neighbouring threads store neighbouring slots of one value
//   scattered                      neighbouring threads store neighbouring values of one slot
// A CTA with scattered slots stores only some of its tokens. With kMany it stores their whole rows
// (write_token); otherwise its chunks of every kFewBlocks-th token.
//
// blockDim.x = kRun * kLanes. gridDim.z = 1 with kMany, else kFewBlocks. `group` is the index of
// the kRun tokens, `head_split` that of the head's chunks. Whole rows are dealt round-robin: this
// CTA is `writer` of `num_writers`. Returns whether it stored whole rows. kRest: the caller has
// handled runs of consecutive slots already.
template <typename T, typename C, int kRun, int kLanes, bool kMany, bool kRest, typename Keys>
__device__ __forceinline__ bool write_pages(const PagesWrite& p, Keys keys, int group, int head,
                                            int head_split, int writer, int num_writers) {
  constexpr int kWidth = kVecWidth<C>;             // elements of a chunk
  constexpr int kVectors = kWidth / kVecWidth<T>;  // vectors of T a chunk
  constexpr int kThreads = kRun * kLanes;
  constexpr uint32_t kWarp = 0xffffffffu;
  __shared__ ValueTile<C, kRun, kLanes> tile;
  __shared__ int32_t own_slots[kRun];
  __shared__ SlotFilter filter;

  const int first = group * kRun, first_chunk = head_split * kLanes;  // `first`: in this launch
  const int thread = threadIdx.x;
  const int x = threadIdx.x % kLanes, row = threadIdx.x / kLanes, lane = threadIdx.x % 32;
  const int slot_lane = threadIdx.x % kRun, chunk = first_chunk + x;

  // Clamped instead of branching, so that all loads of the prologue are in flight together.
  const int num_tokens = p.num_tokens, token = min(first + row, num_tokens - 1);
  const int d = min(chunk * kWidth, p.head_size - kWidth);
  Elements16<T> k[kVectors], v[kVectors];
  const auto* value = reinterpret_cast<const Elements16<T>*>(p.value_at<T>(token, head, d));
  const int64_t* lane_slot_at = p.slot_mapping + min(first + slot_lane, num_tokens - 1);
  // Few tokens: prefetch before the PDL wait.
  if (!kRest && num_tokens <= kPrefetchTokens) {
    keys.prefetch(token, head, d);
    prefetch_l2(value);
    prefetch_l2(lane_slot_at);
  }
  wait_for_primary_kernel();
  const int64_t lane_slot_read = *lane_slot_at;  // every warp reads all own slots and decides alone
  if constexpr (!kRest) {
    keys.load(token, head, d, k);
    load_chunk(v, value);
  }
  // Keeps these loads first: the compiler would delay them behind those of the later slots.
  __syncwarp();
  const int from = first + kRun + thread;
  LaterSlots<kMany ? 8 : 1> later;
  later.load(p, from, kThreads);
  if constexpr (!kMany) keys.rotate(d, k);  // else later, for fewer registers
  const int32_t lane_slot = first + slot_lane < num_tokens ? p.usable(lane_slot_read) : -1;
  const int32_t start = __shfl_sync(kWarp, lane_slot, 0);
  const bool neighbours = __all_sync(kWarp, start >= 0 && lane_slot == start + slot_lane);

  const Divisor k_scale = divisor_of<C>(p.k_scale, p.scale_stride, head);
  const Divisor v_scale = divisor_of<C>(p.v_scale, p.scale_stride, head);
  const bool has_chunk = chunk * kWidth < p.head_size && first + row < num_tokens;
  const int dims = min(kLanes * kWidth, p.head_size - first_chunk * kWidth);
  const PagesTarget<C> target{.p = p, .head = head, .first_chunk = first_chunk};
  const auto store = [&](Slot at) {
    store_key<kMany>(p, target.key(at, chunk), keys, d, k, k_scale);
  };

  // Most prompts: consecutive slots without duplicates.
  if (!kRest && neighbours) {
    if (!kMany && blockIdx.z > 0) return false;
    tile.put(row, x, quantize<T, C>(v, v_scale));
    const OwnRange range{.start = start, .count = kRun};
    if (__syncthreads_or(duplicates_later(p, from, kThreads, later, range) != 0) == 0) {
      if (has_chunk) store(p.place(start + row));
      store_consecutive_values(target, tile, start, slot_lane, dims);
      return false;
    }
    later.load(p, from, kThreads);
  }

  const bool scattered = is_scattered<kRun>(lane, lane_slot);
  if (!kMany && !scattered && blockIdx.z > 0) return false;

  OwnList own{.slots = own_slots, .end = kRun};
  if (scattered) {  // only this CTA's tokens
    own.from = kMany ? writer : blockIdx.z;
    own.step = kMany ? num_writers : kFewBlocks;
  }
  if (thread < kRun) own_slots[thread] = lane_slot;
  if (kMany && thread < 32) filter.fill(lane, lane < kRun ? lane_slot : -1);
  __syncthreads();
  const uint32_t duplicates =
      find_own_duplicates<kRun, kMany, kThreads>(p, own, filter, from, later, lane, lane_slot);
  if constexpr (kMany) {
    // This branch around the loop frees the registers of k and v. Without it 8-bit caches spill.
    if (!kIs8Bit<C> || scattered) {
      store_whole_rows<T, C, kThreads>(p, keys, own_slots, first, scattered, duplicates, writer,
                                       num_writers, thread);
      if (scattered) return true;
    }
  }

  const int32_t slot = own_slots[row];
  const bool own_row = !scattered || row % kFewBlocks == own.from;
  if (own_row && has_chunk && slot >= 0 && (duplicates >> row & 1) == 0) {
    // Not earlier: it would hold registers.
    if constexpr (kRest) keys.load(token, head, d, k);
    store(p.place(slot));
    if constexpr (kRest) load_chunk(v, value);
    tile.put(row, x, quantize<T, C>(v, v_scale));
  }
  __syncthreads();
  store_values(target, tile, own, duplicates, scattered, dims);
  return false;
}

// For a grid whose y counts (head, head_split) pairs.
template <typename T, typename C, int kRun, int kLanes, bool kMany, typename Keys>
__device__ __forceinline__ void write_pages(const PagesWrite& p, const Keys& keys, int group) {
  const int head = p.by_head_splits.divide(blockIdx.y);
  write_pages<T, C, kRun, kLanes, kMany, false>(
      p, keys, group, head, blockIdx.y - head * p.head_splits, blockIdx.y, gridDim.y);
}

// Grid and block of write_pages. A CTA takes at most 16 chunks of a token, kFewChunks for few
// tokens. With `spread` it takes 8 also where 16 would leave SMs idle.
struct PagesShape {
  int lanes;
  bool idle;  // with 16 chunks a CTA some SMs would have none
  dim3 grid;
  PagesWrite write;

  PagesShape(const ReshapeAndCacheParams& p, int run, bool spread) : write(p) {
    const int chunks = p.kv.head_size / p.kv.x;
    const int64_t groups = ceil_div(p.num_tokens, run);
    const bool few = p.num_tokens <= kFewTokens;
    idle = spread && groups * p.kv.num_kv_heads < current_device_model().num_sms;
    lanes = few ? kFewChunks : run == 16 && (chunks <= 8 || idle) ? 8 : 16;
    write.head_splits = static_cast<int>(ceil_div(chunks, lanes));
    write.by_head_splits = FastDivisor(write.head_splits);
    write.by_head_size = FastDivisor(p.kv.head_size);
    grid = dim3(static_cast<unsigned>(groups),
                static_cast<unsigned>(p.kv.num_kv_heads * write.head_splits), few ? kFewBlocks : 1);
  }
};

// Whether every 16-byte access of write_pages is aligned and its grid can be launched.
inline bool pages_aligned(const ReshapeAndCacheParams& p) {
  const PagedKv& kv = p.kv;
  return kv.block_size % 8 == 0 && inputs_aligned(p) && CacheWrite::fits(p) && aligned16(kv.key) &&
         aligned16(kv.value) &&
         multiples(kv.x, {kv.head_size, kv.key_block_stride, kv.key_head_stride,
                          kv.value_block_stride, kv.value_head_stride}) &&
         int64_t{kv.num_kv_heads} * (kv.head_size / kv.x) <= 65535;
}

}  // namespace vllm_kernels::cuda
