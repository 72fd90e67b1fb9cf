// The CPU room's table of contents: one kernel per params struct and level.
// A kernel is a list of independent tasks; the caller spreads them over its threads.
#pragma once
#include <cstdint>

#include "cpu/attention/paged_attention.h"
#include "cpu/attention/paged_attention_decode.h"
#include "cpu/level.h"
#include "ops/activation.h"
#include "ops/activation_gated.h"
#include "ops/combine_attn_partials.h"
#include "ops/convert_fp8.h"
#include "ops/copy_blocks.h"
#include "ops/gather_cache.h"
#include "ops/merge_attn_states.h"
#include "ops/mla_cache.h"
#include "ops/paged_attention.h"
#include "ops/reshape_and_cache.h"
#include "ops/reshape_and_cache_per_token_quant.h"
#include "ops/rms_norm.h"
#include "ops/rms_norm_gain.h"
#include "ops/rms_norm_quant.h"
#include "ops/rope_and_cache.h"
#include "ops/rotary_embedding.h"

namespace vllm_kernels::cpu {

template <typename Params>
struct Kernel {
  // How many tasks there are; a task is large enough (about 32 KiB of traffic) to be worth handing
  // to another thread.
  int64_t (*num_tasks)(const Params&);
  // Runs tasks [begin, end). Does not allocate, does not throw.
  void (*run)(const Params&, int64_t begin, int64_t end);
};

// Each level's object files define their own specialisation. avx512_bf16 has one only where bf16
// dot products pay, avx512_amx where products of tiles do; elsewhere they run the kernel of the
// level below.
template <typename Params, Level level>
Kernel<Params> kernel_at();

template <typename Params>
constexpr bool kHasBf16Kernel = false;
template <typename Params>
constexpr bool kHasAmxKernel = false;

#define VLLM_KERNELS_DECLARE_AT(Params, level) \
  template <>                                  \
  Kernel<Params> kernel_at<Params, Level::level>();
#if defined(__x86_64__)
#define VLLM_KERNELS_DECLARE(Params)        \
  VLLM_KERNELS_DECLARE_AT(Params, baseline) \
  VLLM_KERNELS_DECLARE_AT(Params, avx2)     \
  VLLM_KERNELS_DECLARE_AT(Params, avx512)
#else
#define VLLM_KERNELS_DECLARE(Params) VLLM_KERNELS_DECLARE_AT(Params, baseline)
#endif

// --- norms
VLLM_KERNELS_DECLARE(RmsNormParams)
VLLM_KERNELS_DECLARE(RmsNormGainParams)
VLLM_KERNELS_DECLARE(RmsNormQuantParams)

// --- rotary and activations
VLLM_KERNELS_DECLARE(RotaryParams)
VLLM_KERNELS_DECLARE(RopeAndCacheParams)
VLLM_KERNELS_DECLARE(ActivationParams)
VLLM_KERNELS_DECLARE(GatedParams)
VLLM_KERNELS_DECLARE(GatedQuantParams)

// --- cache
VLLM_KERNELS_DECLARE(ReshapeAndCacheParams)
VLLM_KERNELS_DECLARE(ReshapeAndCachePerTokenQuantParams)
VLLM_KERNELS_DECLARE(GatherCacheParams)
VLLM_KERNELS_DECLARE(ConcatAndCacheMlaParams)
VLLM_KERNELS_DECLARE(UpconvertMlaParams)
VLLM_KERNELS_DECLARE(ConcatMlaQParams)
VLLM_KERNELS_DECLARE(CopyBlocksParams)
VLLM_KERNELS_DECLARE(SwapBlocksParams)
VLLM_KERNELS_DECLARE(ConvertFp8Params)

// --- attention
VLLM_KERNELS_DECLARE(PagedAttentionWork)
VLLM_KERNELS_DECLARE(PagedAttentionMerge)
#if defined(__x86_64__)
template <>
constexpr bool kHasBf16Kernel<PagedAttentionWork> = true;
VLLM_KERNELS_DECLARE_AT(PagedAttentionWork, avx512_bf16)
VLLM_KERNELS_DECLARE_AT(PagedAttentionMerge, avx512_bf16)
#endif
VLLM_KERNELS_DECLARE(GeneralAttentionWork)
VLLM_KERNELS_DECLARE(GeneralAttentionMerge)
#if defined(__x86_64__)
template <>
constexpr bool kHasBf16Kernel<GeneralAttentionWork> = true;
template <>
constexpr bool kHasAmxKernel<GeneralAttentionWork> = true;
VLLM_KERNELS_DECLARE_AT(GeneralAttentionWork, avx512_bf16)
VLLM_KERNELS_DECLARE_AT(GeneralAttentionWork, avx512_amx)
#endif
VLLM_KERNELS_DECLARE(MergeAttnStatesParams)
VLLM_KERNELS_DECLARE(CombineAttnPartialsParams)

#undef VLLM_KERNELS_DECLARE
#undef VLLM_KERNELS_DECLARE_AT

// The kernel of the chosen level.
template <typename Params>
Kernel<Params> kernel() {
#if defined(__x86_64__)
  switch (level()) {
    case Level::avx512_amx:
      if constexpr (kHasAmxKernel<Params>) return kernel_at<Params, Level::avx512_amx>();
      [[fallthrough]];
    case Level::avx512_bf16:
      if constexpr (kHasBf16Kernel<Params>) return kernel_at<Params, Level::avx512_bf16>();
      [[fallthrough]];
    case Level::avx512:
      return kernel_at<Params, Level::avx512>();
    case Level::avx2:
      return kernel_at<Params, Level::avx2>();
    case Level::baseline:
      break;
  }
#endif
  return kernel_at<Params, Level::baseline>();
}

}  // namespace vllm_kernels::cpu

// At the end of csrc/cpu/<op>.cpp, which is compiled once per level.
#define VLLM_KERNELS_CPU_KERNEL(Params, num_tasks, run)                                      \
  template <>                                                                                \
  vllm_kernels::cpu::Kernel<Params>                                                          \
  vllm_kernels::cpu::kernel_at<Params, vllm_kernels::cpu::Level::VLLM_KERNELS_CPU_LEVEL>() { \
    return {num_tasks, run};                                                                 \
  }
