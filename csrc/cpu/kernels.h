// The table of contents of csrc/cpu: one kernel per params struct and instruction-set level. A
// kernel is a number of independent tasks, which the caller spreads over its threads.
#pragma once
#include <cstdint>

#include "cpu/attention/paged_attention.h"
#include "cpu/attention/paged_attention_decode.h"
#include "cpu/level.h"
#include "ops/activation.h"
#include "ops/activation_gated.h"
#include "ops/attention_with_kvcache.h"
#include "ops/convert_fp8.h"
#include "ops/copy_blocks.h"
#include "ops/gather_cache.h"
#include "ops/merge_attn_states.h"
#include "ops/mla_cache.h"
#include "ops/paged_attention.h"
#include "ops/pages/copy_slots.h"
#include "ops/pages/page_bounds_update.h"
#include "ops/pages/page_list.h"
#include "ops/pages/select_pages.h"
#include "ops/pages/sparq_attention.h"
#include "ops/pages/value_mean_update.h"
#include "ops/reshape_and_cache.h"
#include "ops/reshape_and_cache_per_token_quant.h"
#include "ops/rms_norm.h"
#include "ops/rms_norm_quant.h"
#include "ops/rope_and_cache.h"
#include "ops/rotary_embedding.h"
#include "ops/sampling/sample.h"
#include "ops/scaled_quant.h"
#include "ops/upcast_query.h"

namespace vllm_kernels::cpu {

template <typename Params>
struct Kernel {
  // The number of tasks. A task moves about 32 KiB, enough to be worth another thread.
  int64_t (*num_tasks)(const Params&);
  // Runs tasks [begin, end). It neither allocates nor throws.
  void (*run)(const Params&, int64_t begin, int64_t end);
};

// How a launch is cut into tasks. It has `count` independent iterations, over rows for example, and
// a task is `per_task` of them.
struct Loop {
  int64_t count;
  int64_t per_task = 1;
};

// The kernel of a loop. run_range(params, first, last) runs iterations [first, last).
template <typename Params, Loop (*loop_of)(const Params&),
          void (*run_range)(const Params&, int64_t first, int64_t last)>
struct LoopKernel {
  static int64_t num_tasks(const Params& p) {
    const Loop loop = loop_of(p);
    return (loop.count + loop.per_task - 1) / loop.per_task;
  }
  static void run(const Params& p, int64_t begin, int64_t end) {
    const Loop loop = loop_of(p);
    const int64_t last = end * loop.per_task;
    run_range(p, begin * loop.per_task, last < loop.count ? last : loop.count);
  }
};

// Each level's object files define their own specialisation. avx512_bf16 has one only for kernels
// that gain from bf16 dot products. avx512_amx has one only for kernels that gain from AMX. Other
// kernels run at the level below.
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
VLLM_KERNELS_DECLARE(ScaledQuantParams)
VLLM_KERNELS_DECLARE(TensorMagnitudesParams)

// --- cache
VLLM_KERNELS_DECLARE(ReshapeAndCacheParams)
VLLM_KERNELS_DECLARE(ReshapeAndCachePerTokenQuantParams)
VLLM_KERNELS_DECLARE(GatherCacheParams)
VLLM_KERNELS_DECLARE(ConcatAndCacheMlaParams)
VLLM_KERNELS_DECLARE(UpconvertMlaParams)
VLLM_KERNELS_DECLARE(ConcatMlaQParams)
VLLM_KERNELS_DECLARE(CopyBlocksParams)
VLLM_KERNELS_DECLARE(SwapBlocksParams)
VLLM_KERNELS_DECLARE(SwapBlocksBatchParams)
VLLM_KERNELS_DECLARE(ConvertFp8Params)

// --- pages
VLLM_KERNELS_DECLARE(PageNamesParams)
VLLM_KERNELS_DECLARE(PageBoundsUpdateParams)
VLLM_KERNELS_DECLARE(PageScoresParams)
VLLM_KERNELS_DECLARE(SelectPagesParams)
VLLM_KERNELS_DECLARE(CopySlotsParams)
VLLM_KERNELS_DECLARE(SparqScoresParams)
VLLM_KERNELS_DECLARE(SparqParams)
VLLM_KERNELS_DECLARE(ValueMeanUpdateParams)

// --- attention
VLLM_KERNELS_DECLARE(DecodePlan)
VLLM_KERNELS_DECLARE(DecodeCombine)
#if defined(__x86_64__)
template <>
constexpr bool kHasBf16Kernel<DecodePlan> = true;
VLLM_KERNELS_DECLARE_AT(DecodePlan, avx512_bf16)
#endif
VLLM_KERNELS_DECLARE(PagedAttentionPlan)
VLLM_KERNELS_DECLARE(PagedAttentionCombine)
#if defined(__x86_64__)
template <>
constexpr bool kHasBf16Kernel<PagedAttentionPlan> = true;
template <>
constexpr bool kHasAmxKernel<PagedAttentionPlan> = true;
VLLM_KERNELS_DECLARE_AT(PagedAttentionPlan, avx512_bf16)
VLLM_KERNELS_DECLARE_AT(PagedAttentionPlan, avx512_amx)
#endif
VLLM_KERNELS_DECLARE(UpcastQueryParams)
VLLM_KERNELS_DECLARE(KvcacheIndicesParams)
VLLM_KERNELS_DECLARE(PageListParams)
VLLM_KERNELS_DECLARE(MergeAttnStatesParams)
VLLM_KERNELS_DECLARE(CombineAttnPartialsParams)

// --- sampling
VLLM_KERNELS_DECLARE(SampleParams)
VLLM_KERNELS_DECLARE(TokenLogprobsParams)
VLLM_KERNELS_DECLARE(SoftmaxParams)
VLLM_KERNELS_DECLARE(TokenBitmaskParams)
VLLM_KERNELS_DECLARE(RepetitionPenaltiesParams)
VLLM_KERNELS_DECLARE(AppendTokenCountsParams)
VLLM_KERNELS_DECLARE(SpecVerifyParams)

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

// Stands at the end of csrc/cpu/<room>/<op>.cpp, which is compiled once per level.
#define VLLM_KERNELS_CPU_KERNEL(Params, loop_of, run_range)           \
  template <>                                                         \
  Kernel<Params> kernel_at<Params, Level::VLLM_KERNELS_CPU_LEVEL>() { \
    using Tasks = LoopKernel<Params, loop_of, run_range>;             \
    return {Tasks::num_tasks, Tasks::run};                            \
  }

}  // namespace vllm_kernels::cpu
