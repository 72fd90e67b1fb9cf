#include "torch_ops/attention/attention_arguments.h"

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "torch_ops/base/check.h"
#include "torch_ops/base/device.h"
#include "torch_ops/base/index_check.h"
#include "torch_ops/cache/paged_kv.h"

namespace vllm_kernels {

#if defined(VLLM_KERNELS_DEVICE_CUDA)
void launch_decode(const PagedAttentionParams& params, const Tensor& query) {
  raise_bad_index();
  launch_paged_attention(params, query, nullptr);
}
#else
// In two launches where a sequence is shared by several threads: parts, then their merge.
void launch_decode(const PagedAttentionParams& params, const Tensor& query) {
  if (report_cpu_kernel("paged_attention", "decode")) return;
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

BlockSparse block_sparse(const Expect& expect, int64_t tp_rank, int64_t local_blocks,
                         int64_t vert_stride, int64_t block_size, int64_t head_sliding_step) {
  const auto checked = [&](const char* name, int64_t value, int64_t low) {
    if (value < low || value > INT32_MAX) {
      expect.fail(std::string(name) + ": expected " + std::to_string(low) + " to " +
                  std::to_string(INT32_MAX) + ", got " + std::to_string(value));
    }
    return static_cast<int32_t>(value);
  };
  return {
      .tp_rank = checked("tp_rank", tp_rank, 0),
      .local_blocks = checked("blocksparse_local_blocks", local_blocks, 0),
      .vert_stride = checked("blocksparse_vert_stride", vert_stride, INT32_MIN),
      .block_size = checked("blocksparse_block_size", block_size, INT32_MIN),
      .head_sliding_step = checked("blocksparse_head_sliding_step", head_sliding_step, -INT32_MAX)};
}

// Whether a head offset and a sparse block (below 2^28) add up within an int32.
bool head_offsets_fit(const BlockSparse& sparse, int64_t num_heads) {
  int64_t product = 0;
  return !__builtin_mul_overflow(int64_t{sparse.tp_rank} + 1, num_heads, &product) &&
         !__builtin_mul_overflow(product, std::abs(int64_t{sparse.head_sliding_step}), &product) &&
         product <= int64_t{1} << 30;
}

// What v1 and v2 share: every argument but the scratch. (A failing check builds its message itself:
// Expect::that() would have it built by every call.)
// `touched` gets all of these tensors.
PagedAttentionParams pack(Expect& expect, Arguments& touched, const Tensor& out,
                          const Tensor& query, const Tensor& key_cache, const Tensor& value_cache,
                          int64_t num_kv_heads, double scale, const Tensor& block_tables,
                          const Tensor& seq_lens, int64_t block_size, int64_t max_seq_len,
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
  Argument v = expect.tensor("value_cache", value_cache);
  Argument k = expect.tensor("key_cache", key_cache);
  PagedKv kv = vllm_layout(k, v, stored, kv_cache_dtype, sizes);
  Argument ks = expect.tensor("k_scale", k_scale), vs = expect.tensor("v_scale", v_scale);
  set_scales(kv, ks, vs);
  const Argument tables = expect.tensor("block_tables", block_tables)
                              .int32()
                              .shape({&num_seqs, &max_blocks})
                              .inner_contiguous();
  const Argument lens = expect.tensor("seq_lens", seq_lens).int32().shape({&num_seqs}).contiguous();
  const float* slopes = nullptr;
  if (alibi_slopes) {
    const Argument a =
        expect.tensor("alibi_slopes", *alibi_slopes).float32().shape({&num_heads}).contiguous();
    touched.add(a);
    slopes = a.as<const float>();
  }
  if (max_seq_len < 0) {
    expect.fail("max_seq_len: expected a length >= 0, got " + std::to_string(max_seq_len));
  }
  if (max_blocks > INT32_MAX) {
    tables.fail("expected max_blocks_per_seq < 2^31, got shape " + tables.shape_text());
  }
  const int64_t table_tokens = max_blocks * block_size;
  max_seq_len = std::min({max_seq_len, table_tokens, int64_t{INT32_MAX}});
  if (sparse.on() && (sparse.block_size <= 0 || sparse.block_size % block_size != 0)) {
    expect.fail("blocksparse_block_size: expected a multiple of block_size = " +
                std::to_string(block_size) + ", got " + std::to_string(sparse.block_size));
  }
  if (sparse.on() && !head_offsets_fit(sparse, num_heads)) {
    expect.fail(
        "blocksparse_head_sliding_step: expected (tp_rank + 1) * num_heads * |step| <= 2^30, got "
        "tp_rank = " +
        std::to_string(sparse.tp_rank) + ", num_heads = " + std::to_string(num_heads) +
        ", step = " + std::to_string(sparse.head_sliding_step));
  }
  touched.add(q, k, v, tables, lens, ks, vs);
  expect.apart(o, touched);
  touched.add(o);
  check_index(expect, lens, {.noun = "a length that fits block_tables", .high = table_tokens + 1});
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
          .num_tokens = static_cast<int32_t>(num_seqs),
          .out_stride = num_heads * sizes.head_size};
}

void paged_attention_v1(const Tensor& out, const Tensor& query, const Tensor& key_cache,
                        const Tensor& value_cache, int64_t num_kv_heads, double scale,
                        const Tensor& block_tables, const Tensor& seq_lens, int64_t block_size,
                        int64_t max_seq_len, const std::optional<Tensor>& alibi_slopes,
                        const Text& kv_cache_dtype, const Tensor& k_scale, const Tensor& v_scale,
                        int64_t tp_rank, int64_t blocksparse_local_blocks,
                        int64_t blocksparse_vert_stride, int64_t blocksparse_block_size,
                        int64_t blocksparse_head_sliding_step) {
  Expect expect("paged_attention_v1");
  Arguments touched;
  const PagedAttentionParams params =
      pack(expect, touched, out, query, key_cache, value_cache, num_kv_heads, scale, block_tables,
           seq_lens, block_size, max_seq_len, alibi_slopes, kv_cache_dtype, k_scale, v_scale,
           block_sparse(expect, tp_rank, blocksparse_local_blocks, blocksparse_vert_stride,
                        blocksparse_block_size, blocksparse_head_sliding_step));
  if (params.num_seqs > 0) launch_decode(params, query);
}

void paged_attention_v2(const Tensor& out, const Tensor& exp_sums, const Tensor& max_logits,
                        const Tensor& tmp_out, const Tensor& query, const Tensor& key_cache,
                        const Tensor& value_cache, int64_t num_kv_heads, double scale,
                        const Tensor& block_tables, const Tensor& seq_lens, int64_t block_size,
                        int64_t max_seq_len, const std::optional<Tensor>& alibi_slopes,
                        const Text& kv_cache_dtype, const Tensor& k_scale, const Tensor& v_scale,
                        int64_t tp_rank, int64_t blocksparse_local_blocks,
                        int64_t blocksparse_vert_stride, int64_t blocksparse_block_size,
                        int64_t blocksparse_head_sliding_step) {
  Expect expect("paged_attention_v2");
  Arguments touched;
  const PagedAttentionParams params =
      pack(expect, touched, out, query, key_cache, value_cache, num_kv_heads, scale, block_tables,
           seq_lens, block_size, max_seq_len, alibi_slopes, kv_cache_dtype, k_scale, v_scale,
           block_sparse(expect, tp_rank, blocksparse_local_blocks, blocksparse_vert_stride,
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
  for (const Argument* scratch : {&sums, &maxima, &partial}) {
    expect.apart(*scratch, touched);
    touched.add(*scratch);
  }
  const int64_t needed =
      std::max<int64_t>(1, max_seq_len / kPartitionSize + (max_seq_len % kPartitionSize != 0));
  if (partitions < needed) {
    sums.fail("expected room for " + std::to_string(needed) +
              " partitions of 512 tokens (max_seq_len = " + std::to_string(max_seq_len) +
              "), got shape " + sums.shape_text());
  }
  if (params.num_seqs > 0) launch_decode(params, query);
}

}  // namespace
}  // namespace vllm_kernels

VLLM_KERNELS_IMPL(library) {
  library.impl("paged_attention_v1", TORCH_BOX(&vllm_kernels::paged_attention_v1));
  library.impl("paged_attention_v2", TORCH_BOX(&vllm_kernels::paged_attention_v2));
}
