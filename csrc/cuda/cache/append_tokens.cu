// attention_with_kvcache: writes few new tokens into a cache of any layout, and computes the
// indices of ops/attention_with_kvcache.h, in one launch.
//
// Grid: a CTA a new token; behind them CTAs for the indices, a grid-stride loop. A CTA of a token
// computes the token's slot from the length and the table of its sequence. It skips the token if a
// later one has the same slot. Before the PDL wait the new tokens are prefetched into L2.
#include <algorithm>

#include "cuda/base/kv_element.cuh"
#include "cuda/base/launch.cuh"
#include "cuda/base/types.cuh"
#include "cuda/cache/heuristics.h"
#include "cuda/cache/write_pages.cuh"
#include "cuda/cache/write_rows.cuh"
#include "cuda/launchers.h"
#include "ops/attention_with_kvcache.h"

namespace vllm_kernels::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int64_t kMaxIndexBlocks = 1024;

struct AppendWrite : CacheWrite {
  FastDivisor by_new_tokens;
  FastDivisor by_head_chunks;
  int32_t chunks;         // of a token: 16 bytes of the cache each
  int32_t head_chunks;    // of a head
  bool values_are_apart;  // layout vllm: neighbouring values of a token are not neighbours

  explicit AppendWrite(const KvcacheAppendParams& p)
      : CacheWrite(p.write),
        by_new_tokens(p.indices.new_tokens),
        by_head_chunks(p.write.kv.head_size / p.write.kv.x),
        chunks(p.write.kv.num_kv_heads * (p.write.kv.head_size / p.write.kv.x)),
        head_chunks(p.write.kv.head_size / p.write.kv.x),
        values_are_apart(p.write.kv.layout == KvLayout::kVllm) {}

  // The slot of a new token of the call, or -1.
  __device__ __forceinline__ int32_t slot_of(const KvcacheIndicesParams& p, int token) const {
    const int seq = by_new_tokens.divide(token);
    return usable(p.slot(seq, token - seq * p.new_tokens));
  }
};

// 16 bytes of the cache, of K and of V.
template <typename T, typename C>
struct Chunk {
  static constexpr int kWidth = kVecWidth<C>;
  static constexpr int kVectors = kWidth / kVecWidth<T>;
  int head, d;  // its first element
  Elements16<T> key[kVectors], value[kVectors];

  __device__ __forceinline__ void locate(const AppendWrite& w, int chunk) {
    head = w.by_head_chunks.divide(chunk);
    d = (chunk - head * w.head_chunks) * kWidth;
  }
  __device__ __forceinline__ const Elements16<T>* value_at(const AppendWrite& w, int token) const {
    return reinterpret_cast<const Elements16<T>*>(w.value_at<T>(token, head, d));
  }
  __device__ __forceinline__ void load(const AppendWrite& w, int token) {
    GivenKeys<T, kVectors>(w).load(token, head, d, key);
    load_chunk(value, value_at(w, token));
  }
  __device__ __forceinline__ void store(const AppendWrite& w, Slot at) const {
    C* keys = stepped(w.key_page<C>(at.block, head), at.token, w.to_key_token);
    *reinterpret_cast<Elements16<C>*>(stepped(keys, d / kWidth, w.to_key_chunk)) =
        quantize<T, C>(key, Divisor{});
    C* values = stepped(w.value_page<C>(at.block, head), at.token, w.to_value_token);
    const Elements16<C> stored = quantize<T, C>(value, Divisor{});
    if (!w.values_are_apart) {
      *reinterpret_cast<Elements16<C>*>(values + d) = stored;
      return;
    }
#pragma unroll
    for (int i = 0; i < kWidth; ++i) *stepped(values, d + i, w.to_value_dim) = stored[i];
  }
};

template <typename T, typename C>
__global__ void __launch_bounds__(kThreads)
    append_tokens_kernel(const __grid_constant__ KvcacheIndicesParams p,
                         const __grid_constant__ AppendWrite w) {
  launch_dependents();
  const int token = blockIdx.x, thread = threadIdx.x;
  if (token >= w.num_tokens) {
    wait_for_primary_kernel();
    const int64_t count = p.count(), step = int64_t{gridDim.x - w.num_tokens} * kThreads;
    for (int64_t i = int64_t{token - w.num_tokens} * kThreads + thread; i < count; i += step) {
      p.run(i);
    }
    return;
  }
  Chunk<T, C> chunk;
  chunk.locate(w, min(thread, w.chunks - 1));
  GivenKeys<T, Chunk<T, C>::kVectors>(w).prefetch(token, chunk.head, chunk.d);
  prefetch_l2(chunk.value_at(w, token));
  wait_for_primary_kernel();
  chunk.load(w, token);
  const int32_t slot = w.slot_of(p, token);
  bool is_repeated = false;
#pragma unroll 1
  for (int later = token + 1 + thread; later < w.num_tokens; later += kThreads) {
    is_repeated |= w.slot_of(p, later) == slot;
  }
  if (__syncthreads_or(is_repeated) || slot < 0) return;
  const Slot at = w.place(slot);
#pragma unroll 1
  for (int i = thread; i < w.chunks; i += kThreads) {
    if (i != thread) {
      chunk.locate(w, i);
      chunk.load(w, token);
    }
    chunk.store(w, at);
  }
}

}  // namespace

bool may_append(const ReshapeAndCacheParams& p) {
  if (p.num_tokens < 1 || p.num_tokens > kMaxAppended) return false;
  return p.kv.layout == KvLayout::kVllm ? pages_aligned(p) : rows_aligned(p);
}

void launch(const KvcacheAppendParams& p, Stream stream) {
  const int64_t index_blocks = std::min(ceil_div(p.indices.count(), kThreads), kMaxIndexBlocks);
  const dim3 grid(static_cast<unsigned>(p.write.num_tokens + index_blocks));
  dispatch_float(p.write.dtype, [&](auto model) {
    using T = decltype(model);
    dispatch_cache<T>(p.write.kv.dtype, [&](auto stored) {
      launch_kernel(p.write.op, append_tokens_kernel<T, decltype(stored)>, grid, dim3(kThreads), 0,
                    stream, p.indices, AppendWrite(p));
    });
  });
}

}  // namespace vllm_kernels::cuda
