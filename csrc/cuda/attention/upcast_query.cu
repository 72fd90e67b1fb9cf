// e4m3 queries as 16-bit ones.
// Grid: a CTA per token, or per sequence of a concurrent launch, which has few tokens. A thread has
// 16 elements of a head at a time; one where the queries are not aligned.
// Early reads: none. The kernel waits for its primary kernel first.
#include "cuda/attention/upcast_query.h"

#include "cuda/base/fast_divmod.cuh"
#include "cuda/base/fp8.cuh"
#include "cuda/base/launch.cuh"
#include "cuda/base/vec.cuh"

namespace vllm_kernels::cuda {
namespace {

constexpr int kThreads = 256;

// by_token, by_group: by the Vecs of a token, and of the query heads of a KV head.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    upcast_query_kernel(const __grid_constant__ PagedAttentionParams p, E4M3Query query, T* out,
                        FastDivisor by_token, FastDivisor by_group, int per_token) {
  launch_dependents();
  wait_for_primary_kernel();
  const int index = static_cast<int>(blockIdx.x);
  const RowRange tokens = p.concurrent ? query_range(p, index) : RowRange{index, 1};
#pragma unroll 1
  for (int i = threadIdx.x; i < tokens.count * per_token; i += kThreads) {
    const int in_range = static_cast<int>(by_token.divide(i)), vec = i - in_range * per_token;
    const float scale = query.of(static_cast<int>(by_group.divide(vec)));
    const int64_t token = tokens.first + in_range;
    const auto* from = static_cast<const Fp8E4M3*>(p.query) + token * p.query_stride;
    const auto elements = reinterpret_cast<const Elements<Fp8E4M3, kWidth>*>(from)[vec];
    alignas(16) Elements<T, kWidth> result;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      result[j] = from_float<T>(to_float(elements.data[j]) * scale);
    }
    T* to = out + (token * per_token + vec) * kWidth;
    if constexpr (kWidth == 1) {
      *to = result[0];
    } else {
#pragma unroll
      for (int j = 0; j < kWidth / 8; ++j) {
        reinterpret_cast<uint4*>(to)[j] = reinterpret_cast<const uint4*>(&result)[j];
      }
    }
  }
}

template <typename T, int kWidth>
void launch_as(const PagedAttentionParams& p, const E4M3Query& query, void* out, void* stream) {
  const int per_token = p.num_heads * p.head_size() / kWidth;
  launch_kernel("paged_attention", upcast_query_kernel<T, kWidth>,
                dim3(static_cast<unsigned>(p.concurrent ? p.num_seqs : p.num_tokens)),
                dim3(kThreads), 0, stream, p, query, static_cast<T*>(out), FastDivisor(per_token),
                FastDivisor(per_token / p.kv.num_kv_heads), per_token);
}

}  // namespace

void upcast_query(const PagedAttentionParams& p, const E4M3Query& query, void* out, void* stream) {
  const bool vectorized = aligned16(p.query) && p.query_stride % 16 == 0 && p.head_size() % 16 == 0;
  dispatch_16_bit(p.dtype, [&](auto result) {
    using T = decltype(result);
    vectorized ? launch_as<T, 16>(p, query, out, stream) : launch_as<T, 1>(p, query, out, stream);
  });
}

}  // namespace vllm_kernels::cuda
