// e4m3 queries as 16-bit ones (ops/upcast_query.h), before attention that multiplies in 16 bits.
// Grid: a thread per 16 elements of a head; per element where the queries are not aligned.
// Early reads: none. The kernel waits for its primary kernel first.
#include "ops/upcast_query.h"

#include "cuda/base/fast_divmod.cuh"
#include "cuda/base/fp8.cuh"
#include "cuda/base/launch.cuh"
#include "cuda/base/vec.cuh"
#include "cuda/launchers.h"

namespace vllm_kernels::cuda {
namespace {

constexpr int kThreads = 256;

// by_token, by_group: by the Vecs of a token, and of the query heads of a KV head.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    upcast_query_kernel(UpcastQueryParams p, FastDivisor by_token, FastDivisor by_group,
                        int per_token) {
  launch_dependents();
  wait_for_primary_kernel();
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= int64_t{p.num_tokens} * per_token) return;
  const int token = static_cast<int>(by_token.divide(i));
  const int vec = static_cast<int>(i - int64_t{token} * per_token);
  const int kv_head = static_cast<int>(by_group.divide(vec));
  const float scale = p.scales.of(kv_head);
  const auto* from = static_cast<const Fp8E4M3*>(p.query) + token * p.query_stride;
  const auto elements = reinterpret_cast<const Elements<Fp8E4M3, kWidth>*>(from)[vec];
  Elements<T, kWidth> result;
#pragma unroll
  for (int j = 0; j < kWidth; ++j) {
    result[j] = from_float<T>(to_float(elements.data[j]) * scale);
  }
  auto* to = static_cast<T*>(p.out) + i * kWidth;
  if constexpr (kWidth == 1) {
    *to = result[0];
  } else {
#pragma unroll
    for (int j = 0; j < kWidth / 8; ++j) {
      reinterpret_cast<uint4*>(to)[j] = reinterpret_cast<const uint4*>(&result)[j];
    }
  }
}

template <typename T, int kWidth>
void launch_as(const UpcastQueryParams& p, Stream stream) {
  const int per_token = p.num_heads * p.head_size / kWidth;
  const int64_t vecs = int64_t{p.num_tokens} * per_token;
  launch_kernel("paged_attention", upcast_query_kernel<T, kWidth>,
                dim3(grid_size("paged_attention", ceil_div(vecs, kThreads))), dim3(kThreads), 0,
                stream, p, FastDivisor(per_token), FastDivisor(per_token / p.num_kv_heads),
                per_token);
}

}  // namespace

void launch(const UpcastQueryParams& p, Stream stream) {
  const bool vectorized = aligned16(p.query) && p.query_stride % 16 == 0 && p.head_size % 16 == 0;
  dispatch_16_bit(p.dtype, [&](auto result) {
    using T = decltype(result);
    vectorized ? launch_as<T, 16>(p, stream) : launch_as<T, 1>(p, stream);
  });
}

}  // namespace vllm_kernels::cuda
