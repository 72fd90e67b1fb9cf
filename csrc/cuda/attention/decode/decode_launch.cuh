// Launches of the decode kernels. Host code: the kernel's shape from the KernelChoice, and the
// instantiation that it names.
#pragma once
#include <stdexcept>

#include "cuda/attention/decode/decode.h"
#include "cuda/attention/decode/decode_kernel.cuh"

namespace vllm_kernels::cuda {

// Launches kKernel, whose parameters are p, DecodeShape, KvTensorMaps, workspace and `more`.
template <typename Cache, int kMaxHeadSize, bool kMultiWarp, KvForm kForm, bool kHalves,
          auto kKernel, typename... More>
void launch_decode_kernel(const PagedAttentionParams& p, const KernelChoice& choice,
                          const DecodeWorkspace& workspace, void* stream, const More&... more) {
  constexpr int kTokens = (kHalves ? 32 : 16) * kTokenTiles<Cache, kMaxHeadSize, kMultiWarp>;
  constexpr int kShift = kStageShift<kTokens>;
  const int ctas = static_cast<int>(choice.grid.x);
  constexpr int kMaxStored = kMaxHeadSize / kValuesOf<Cache>;
  const PagedKv rows = rows_of_heads(p.kv, choice.kv_heads);
  DecodeShape shape;
  set_stage_layout<Cache, kMaxStored, kTokens, kForm>(rows, shape.pipeline, shape.stage_layout);
  shape.pipeline.stages = choice.stages;
  shape.consumer_shift = choice.consumer_shift;
  shape.warp_shift = choice.warp_shift;
  shape.combine_rows = choice.combine_rows;
  shape.fours = FastDivisor(p.head_size() / 4);
  shape.cap = score_cap(p.softcap);
  shape.work = work_shape(p, choice, kShift, p.head_size());
  check_shared_memory<kKernel>("paged_attention", choice);
  PagedAttentionParams params = p;
  params.kv.num_kv_heads /= choice.kv_heads;  // the scheduler counts groups of heads
  launch_kernel("paged_attention", kKernel, dim3(ctas), dim3(choice.warps * 32),
                choice.shared_bytes, stream, params, shape,
                kv_tensor_maps<Cache, kTokens, kForm>(rows, shape.pipeline.line_shift), workspace,
                more...);
}

// Calls body(Constant<size>{}) if `size` is one of kSizes.
template <int... kSizes, typename Body>
bool with_size(int size, const Body& body) {
  return ((size == kSizes && (body(Constant<kSizes>{}), true)) || ...);
}

// The instantiation that `choice` names.
template <typename Cache>
void DecodeKernels<Cache>::launch(const PagedAttentionParams& p, const KernelChoice& choice,
                                  const DecodeWorkspace& workspace, void* stream) {
  const auto launch_one = [&](auto form, auto head_size, auto multi_warp) {
    constexpr KvForm kForm = decltype(form)::value;
    constexpr int kMaxHeadSize = decltype(head_size)::value;
    constexpr bool kMultiWarp = decltype(multi_warp)::value;
    const auto launch = [&](auto halves) {
      constexpr bool kHalves = decltype(halves)::value;
      launch_decode_kernel<
          Cache, kMaxHeadSize, kMultiWarp, kForm, kHalves,
          paged_attention_decode_kernel<Cache, kMaxHeadSize, kMultiWarp, kForm, kHalves>>(
          p, choice, workspace, stream);
    };
    if constexpr (kHasCodeForSm90a && !kMultiWarp && kMayHalveStages<Cache, kMaxHeadSize, kForm>) {
      if (choice.halves_stages) return launch(std::true_type{});
    }
    launch(std::false_type{});
  };
  const auto with_head_size = [&](auto form, auto head_size) {
    constexpr bool kWgmma = kHasWgmmaDecode<Cache, decltype(head_size)::value>;
    if (!choice.multi_warp) return launch_one(form, head_size, std::false_type{});
    if constexpr (kWgmma && kHasCodeForSm90a) {
      if (choice.kernel == AttentionKernel::kDecodeWgmma) {
        return launch_decode_wgmma<Cache, decltype(head_size)::value, decltype(form)::value>(
            p, choice, workspace, stream);
      }
    }
    if constexpr (!kWgmma || kHasCodeForOthers) {
      launch_one(form, head_size, std::true_type{});
    } else {
      throw std::logic_error("paged_attention: the chosen decode kernel is not in this build");
    }
  };
  const auto with_form = [&](auto form) {
    if constexpr (!kHasZeros<Cache>) {
      if (choice.padded_head_size == 64) return with_head_size(form, Constant<64>{});
    }
    if (choice.padded_head_size == 128) return with_head_size(form, Constant<128>{});
    with_head_size(form, Constant<256>{});
  };
  const auto plain_rows = [&](auto head_size) {
    launch_one(std::integral_constant<KvForm, KvForm::kPlainRows>{}, head_size, std::false_type{});
  };
  const auto lines = [&](auto head_size) {
    launch_one(std::integral_constant<KvForm, KvForm::kLines>{}, head_size, std::false_type{});
  };
  switch (choice.form) {
    case KvForm::kPackedPages:
      return with_form(std::integral_constant<KvForm, KvForm::kPackedPages>{});
    case KvForm::kPackedBoxes:
      return with_form(std::integral_constant<KvForm, KvForm::kPackedBoxes>{});
    case KvForm::kSwizzledRows:
      return with_form(std::integral_constant<KvForm, KvForm::kSwizzledRows>{});
    case KvForm::kPlainRows:
      if constexpr (kHasZeros<Cache>) {
        return plain_rows(Constant<128>{});
      } else {
        if (with_size<80, 96, 112>(choice.padded_head_size, plain_rows)) return;
        if constexpr (sizeof(Cache) == 1) {
          if (with_size<160, 192, 224>(choice.padded_head_size, plain_rows)) return;
        }
      }
      throw std::logic_error("paged_attention: no decode kernel has plain rows of this head size");
    case KvForm::kLines:
      if constexpr (kHasCodeForSm90a && sizeof(Cache) == 1 && !kHasTokenScales<Cache>) {
        if (with_size<64, 80, 96, 112, 128, 160, 192, 224>(choice.padded_head_size, lines)) return;
      }
      throw std::logic_error("paged_attention: no decode kernel has lines of this head size");
  }
}

}  // namespace vllm_kernels::cuda
