#include "ops/reshape_and_cache.h"

#include <algorithm>

#include "cuda/cache_element.cuh"
#include "cuda/fast_divisor.cuh"
#include "cuda/launch.cuh"
#include "cuda/launchers.h"
#include "cuda/pack.cuh"
#include "cuda/slots.cuh"
#include "cuda/types.cuh"
#include "cuda/write_rows.cuh"

namespace vllm_kernels::cuda {
namespace {

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
template <typename T, typename C>
__device__ __forceinline__ void write_token(const ReshapeAndCacheParams& p, FastDivisor head_size,
                                            int64_t token, Place at, int thread, int threads) {
  const PagedKv& kv = p.kv;
  const T* key = static_cast<const T*>(p.key) + token * p.key_token_stride;
  const T* value = static_cast<const T*>(p.value) + token * p.value_token_stride;
  C* keys = static_cast<C*>(kv.key) + at.block * kv.key_block_stride + at.token * kv.x;
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
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      k[j] = reinterpret_cast<const Vector<T>*>(key + head * p.key_head_stride + d)[j];
    }
    C* to = keys + head * kv.key_head_stride + d / kWidth * kv.key_chunk_stride;
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
// kFewBlocks.
template <typename T, typename C, int kRun, bool kMany>
__global__ void __launch_bounds__(kRun * 16, kResident<T, C, kMany> * 16 / kRun)
    write_pages_kernel(ReshapeAndCacheParams p, FastDivisor block_size, FastDivisor parts,
                       FastDivisor head_size) {
  launch_dependents();
  constexpr int kWidth = kVectorWidth<C>;                // elements of a chunk
  constexpr int kVectors = kWidth / kVectorWidth<T>;     // of T that make a chunk
  constexpr int kStore = kWidth < kRun ? kWidth : kRun;  // tokens of one store of V
  constexpr uint32_t kAll = (1u << kRun) - 1;
  extern __shared__ __align__(16) char tile_bytes[];
  __shared__ int32_t own_slots[kRun];

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
  {
    const int token = min(first + row, num_tokens - 1);
    const int d = min(chunk * kWidth, kv.head_size - kWidth);
    const auto* key = reinterpret_cast<const Vector<T>*>(
        static_cast<const T*>(p.key) + token * p.key_token_stride + head * p.key_head_stride + d);
    const auto* value = reinterpret_cast<const Vector<T>*>(static_cast<const T*>(p.value) +
                                                           token * p.value_token_stride +
                                                           head * p.value_head_stride + d);
    if (num_tokens <= 1024) {  // few: under way before the wait
      prefetch_l2(key);
      prefetch_l2(value);
      prefetch_l2(p.slot_mapping + min(first + thread, num_tokens - 1));
    }
    wait_for_predecessor();
#pragma unroll
    for (int i = 0; i < kVectors; ++i) k[i] = key[i];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) v[i] = value[i];
  }
  // Every warp finds out for itself.
  const int32_t lane_slot = lane < kRun ? slot_of(p, first + lane) : -1;
  const int from = first + kRun + thread;
  LaterSlots later;
  later.load(p, from, threads);
  const int32_t next = __shfl_down_sync(0xffffffffu, lane_slot, 1);
  const uint32_t follows =
      __ballot_sync(0xffffffffu, lane_slot >= 0 && next == lane_slot + 1) & (kAll >> 1);
  const int32_t start = __shfl_sync(0xffffffffu, lane_slot, 0);
  const bool neighbours = follows == kAll >> 1;
  const bool scattered = __popc(follows) < kRun - 4;
  if (!kMany && !scattered && blockIdx.z > 0) return;

  OwnSlots own{.start = start, .count = neighbours ? kRun : 0u, .list = own_slots};
  if (!neighbours) own.end = kRun;
  if (scattered) {  // this block's tokens only
    own.from = kMany ? blockIdx.y : blockIdx.z;
    own.step = kMany ? gridDim.y : kFewBlocks;
  }
  if (thread < kRun) own_slots[thread] = lane_slot;
  __syncthreads();
  const uint32_t repeated =
      repeated_in_warp(lane, lane_slot) | find_repeated<kRun>(p, from, threads, later, own);
  if constexpr (kMany) {
    // Around the loop a branch, in which k and v need no registers: 8 bits spill without.
    if (!kIs8Bit<C> || scattered) {
#pragma unroll 1
      for (int r = scattered ? blockIdx.y : kRun; r < kRun; r += gridDim.y) {
        const int32_t slot = own_slots[r];
        if (slot < 0 || (repeated >> r & 1)) continue;
        write_token<T, C>(p, head_size, first + r, place_of(slot, block_size, kv.block_size),
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
    if (!p.values_only) *reinterpret_cast<Vector<C>*>(to) = narrow<T, C>(k, k_scale);
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

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// Block shape: whole warps, at most 16 chunks a token, fewer where that leaves multiprocessors
// idle. For few tokens 2 or 4 chunks: a power of two, as the kernel divides warps by it.
struct PagesShape {
  int lanes;
  int parts;
  dim3 grid;
};

PagesShape shape_of(const ReshapeAndCacheParams& p, int run) {
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
          .grid = dim3(static_cast<unsigned>(groups),
                       static_cast<unsigned>(p.kv.num_kv_heads * parts), few ? kFewBlocks : 1)};
}

template <int kRun>
void launch_pages(const ReshapeAndCacheParams& p, Stream stream) {
  const PagesShape shape = shape_of(p, kRun);
  const int64_t tile_bytes = int64_t{kRun} * (shape.lanes + 1) * 16;
  dispatch_float(p.dtype, [&](auto model) {
    using T = decltype(model);
    dispatch_cache<T>(p.kv.dtype, [&](auto stored) {
      using C = decltype(stored);
      const auto kernel = p.num_tokens > kFewTokens ? write_pages_kernel<T, C, kRun, true>
                                                    : write_pages_kernel<T, C, kRun, false>;
      launch_kernel(p.op(), kernel, shape.grid, dim3(shape.lanes, kRun), tile_bytes, stream, p,
                    FastDivisor(p.kv.block_size), FastDivisor(shape.parts),
                    FastDivisor(p.kv.head_size));
    });
  });
}

// Every 16-byte access of write_pages_kernel is aligned, and its grid can be launched.
bool pages_aligned(const ReshapeAndCacheParams& p) {
  const PagedKv& kv = p.kv;
  return kv.block_size % 8 == 0 && kv.head_size % kv.x == 0 && inputs_aligned(p) &&
         aligned16(kv.key) && aligned16(kv.value) && kv.key_block_stride % kv.x == 0 &&
         kv.key_head_stride % kv.x == 0 && kv.value_block_stride % kv.x == 0 &&
         kv.value_head_stride % kv.x == 0 &&
         int64_t{kv.num_kv_heads} * (kv.head_size / kv.x) <= 65535;
}

void launch_once(const ReshapeAndCacheParams& p, Stream stream) {
  if (p.kv.layout == KvLayout::kNHD) return launch_rows(p, stream);
  if (!pages_aligned(p)) return launch_elements(p, stream);
  p.kv.block_size % 16 == 0 ? launch_pages<16>(p, stream) : launch_pages<8>(p, stream);
}

}  // namespace

void launch(const ReshapeAndCacheParams& params, Stream stream) {
  ReshapeAndCacheParams part = params;
  const int64_t size = size_of(params.dtype);
  for (int64_t done = 0; done < params.num_tokens; done += kTokensPerLaunch) {
    part.num_tokens = std::min(kTokensPerLaunch, params.num_tokens - done);
    part.slot_mapping = params.slot_mapping + done;
    part.key = static_cast<const char*>(params.key) + done * params.key_token_stride * size;
    part.value = static_cast<const char*>(params.value) + done * params.value_token_stride * size;
    launch_once(part, stream);
  }
}

}  // namespace vllm_kernels::cuda
