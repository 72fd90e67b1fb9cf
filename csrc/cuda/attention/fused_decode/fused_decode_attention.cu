// fused_decode_attention: rotation, cache write and attention of one new token per sequence.
// ops/fused_decode_attention.h has the shapes. It is one launch if choose_fused_decode() finds no
// obstacle. Otherwise rope_and_cache and paged_attention are launched one after the other.
//
// The kernel is the decode kernel with one warp per consumer (attention/decode/decode_kernel.cuh),
// which also prepares the new tokens' heads (new_token.cuh). Layout vllm, pages of up to 16 tokens,
// heads of up to 128 dimensions.
//
// The decode kernel has the grid, the roles of warps and the early reads. With a 16-bit cache, the
// new tokens' positions are read early, too.
#include "cuda/attention/decode/decode_launch.cuh"
#include "cuda/attention/dispatch.h"
#include "cuda/attention/fused_decode/new_token.cuh"
#include "cuda/launchers.h"
#include "ops/report.h"

namespace vllm_kernels::cuda {
namespace {

template <typename Cache, int kMaxHeadSize>
__global__ void __launch_bounds__(kDecodeThreads<Cache, kMaxHeadSize, false>, 1)
    fused_decode_attention_kernel(const __grid_constant__ PagedAttentionParams p,
                                  const __grid_constant__ DecodeShape shape,
                                  const __grid_constant__ KvTensorMaps maps,
                                  const __grid_constant__ DecodeWorkspace workspace,
                                  const __grid_constant__ NewTokenParams new_token) {
  __shared__ NewTokenMemory<kMaxHeadSize> memory;
  decode<Cache, kMaxHeadSize, false, KvForm::kPackedPages, false>(
      p, shape, maps, workspace, FusedNewToken<Cache, kMaxHeadSize>(new_token, memory));
}

template <typename Cache>
void launch_fused_decode(const FusedDecodeAttentionParams& params, const KernelChoice& choice,
                         const DecodeWorkspace& workspace, void* stream) {
  const PagedAttentionParams& p = params.attention;
  const NewTokenParams new_token{.rope = params.rope,
                                 .block_size = FastDivisor(p.kv.block_size),
                                 .lane_shift = new_token_lane_shift(p.kv.head_size)};
  const auto with_head_size = [&](auto head_size) {
    constexpr int kMaxHeadSize = decltype(head_size)::value;
    launch_decode_kernel<Cache, kMaxHeadSize, false, KvForm::kPackedPages, false,
                         fused_decode_attention_kernel<Cache, kMaxHeadSize>>(p, choice, workspace,
                                                                             stream, new_token);
  };
  choice.padded_head_size == 64 ? with_head_size(Constant<64>{}) : with_head_size(Constant<128>{});
}

KernelChoice choose(const FusedDecodeAttentionParams& params) {
  const PagedAttentionParams& p = params.attention;
  // A CTA prepares the query heads of a KV head, its key and its value.
  const int threads = (p.num_heads / p.kv.num_kv_heads + 2) << new_token_lane_shift(p.kv.head_size);
  KernelChoice choice = choose_fused_decode(p, current_device_model(), threads);
  if (!vecs_fit(params.rope)) choice.obstacles |= kUnalignedProjection;
  return choice;
}

}  // namespace

void launch(const FusedDecodeAttentionParams& params, void* memory, Stream stream) {
  const PagedAttentionParams& p = params.attention;
  const KernelChoice choice = choose(params);
  const bool in_one = choice.obstacles == kNoObstacle;
  if (in_one) check_fixed_split(p, choice);
  const bool explained = report("fused_decode_attention", [&] {
    return in_one ? describe(choice)
                  : "two launches, rope_and_cache and paged_attention" + because(choice.obstacles);
  });
  if (!in_one) {
    if (!explained) launch(params.rope, stream);
    return launch_paged_attention(p, {}, memory, nullptr, stream);
  }
  if (explained) return;
  const DecodeWorkspace workspace = decode_workspace(memory, stream);
  const auto launch_one = [&](auto cache) {
    launch_fused_decode<decltype(cache)>(params, choice, workspace, stream);
  };
  p.kv.dtype == DType::kFp8E4M3 ? launch_one(Fp8E4M3{}) : dispatch_16_bit(p.kv.dtype, launch_one);
}

}  // namespace vllm_kernels::cuda
