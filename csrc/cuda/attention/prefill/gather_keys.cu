// Gathers K and V to contiguous 16-bit keys before a launch of prefill sm90.
//
// Scratch: K [rows, num_kv_heads, head_size], V of that shape, then the first row of each sequence
// [num_seqs + 1]. Only sequences of min_query_len query tokens or more have rows, and only while
// there is room.
//
// Two launches, or three for pages of layout vllm:
//   key_starts_kernel   one CTA: an exclusive prefix sum of the lengths
//   gather_paged_kv's   cache/gather_cache.cu, without scales: the upcast of 8 bits is exact. (With
//                       a scale a token: as gather_paged_kv has the values.)
//
// Early reads: none. Each kernel waits for its primary kernel first.
#include "cuda/attention/prefill/gather_keys.h"

#include "cuda/base/launch.cuh"
#include "cuda/base/reduce.cuh"

namespace vllm_kernels::cuda {
namespace {

constexpr int kThreads = 1024;

// starts[s] is the first row of sequence s, starts[num_seqs] the end of all. A sequence that does
// not fit in `rows` has none, nor have those after it. Contiguous keys as one sequence: starts is
// {0, rows}, and the block table after it {0}.
__global__ void __launch_bounds__(kThreads)
    key_starts_kernel(PagedAttentionParams p, int min_query_len, int32_t rows, int32_t* starts) {
  launch_dependents();
  wait_for_primary_kernel();
  if (p.key_start_loc != nullptr) {
    if (threadIdx.x < 3) starts[threadIdx.x] = threadIdx.x == 1 ? rows : 0;
    return;
  }
  __shared__ int64_t warp_sums[kThreads / 32];
  __shared__ int32_t end;  // of the rows of the sequences that fit
  if (threadIdx.x == 0) end = 0;
  int64_t before = 0;
  for (int first = 0; first < p.num_seqs; first += kThreads) {
    const int seq = first + static_cast<int>(threadIdx.x);
    const bool gathered = seq < p.num_seqs && query_range(p, seq).count >= min_query_len;
    const int64_t length = gathered ? key_range(p, seq).count : 0;
    int64_t total;
    const int64_t sum = before + inclusive_block_sum(length, warp_sums, total);
    if (sum <= rows) atomicMax(&end, static_cast<int32_t>(sum));
    __syncthreads();
    if (seq < p.num_seqs) starts[seq] = static_cast<int32_t>(min(sum - length, int64_t{end}));
    before += total;
    __syncthreads();
  }
  if (threadIdx.x == 0) starts[p.num_seqs] = end;
}

}  // namespace

GatheredKeys gather_keys(const PagedAttentionParams& p, const AttentionChoice& choice,
                         void* scratch, void* stream) {
  const PagedKv& kv = p.kv;
  const int64_t tensor_bytes = gathered_tensor_bytes(p, choice.gathered_rows);
  char* memory = static_cast<char*>(scratch);
  auto* starts = reinterpret_cast<int32_t*>(memory + 2 * tensor_bytes);
  const auto rows = static_cast<int32_t>(choice.gathered_rows);
  launch_kernel("paged_attention", key_starts_kernel, dim3(1), dim3(kThreads), 0, stream, p,
                choice.min_query_len, rows, starts);

  const bool contiguous = p.key_start_loc != nullptr;
  const int64_t head_stride = gathered_head_stride(p), row_stride = kv.num_kv_heads * head_stride;
  GatherCacheParams gather = {.op = "paged_attention",
                              .tokens = {.block_table = p.block_tables,
                                         .block_table_stride = p.block_table_stride,
                                         .blocks_per_seq = p.max_blocks_per_seq,
                                         .cu_seq_lens = starts,
                                         .num_seqs = p.num_seqs,
                                         .num_rows = rows,
                                         .num_blocks = kv.num_blocks,
                                         .block_size = kv.block_size},
                              .kv = kv,
                              .key = memory,
                              .value = memory + tensor_bytes,
                              .key_row_stride = row_stride,
                              .key_head_stride = head_stride,
                              .value_row_stride = row_stride,
                              .value_head_stride = head_stride,
                              .dtype = p.dtype};
  gather.kv.k_scale = p.token_scales.key;
  gather.kv.v_scale = p.token_scales.value;
  gather.k_zero = p.token_scales.key_zero;
  gather.v_zero = p.token_scales.value_zero;
  if (p.token_scales.any()) {
    gather.scale_block_stride = p.token_scales.key_block_stride;
    gather.scale_head_stride = p.token_scales.key_head_stride;
    gather.scale_token_stride = 1;
  }
  if (contiguous) {
    gather.tokens.block_table = starts + 2;
    gather.tokens.block_table_stride = 1;
    gather.tokens.blocks_per_seq = 1;
    gather.tokens.num_seqs = 1;
  }
  PagedAttentionParams gathered = p;
  if (!contiguous) gathered.key_start_loc = starts;
  gathered.token_scales = {};
  gathered.kv = {.key = gather.key,
                 .value = gather.value,
                 .num_blocks = 1,
                 .num_kv_heads = kv.num_kv_heads,
                 .head_size = p.head_size(),
                 .block_size = rows,
                 .dtype = p.dtype,
                 .layout = KvLayout::kNHD,
                 .key_head_stride = head_stride,
                 .key_token_stride = row_stride,
                 .value_head_stride = head_stride,
                 .value_token_stride = row_stride,
                 .value_dim_stride = 1,
                 .k_scale = kv.k_scale,
                 .v_scale = kv.v_scale,
                 .scale_stride = kv.scale_stride};
  return {.gather = gather, .params = gathered, .starts = choice.gathers_some ? starts : nullptr};
}

}  // namespace vllm_kernels::cuda
