// What the writers of rope_and_cache share: where angles lie, and blocks that turn queries in
// place.
#pragma once
#include <cstdint>
#include <type_traits>

#include "cuda/base/fast_divmod.cuh"
#include "cuda/base/launch.cuh"
#include "cuda/base/prefetch.cuh"
#include "cuda/base/vec.cuh"
#include "cuda/cache/kv_writer.cuh"
#include "cuda/rope/rope_heads.cuh"
#include "ops/rope_and_cache.h"

namespace vllm_kernels::cuda {

// Of kWidth pairs, as they are stored.
template <typename A, int kWidth>
struct AnglePacks {
  Pack<A, kWidth> cosines;
  Pack<A, kWidth> sines;
};

struct Angles {
  const int64_t* positions;  // [num_tokens]
  const void* cos_sin_cache;
  uint32_t stride;        // from position to position, bytes
  uint32_t max_position;  // below 2^31
  int32_t half;           // pairs
  DType dtype;
  bool is_neox;

  Angles() = default;
  explicit Angles(const RopeAndCacheParams& p)
      : positions(p.positions),
        cos_sin_cache(p.cos_sin_cache),
        stride(static_cast<uint32_t>(p.cos_sin_stride * size_of(p.cos_sin_dtype))),
        max_position(static_cast<uint32_t>(p.max_position)),
        half(p.rotary_size / 2),
        dtype(p.cos_sin_dtype),
        is_neox(p.is_neox) {}

  __device__ __forceinline__ bool known(int64_t position) const {
    return static_cast<uint64_t>(position) < max_position;
  }
  // Where a known position's cosines start.
  __device__ __forceinline__ const char* row(int64_t position) const {
    return stepped(static_cast<const char*>(cos_sin_cache), static_cast<uint32_t>(position),
                   stride);
  }
  // Of the pairs from `pair` on.
  template <typename A, int kWidth>
  __device__ __forceinline__ AnglePacks<A, kWidth> of(int64_t position, int pair) const {
    const auto* start = reinterpret_cast<const A*>(row(position)) + pair;
    return {*reinterpret_cast<const Pack<A, kWidth>*>(start),
            *reinterpret_cast<const Pack<A, kWidth>*>(start + half)};
  }
  // The same, widened. A = void: what they are stored as is known at run time.
  template <typename A, int kWidth>
  __device__ __forceinline__ void load(int64_t position, int pair, float (&cosines)[kWidth],
                                       float (&sines)[kWidth]) const {
    if constexpr (std::is_void_v<A>) {
      load_angles(row(position), dtype, pair, pair + half, cosines, sines);
    } else {
      const auto packs = of<A, kWidth>(position, pair);
      widen(packs.cosines, cosines);
      widen(packs.sines, sines);
    }
  }
};

template <typename A, typename T, int kWidth>
__device__ __forceinline__ void turn_by(bool is_neox, Pack<T, kWidth> (&packs)[2],
                                        const AnglePacks<A, kWidth>& by) {
  is_neox ? turn_packs<true>(packs, by.cosines, by.sines)
          : turn_packs<false>(packs, by.cosines, by.sines);
}

// Of a grid's rows every period-th block stores, until there are `storing`; the others turn queries
// in place, `rows` heads each.
struct Queries {
  Angles angles;
  void* data;
  uint32_t token_stride, head_stride;  // bytes
  int32_t num_tokens;
  int32_t heads;  // of a token
  FastDivisor by_heads;
  int32_t rows;
  int32_t lanes;  // of a head: 16 bytes of either side of its pairs each
  FastDivisor by_lanes;
  int32_t storing;
  int32_t period;
  FastDivisor by_period;

  // For blocks of `threads`; `grid`: those that store, to which the others are added. `between`:
  // the one kind among the other, so that one's instructions meet the other's transfers.
  Queries(const RopeAndCacheParams& p, int threads, bool between, dim3& grid)
      : angles(p),
        data(p.query.data),
        token_stride(static_cast<uint32_t>(p.query.token_stride * size_of(p.dtype))),
        head_stride(static_cast<uint32_t>(p.query.head_stride * size_of(p.dtype))),
        num_tokens(static_cast<int32_t>(p.num_tokens)),
        heads(p.query.count),
        by_heads(p.query.count),
        lanes(p.rotary_size / 2 * size_of(p.dtype) / 16),
        by_lanes(lanes),
        storing(static_cast<int32_t>(grid.x)) {
    rows = threads / lanes;
    grid.x += static_cast<unsigned>(
        ceil_div(ceil_div(p.num_tokens * heads, rows), int64_t{grid.y} * grid.z));
    period = between && storing > 0 ? static_cast<int32_t>(grid.x) / storing : 1;
    by_period = FastDivisor(period);
  }

  // This block's number among those that store, or -1.
  __device__ __forceinline__ int group() const {
    const int nth = by_period.divide(blockIdx.x);
    return nth < storing && static_cast<int>(blockIdx.x) == nth * period ? nth : -1;
  }
  // Its number among the others of its row.
  __device__ __forceinline__ int other() const {
    return blockIdx.x - min(static_cast<int>(by_period.divide(blockIdx.x)) + 1, storing);
  }
};

// A: what angles are stored as; void: known at run time.
template <typename T, typename A>
__device__ __forceinline__ void turn_query(const Queries& q) {
  constexpr int kWidth = kVectorWidth<T>;
  const int thread = threadIdx.x;
  const int block = q.other() + (gridDim.x - q.storing) * (blockIdx.y + gridDim.y * blockIdx.z);
  const int within = q.by_lanes.divide(thread);
  const int row = block * q.rows + within;
  if (within >= q.rows || row >= q.num_tokens * q.heads) return;
  const Angles& angles = q.angles;
  const int token = q.by_heads.divide(row), head = row - token * q.heads;
  const int pair = (thread - within * q.lanes) * kWidth;
  T* start = stepped(stepped(static_cast<T*>(q.data), token, q.token_stride), head, q.head_stride) +
             (angles.is_neox ? pair : 2 * pair);
  auto* first = reinterpret_cast<Pack16<T>*>(start);
  auto* second = reinterpret_cast<Pack16<T>*>(start + (angles.is_neox ? angles.half : kWidth));
  prefetch_l2(angles.positions + token);
  prefetch_l2(first);
  prefetch_l2(second);
  wait_for_predecessor();
  const int64_t position = angles.positions[token];
  Pack16<T> packs[2] = {*first, *second};
  if (!angles.known(position)) return;  // the token stays as it is
  if constexpr (std::is_void_v<A>) {
    float cosines[kWidth], sines[kWidth], values[2][kWidth];
    angles.load<A>(position, pair, cosines, sines);
    widen(packs[0], values[0]);
    widen(packs[1], values[1]);
    angles.is_neox ? turn_pairs<true>(values, cosines, sines)
                   : turn_pairs<false>(values, cosines, sines);
    packs[0] = narrow<T>(values[0]);
    packs[1] = narrow<T>(values[1]);
  } else {
    turn_by(angles.is_neox, packs, angles.of<A, kWidth>(position, pair));
  }
  *first = packs[0];
  *second = packs[1];
}

}  // namespace vllm_kernels::cuda
