#include "ops/rope_and_cache.h"

#include <algorithm>
#include <bit>

#include "cuda/cache_element.cuh"
#include "cuda/fast_divisor.cuh"
#include "cuda/launch.cuh"
#include "cuda/launchers.h"
#include "cuda/pack.cuh"
#include "cuda/rms_norm_rows.cuh"
#include "cuda/rope_heads.cuh"
#include "cuda/slots.cuh"

namespace vllm_kernels::cuda {
namespace {

constexpr int kMaxThreads = 384;

// What the kernel does to a head of query, key or value.
enum class Role : uint8_t { kQuery, kKey, kValue };

// Stores two packs of one head of a token into the cache.
template <typename T, typename C, int kWidth>
__device__ __forceinline__ void store_in_cache(const RopeAndCacheParams& p, Role role, int head,
                                               Place at, const Pack<T, kWidth>& pack, int d) {
  const PagedKv& kv = p.kv;
  const float* scales = role == Role::kKey ? kv.k_scale : kv.v_scale;
  const Divisor scale =
      kIs8Bit<C> && scales != nullptr ? Divisor::of(scales[head * kv.scale_stride]) : Divisor{};
  float values[kWidth];
  widen(pack, values);
  struct alignas(kWidth * sizeof(C)) Stored {
    C data[kWidth];
  } stored;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) stored.data[j] = to_cache<C>(from_float<T>(values[j]), scale);
  constexpr int kX = 16 / sizeof(C);  // PagedKv's x
  if (role == Role::kKey) {
    C* to = static_cast<C*>(kv.key) + at.block * kv.key_block_stride + head * kv.key_head_stride +
            at.token * kv.key_token_stride + d / kX * kv.key_chunk_stride + d % kX;
    *reinterpret_cast<Stored*>(to) = stored;
    return;
  }
  C* to = static_cast<C*>(kv.value) + at.block * kv.value_block_stride +
          head * kv.value_head_stride + at.token * kv.value_token_stride + d * kv.value_dim_stride;
  if (kv.value_dim_stride == 1) {
    *reinterpret_cast<Stored*>(to) = stored;
  } else {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) to[j * kv.value_dim_stride] = stored.data[j];
  }
}

// A block takes one token and a tile of its heads, of query, then key, then value; blockDim.x
// neighbouring lanes (a power of two) one head, each with kItems pairs of packs.
template <typename T, typename C, typename A, int kWidth, int kItems>
__global__ void __launch_bounds__(kMaxThreads, kWidth == 1 ? 1 : 3)
    rope_and_cache_kernel(RopeAndCacheParams p, FastDivisor block_size) {
  launch_dependents();
  const int token = blockIdx.x;
  const int first_head = blockIdx.y * blockDim.y;
  int head = first_head + threadIdx.y;
  const bool inside = head < p.query.count + p.key.count + p.value.count;
  Role role = Role::kQuery;
  ProjectedHeads heads = p.query;
  if (head >= p.query.count) {
    head -= p.query.count;
    role = Role::kKey;
    heads = p.key;
    if (head >= p.key.count) {
      head -= p.key.count;
      role = Role::kValue;
      heads = p.value;
    }
  }
  if (!inside) head = 0;
  T* row = static_cast<T*>(heads.data) + token * heads.token_stride + head * heads.head_stride;
  const HeadItems<kWidth, kItems> items(p.head_size, role == Role::kValue ? 0 : p.rotary_size,
                                        p.is_neox, threadIdx.x, blockDim.x, inside);
  HeadPacks<T, kWidth, kItems> x;
  x.prefetch(items, row);
  prefetch_l2(p.positions + token);
  wait_for_predecessor();

  x.load(items, row);
  const int64_t position = p.positions[token];
  const bool stores = p.slot_mapping != nullptr && first_head + blockDim.y > p.query.count;
  const SlotMapping slots{p.slot_mapping, p.num_slots, p.kv.num_blocks * p.kv.block_size};
  const int threads = blockDim.x * blockDim.y;
  const int from = token + 1 + threadIdx.y * blockDim.x + threadIdx.x;
  int32_t slot = -1;
  LaterSlots later;
  if (stores) {  // the same for the whole block
    slot = slot_of(slots, token);
    later.load(slots, from, threads);
  }
  const bool good = position >= 0 && position < p.max_position;
  HeadAngles<A, kWidth, kItems> angles;
  if (good) {
    angles.load(items, p.cos_sin_cache, p.cos_sin_dtype, position * p.cos_sin_stride,
                p.rotary_size / 2);
  }
  uint32_t repeated = 0;
  if (stores) {
    repeated = find_repeated<1>(slots, from, threads, later, {.start = slot, .count = slot >= 0});
  }

  if (heads.bias != nullptr) {
    x.add(items, static_cast<const T*>(heads.bias) + static_cast<int64_t>(head) * p.head_size);
  }
  if (p.query.weight != nullptr || p.key.weight != nullptr) {  // every lane of the block
    const float inverse = x.inverse_root(p.head_size, blockDim.x, p.epsilon);
    if (heads.weight != nullptr) x.norm(items, static_cast<const T*>(heads.weight), inverse);
  }
  if (good) x.turn(items, angles, p.is_neox);
  if (!good) return;  // the token stays as it is, and is not stored

  if (role == Role::kQuery || p.slot_mapping == nullptr) {
    x.store(items, row);
  } else if (slot >= 0 && repeated == 0) {
    const Place at = place_of(slot, block_size, p.kv.block_size);
    x.each(items, [&](const Pack<T, kWidth>& pack, int d) {
      store_in_cache<T, C, kWidth>(p, role, head, at, pack, d);
    });
  }
}

template <typename T, typename C, typename A, int kWidth>
void launch_width(const RopeAndCacheParams& p, Stream stream) {
  const auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const int64_t heads = int64_t{p.query.count} + p.key.count + p.value.count;
  const auto items = static_cast<unsigned>(ceil_div(p.head_size, 2 * kWidth));
  const int64_t lanes = std::min(32u, std::bit_ceil(items));
  const int64_t tiles = ceil_div(heads, kMaxThreads / lanes);
  const dim3 block(static_cast<unsigned>(lanes), static_cast<unsigned>(ceil_div(heads, tiles)));
  const dim3 grid(grid_size(p.op, p.num_tokens), static_cast<unsigned>(tiles));
  // With single elements a head of 256 has 128 pairs.
  constexpr int kItems = kWidth == 1 ? 4 : 1;
  launch_kernel(p.op, rope_and_cache_kernel<T, C, A, kWidth, kItems>, grid, block, 0, stream, p,
                FastDivisor(std::max(p.kv.block_size, 1)));
}

// Whether packs of 16 bytes fit heads, weights, cosines and cache.
bool packs_fit(const RopeAndCacheParams& p) {
  const int64_t width = 16 / size_of(p.dtype);
  const auto fits = [&](const ProjectedHeads& heads) {
    return aligned16(heads.data) && aligned16(heads.bias) && aligned16(heads.weight) &&
           heads.token_stride % width == 0 && heads.head_stride % width == 0;
  };
  const auto aligned = [&](const void* data, DType dtype) {
    return reinterpret_cast<uintptr_t>(data) % (width * size_of(dtype)) == 0;
  };
  const PagedKv& kv = p.kv;
  bool cache_fits = true;
  for (const int64_t stride : {kv.key_block_stride, kv.key_head_stride, kv.key_token_stride,
                               kv.value_dim_stride == 1 ? kv.value_block_stride : 0,
                               kv.value_dim_stride == 1 ? kv.value_head_stride : 0,
                               kv.value_dim_stride == 1 ? kv.value_token_stride : 0}) {
    cache_fits = cache_fits && stride % width == 0;
  }
  return (p.cos_sin_dtype == p.dtype || p.cos_sin_dtype == DType::kFloat32) && fits(p.query) &&
         fits(p.key) && fits(p.value) && p.head_size % width == 0 &&
         p.rotary_size / 2 % width == 0 && aligned(p.cos_sin_cache, p.cos_sin_dtype) &&
         p.cos_sin_stride % width == 0 && cache_fits && aligned(kv.key, kv.dtype) &&
         aligned(kv.value, kv.dtype);
}

void launch_once(const RopeAndCacheParams& p, Stream stream) {
  dispatch_float(p.dtype, [&](auto model) {
    using T = decltype(model);
    dispatch_cache<T>(p.kv.dtype, [&](auto stored) {
      using C = decltype(stored);
      if (!packs_fit(p)) {
        launch_width<T, C, float, 1>(p, stream);
      } else if (p.cos_sin_dtype == p.dtype) {
        launch_width<T, C, T, kVectorWidth<T>>(p, stream);
      } else {
        launch_width<T, C, float, kVectorWidth<T>>(p, stream);
      }
    });
  });
}

}  // namespace

void launch(const RopeAndCacheParams& params, Stream stream) {
  if (params.slot_mapping == nullptr) return launch_once(params, stream);
  RopeAndCacheParams part = params;
  const int64_t size = size_of(params.dtype);
  const auto advance = [&](ProjectedHeads& heads, const ProjectedHeads& all, int64_t tokens) {
    heads.data = static_cast<char*>(all.data) + tokens * all.token_stride * size;
  };
  for (int64_t done = 0; done < params.num_tokens; done += kTokensPerLaunch) {
    part.num_tokens = std::min(kTokensPerLaunch, params.num_tokens - done);
    part.num_slots = std::clamp<int64_t>(params.num_slots - done, 0, part.num_tokens);
    part.slot_mapping = params.slot_mapping + done;
    part.positions = params.positions + done;
    advance(part.query, params.query, done);
    advance(part.key, params.key, done);
    advance(part.value, params.value, done);
    launch_once(part, stream);
  }
}

}  // namespace vllm_kernels::cuda
