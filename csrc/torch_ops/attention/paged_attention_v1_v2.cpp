// Bindings of paged_attention_v1 and _v2: query [num_seqs, num_heads, head_size] over a cache of
// layout vllm -> out of that shape. They fill PagedAttentionParams and launch paged_attention's
// kernels. v2's scratch is checked and not used. Both have vLLM's block-sparse patterns.
#include "torch_ops/attention/attention_arguments.h"

#include <algorithm>
#include <cstdlib>

#include "torch_ops/base/check.h"
#include "torch_ops/base/device.h"
#include "torch_ops/cache/paged_kv.h"

namespace vllm_kernels {
namespace {

constexpr int64_t kPartitionSize = 512;  // tokens, as in vLLM's v2

BlockSparse block_sparse(const Expect& expect, int64_t tp_rank, int64_t local_blocks,
                         int64_t vert_stride, int64_t block_size, int64_t head_sliding_step) {
  const auto checked = [&](const char* name, int64_t value, int64_t low) {
    if (value < low || value > INT32_MAX) {
      expect.fail(std::string(name) + ": expected " + std::to_string(low) + " to " +
                  std::to_string(INT32_MAX) + ", got " + std::to_string(value));
    }
    return clamped_int32(value);
  };
  const int32_t rank = checked("tp_rank", tp_rank, 0);
  return {
      .tp_rank = head_sliding_step == 0 ? 0 : rank,  // has no effect then, and might overflow
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

void check_sparse(const Expect& expect, const BlockSparse& sparse, int64_t block_size,
                  int64_t num_heads) {
  if (!sparse.on()) return;
  if (sparse.block_size <= 0 || sparse.block_size % block_size != 0) {
    expect.fail("blocksparse_block_size: expected a multiple of block_size = " +
                std::to_string(block_size) + ", got " + std::to_string(sparse.block_size));
  }
  if (!head_offsets_fit(sparse, num_heads)) {
    expect.fail(
        "blocksparse_head_sliding_step: expected (tp_rank + 1) * num_heads * |step| <= 2^30, got "
        "tp_rank = " +
        std::to_string(sparse.tp_rank) + ", num_heads = " + std::to_string(num_heads) +
        ", step = " + std::to_string(sparse.head_sliding_step));
  }
}

// Checks and packs what v1 and v2 share: every argument but the scratch. (Checks build their
// message only on failure. With Expect::that() every call would build it.) `touched` gets all of
// these tensors.
PagedAttentionParams pack(Expect& expect, Arguments& touched, const Tensor& out,
                          const Tensor& query, const Tensor& key_cache, const Tensor& value_cache,
                          int64_t num_kv_heads, double scale, const Tensor& block_tables,
                          const Tensor& seq_lens, int64_t block_size, int64_t max_seq_len,
                          const std::optional<Tensor>& alibi_slopes, const Text& kv_cache_dtype,
                          const Tensor& k_scale, const Tensor& v_scale, const BlockSparse& sparse) {
  Queries queries;
  queries.num_tokens = Size("num_seqs");
  Size &num_seqs = queries.num_tokens, &num_heads = queries.num_heads;
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
  const DType stored = cache_dtype(expect, kv_cache_dtype, q.dtype());
  check_head_size(q, sizes.head_size, stored);
  if (q.stride(2) != 1 || (num_heads > 1 && q.stride(1) != sizes.head_size)) {
    q.fail("expected contiguous heads (only the stride of num_seqs is free), got shape " +
           q.shape_text() + " with stride " + std::to_string(q.stride(1)) + " between heads");
  }
  queries.query = q;
  queries.out = expect.tensor("out", out).same_dtype(q).same_shape(q).contiguous();
  Argument v = expect.tensor("value_cache", value_cache);
  Argument k = expect.tensor("key_cache", key_cache);
  PagedAttentionParams params{};
  params.kv = cache_of_dtype(k, v, stored, kv_cache_dtype, KvLayout::kVllm, sizes);
  Argument ks = expect.tensor("k_scale", k_scale), vs = expect.tensor("v_scale", v_scale);
  set_scales(expect, params.kv, ks, vs);
  params.scale = expect.finite("scale", scale);
  params.alibi_slopes = read_per_head(expect, "alibi_slopes", alibi_slopes, num_heads, touched);
  if (max_seq_len < 0) {
    expect.fail("max_seq_len: expected a length >= 0, got " + std::to_string(max_seq_len));
  }
  check_sparse(expect, sparse, block_size, num_heads);
  params.sparse = sparse;
  read_pages(expect, params, block_tables, seq_lens, num_seqs, touched,
             std::min<int64_t>(max_seq_len, INT32_MAX));
  touched.add(q, k, v, ks, vs);
  expect.apart(queries.out, touched);
  touched.add(queries.out);
  queries.num_seqs = num_seqs;
  set_queries(params, queries);
  return params;
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
  const auto read_float32 = [&](const char* name, const Tensor& tensor) {
    return expect.tensor(name, tensor)
        .float32()
        .shape({&num_seqs, &num_heads, &partitions})
        .contiguous();
  };
  const Argument sums = read_float32("exp_sums", exp_sums);
  const Argument maxima = read_float32("max_logits", max_logits);
  const Argument o = expect.tensor("out", out);
  const Argument partial = expect.tensor("tmp_out", tmp_out)
                               .same_dtype(o)
                               .shape({&num_seqs, &num_heads, &partitions, &head_size})
                               .contiguous();
  expect.apart({sums, maxima, partial}, touched);
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
