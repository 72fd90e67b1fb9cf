// copy_slots (ops/pages/copy_slots.h), one launch for all caches.
//
//   grid   (accesses of a token, shared by CTAs; caches)
//   CTA    has a few accesses, of 16 bytes or an element, of the tokens of all pairs: it reads them
//          into shared memory, then writes them. No other CTA reads or writes these bytes, so pairs
//          may overlap in any way.
//
// Nothing is read before the PDL wait. A pair with a slot out of range is skipped.
#include "ops/pages/copy_slots.h"

#include <algorithm>

#include "cuda/base/fast_divmod.cuh"
#include "cuda/base/launch.cuh"
#include "cuda/base/types.cuh"
#include "cuda/launchers.h"

namespace vllm_kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTileBytes = 64 << 10;        // shared memory, at most
constexpr int kWantedTileBytes = 16 << 10;  // for enough CTAs

// Caches travel as kernel parameters, about 2.7 KB of the 4 KB allowed. So no table is uploaded,
// and a CUDA graph holds all it needs. K and V of all layers have two geometries.
constexpr int kMaxCaches = 256;
constexpr int kMaxGeometries = 4;

struct CacheTile {
  TokenGeometry token;
  int width;           // bytes of an access
  int accesses;        // of a token
  int per_cta;         // accesses of a token
  bool tokens_first;   // neighbouring threads take neighbouring pairs, else neighbouring accesses
  FastDivisor by_run;  // accesses of a run
  FastDivisor by_cta;  // per_cta
};

struct SlotCaches {
  char* start[kMaxCaches];
  uint8_t tile[kMaxCaches];
  CacheTile tiles[kMaxGeometries];
  int count = 0;
  int num_tiles = 0;
};

struct SlotPairs {
  const int64_t *src, *dst;
  int count;
  int64_t num_slots;  // of a cache
  int block_size;
  FastDivisor by_count, by_block_size;
};

// Moves the accesses [first, first + per_cta) of all tokens.
template <typename V>
__device__ __forceinline__ void copy_accesses(const CacheTile& tile, const SlotPairs& pairs,
                                              char* start, int first, char* shared) {
  V* held = reinterpret_cast<V*>(shared);
  const int count = tile.per_cta * pairs.count;
  const int per_run = tile.token.run_bytes / sizeof(V);
  // Calls move(element of `held`, address in the cache) for slots src or dst.
  const auto for_each = [&](const int64_t* slots, const auto& move) {
#pragma unroll 4
    for (int i = threadIdx.x; i < count; i += kThreads) {
      int pair, access;
      if (tile.tokens_first) {
        access = pairs.by_count.divide(i);
        pair = i - access * pairs.count;
      } else {
        pair = tile.by_cta.divide(i);
        access = i - pair * tile.per_cta;
      }
      access += first;
      const int64_t from = pairs.src[pair], to = pairs.dst[pair];
      const bool good = from >= 0 && from < pairs.num_slots && to >= 0 && to < pairs.num_slots;
      if (!good || access >= tile.accesses) continue;
      const int slot = static_cast<int>(slots[pair]);
      const int block = pairs.by_block_size.divide(slot), run = tile.by_run.divide(access);
      move(held[i],
           reinterpret_cast<V*>(start + block * tile.token.block_stride +
                                (slot - block * pairs.block_size) * tile.token.token_stride +
                                run * tile.token.run_stride +
                                (access - run * per_run) * static_cast<int64_t>(sizeof(V))));
    }
  };
  for_each(pairs.src, [](V& element, const V* at) { element = *at; });
  __syncthreads();  // all have read before any writes
  for_each(pairs.dst, [](const V& element, V* at) { *at = element; });
}

__global__ void __launch_bounds__(kThreads)
    copy_slots_kernel(const __grid_constant__ SlotCaches caches,
                      const __grid_constant__ SlotPairs pairs) {
  extern __shared__ __align__(16) char slots_shared[];
  launch_dependents();
  wait_for_primary_kernel();
  const CacheTile& tile = caches.tiles[caches.tile[blockIdx.y]];
  const int64_t first = int64_t{blockIdx.x} * tile.per_cta;
  if (first >= tile.accesses) return;
  char* start = caches.start[blockIdx.y];
  switch (tile.width) {
    case 16:
      return copy_accesses<uint4>(tile, pairs, start, static_cast<int>(first), slots_shared);
    case 4:
      return copy_accesses<uint32_t>(tile, pairs, start, static_cast<int>(first), slots_shared);
    case 2:
      return copy_accesses<uint16_t>(tile, pairs, start, static_cast<int>(first), slots_shared);
    default:
      return copy_accesses<uint8_t>(tile, pairs, start, static_cast<int>(first), slots_shared);
  }
}

CacheTile tile_of(const SlotCache& cache, int num_slots) {
  const TokenGeometry& token = cache.token;
  const bool by_16 =
      aligned16(cache.start) && 16 * num_slots <= kTileBytes &&
      multiples(16, {token.block_stride, token.token_stride, token.run_stride, token.run_bytes});
  const int width = by_16 ? 16 : token.element_bytes;
  const int64_t per_run = token.run_bytes / width, accesses = token.runs * per_run;
  const int64_t fit = kWantedTileBytes / (int64_t{num_slots} * width);
  const int per_cta = static_cast<int>(std::clamp<int64_t>(fit, 1, accesses));
  return {.token = token,
          .width = width,
          .accesses = static_cast<int>(accesses),
          .per_cta = per_cta,
          .tokens_first = token.token_stride < token.run_stride,
          .by_run = FastDivisor(per_run),
          .by_cta = FastDivisor(per_cta)};
}

// Adds a cache, unless there is no room.
bool add(SlotCaches& caches, const SlotCache& cache, int num_slots) {
  if (caches.count == kMaxCaches) return false;
  const CacheTile tile = tile_of(cache, num_slots);
  int found = 0;
  while (found < caches.num_tiles &&
         (caches.tiles[found].token != tile.token || caches.tiles[found].width != tile.width)) {
    ++found;
  }
  if (found == kMaxGeometries) return false;
  if (found == caches.num_tiles) caches.tiles[caches.num_tiles++] = tile;
  caches.tile[caches.count] = static_cast<uint8_t>(found);
  caches.start[caches.count++] = cache.start;
  return true;
}

void launch_caches(const SlotCaches& caches, const SlotPairs& pairs, Stream stream) {
  int64_t ctas = 0, bytes = 0;
  for (int i = 0; i < caches.num_tiles; ++i) {
    const CacheTile& tile = caches.tiles[i];
    ctas = std::max(ctas, ceil_div(tile.accesses, tile.per_cta));
    bytes = std::max(bytes, int64_t{tile.per_cta} * pairs.count * tile.width);
  }
  dynamic_shared_memory<copy_slots_kernel>("copy_slots");
  const dim3 grid(grid_size("copy_slots", ctas), static_cast<unsigned>(caches.count));
  launch_kernel("copy_slots", copy_slots_kernel, grid, dim3(kThreads), bytes, stream, caches,
                pairs);
}

}  // namespace

void launch(const CopySlotsParams& p, Stream stream) {
  static_assert(4 * kMaxCopiedSlots <= kTileBytes);
  const SlotPairs pairs{.src = p.src,
                        .dst = p.dst,
                        .count = p.num_slots,
                        .num_slots = p.num_blocks * p.block_size,
                        .block_size = p.block_size,
                        .by_count = FastDivisor(p.num_slots),
                        .by_block_size = FastDivisor(p.block_size)};
  for (int64_t done = 0; done < p.num_caches;) {
    SlotCaches caches{};
    while (done < p.num_caches && add(caches, p.caches[done], p.num_slots)) ++done;
    launch_caches(caches, pairs, stream);
  }
}

}  // namespace vllm_kernels::cuda
