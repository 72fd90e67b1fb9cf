#include "torch_ops/paged_attention.h"

#include <memory>

#include "torch_ops/check.h"
#include "torch_ops/device.h"
#include "torch_ops/index_check.h"
#include "torch_ops/paged_kv.h"

namespace vllm_kernels {

#if defined(VLLM_KERNELS_DEVICE_CUDA)
void launch_decode(const PagedAttentionParams& params, const Tensor& query) {
  launch(params, query);
}
#else
// In two launches where a sequence is shared by several threads: parts, then their merge.
void launch_decode(const PagedAttentionParams& params, const Tensor& query) {
  cpu::PagedAttentionWork work = cpu::cut_paged_attention(params, torch::stable::get_num_threads());
  if (work.tasks == 1) return launch(work, query);
  const std::unique_ptr<float[]> partials(new float[2 * work.tasks * work.partial_size()]);
  work.partials = partials.get();
  launch(work, query);
  launch(cpu::PagedAttentionMerge{work}, query);
}
#endif

namespace {

constexpr int64_t kPartitionSize = 512;  // tokens, as in vLLM's v2

// What v1 and v2 share: every argument but the scratch. (A failing check builds its message itself:
// Expect::that() would have it built by every call.)
PagedAttentionParams pack(Expect& expect, const Tensor& out, const Tensor& query,
                          const Tensor& key_cache, const Tensor& value_cache, int64_t num_kv_heads,
                          double scale, const Tensor& block_tables, const Tensor& seq_lens,
                          int64_t block_size, int64_t max_seq_len,
                          const std::optional<Tensor>& alibi_slopes, const Text& kv_cache_dtype,
                          const Tensor& k_scale, const Tensor& v_scale, const BlockSparse& sparse) {
  Size num_seqs("num_seqs"), num_heads("num_heads"), max_blocks("max_blocks_per_seq");
  CacheSizes sizes;
  sizes.num_kv_heads = Size("num_kv_heads", num_kv_heads, "num_kv_heads");
  sizes.block_size = Size("block_size", block_size, "block_size");

  const Argument q =
      expect.tensor("query", query).floating().shape({&num_seqs, &num_heads, &sizes.head_size});
  if (num_kv_heads <= 0 || num_heads <= 0 || num_heads % num_kv_heads != 0) {
    expect.fail("num_kv_heads: expected a divisor of num_heads = " + std::to_string(num_heads) +
                ", got " + std::to_string(num_kv_heads));
  }
  if (block_size != 8 && block_size != 16 && block_size != 32) {
    expect.fail("block_size: expected 8, 16 or 32, got " + std::to_string(block_size));
  }
  const DType dtype = q.dtype();
  const DType stored = cache_dtype(expect, kv_cache_dtype, dtype);
  const int64_t step = size_of(stored) == 1 ? 16 : 8;
  if (sizes.head_size < 32 || sizes.head_size > 256 || sizes.head_size % step != 0) {
    q.fail("expected a head_size of 32 to 256 in steps of " + std::to_string(step) + " for a " +
           name_of(stored) + " cache, got " + std::to_string(sizes.head_size));
  }
  if (q.stride(2) != 1 || (num_heads > 1 && q.stride(1) != sizes.head_size)) {
    q.fail("expected contiguous heads (only the stride of num_seqs is free), got shape " +
           q.shape_text() + " with stride " + std::to_string(q.stride(1)) + " between heads");
  }
  const Argument o = expect.tensor("out", out).same_dtype(q).same_shape(q).contiguous();
  PagedKv kv = vllm_layout(expect, key_cache, value_cache, stored, kv_cache_dtype, sizes);
  set_scales(expect, kv, k_scale, v_scale);
  const Argument tables = expect.tensor("block_tables", block_tables)
                              .int32()
                              .shape({&num_seqs, &max_blocks})
                              .inner_contiguous();
  const Argument lens = expect.tensor("seq_lens", seq_lens).int32().shape({&num_seqs}).contiguous();
  const float* slopes = nullptr;
  if (alibi_slopes) {
    slopes = expect.tensor("alibi_slopes", *alibi_slopes)
                 .float32()
                 .shape({&num_heads})
                 .contiguous()
                 .as<const float>();
  }
  if (max_seq_len < 0) {
    expect.fail("max_seq_len: expected a length >= 0, got " + std::to_string(max_seq_len));
  }
  if (sparse.on() && (sparse.block_size <= 0 || sparse.block_size % block_size != 0)) {
    expect.fail("blocksparse_block_size: expected a multiple of block_size = " +
                std::to_string(block_size) + ", got " + std::to_string(sparse.block_size));
  }
  expect.apart(o, q);
  check_index(expect, lens,
              {.noun = "a length that fits block_tables", .high = max_blocks * block_size + 1});
  check_index(expect, lens, {.noun = "a length up to max_seq_len", .high = max_seq_len + 1});
  check_index(expect, tables, {.noun = "a block", .high = sizes.num_blocks},
              {.row_lengths = lens, .tokens_per_column = kv.block_size});

  return {.out = o.mutable_data(),
          .query = q.data(),
          .query_stride = q.stride(0),
          .kv = kv,
          .block_tables = tables.as<const int32_t>(),
          .block_table_stride = tables.stride(0),
          .max_blocks_per_seq = static_cast<int32_t>(max_blocks),
          .seq_lens = lens.as<const int32_t>(),
          .alibi_slopes = slopes,
          .num_seqs = static_cast<int32_t>(num_seqs),
          .num_heads = static_cast<int32_t>(num_heads),
          .max_seq_len = max_seq_len,
          .scale = static_cast<float>(scale),
          .dtype = dtype,
          .sparse = sparse,
          .partition_size = 0,
          .max_partitions = 1,
          .exp_sums = nullptr,
          .max_logits = nullptr,
          .tmp_out = nullptr,
          .num_tokens = static_cast<int32_t>(num_seqs),
          .out_stride = num_heads * sizes.head_size};
}

BlockSparse block_sparse(int64_t tp_rank, int64_t local_blocks, int64_t vert_stride,
                         int64_t block_size, int64_t head_sliding_step) {
  return {.tp_rank = static_cast<int32_t>(tp_rank),
          .local_blocks = static_cast<int32_t>(local_blocks),
          .vert_stride = static_cast<int32_t>(vert_stride),
          .block_size = static_cast<int32_t>(block_size),
          .head_sliding_step = static_cast<int32_t>(head_sliding_step)};
}

void paged_attention_v1(Tensor out, Tensor query, Tensor key_cache, Tensor value_cache,
                        int64_t num_kv_heads, double scale, Tensor block_tables, Tensor seq_lens,
                        int64_t block_size, int64_t max_seq_len, std::optional<Tensor> alibi_slopes,
                        Text kv_cache_dtype, Tensor k_scale, Tensor v_scale, int64_t tp_rank,
                        int64_t blocksparse_local_blocks, int64_t blocksparse_vert_stride,
                        int64_t blocksparse_block_size, int64_t blocksparse_head_sliding_step) {
  Expect expect("paged_attention_v1");
  const PagedAttentionParams params =
      pack(expect, out, query, key_cache, value_cache, num_kv_heads, scale, block_tables, seq_lens,
           block_size, max_seq_len, alibi_slopes, kv_cache_dtype, k_scale, v_scale,
           block_sparse(tp_rank, blocksparse_local_blocks, blocksparse_vert_stride,
                        blocksparse_block_size, blocksparse_head_sliding_step));
  if (params.num_seqs > 0) launch_decode(params, query);
}

void paged_attention_v2(Tensor out, Tensor exp_sums, Tensor max_logits, Tensor tmp_out,
                        Tensor query, Tensor key_cache, Tensor value_cache, int64_t num_kv_heads,
                        double scale, Tensor block_tables, Tensor seq_lens, int64_t block_size,
                        int64_t max_seq_len, std::optional<Tensor> alibi_slopes,
                        Text kv_cache_dtype, Tensor k_scale, Tensor v_scale, int64_t tp_rank,
                        int64_t blocksparse_local_blocks, int64_t blocksparse_vert_stride,
                        int64_t blocksparse_block_size, int64_t blocksparse_head_sliding_step) {
  Expect expect("paged_attention_v2");
  PagedAttentionParams params =
      pack(expect, out, query, key_cache, value_cache, num_kv_heads, scale, block_tables, seq_lens,
           block_size, max_seq_len, alibi_slopes, kv_cache_dtype, k_scale, v_scale,
           block_sparse(tp_rank, blocksparse_local_blocks, blocksparse_vert_stride,
                        blocksparse_block_size, blocksparse_head_sliding_step));
  Size num_seqs("num_seqs", params.num_seqs, "query");
  Size num_heads("num_heads", params.num_heads, "query");
  Size head_size("head_size", params.kv.head_size, "query");
  Size partitions("max_num_partitions");
  const Argument sums = expect.tensor("exp_sums", exp_sums)
                            .float32()
                            .shape({&num_seqs, &num_heads, &partitions})
                            .contiguous();
  const Argument maxima = expect.tensor("max_logits", max_logits)
                              .float32()
                              .shape({&num_seqs, &num_heads, &partitions})
                              .contiguous();
  const Argument o = expect.tensor("out", out);
  const Argument partial = expect.tensor("tmp_out", tmp_out)
                               .same_dtype(o)
                               .shape({&num_seqs, &num_heads, &partitions, &head_size})
                               .contiguous();
  expect.apart(sums, maxima);
  expect.apart(partial, o);
  const int64_t needed = (params.max_seq_len + kPartitionSize - 1) / kPartitionSize;
  if (partitions < (needed > 0 ? needed : 1)) {
    sums.fail("expected room for " + std::to_string(needed > 0 ? needed : 1) +
              " partitions of 512 tokens (max_seq_len = " + std::to_string(params.max_seq_len) +
              "), got shape " + sums.shape_text());
  }
  params.partition_size = kPartitionSize;
  params.max_partitions = static_cast<int32_t>(partitions);
  params.exp_sums = sums.as<float>();
  params.max_logits = maxima.as<float>();
  params.tmp_out = partial.mutable_data();
  if (params.num_seqs > 0) launch_decode(params, query);
}

}  // namespace
}  // namespace vllm_kernels

VLLM_KERNELS_IMPL(library) {
  library.impl("paged_attention_v1", TORCH_BOX(&vllm_kernels::paged_attention_v1));
  library.impl("paged_attention_v2", TORCH_BOX(&vllm_kernels::paged_attention_v2));
}
