// fused_decode_attention's entry point. It launches the one fused kernel where there is one
// (fused_decode_attention.cuh), else rope_and_cache and paged_attention one after the other.
#include "cuda/attention/fused_decode/fused_decode_attention.h"

#include "cuda/attention/decode/decode.h"
#include "cuda/attention/fused_decode/new_token.cuh"
#include "cuda/launchers.h"

namespace vllm_kernels::cuda {
namespace {

bool launch_in_one(const FusedDecodeAttentionParams& params, void* memory, Stream stream) {
  const PagedAttentionParams& p = params.attention;
  if (p.kv.layout != KvLayout::kVllm || p.kv.block_size > 16 || p.kv.head_size > 128 ||
      p.num_heads / p.kv.num_kv_heads > kMaxNewTokenRows || !fits_decode(p) ||
      !vecs_fit(params.rope)) {
    return false;
  }
  const DecodeWorkspace workspace = decode_workspace(memory, stream);
  switch (p.kv.dtype) {
    case DType::kFloat16:
      return fused_decode_attention_f16(params, workspace, stream);
    case DType::kBFloat16:
      return fused_decode_attention_bf16(params, workspace, stream);
    case DType::kFp8E4M3:
      return fused_decode_attention_e4m3(params, workspace, stream);
    default:
      return false;
  }
}

}  // namespace

void launch(const FusedDecodeAttentionParams& params, void* memory, Stream stream) {
  if (launch_in_one(params, memory, stream)) return;
  launch(params.rope, stream);
  launch_paged_attention(params.attention, memory, stream);
}

}  // namespace vllm_kernels::cuda
