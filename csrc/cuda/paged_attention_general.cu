// paged_attention: the choice of kernel.
#include "cuda/launchers.h"
#include "cuda/paged_attention_decode.h"
#include "cuda/paged_attention_simt.cuh"

namespace vllm_kernels::cuda {

bool fits_tensor_cores(const PagedAttentionParams& p) {
  const PagedKv& kv = p.kv;
  const int element = size_of(kv.dtype);
  const auto aligned = [&](int64_t stride) {
    return stride * element % 16 == 0 && stride >= 0 && stride * element / 16 <= UINT32_MAX;
  };
  const bool by_row = kv.layout != KvLayout::kVllm;
  const int query_alignment = element == 1 ? 4 : 2;  // elements
  // Room for two warps with two stages each, and for what they merge.
  const int padded = kv.head_size <= 64 ? 64 : kv.head_size <= 128 ? 128 : 256;
  const int stage_bytes = 2 * padded * element * (padded <= 128 ? 32 : 16);
  if (4 * stage_bytes + 20 * 1024 > current_device_info().shared_memory_per_block) return false;
  return p.dtype != DType::kFloat32 && kv.block_size >= (element == 1 && !by_row ? 16 : 8) &&
         aligned16(kv.key) && aligned16(kv.value) && aligned(kv.key_block_stride) &&
         aligned(kv.key_head_stride) && aligned(kv.value_block_stride) &&
         aligned(kv.value_head_stride) &&
         (!by_row || (aligned(kv.key_token_stride) && aligned(kv.value_token_stride))) &&
         reinterpret_cast<uintptr_t>(p.query) % (query_alignment * 2) == 0 &&
         p.query_stride % query_alignment == 0 && reinterpret_cast<uintptr_t>(p.out) % 8 == 0 &&
         p.out_stride % 4 == 0;
}

void launch_paged_attention(const PagedAttentionParams& p, void* memory, Stream stream) {
  if (!fits_tensor_cores(p)) return launch_paged_attention_simt<true>(p, stream);
  const DecodeWorkspace workspace = decode_workspace(memory, stream);
  switch (p.kv.dtype) {
    case DType::kFloat16:
      return paged_attention_decode_f16(p, workspace, stream);
    case DType::kBFloat16:
      return paged_attention_decode_bf16(p, workspace, stream);
    case DType::kFp8E4M3:
      return paged_attention_decode_e4m3(p, workspace, stream);
    case DType::kFp8E5M2:
      return paged_attention_decode_e5m2(p, workspace, stream);
    default:
      return paged_attention_decode_int8(p, workspace, stream);
  }
}

}  // namespace vllm_kernels::cuda
