// The choice for e4m3 queries: that of the same call with 16-bit ones, and whether prefill sm90
// multiplies in 8 bits. Host code: it makes no CUDA call.
#include <algorithm>

#include "cuda/attention/alignment.h"
#include "cuda/attention/common/heuristics.h"
#include "cuda/attention/dispatch.h"
#include "ops/upcast_query.h"

namespace vllm_kernels::cuda {
namespace {

// Sets whether prefill sm90 multiplies in 8 bits. `choice` is that of the same call with 16-bit
// queries. Few rows do not pay for the copy of V. The room depends on the batch. Returns whether it
// does.
bool choose_fp8(const PagedAttentionParams& p, AttentionChoice& choice) {
  const PagedKv& kv = p.kv;
  const bool packs_pages = kv.layout != KvLayout::kVllm ||
                           (kv.block_size % 16 == 0 && fits_stride(kv, kv.key_chunk_stride) &&
                            fits_stride(kv, kv.value_dim_stride));
  const auto padded = [](int64_t tokens) { return (tokens + kFp8Rows - 1) / kFp8Rows * kFp8Rows; };
  const int64_t longest = std::clamp(p.max_seq_len, int64_t{1}, kMaxGatherBytes);  // no overflow
  // Behind the sequences there are rows of zeros.
  const int64_t rows =
      kFp8Rows + (p.key_start_loc != nullptr ? padded(longest + int64_t{p.num_seqs} * kFp8Rows)
                                             : p.num_seqs * padded(longest));
  const auto has_room = [&](bool copies_keys) {
    return rows <= kMaxGatherBytes / Fp8Scratch(p, 1, copies_keys).starts;
  };
  // TMA cannot read pages below 16 tokens.
  const int64_t query_rows = int64_t{p.max_query_len} * (p.num_heads / kv.num_kv_heads);
  const bool is_paged = p.key_start_loc == nullptr;
  const bool copies_keys =
      is_paged && (kv.block_size < 16 || (query_rows >= kRowsOfCopiedKeys && has_room(true)));
  const bool fits =
      choice.main.kernel == AttentionKernel::kPrefillSm90 && p.fixed_split_size == 0 &&
      kv.dtype == DType::kFp8E4M3 && p.head_size() <= kMaxHeadSizeFp8 && !p.modifies_scores() &&
      cache_is_aligned(p) && packs_pages && is_aligned(p.query, 16) && p.query_stride % 16 == 0 &&
      p.query_stride > 0 && query_rows >= kRowsOfFp8Products && has_room(copies_keys);
  if (fits) {
    choice.fp8_rows = rows;
    choice.copies_fp8_keys = copies_keys;
    choice.gathered_rows = 0;
    choice.gathers_some = false;
    choice.main.padded_head_size = p.head_size() <= 64 ? 64 : kMaxHeadSizeFp8;
  }
  choice.upcasts_query = !fits || choice.has_concurrent_decode;
  return fits;
}

}  // namespace

AttentionChoice choose_e4m3_kernel(const PagedAttentionParams& p, const DeviceModel& device) {
  alignas(16) static char memory[16];  // as aligned as the queries in 16 bits
  const PagedAttentionParams wide = with_upcast_query(p, memory);
  AttentionChoice choice = choose_kernel(wide, device, true);
  if (choose_fp8(p, choice)) return choice;
  choice = choose_kernel(wide, device);
  choice.upcasts_query = true;
  return choice;
}

}  // namespace vllm_kernels::cuda
