// paged_attention: the choice of kernel.
#include <algorithm>
#include <bit>

#include "cuda/attention/decode/decode.h"
#include "cuda/attention/prefill/prefill.h"
#include "cuda/attention/prefill/prefill_sm80.h"
#include "cuda/attention/simt/simt_kernel.cuh"
#include "cuda/launchers.h"

namespace vllm_kernels::cuda {

bool fits_decode(const PagedAttentionParams& p) {
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
         kv.num_blocks > 0 &&  // a tensor map has no dimension of 0
         aligned16(kv.key) && aligned16(kv.value) && aligned(kv.key_block_stride) &&
         aligned(kv.key_head_stride) && aligned(kv.value_block_stride) &&
         aligned(kv.value_head_stride) &&
         (!by_row || (aligned(kv.key_token_stride) && aligned(kv.value_token_stride))) &&
         reinterpret_cast<uintptr_t>(p.query) % (query_alignment * 2) == 0 &&
         p.query_stride % query_alignment == 0 && reinterpret_cast<uintptr_t>(p.out) % 8 == 0 &&
         p.out_stride % 4 == 0;
}

namespace {

// Query rows of a KV head up to which a sequence is better off with the kernels for few.
constexpr int kFewRows = 32;

using LaunchPrefill = void (*)(const PagedAttentionParams&, const PrefillLaunch&, void*);

// Query tokens of a sequence up to which it is.
int few_tokens(const PagedAttentionParams& p) {
  return std::max(1, kFewRows / (p.num_heads / p.kv.num_kv_heads));
}

// Whether query tokens see their past alone, in pages: what the kernels for few query rows know.
bool causal_pages(const PagedAttentionParams& p) {
  return p.key_start_loc == nullptr && p.window_right == 0;
}

// Whether the kernels for few query rows, where they serve these tensors, are the ones to take the
// call: those for many have no work for half of the device, and could not make up for pieces of
// sequences, which the others take. (With fixed_split_size the kernel must not depend on the
// batch.)
bool prefers_decode(const PagedAttentionParams& p) {
  const int64_t group = p.num_heads / p.kv.num_kv_heads;
  // Every sequence but one may be a single token, of a decode.
  const int64_t tokens = std::max(0, p.num_tokens - p.num_seqs + 1);
  const int64_t work_tiles = (tokens * group + 127) / 128 * p.kv.num_kv_heads;
  return p.max_query_len <= few_tokens(p) || p.max_query_len * group <= 2 * kFewRows ||
         2 * work_tiles < current_device_info().num_sms || p.fixed_split_size > 0;
}

// Whether the kernels for many query rows can read the queries and write the results.
bool fits_prefill(const PagedAttentionParams& p) {
  return aligned16(p.query) && p.query_stride % 8 == 0 && p.query_stride > 0 && aligned16(p.out) &&
         p.out_stride % 8 == 0 && p.kv.num_blocks > 0 && p.scale > 0.0f;
}

// The kernel for many query rows on Hopper's warpgroup products where it serves these tensors, else
// null.
LaunchPrefill prefill_kernel(const PagedAttentionParams& p) {
  const PagedKv& kv = p.kv;
  const bool cache_is_8bit = size_of(kv.dtype) == 1;
  const bool longer = (kv.layout != KvLayout::kVllm || cache_is_8bit) && kv.block_size > 16 &&
                      std::has_single_bit(static_cast<uint32_t>(kv.block_size));
  const bool pages = p.key_start_loc != nullptr || kv.block_size == 16 || longer;
  const bool plain = !(p.softcap > 0.0f) && p.alibi_slopes == nullptr;
  const bool stored =
      cache_is_8bit ? kv.head_size <= kMaxHeadSize8Bit && plain : kv.dtype == p.dtype;
  if (!current_device_info().has_wgmma || !stored || !pages) return nullptr;
  switch (kv.head_size) {
    case 64:
      return paged_attention_prefill_64;
    case 96:
      return paged_attention_prefill_96;
    case 128:
      return paged_attention_prefill_128;
    case 192:
      return paged_attention_prefill_192;
    case 256:
      return paged_attention_prefill_256;
    default:
      return nullptr;
  }
}

// Whether the kernel for many query rows that needs no more than sm_80 can address these tensors.
bool fits_prefill_sm80(const PagedAttentionParams& p) {
  const PagedKv& kv = p.kv;
  const int element = size_of(kv.dtype);
  const auto units_of = [&](int bytes) {
    return [=](int64_t stride) {
      return stride >= 0 && stride * element % bytes == 0 && stride * element / 16 <= UINT32_MAX;
    };
  };
  const auto aligned = units_of(16);
  const bool rows = kv.layout != KvLayout::kVllm;
  const bool pages =
      rows ? aligned(kv.key_token_stride) && aligned(kv.value_token_stride)
           : kv.block_size % 8 == 0 && aligned(kv.key_chunk_stride) &&
                 units_of(kv.block_size % 16 == 0 ? 16 : 8 * element)(kv.value_dim_stride);
  return p.dtype != DType::kFloat32 && (element == 1 || kv.dtype == p.dtype) &&
         kv.head_size <= 256 && kv.head_size * element % 16 == 0 && pages && aligned16(kv.key) &&
         aligned16(kv.value) && aligned(kv.key_block_stride) && aligned(kv.key_head_stride) &&
         aligned(kv.value_block_stride) && aligned(kv.value_head_stride) &&
         p.max_seq_len <= kMaxLength;
}

bool launch_prefill_sm80(const PagedAttentionParams& p, const PrefillLaunch& launch,
                         Stream stream) {
  const bool rows = p.kv.layout != KvLayout::kVllm;
  const auto kernel = size_of(p.kv.dtype) == 1     ? rows ? paged_attention_prefill_sm80_8bit_rows
                                                          : paged_attention_prefill_sm80_8bit_pages
                      : p.dtype == DType::kFloat16 ? rows ? paged_attention_prefill_sm80_f16_rows
                                                          : paged_attention_prefill_sm80_f16_pages
                      : rows                       ? paged_attention_prefill_sm80_bf16_rows
                                                   : paged_attention_prefill_sm80_bf16_pages;
  return kernel(p, launch, stream);
}

void launch_decode(const PagedAttentionParams& p, const DecodeWorkspace& workspace, Stream stream) {
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

}  // namespace

void launch_paged_attention(const PagedAttentionParams& p, void* memory, Stream stream) {
  const bool tensor_cores = fits_decode(p);
  const bool decodes = tensor_cores && causal_pages(p);  // whether the kernels for few rows serve
  const auto launch_for_few = [&] {
    if (!decodes) return launch_paged_attention_simt<true>(p, stream);
    launch_decode(p, decode_workspace(memory, stream), stream);
  };
  if (!fits_prefill(p) || (decodes && prefers_decode(p))) return launch_for_few();
  const LaunchPrefill prefill = tensor_cores ? prefill_kernel(p) : nullptr;
  if (prefill == nullptr && !fits_prefill_sm80(p)) return launch_for_few();
  const DecodeWorkspace workspace = decode_workspace(memory, stream);
  // Sequences of few query tokens, if there can be any, have a launch of their own beside it: of
  // one where tokens see what comes after them, since nothing comes after a sequence's last.
  const int few = p.window_right == 0 ? few_tokens(p) : 1;
  const bool mixed = tensor_cores && p.key_start_loc == nullptr && p.num_seqs > 1 &&
                     p.num_tokens < int64_t{p.num_seqs} * p.max_query_len;
  const PrefillLaunch launch = {.min_query_len = mixed ? few + 1 : 1,
                                .has_concurrent_launch = mixed,
                                .next = prefill_next(workspace)};
  if (prefill != nullptr) {
    prefill(p, launch, stream);
  } else if (!launch_prefill_sm80(p, launch, stream)) {
    return launch_for_few();
  }
  if (!mixed) return;
  PagedAttentionParams others = p;
  others.max_query_len = few;
  others.window_right = 0;
  others.concurrent = true;
  launch_decode(others, workspace, stream);
}

}  // namespace vllm_kernels::cuda
