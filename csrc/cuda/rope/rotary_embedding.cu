// rotary_embedding: rotates query [tokens, heads, head_size] and key in place by the angles of
// their positions. cos_sin_cache is [max_position, rotary_size]. batched_rotary_embedding adds an
// offset to each position.
//
// Grid (token, tile of heads, tile of a head's chunks). Before the PDL wait nothing is read;
// addresses are only prefetched into L2. ops/rotary_embedding.h has the contract, rope_heads.cuh
// the arithmetic. rope_and_cache.cu rotates and writes the cache in one launch.
#include "ops/rotary_embedding.h"

#include "cuda/base/fast_divmod.cuh"
#include "cuda/base/launch.cuh"
#include "cuda/base/prefetch.cuh"
#include "cuda/base/vec.cuh"
#include "cuda/launchers.h"
#include "cuda/rope/rope_heads.cuh"

namespace vllm_kernels::cuda {
namespace {

constexpr int kMaxThreads = 320;

// A CTA takes a tile of one token's heads in y: query heads, then key heads. In x it takes a tile
// of a head's chunks. A thread takes one chunk of kWidth pairs. A chunk is two Vecs: one of each
// half of the rotated elements (Neox), or two consecutive ones (GPT-J).
template <typename T, int kWidth, bool kNeox>
__global__ void __launch_bounds__(kMaxThreads, 4)
    rotary_embedding_kernel(RotaryParams p, RowOffsets position_rows, RowOffsets query_tokens,
                            RowOffsets key_tokens) {
  launch_dependents();
  const uint32_t token = blockIdx.x;
  const int head = blockIdx.y * blockDim.y + threadIdx.y;
  const int pair = (blockIdx.z * blockDim.x + threadIdx.x) * kWidth;
  const int half = static_cast<int>(p.rotary_size / 2);
  if (head >= p.query.count + p.key.count || pair >= half) return;
  const int64_t* position_at = p.positions + position_rows.of(token);
  const bool is_query = head < p.query.count;
  const RotaryHeads& heads = is_query ? p.query : p.key;
  T* start = static_cast<T*>(heads.data) + (is_query ? query_tokens : key_tokens).of(token) +
             (is_query ? head : head - p.query.count) * heads.stride + (kNeox ? pair : 2 * pair);
  auto* first = reinterpret_cast<Vec<T, kWidth>*>(start);
  auto* second = reinterpret_cast<Vec<T, kWidth>*>(start + (kNeox ? half : kWidth));
  prefetch_l2(position_at);
  prefetch_l2(first);
  prefetch_l2(second);
  wait_for_primary_kernel();
  const int64_t position = *position_at;
  const int64_t offset = p.offsets == nullptr ? 0 : p.offsets[token];
  // Issued before the position is known.
  const Vec<T, kWidth> vecs[2] = {*first, *second};
  if (!p.has_angles(position, offset)) return;  // the head stays unchanged
  const int64_t row = (position + offset) * p.cache_stride + pair;
  float cosines[kWidth], sines[kWidth], values[2][kWidth];
  load_angles(p.cos_sin_cache, p.cache_dtype, row, row + half, cosines, sines);
  upcast(vecs[0], values[0]);
  upcast(vecs[1], values[1]);
  rotate_pairs<kNeox>(values, cosines, sines);
  *first = downcast<T>(values[0]);
  *second = downcast<T>(values[1]);
}

template <typename T, int kWidth, bool kNeox>
void launch_width(const RotaryParams& p, Stream stream) {
  // Block shape: all chunks of as many heads as fit, divided evenly. 32 + 8 heads of 128 give 8 x
  // 40 threads.
  const int64_t chunks = p.rotary_size / 2 / kWidth;
  const int64_t heads = p.query.count + p.key.count;
  const int64_t z = ceil_div(chunks, kMaxThreads);
  const int64_t block_x = ceil_div(chunks, z);
  const int64_t y = ceil_div(heads, kMaxThreads / block_x);
  const dim3 grid(grid_size("rotary_embedding", p.position_rows.count), static_cast<unsigned>(y),
                  static_cast<unsigned>(z));
  const dim3 block(static_cast<unsigned>(block_x), static_cast<unsigned>(ceil_div(heads, y)));
  launch_kernel("rotary_embedding", rotary_embedding_kernel<T, kWidth, kNeox>, grid, block, 0,
                stream, p, RowOffsets(p.position_rows), RowOffsets(p.query.tokens),
                RowOffsets(p.key.tokens));
}

// Whether 16-byte accesses fit the heads and the cos_sin_cache.
bool vectors_fit(const RotaryParams& p) {
  const int64_t width = 16 / size_of(p.dtype);
  const auto fits = [&](const RotaryHeads& heads) {
    return heads.stride % width == 0 && rows_aligned16(heads.data, heads.tokens, p.dtype);
  };
  const auto cache = reinterpret_cast<uintptr_t>(p.cos_sin_cache);
  return p.rotary_size / 2 % width == 0 && fits(p.query) && fits(p.key) &&
         cache % (width * size_of(p.cache_dtype)) == 0 && p.cache_stride % width == 0;
}

}  // namespace

void launch(const RotaryParams& p, Stream stream) {
  dispatch_float(p.dtype, [&](auto tag) {
    using T = decltype(tag);
    constexpr int kWidth = kVecWidth<T>;
    if (vectors_fit(p)) {
      p.is_neox ? launch_width<T, kWidth, true>(p, stream)
                : launch_width<T, kWidth, false>(p, stream);
    } else {
      p.is_neox ? launch_width<T, 1, true>(p, stream) : launch_width<T, 1, false>(p, stream);
    }
  });
}

}  // namespace vllm_kernels::cuda
