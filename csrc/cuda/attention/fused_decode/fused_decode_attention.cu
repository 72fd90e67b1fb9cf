// fused_decode_attention's entry point. It launches the one fused kernel where there is one
// (fused_decode_attention.cuh), else rope_and_cache and paged_attention one after the other.
#include "cuda/attention/fused_decode/fused_decode_attention.h"

#include "cuda/attention/dispatch.h"
#include "cuda/attention/fused_decode/new_token.cuh"
#include "cuda/launchers.h"
#include "ops/report.h"

namespace vllm_kernels::cuda {
namespace {

bool launch_in_one(const FusedDecodeAttentionParams& params, void* memory, Stream stream) {
  const PagedAttentionParams& p = params.attention;
  // A CTA prepares the query heads of a KV head, its key and its value.
  const int threads = (p.num_heads / p.kv.num_kv_heads + 2) << new_token_lane_shift(p.kv.head_size);
  KernelChoice choice;
  if (!vecs_fit(params.rope) || !choose_fused_decode(p, current_device_info(), threads, choice)) {
    return false;
  }
  if (report("fused_decode_attention", [&] { return describe(choice, current_device_info()); })) {
    return true;
  }
  const DecodeWorkspace workspace = decode_workspace(memory, stream);
  switch (p.kv.dtype) {
    case DType::kFloat16:
      fused_decode_attention_f16(params, choice, workspace, stream);
      break;
    case DType::kBFloat16:
      fused_decode_attention_bf16(params, choice, workspace, stream);
      break;
    default:
      fused_decode_attention_e4m3(params, choice, workspace, stream);
  }
  return true;
}

}  // namespace

void launch(const FusedDecodeAttentionParams& params, void* memory, Stream stream) {
  if (launch_in_one(params, memory, stream)) return;
  const bool explained = report("fused_decode_attention", [] {
    return std::string(
        "two launches, rope_and_cache and paged_attention; one launch has float16, "
        "bfloat16 and e4m3 caches of layout vllm, pages up to 16 tokens, heads up "
        "to 128, up to 8 query heads a KV head");
  });
  if (!explained) launch(params.rope, stream);
  launch_paged_attention(params.attention, memory, stream);
}

}  // namespace vllm_kernels::cuda
