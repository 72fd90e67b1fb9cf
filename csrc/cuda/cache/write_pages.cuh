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
#include "cuda/cache/kv_writer.cuh"
#include "ops/reshape_and_cache.h"

namespace vllm_kernels::cuda {

// Up to kFewTokens tokens, a CTA stores scattered tokens from the values it has loaded. To get
// enough CTAs, a CTA then takes at most kFewChunks chunks of a head. kFewBlocks CTAs share its
// tokens.
constexpr int kFewTokens = 64;
constexpr int kFewChunks = 4;
constexpr int kFewBlocks = 4;

// Resident CTAs an SM (of 256 threads), for __launch_bounds__: as many as registers allow. One
// CTA's memory accesses then overlap another's instructions.
template <typename T, typename C, bool kMany>
constexpr int kResident = !kMany || kVecWidth<C> > 2 * kVecWidth<T> ? 2
                          : kIs8Bit<C>                              ? 3
                                                                    : 6;

struct PagesWrite : CacheWrite {
  FastDivisor by_head_size;
  FastDivisor by_parts;
  int32_t parts;  // CTAs that share the chunks of one head

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
    Vector<T> k[kVectors];
    keys.load(token, head, d, k);
    keys.rotate(d, k);
    if (!keys.valid()) return;
    C* to = stepped(stepped(key_cache, head, p.to_key_head), d / kWidth, p.to_key_chunk);
    store_streaming(reinterpret_cast<Vector<C>*>(to),
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
  __device__ __forceinline__ void put(int token, int lane, const Vector<C>& chunk) {
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
// the kRun tokens, `part` that of the head's chunks. `rotate` of `rotates` is this CTA's share of
// the whole rows; they are dealt round-robin. Returns whether whole rows were stored. kRest: the
// caller has handled runs of consecutive slots already.
template <typename T, typename C, int kRun, int kLanes, bool kMany, bool kRest, typename Keys>
__device__ __forceinline__ bool write_pages(const PagesWrite& p, Keys keys, int group, int head,
                                            int part, int rotate, int rotates) {
  constexpr int kWidth = kVecWidth<C>;             // elements of a chunk
  constexpr int kVectors = kWidth / kVecWidth<T>;  // vectors of T a chunk
  constexpr int kThreads = kRun * kLanes;
  constexpr uint32_t kWarp = 0xffffffffu;
  __shared__ ValueTile<C, kRun, kLanes> tile;
  __shared__ int32_t own_slots[kRun];
  __shared__ SlotFilter filter;

  const int first = group * kRun;  // relative to this launch
  const int first_chunk = part * kLanes;
  const int thread = threadIdx.x;
  const int x = threadIdx.x % kLanes, row = threadIdx.x / kLanes, lane = threadIdx.x % 32;
  const int slot_lane = threadIdx.x % kRun;
  const int chunk = first_chunk + x;

  // Clamped instead of branching, so that all loads of the prologue are in flight together.
  const int num_tokens = p.num_tokens;
  const int d = min(chunk * kWidth, p.head_size - kWidth);
  Vector<T> k[kVectors], v[kVectors];
  const int token = min(first + row, num_tokens - 1);
  const auto* value = reinterpret_cast<const Vector<T>*>(stepped(
      stepped(static_cast<const T*>(p.value) + d, token, p.value_token), head, p.value_head));
  const auto fetch_value = [&] {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) v[i] = value[i];
  };
  const int64_t* lane_slot_at = p.slot_mapping + min(first + slot_lane, num_tokens - 1);
  // Few tokens: prefetch before the PDL wait.
  if (!kRest && num_tokens <= 1024) {
    keys.prefetch(token, head, d);
    prefetch_l2(value);
    prefetch_l2(lane_slot_at);
  }
  wait_for_primary_kernel();
  const int64_t lane_slot_read = *lane_slot_at;  // every warp reads all own slots and decides alone
  if constexpr (!kRest) {
    keys.load(token, head, d, k);
    fetch_value();
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
  // Value 0 of this CTA's chunks, for a token.
  const auto values_of = [&](Slot at) {
    return stepped(stepped(page(static_cast<C*>(p.value_cache), at.block, p.to_value_block), head,
                           p.to_value_head),
                   first_chunk * kWidth, p.to_value_dim) +
           static_cast<uint32_t>(at.token);
  };
  const auto store_key = [&](Slot at) {
    C* to = stepped(stepped(page(static_cast<C*>(p.key_cache), at.block, p.to_key_block), head,
                            p.to_key_head),
                    chunk, p.to_key_chunk) +
            static_cast<uint32_t>(at.token * kWidth);
    if constexpr (kMany) keys.rotate(d, k);
    if (!p.values_only && keys.valid()) {
      *reinterpret_cast<Vector<C>*>(to) = quantize<T, C>(k, k_scale);
    }
  };

  // Most prompts: consecutive slots without duplicates.
  if (!kRest && neighbours) {
    if (!kMany && blockIdx.z > 0) return false;
    tile.put(row, x, quantize<T, C>(v, v_scale));
    const OwnRange range{.start = start, .count = kRun};
    if (__syncthreads_or(repeated_later(p, from, kThreads, later, range) != 0) == 0) {
      if (has_chunk) store_key(p.place(start + row));
      if (start % kRun == 0) {
        C* to = values_of(p.place(start));
        tile.template store_run<kThreads>(to, p.to_value_dim, dims, threadIdx.x);
      } else {
        C* to = values_of(p.place(start + slot_lane));
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          const int d = i * kLanes + threadIdx.x / kRun;
          if (d < dims) *stepped(to, d, p.to_value_dim) = tile.get(slot_lane, d);
        }
      }
      return false;
    }
    later.load(p, from, kThreads);
  }

  const int32_t next = __shfl_down_sync(kWarp, lane_slot, 1);
  const uint32_t follows =
      __ballot_sync(kWarp, lane < kRun - 1 && lane_slot >= 0 && next == lane_slot + 1);
  const bool scattered = __popc(follows) < kRun - 4;
  if (!kMany && !scattered && blockIdx.z > 0) return false;

  OwnList own{.slots = own_slots, .end = kRun};
  if (scattered) {  // only this CTA's tokens
    own.from = kMany ? rotate : blockIdx.z;
    own.step = kMany ? rotates : kFewBlocks;
  }
  if (thread < kRun) own_slots[thread] = lane_slot;
  if (kMany && thread < 32) filter.fill(lane, lane < kRun ? lane_slot : -1);
  __syncthreads();
  uint32_t repeated;
  if constexpr (kMany) {
    const OwnFiltered filtered{.filter = &filter, .list = own};
    repeated = find_duplicates<kRun>(p, from, kThreads, later, filtered);
  } else {
    repeated = find_duplicates<kRun>(p, from, kThreads, later, own);
  }
  repeated |= repeated_in_warp(lane, lane < kRun ? lane_slot : -1);
  if constexpr (kMany) {
    // This branch around the loop frees the registers of k and v. Without it 8-bit caches spill.
    if (!kIs8Bit<C> || scattered) {
#pragma unroll 1
      for (int r = scattered ? rotate : kRun; r < kRun; r += rotates) {
        const int32_t slot = own_slots[r];
        if (slot < 0 || (repeated >> r & 1)) continue;
        write_token<T, C>(p, keys, first + r, p.place(slot), thread, kThreads);
      }
      if (scattered) return true;
    }
  }

  const int32_t slot = own_slots[row];
  const bool own_row = !scattered || row % kFewBlocks == own.from;
  if (own_row && has_chunk && slot >= 0 && (repeated >> row & 1) == 0) {
    // Not earlier: it would hold registers.
    if constexpr (kRest) keys.load(token, head, d, k);
    store_key(p.place(slot));
    if constexpr (kRest) fetch_value();
    tile.put(row, x, quantize<T, C>(v, v_scale));
  }
  __syncthreads();
  // Threads that share one row of the tile: at most as many as it has values.
  constexpr int kScatterLanes = kLanes * kWidth < 32 ? kLanes * kWidth : 32;
  const int lanes = scattered ? kScatterLanes : kRun;
  const int outer = thread / lanes, inner = thread % lanes, step = kThreads / lanes;
#pragma unroll 1
  for (int r = scattered ? own.from + outer * own.step : inner; r < kRun;
       r += scattered ? step * own.step : kRun) {
    const int32_t to_slot = own_slots[r];
    if (to_slot < 0 || (repeated >> r & 1)) continue;
    const Slot at = p.place(to_slot);
    C* to = values_of(at);
    for (int d = scattered ? inner : outer; d < dims; d += scattered ? lanes : step) {
      *stepped(to, d, p.to_value_dim) = tile.get(r, d);
    }
  }
  return false;
}

// For a grid whose y counts (head, part) pairs.
template <typename T, typename C, int kRun, int kLanes, bool kMany, typename Keys>
__device__ __forceinline__ void write_pages(const PagesWrite& p, const Keys& keys, int group) {
  const int head = p.by_parts.divide(blockIdx.y);
  write_pages<T, C, kRun, kLanes, kMany, false>(p, keys, group, head, blockIdx.y - head * p.parts,
                                                blockIdx.y, gridDim.y);
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
    idle = spread && groups * p.kv.num_kv_heads < current_device_info().num_sms;
    lanes = few ? kFewChunks : run == 16 && (chunks <= 8 || idle) ? 8 : 16;
    write.parts = static_cast<int>(ceil_div(chunks, lanes));
    write.by_parts = FastDivisor(write.parts);
    write.by_head_size = FastDivisor(p.kv.head_size);
    grid = dim3(static_cast<unsigned>(groups),
                static_cast<unsigned>(p.kv.num_kv_heads * write.parts), few ? kFewBlocks : 1);
  }
};

// Whether every 16-byte access of write_pages is aligned and its grid can be launched.
inline bool pages_aligned(const ReshapeAndCacheParams& p) {
  const PagedKv& kv = p.kv;
  return kv.block_size % 8 == 0 && kv.head_size % kv.x == 0 && inputs_aligned(p) &&
         CacheWrite::fits(p) && aligned16(kv.key) && aligned16(kv.value) &&
         kv.key_block_stride % kv.x == 0 && kv.key_head_stride % kv.x == 0 &&
         kv.value_block_stride % kv.x == 0 && kv.value_head_stride % kv.x == 0 &&
         int64_t{kv.num_kv_heads} * (kv.head_size / kv.x) <= 65535;
}

}  // namespace vllm_kernels::cuda
