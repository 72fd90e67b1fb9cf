// Gathers tokens of paged sequences into rows [num_rows, num_kv_heads, head_size], and dequantizes
// an 8-bit or int4 cache on the way. It serves cp_gather_cache, gather_and_maybe_dequant_cache and
// gather_paged_kv.
//
//   gather_rows_kernel    grid (rows / tokens, K and V): all layouts but the V of layout vllm
//   gather_pages_kernel   grid (rows / kGroup, KV head): the V of layout vllm, transposed in
//                         shared memory
//
// Nothing is read before the PDL wait. ops/gather_cache.h has the contract, paged_tokens.cuh the
// lookup of a row's page.
#include "ops/gather_cache.h"

#include <initializer_list>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "cuda/base/dequant_row.cuh"
#include "cuda/base/fast_divmod.cuh"
#include "cuda/base/kv_element.cuh"
#include "cuda/base/launch.cuh"
#include "cuda/cache/paged_tokens.cuh"
#include "cuda/launchers.h"

namespace vllm_kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;  // accesses in flight a thread
template <typename Stored>
constexpr bool kIsInt4 = kValuesOf<Stored> == 2;

// How a CTA's work is divided, computed at launch.
struct RowVecs {
  int tokens;            // rows of a CTA, at most kMaxTokens
  FastDivisor by_token;  // by the accesses of a row
  FastDivisor by_head;   // by the accesses of one head of a row
  int per_token;
  int per_head;
};

// Sources whose head is a sequence of chunks: layouts NHD and HND, single-head entries, and the K
// of layout vllm. CTA (x, y) gathers rows x * tokens and on, of K (y = 0) or V (y = 1).
template <typename Out, typename Stored, int kWidth>
__global__ void __launch_bounds__(kThreads)
    gather_rows_kernel(GatherCacheParams p, RowVecs row_vecs) {
  launch_dependents();
  wait_for_primary_kernel();
  __shared__ TokenLocation locations[kMaxTokens];
  const int first = blockIdx.x * row_vecs.tokens;
  if (threadIdx.x < 32) locate_rows(p.tokens, first, row_vecs.tokens, locations);
  __syncthreads();

  const PagedKv& kv = p.kv;
  const bool is_key = blockIdx.y == 0;
  const auto* source = static_cast<const Stored*>(is_key ? kv.key : kv.value);
  auto* rows = static_cast<Out*>(is_key ? p.key : p.value);
  const float* scales = is_key ? kv.k_scale : kv.v_scale;
  [[maybe_unused]] const float* zeros = is_key ? p.k_zero : p.v_zero;
  const int64_t block_stride = is_key ? kv.key_block_stride : kv.value_block_stride;
  const int64_t token_stride = is_key ? kv.key_token_stride : kv.value_token_stride;
  const int64_t head_stride = is_key ? kv.key_head_stride : kv.value_head_stride;
  // Distance between chunks of x elements. The V gathered here is contiguous in a head: a chunk
  // stride of x.
  const int64_t chunk_stride = is_key ? kv.key_chunk_stride : kv.x;
  const int64_t row_stride = is_key ? p.key_row_stride : p.value_row_stride;
  const int64_t out_head_stride = is_key ? p.key_head_stride : p.value_head_stride;
  const int shift = __ffs(kv.x) - 1;
  const int count = row_vecs.tokens * row_vecs.per_token;

#pragma unroll 1
  for (int base = threadIdx.x; base < count; base += kUnroll * kThreads) {
    Elements<Stored, kWidth> vecs[kUnroll];
    float scale[kUnroll];
    [[maybe_unused]] float zero[kUnroll];
    Out* to[kUnroll];
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      const int i = min(base + j * kThreads, count - 1);
      const int token = row_vecs.by_token.divide(i);
      const int within = i - token * row_vecs.per_token;
      const int head = row_vecs.by_head.divide(within);
      const int d = (within - head * row_vecs.per_head) * kWidth;
      const TokenLocation at = locations[token];
      to[j] = nullptr;
      scale[j] = kIsInt4<Stored> ? 0.0f : 1.0f;  // a row of zeros is 1 * 0, of int4 0 * -8 + 0
      if constexpr (kIsInt4<Stored>) zero[j] = 0.0f;
      vecs[j] = {};
      if (at.block != TokenLocation::kUnwritten && base + j * kThreads < count) {
        to[j] = rows + int64_t{first + token} * row_stride + head * out_head_stride + d;
      }
      if (at.block >= 0) {
        vecs[j] = *reinterpret_cast<const Elements<Stored, kWidth>*>(
            source + at.block * block_stride + head * head_stride + at.token * token_stride +
            (d >> shift) * chunk_stride + (d & (kv.x - 1)));
        if constexpr (!std::is_same_v<Out, Stored>) scale[j] = p.scale(scales, at, head);
        if constexpr (kIsInt4<Stored>) zero[j] = p.scale(zeros, at, head);
      }
    }
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      if (to[j] == nullptr) continue;
      if constexpr (kIsInt4<Stored>) {
        store_dequantized<Out>(to[j], vecs[j], scale[j], zero[j], kv.head_size);
      } else {
        store_dequantized<Out>(to[j], vecs[j], scale[j]);
      }
    }
  }
}

// The V of layout vllm. A token's values lie block_size elements apart. Neighbouring threads read
// neighbouring tokens, and shared memory transposes the tile. CTA (x, y) gathers rows x * kGroup
// and on, of KV head y.
constexpr int kGroup = 16;

template <typename Out, typename Stored, int kWidth>
__global__ void __launch_bounds__(kThreads) gather_pages_kernel(GatherCacheParams p) {
  launch_dependents();
  wait_for_primary_kernel();
  extern __shared__ __align__(16) char tile_bytes[];  // [kGroup][pitch]
  __shared__ TokenLocation locations[kMaxTokens];
  const int first = blockIdx.x * kGroup;
  if (threadIdx.x < 32) locate_rows(p.tokens, first, kGroup, locations);
  __syncthreads();

  const PagedKv& kv = p.kv;
  const int head = blockIdx.y;
  auto* tile = reinterpret_cast<Stored*>(tile_bytes);
  const int pitch =
      kv.head_size + 16 / static_cast<int>(sizeof(Stored));  // padded against bank conflicts
  const auto* source = static_cast<const Stored*>(kv.value) + head * kv.value_head_stride;
  const int token = threadIdx.x % kGroup;
  const TokenLocation at = locations[token];
  if (at.block >= 0) {
    source += at.block * kv.value_block_stride + at.token;
#pragma unroll 8
    for (int d = threadIdx.x / kGroup; d < kv.head_size; d += kThreads / kGroup) {
      tile[token * pitch + d] = source[d * kv.value_dim_stride];
    }
  }
  __syncthreads();
  const int lanes = kv.head_size / kWidth;  // accesses of a row
  auto* rows = static_cast<Out*>(p.value) + head * p.value_head_stride;
  for (int i = threadIdx.x; i < kGroup * lanes; i += kThreads) {
    const int row = i / lanes, d = (i - row * lanes) * kWidth;
    const TokenLocation from = locations[row];
    if (from.block == TokenLocation::kUnwritten) continue;
    Elements<Stored, kWidth> vec = {};
    float scale = kIsInt4<Stored> ? 0.0f : 1.0f;
    [[maybe_unused]] float zero = 0.0f;
    if (from.block >= 0) {
      vec = *reinterpret_cast<const Elements<Stored, kWidth>*>(tile + row * pitch + d);
      if constexpr (!std::is_same_v<Out, Stored>) scale = p.scale(kv.v_scale, from, head);
      if constexpr (kIsInt4<Stored>) zero = p.scale(p.v_zero, from, head);
    }
    Out* to = rows + int64_t{first + row} * p.value_row_stride + d;
    if constexpr (kIsInt4<Stored>) {
      store_dequantized<Out>(to, vec, scale, zero, kv.head_size);
    } else {
      store_dequantized<Out>(to, vec, scale);
    }
  }
}

// Whether every access of `width` elements is aligned, at source and destination.
bool rows_aligned(const GatherCacheParams& p, int width) {
  const PagedKv& kv = p.kv;
  const auto aligned_all = [&](const void* source, const void* rows,
                               std::initializer_list<int64_t> all) {
    const auto source_bytes = static_cast<uintptr_t>(width * size_of(kv.dtype));
    return reinterpret_cast<uintptr_t>(source) % source_bytes == 0 && aligned16(rows) &&
           multiples(width, all);
  };
  const int64_t value_token = kv.layout == KvLayout::kVllm ? 0 : kv.value_token_stride;
  return kv.head_size % width == 0 &&
         aligned_all(kv.key, p.key,
                     {kv.key_block_stride, kv.key_head_stride, kv.key_token_stride,
                      kv.key_chunk_stride, p.key_row_stride, p.key_head_stride}) &&
         (p.value == nullptr ||
          aligned_all(kv.layout == KvLayout::kVllm ? nullptr : kv.value, p.value,
                      {kv.value_block_stride, kv.value_head_stride, value_token, p.value_row_stride,
                       p.value_head_stride}));
}

template <typename Out, typename Stored, int kWidth>
void launch_width(const GatherCacheParams& p, Stream stream) {
  const PagedKv& kv = p.kv;
  const bool transposed = kv.layout == KvLayout::kVllm && p.value != nullptr;
  const int num_tensors = p.value == nullptr || transposed ? 1 : 2;
  const int per_head = kv.head_size / kWidth;
  int tokens = kGroup;
  const int64_t wanted = int64_t{2} * current_device_model().num_sms;
  while (tokens > 1 && int64_t{p.tokens.num_rows} / tokens * num_tensors < wanted) tokens /= 2;
  const RowVecs row_vecs{.tokens = tokens,
                         .by_token = FastDivisor(kv.num_kv_heads * per_head),
                         .by_head = FastDivisor(per_head),
                         .per_token = kv.num_kv_heads * per_head,
                         .per_head = per_head};
  const auto blocks = [&](int rows) {
    return static_cast<unsigned>(ceil_div(p.tokens.num_rows, rows));
  };
  launch_kernel(p.op, gather_rows_kernel<Out, Stored, kWidth>, dim3(blocks(tokens), num_tensors),
                dim3(kThreads), 0, stream, p, row_vecs);
  if constexpr (sizeof(Out) > 1) {
    if (!transposed) return;
    const int64_t tile_bytes = int64_t{kGroup} * (kv.head_size * sizeof(Stored) + 16);
    constexpr auto kernel = gather_pages_kernel<Out, Stored, kWidth>;
    if (tile_bytes > dynamic_shared_memory<kernel>(p.op)) {
      throw std::runtime_error(std::string(p.op) + ": head_size " + std::to_string(kv.head_size) +
                               " is too large for layout \"vllm\" on CUDA");
    }
    launch_kernel(p.op, kernel, dim3(blocks(kGroup), kv.num_kv_heads), dim3(kThreads), tile_bytes,
                  stream, p);
  }
}

template <typename Out, typename Stored>
void launch_as(const GatherCacheParams& p, Stream stream) {
  constexpr int kWidth = 16 / sizeof(Out);
  rows_aligned(p, kWidth) ? launch_width<Out, Stored, kWidth>(p, stream)
                          : launch_width<Out, Stored, 1>(p, stream);
}

}  // namespace

void launch(const GatherCacheParams& p, Stream stream) {
  if (p.dtype == p.kv.dtype) {  // equal dtypes: only bits are moved
    switch (size_of(p.dtype)) {
      case 1:
        return launch_as<uint8_t, uint8_t>(p, stream);
      case 2:
        return launch_as<uint16_t, uint16_t>(p, stream);
      default:
        return launch_as<uint32_t, uint32_t>(p, stream);
    }
  }
  dispatch_float(p.dtype, [&](auto rows) {
    using Out = decltype(rows);
    if (p.kv.dtype == DType::kInt4x2) return launch_as<Out, ScaledInt4>(p, stream);
    dispatch_8_bit(p.kv.dtype, [&](auto stored) { launch_as<Out, decltype(stored)>(p, stream); });
  });
}

}  // namespace vllm_kernels::cuda
