// merge_attn_states: merges two attention results over disjoint keys by their lse. Shapes and the
// formula are in ops/merge_attn_states.h. Rows are (token, head): up to 32 lanes share one, and a
// CTA of 128 threads has several. There are no early reads.
// combine_attn_partials.cu merges any number of results.
#include "ops/merge_attn_states.h"

#include <cmath>

#include "cuda/base/launch.cuh"
#include "cuda/base/vec.cuh"
#include "cuda/launchers.h"

namespace vllm_kernels::cuda {
namespace {

constexpr int kThreads = 128;

// `lanes` neighbouring lanes (a power of two, at most 32) share a (token, head) row. kWidth is the
// number of elements per access: 16 bytes, or one element where a row is unaligned.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    merge_attn_states_kernel(MergeAttnStatesParams p, int lanes) {
  using Access = Elements<T, kWidth>;
  launch_dependents();
  wait_for_primary_kernel();
  const int64_t row = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / lanes;
  const int lane = threadIdx.x % lanes;
  const bool exists = row < p.num_tokens * p.num_heads;
  const int64_t token = exists ? row / p.num_heads : 0;
  const int64_t head = exists ? row % p.num_heads : 0;
  const int64_t at = head * p.num_tokens + token;
  float prefix_lse = exists ? p.prefix_lse[at] : 0.0f;
  float suffix_lse = exists ? p.suffix_lse[at] : 0.0f;
  __syncwarp();  // output_lse may alias an input: all lanes read before one writes
  if (!exists) return;

  if (prefix_lse == INFINITY) prefix_lse = -INFINITY;
  if (suffix_lse == INFINITY) suffix_lse = -INFINITY;
  const float largest = fmaxf(prefix_lse, suffix_lse);
  float prefix_weight = 0.0f, suffix_weight = 0.0f, lse = -INFINITY;
  if (!(prefix_lse == -INFINITY && suffix_lse == -INFINITY)) {
    const float ep = expf(prefix_lse - largest), es = expf(suffix_lse - largest);
    const float sum = ep + es;
    prefix_weight = ep / sum;
    suffix_weight = es / sum;
    lse = largest + logf(sum);
  }
  if (p.output_lse != nullptr && lane == 0) p.output_lse[at] = lse;

  const auto* prefix =
      reinterpret_cast<const Access*>(static_cast<const T*>(p.prefix.data) +
                                      token * p.prefix.token_stride + head * p.prefix.head_stride);
  const auto* suffix =
      reinterpret_cast<const Access*>(static_cast<const T*>(p.suffix.data) +
                                      token * p.suffix.token_stride + head * p.suffix.head_stride);
  auto* output = reinterpret_cast<Access*>(
      static_cast<T*>(p.output) + token * p.output_token_stride + head * p.output_head_stride);
  for (int i = lane; i < p.head_size / kWidth; i += lanes) {
    const Access left = prefix[i], right = suffix[i];
    Access merged;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      // A state of weight 0 may contain anything, even NaN: it counts as 0.
      const float l = prefix_weight == 0.0f ? 0.0f : to_float(left.data[j]) * prefix_weight;
      const float r = suffix_weight == 0.0f ? 0.0f : to_float(right.data[j]) * suffix_weight;
      merged.data[j] = from_float<T>(l + r);
    }
    output[i] = merged;
  }
}

}  // namespace

void launch(const MergeAttnStatesParams& p, Stream stream) {
  dispatch_float(p.dtype, [&](auto tag) {
    using T = decltype(tag);
    constexpr int kWidth = kVecWidth<T>;
    const bool vectors =
        aligned16(p.output) && aligned16(p.prefix.data) && aligned16(p.suffix.data) &&
        multiples(kWidth,
                  {p.head_size, p.output_token_stride, p.output_head_stride, p.prefix.token_stride,
                   p.prefix.head_stride, p.suffix.token_stride, p.suffix.head_stride});
    const int steps = vectors ? p.head_size / kWidth : p.head_size;
    int lanes = 1;
    while (lanes < steps && lanes < 32) lanes *= 2;
    const int64_t blocks = ceil_div(p.num_tokens * p.num_heads, kThreads / lanes);
    launch_kernel("merge_attn_states",
                  vectors ? merge_attn_states_kernel<T, kWidth> : merge_attn_states_kernel<T, 1>,
                  dim3(grid_size("merge_attn_states", blocks)), dim3(kThreads), 0, stream, p,
                  lanes);
  });
}

}  // namespace vllm_kernels::cuda
