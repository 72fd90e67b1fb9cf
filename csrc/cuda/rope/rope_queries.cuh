// Shared by the kernels of rope_and_cache that have no bias and no norm: the addresses of angles,
// and CTAs that rotate the query in place.
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

// Cosines and sines of kWidth pairs, as they are stored.
template <typename A, int kWidth>
struct AngleVecs {
  Vec<A, kWidth> cosines;
  Vec<A, kWidth> sines;
};

struct Angles {
  const int64_t* positions;  // [num_tokens]
  const void* cos_sin_cache;
  uint32_t stride;        // between positions, bytes
  uint32_t max_position;  // < 2^31
  int32_t half;           // pairs of a head
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
  // The cosines of a valid position.
  __device__ __forceinline__ const char* row(int64_t position) const {
    return stepped(static_cast<const char*>(cos_sin_cache), static_cast<uint32_t>(position),
                   stride);
  }
  // The angles of the pairs from `pair` on.
  template <typename A, int kWidth>
  __device__ __forceinline__ AngleVecs<A, kWidth> of(int64_t position, int pair) const {
    const auto* start = reinterpret_cast<const A*>(row(position)) + pair;
    return {*reinterpret_cast<const Vec<A, kWidth>*>(start),
            *reinterpret_cast<const Vec<A, kWidth>*>(start + half)};
  }
  // The same, upcast to float32. A = void: the stored type is known at run time only.
  template <typename A, int kWidth>
  __device__ __forceinline__ void load(int64_t position, int pair, float (&cosines)[kWidth],
                                       float (&sines)[kWidth]) const {
    if constexpr (std::is_void_v<A>) {
      load_angles(row(position), dtype, pair, pair + half, cosines, sines);
    } else {
      const auto vecs = of<A, kWidth>(position, pair);
      upcast(vecs.cosines, cosines);
      upcast(vecs.sines, sines);
    }
  }
};

template <typename A, typename T, int kWidth>
__device__ __forceinline__ void rotate_by(bool is_neox, Vec<T, kWidth> (&vecs)[2],
                                          const AngleVecs<A, kWidth>& by) {
  is_neox ? rotate_vecs<true>(vecs, by.cosines, by.sines)
          : rotate_vecs<false>(vecs, by.cosines, by.sines);
}

// Divides grid.x between CTAs that store and CTAs that rotate the query in place. Every period-th
// CTA stores, until there are `storing` of them. Each of the others rotates `rows` heads.
struct Queries {
  Angles angles;
  void* data;
  uint32_t token_stride, head_stride;  // bytes
  int32_t num_tokens;
  int32_t heads;  // of a token
  FastDivisor by_heads;
  int32_t rows;
  int32_t lanes;  // threads of a head; each takes 16 bytes of both sides of its pairs
  FastDivisor by_lanes;
  int32_t storing;
  int32_t period;
  FastDivisor by_period;

  // `threads` is the block size. `grid` holds the CTAs that store; the others are added. `between`:
  // interleave the two kinds, so that one kind's instructions overlap the other's memory accesses.
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

  // The index of this CTA among the storing CTAs, or -1.
  __device__ __forceinline__ int group() const {
    const int nth = by_period.divide(blockIdx.x);
    return nth < storing && static_cast<int>(blockIdx.x) == nth * period ? nth : -1;
  }
  // The index of this CTA among the query-rotating CTAs of its grid row.
  __device__ __forceinline__ int other() const {
    return blockIdx.x - min(static_cast<int>(by_period.divide(blockIdx.x)) + 1, storing);
  }
};

// Rotates one Vec pair a thread. A is the stored type of the angles; void: known at run time only.
template <typename T, typename A>
__device__ __forceinline__ void rotate_query(const Queries& q) {
  constexpr int kWidth = kVecWidth<T>;
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
  auto* first = reinterpret_cast<Vec16<T>*>(start);
  auto* second = reinterpret_cast<Vec16<T>*>(start + (angles.is_neox ? angles.half : kWidth));
  prefetch_l2(angles.positions + token);
  prefetch_l2(first);
  prefetch_l2(second);
  wait_for_primary_kernel();
  const int64_t position = angles.positions[token];
  Vec16<T> vecs[2] = {*first, *second};
  if (!angles.known(position)) return;  // the head stays unchanged
  if constexpr (std::is_void_v<A>) {
    float cosines[kWidth], sines[kWidth], values[2][kWidth];
    angles.load<A>(position, pair, cosines, sines);
    upcast(vecs[0], values[0]);
    upcast(vecs[1], values[1]);
    angles.is_neox ? rotate_pairs<true>(values, cosines, sines)
                   : rotate_pairs<false>(values, cosines, sines);
    vecs[0] = downcast<T>(values[0]);
    vecs[1] = downcast<T>(values[1]);
  } else {
    rotate_by(angles.is_neox, vecs, angles.of<A, kWidth>(position, pair));
  }
  *first = vecs[0];
  *second = vecs[1];
}

}  // namespace vllm_kernels::cuda
