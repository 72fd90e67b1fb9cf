// fused_decode_attention in one launch: paged_attention's kernel of one warp a team, with the new
// tokens' heads prepared in it (paged_attention_fresh.cuh).
#pragma once
#include "cuda/paged_attention_decode.cuh"
#include "cuda/paged_attention_fresh.cuh"

namespace vllm_kernels::cuda {

template <typename Cache, int kMaxHeadSize, PageForm kForm>
__global__ void __launch_bounds__(kDecodeThreads<Cache, kMaxHeadSize, false>, 1)
    fused_decode_attention_kernel(const __grid_constant__ PagedAttentionParams p,
                                  const __grid_constant__ DecodeShape shape,
                                  const __grid_constant__ RowMaps maps,
                                  const __grid_constant__ DecodeWorkspace workspace,
                                  const __grid_constant__ FreshParams fresh) {
  __shared__ FreshMemory<kMaxHeadSize> memory;
  decode<Cache, kMaxHeadSize, false, kForm>(p, shape, maps, workspace,
                                            FreshToken<Cache, kMaxHeadSize>(fresh, memory));
}

// False: this batch is better served by two launches.
template <typename Cache>
bool launch_fused_decode(const FusedDecodeAttentionParams& params, const DecodeWorkspace& workspace,
                         void* stream) {
  const PagedAttentionParams& p = params.attention;
  FreshParams fresh{.rope = params.rope, .block_size = FastDivisor(p.kv.block_size)};
  while (2 * kFreshWidth << fresh.lane_shift < p.kv.head_size) ++fresh.lane_shift;
  const int rows = p.num_heads / p.kv.num_kv_heads + 2;  // the item's query heads, key, value
  const auto with_head_size = [&](auto form, auto head_size) {
    constexpr PageForm kForm = decltype(form)::value;
    constexpr int kMaxHeadSize = decltype(head_size)::value;
    if (better_filled_apart<Cache, kForm>(p, kMaxHeadSize)) return false;
    return launch_decode_kernel<Cache, kMaxHeadSize, false, kForm,
                                fused_decode_attention_kernel<Cache, kMaxHeadSize, kForm>>(
        p, workspace, stream, rows << fresh.lane_shift, fresh);
  };
  const auto with_form = [&](auto form) {
    if (p.kv.head_size <= 64) return with_head_size(form, std::integral_constant<int, 64>{});
    return with_head_size(form, std::integral_constant<int, 128>{});
  };
  if (p.kv.layout != KvLayout::kVllm) {
    return with_form(std::integral_constant<PageForm, PageForm::kRows>{});
  }
  return with_form(std::integral_constant<PageForm, PageForm::kPages>{});
}

}  // namespace vllm_kernels::cuda
