// fused_decode_attention in one launch: rotation, cache write and attention of one new token per
// sequence (ops/fused_decode_attention.h). It is the decode kernel with one warp per consumer
// (attention/decode/decode_kernel.cuh), which also prepares the new tokens' heads (new_token.cuh).
// Layout vllm, pages of up to 16 tokens, heads of up to 128 dimensions.
//
// Grid, roles of warps and early reads are the decode kernel's. With a 16-bit cache, the new
// tokens' positions are read early, too.
#pragma once
#include "cuda/attention/decode/decode_kernel.cuh"
#include "cuda/attention/fused_decode/new_token.cuh"

namespace vllm_kernels::cuda {

template <typename Cache, int kMaxHeadSize>
__global__ void __launch_bounds__(kDecodeThreads<Cache, kMaxHeadSize, false>, 1)
    fused_decode_attention_kernel(const __grid_constant__ PagedAttentionParams p,
                                  const __grid_constant__ DecodeShape shape,
                                  const __grid_constant__ KvTensorMaps maps,
                                  const __grid_constant__ DecodeWorkspace workspace,
                                  const __grid_constant__ NewTokenParams new_token) {
  __shared__ NewTokenMemory<kMaxHeadSize> memory;
  decode<Cache, kMaxHeadSize, false, KvForm::kPackedPages>(
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
    launch_decode_kernel<Cache, kMaxHeadSize, false, KvForm::kPackedPages,
                         fused_decode_attention_kernel<Cache, kMaxHeadSize>>(p, choice, workspace,
                                                                             stream, new_token);
  };
  choice.padded_head_size == 64 ? with_head_size(Constant<64>{}) : with_head_size(Constant<128>{});
}

}  // namespace vllm_kernels::cuda
