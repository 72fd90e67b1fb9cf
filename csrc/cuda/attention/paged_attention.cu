// paged_attention and varlen_attention: launches what choose_kernel() answers.
#include "cuda/attention/common/workspace.h"
#include "cuda/attention/decode/decode.h"
#include "cuda/attention/dispatch.h"
#include "cuda/attention/prefill/prefill.h"
#include "cuda/attention/prefill/prefill_sm80.h"
#include "cuda/attention/simt/simt_kernel.cuh"
#include "cuda/launchers.h"
#include "ops/report.h"

namespace vllm_kernels::cuda {
namespace {

void launch_decode(const PagedAttentionParams& p, const KernelChoice& choice,
                   const DecodeWorkspace& workspace, Stream stream) {
  switch (p.kv.dtype) {
    case DType::kFloat16:
      return paged_attention_decode_f16(p, choice, workspace, stream);
    case DType::kBFloat16:
      return paged_attention_decode_bf16(p, choice, workspace, stream);
    case DType::kFp8E4M3:
      return paged_attention_decode_e4m3(p, choice, workspace, stream);
    case DType::kFp8E5M2:
      return paged_attention_decode_e5m2(p, choice, workspace, stream);
    default:
      return paged_attention_decode_int8(p, choice, workspace, stream);
  }
}

void launch_prefill_sm90(const PagedAttentionParams& p, const PrefillLaunch& launch,
                         Stream stream) {
  switch (p.kv.head_size) {
    case 64:
      return paged_attention_prefill_64(p, launch, stream);
    case 96:
      return paged_attention_prefill_96(p, launch, stream);
    case 128:
      return paged_attention_prefill_128(p, launch, stream);
    case 192:
      return paged_attention_prefill_192(p, launch, stream);
    default:
      return paged_attention_prefill_256(p, launch, stream);
  }
}

void launch_prefill_sm80(const PagedAttentionParams& p, const KernelChoice& choice,
                         const PrefillLaunch& launch, Stream stream) {
  const bool rows = p.kv.layout != KvLayout::kVllm;
  const auto kernel = size_of(p.kv.dtype) == 1     ? rows ? paged_attention_prefill_sm80_8bit_rows
                                                          : paged_attention_prefill_sm80_8bit_pages
                      : p.dtype == DType::kFloat16 ? rows ? paged_attention_prefill_sm80_f16_rows
                                                          : paged_attention_prefill_sm80_f16_pages
                      : rows                       ? paged_attention_prefill_sm80_bf16_rows
                                                   : paged_attention_prefill_sm80_bf16_pages;
  kernel(p, choice, launch, stream);
}

}  // namespace

void launch_paged_attention(const PagedAttentionParams& p, void* memory, Stream stream) {
  const DeviceModel& device = current_device_info();
  const AttentionChoice choice = choose_kernel(p, device);
  if (report("paged_attention", [&] { return describe(choice, device); })) return;
  const DecodeWorkspace workspace = decode_workspace(memory, stream);
  const PrefillLaunch launch = {.min_query_len = choice.min_query_len,
                                .has_concurrent_launch = choice.has_concurrent_decode,
                                .next = prefill_next(workspace)};
  switch (choice.main.kernel) {
    case AttentionKernel::kSimt:
      return launch_simt(p, workspace, stream);
    case AttentionKernel::kDecode:
    case AttentionKernel::kDecodeWgmma:
      return launch_decode(p, choice.main, workspace, stream);
    case AttentionKernel::kPrefillSm90:
      launch_prefill_sm90(p, launch, stream);
      break;
    case AttentionKernel::kPrefillSm80:
      launch_prefill_sm80(p, choice.main, launch, stream);
  }
  if (choice.has_concurrent_decode) {
    launch_decode(concurrent_params(p, choice), choice.concurrent_decode, workspace, stream);
  }
}

}  // namespace vllm_kernels::cuda
