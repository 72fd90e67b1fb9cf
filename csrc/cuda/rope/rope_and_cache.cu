// rope_and_cache and fused_qk_norm_rope: bias, RMS norm and rotation of a layer's projected heads.
// The query is rotated in place; key and value are stored in a paged cache. Without a cache the key
// is rotated in place, too. launch() chooses among three kernels:
//
//   rope_and_cache_kernel      any input, this file
//   launch_writers()           no bias, no norm: the cache writers' bodies with RotatedKeys,
//                              rope_and_cache_writers.cu
//   launch_many()              the same inputs, many tokens: rope_and_cache_prefill.cu
//
// Shapes: query, key, value [num_tokens, heads, head_size]. A row is one head of one token.
// rope_and_cache_kernel has grid (CTAs that store, then CTAs that rotate in place) and block (lanes
// of a row, rows). Before the PDL wait nothing is read; for few tokens addresses are prefetched
// into L2. rope_heads.cuh has the arithmetic, rope_rows.cuh the addressing of a row.
#include "ops/rope_and_cache.h"

#include <algorithm>
#include <bit>

#include "cuda/base/launch.cuh"
#include "cuda/base/prefetch.cuh"
#include "cuda/launchers.h"
#include "cuda/rope/heuristics.h"
#include "cuda/rope/rope_rows.cuh"

namespace vllm_kernels::cuda {

bool vecs_fit(const RopeAndCacheParams& p) {
  const int64_t width = 16 / size_of(p.dtype);
  const auto fits = [&](const ProjectedHeads& heads) {
    return aligned16(heads.data) && aligned16(heads.bias) && aligned16(heads.weight) &&
           multiples(width, {heads.token_stride, heads.head_stride});
  };
  const auto aligned = [&](const void* data, DType dtype) {
    return reinterpret_cast<uintptr_t>(data) % (width * size_of(dtype)) == 0;
  };
  const PagedKv& kv = p.kv;
  const bool cache_fits =
      multiples(width, {kv.key_block_stride, kv.key_head_stride, kv.key_token_stride}) &&
      (kv.value_dim_stride != 1 ||
       multiples(width, {kv.value_block_stride, kv.value_head_stride, kv.value_token_stride}));
  return (p.cos_sin_dtype == p.dtype || p.cos_sin_dtype == DType::kFloat32) && fits(p.query) &&
         fits(p.key) && fits(p.value) && aligned(p.cos_sin_cache, p.cos_sin_dtype) &&
         multiples(width, {p.head_size, p.rotary_size / 2, p.cos_sin_stride}) && cache_fits &&
         aligned(kv.key, kv.dtype) && aligned(kv.value, kv.dtype);
}

namespace {

constexpr int kThreads = 256;
constexpr int kOwnTokens = 32;  // of a CTA that stores

// How rows are distributed. CTAs that store keys and values come first, CTAs that rotate in place
// after them. A CTA takes blockDim.y rows.
struct RowBlocks {
  int storing = 0;            // CTAs that store
  FastDivisor stored_heads;   // by the heads of a token in key and value
  FastDivisor inplace_heads;  // by the heads of a token in query (without a cache: and key)
  FastDivisor block_size;
};

template <typename T, typename A, int kWidth, int kVecPairs, bool kFew>
__device__ __forceinline__ void rotate_in_place(const RopeAndCacheParams& p,
                                                const RowBlocks& blocks) {
  const ProjectedHeads second = p.stores ? ProjectedHeads{} : p.key;
  const int rows = static_cast<int>(p.num_tokens) * (p.query.count + second.count);
  const int r = (blockIdx.x - blocks.storing) * blockDim.y + threadIdx.y;
  const bool inside = r < rows;
  const HeadRow<T> row(p.query, second, blocks.inplace_heads, inside ? r : 0);
  Lane<T, A, kWidth, kVecPairs> lane;
  const auto vec_pairs = lane.vec_pairs(p, false, inside, threadIdx.x, blockDim.x);
  if constexpr (kFew) lane.prefetch(p, row, vec_pairs);
  wait_for_primary_kernel();
  const bool valid = lane.load(p, row, vec_pairs);
  prepare(p, row, vec_pairs, lane.angles, blockDim.x, lane.x);
  if (valid) lane.x.store(vec_pairs, row.start);  // else the row stays unchanged
}

// Few tokens, and all rows of a warp belong to one token. Every warp checks alone whether its slot
// is a duplicate, without a barrier.
template <typename T, typename C, typename A, int kWidth, int kVecPairs>
__device__ __forceinline__ void store_few(const RopeAndCacheParams& p, const RowBlocks& blocks,
                                          const SlotMapping& slots) {
  const int rows = static_cast<int>(p.num_tokens) * (p.key.count + p.value.count);
  const int r = blockIdx.x * blockDim.y + threadIdx.y;
  const bool inside = r < rows;
  const HeadRow<T> row(p.key, p.value, blocks.stored_heads, inside ? r : 0);
  Lane<T, A, kWidth, kVecPairs> lane;
  const auto vec_pairs = lane.vec_pairs(p, row.is_second, inside, threadIdx.x, blockDim.x);
  lane.prefetch(p, row, vec_pairs);
  prefetch_l2(p.slot_mapping + min(row.token, static_cast<int>(p.num_slots) - 1));
  wait_for_primary_kernel();
  const int32_t slot = slot_of(slots, row.token);
  const bool valid = lane.load(p, row, vec_pairs);
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  const bool duplicate = is_duplicate(slots, row.token, slot, thread % 32);
  prepare(p, row, vec_pairs, lane.angles, blockDim.x, lane.x);
  if ((!valid && !row.is_second) || slot < 0 || duplicate) return;
  const CacheRow<C> to(p.kv, !row.is_second, row.head,
                       place_of(slot, blocks.block_size, p.kv.block_size));
  lane.x.each(vec_pairs, [&](const Vec<T, kWidth>& vec, int d) { to.store(to.round(vec), d); });
}

// The CTA scans the later slots once for all its rows.
template <typename T, typename C, typename A, int kWidth, int kVecPairs>
__device__ __forceinline__ void store_many(const RopeAndCacheParams& p, const RowBlocks& blocks,
                                           const SlotMapping& slots) {
  const int rows = static_cast<int>(p.num_tokens) * (p.key.count + p.value.count);
  const int first_row = blockIdx.x * blockDim.y;
  const int end_row = min(rows, first_row + static_cast<int>(blockDim.y));
  const int first_token = blocks.stored_heads.divide(first_row);
  const int end_token = static_cast<int>(blocks.stored_heads.divide(end_row - 1)) + 1;
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  const int threads = blockDim.x * blockDim.y;
  const int r = first_row + threadIdx.y;
  const bool inside = r < end_row;
  const HeadRow<T> row(p.key, p.value, blocks.stored_heads, inside ? r : first_row);
  Lane<T, A, kWidth, kVecPairs> lane;
  const auto vec_pairs = lane.vec_pairs(p, row.is_second, inside, threadIdx.x, blockDim.x);
  __shared__ int32_t own_slots[kOwnTokens];
  __shared__ uint32_t own_duplicates;
  wait_for_primary_kernel();
  const int32_t slot_here =
      first_token + thread < end_token ? slot_of(slots, first_token + thread) : -1;
  const bool valid = lane.load(p, row, vec_pairs);
  const int from = end_token + thread;
  LaterSlots<16> later;
  later.load(slots, from, threads);
  if (thread < 32) {
    own_slots[thread] = slot_here;
    const uint32_t duplicates = duplicates_in_warp(thread, slot_here);
    if (thread == 0) own_duplicates = duplicates;
  }
  __syncthreads();
  const OwnList list{.slots = own_slots, .end = end_token - first_token};
  const uint32_t duplicates =
      own_duplicates | find_duplicates<kOwnTokens>(slots, from, threads, later, list);
  const int own = row.token - first_token;
  const int32_t slot = own_slots[own];
  prepare(p, row, vec_pairs, lane.angles, blockDim.x, lane.x);
  if ((!valid && !row.is_second) || slot < 0 || (duplicates >> own & 1)) return;
  const CacheRow<C> to(p.kv, !row.is_second, row.head,
                       place_of(slot, blocks.block_size, p.kv.block_size));
  lane.x.each(vec_pairs, [&](const Vec<T, kWidth>& vec, int d) { to.store(to.round(vec), d); });
}

// Resident CTAs an SM, for __launch_bounds__. With one more, conversions or float32 angles would
// spill.
template <typename T, typename C, typename A, int kWidth>
constexpr int kMinBlocks = kWidth == 1                           ? 2
                           : kIs8Bit<C> || sizeof(A) > sizeof(T) ? 3
                                                                 : 4;

template <typename T, typename C, typename A, int kWidth, int kVecPairs, bool kFew>
__global__ void __launch_bounds__(kThreads, kMinBlocks<T, C, A, kWidth>)
    rope_and_cache_kernel(RopeAndCacheParams p, RowBlocks blocks) {
  launch_dependents();
  if (static_cast<int>(blockIdx.x) >= blocks.storing) {
    rotate_in_place<T, A, kWidth, kVecPairs, kFew>(p, blocks);
    return;
  }
  const SlotMapping slots{p.slot_mapping, p.num_slots, p.kv.num_blocks * p.kv.block_size};
  if constexpr (kFew) {
    store_few<T, C, A, kWidth, kVecPairs>(p, blocks, slots);
  } else {
    store_many<T, C, A, kWidth, kVecPairs>(p, blocks, slots);
  }
}

template <typename T, typename C, typename A, int kWidth>
void launch_width(const RopeAndCacheParams& p, Stream stream) {
  const bool stores = p.stores;
  const int64_t stored = stores ? p.key.count + p.value.count : 0;
  const int64_t inplace = p.query.count + (stores ? 0 : p.key.count);
  const auto num_pairs = static_cast<unsigned>(ceil_div(p.head_size, 2 * kWidth));
  const int64_t lanes = std::min(32u, std::bit_ceil(num_pairs));
  int64_t rows = kThreads / lanes;  // of a CTA
  constexpr bool kMayBeFew = kWidth > 1;
  const bool few = kMayBeFew && p.num_tokens <= kFewRopeTokens && stored * lanes % 32 == 0;
  RowBlocks blocks;
  if (stored > 0) {
    if (!few) {  // whole warps, of at most kOwnTokens tokens
      const int64_t of_warp = 32 / lanes;
      rows = std::max(std::min(rows, (kOwnTokens - 1) * stored) / of_warp, int64_t{1}) * of_warp;
    }
    blocks.storing = static_cast<int>(ceil_div(p.num_tokens * stored, rows));
  }
  blocks.stored_heads = FastDivisor(std::max<int64_t>(stored, 1));
  blocks.inplace_heads = FastDivisor(std::max<int64_t>(inplace, 1));
  blocks.block_size = FastDivisor(std::max(p.kv.block_size, 1));
  // With one element an access, a head of 256 has 128 pairs: 4 a lane.
  constexpr int kVecPairs = kWidth == 1 ? 4 : 1;
  const auto kernel = few ? rope_and_cache_kernel<T, C, A, kWidth, kVecPairs, kMayBeFew>
                          : rope_and_cache_kernel<T, C, A, kWidth, kVecPairs, false>;
  launch_kernel(
      p.op, kernel, grid_size(p.op, blocks.storing + ceil_div(p.num_tokens * inplace, rows)),
      dim3(static_cast<unsigned>(lanes), static_cast<unsigned>(rows)), 0, stream, p, blocks);
}

void launch_once(const RopeAndCacheParams& p, Stream stream) {
  dispatch_float(p.dtype, [&](auto model) {
    using T = decltype(model);
    dispatch_cache<T>(p.kv.dtype, [&](auto stored) {
      using C = decltype(stored);
      if (!vecs_fit(p)) {
        launch_width<T, C, float, 1>(p, stream);
      } else if (p.cos_sin_dtype == p.dtype) {
        launch_width<T, C, T, kVecWidth<T>>(p, stream);
      } else {
        launch_width<T, C, float, kVecWidth<T>>(p, stream);
      }
    });
  });
}

}  // namespace

ReshapeAndCacheParams as_write(const RopeAndCacheParams& p) {
  return {.key = p.key.data,
          .value = p.value.data,
          .key_token_stride = p.key.token_stride,
          .key_head_stride = p.key.head_stride,
          .value_token_stride = p.value.token_stride,
          .value_head_stride = p.value.head_stride,
          .kv = p.kv,
          .slot_mapping = p.slot_mapping,
          .num_tokens = p.num_slots,
          .dtype = p.dtype,
          .op = p.op};
}

// At most kTokensPerLaunch tokens a launch: rows are numbered in 31 bits, and duplicate slots are
// found within a launch.
void launch(const RopeAndCacheParams& params, Stream stream) {
  RopeAndCacheParams slice = params;
  const bool stores = params.stores && params.num_slots > 0;
  const bool paged = params.kv.value_dim_stride != 1;
  const bool gains = params.num_tokens >= (paged ? kMinPagedWriterTokens : kMinRowWriterTokens);
  const bool in_writers = stores && gains && fits_writers(params);
  const bool in_many = in_writers && (!paged || fits_runs(params));
  // In layout vllm a token's values lie block_size elements apart. The cache writer gathers several
  // tokens and stores whole sectors where the slots allow. It cannot add a bias.
  if (stores && paged && !in_writers && params.num_tokens > 1 && params.value.bias == nullptr) {
    slice.value.count = 0;
    ReshapeAndCacheParams values = as_write(params);
    values.key = values.value;
    values.key_token_stride = values.value_token_stride;
    values.key_head_stride = values.value_head_stride;
    values.values_only = true;
    launch(values, stream);
  }
  const int64_t size = size_of(params.dtype);
  const auto advance = [&](ProjectedHeads& heads, const ProjectedHeads& all, int64_t tokens) {
    heads.data = static_cast<char*>(all.data) + tokens * all.token_stride * size;
  };
  for (int64_t done = 0; done < params.num_tokens; done += kTokensPerLaunch) {
    slice.num_tokens = std::min(kTokensPerLaunch, params.num_tokens - done);
    slice.num_slots = std::clamp<int64_t>(params.num_slots - done, 0, slice.num_tokens);
    if (params.stores) slice.slot_mapping = params.slot_mapping + done;
    slice.positions = params.positions + done;
    advance(slice.query, params.query, done);
    advance(slice.key, params.key, done);
    advance(slice.value, params.value, done);
    const auto launch_slice = in_many && slice.num_slots > kManySlots ? launch_many
                              : in_writers                            ? launch_writers
                                                                      : launch_once;
    launch_slice(slice, stream);
  }
}

}  // namespace vllm_kernels::cuda
