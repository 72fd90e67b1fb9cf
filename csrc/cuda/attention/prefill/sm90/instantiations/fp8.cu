// The sm90 prefill kernels of e4m3 queries, for wgmma (fp8.cuh).
#include "cuda/attention/prefill/sm90/fp8.cuh"

namespace vllm_kernels::cuda {

void launch_prefill_fp8(const PagedAttentionParams& p, const PrefillLaunch& launch, void* stream) {
  dispatch_16_bit(p.dtype, [&](auto result) {
    using T = decltype(result);
    const auto with_form = [&](auto form) {
      constexpr KvForm kForm = decltype(form)::value;
      if (p.kv.head_size <= 64) return launch_prefill_fp8<T, 64, kForm>(p, launch, stream);
      launch_prefill_fp8<T, 128, kForm>(p, launch, stream);
    };
    if (p.kv.layout == KvLayout::kVllm) {
      return with_form(std::integral_constant<KvForm, KvForm::kPackedPages>{});
    }
    with_form(std::integral_constant<KvForm, KvForm::kSwizzledRows>{});
  });
}

}  // namespace vllm_kernels::cuda
