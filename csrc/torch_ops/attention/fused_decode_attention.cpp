// Binding of fused_decode_attention: qkv [num_seqs, (num_heads + 2 * num_kv_heads) * head_size] ->
// out [num_seqs, num_heads, head_size]. It fills the params of rope_and_cache and of
// paged_attention. On CUDA one launcher gets both; on the CPU the two ops run one after the other.
#include "ops/fused_decode_attention.h"

#include "torch_ops/attention/attention_arguments.h"
#include "torch_ops/base/check.h"
#include "torch_ops/base/device.h"
#include "torch_ops/cache/paged_kv.h"
#include "torch_ops/rope/rope_and_cache.h"

namespace vllm_kernels {
namespace {

#if defined(VLLM_KERNELS_DEVICE_CUDA)
void launch_fused(const FusedDecodeAttentionParams& params, const Tensor& qkv, void* workspace) {
  run_on_stream(qkv, [&](cuda::Stream stream) { cuda::launch(params, workspace, stream); });
}
#else
void launch_fused(const FusedDecodeAttentionParams& params, const Tensor& qkv, void* workspace) {
  if (qkv.is_meta()) return;
  if (!report_cpu_kernel("fused_decode_attention", "rope_and_cache, then paged_attention's")) {
    launch(params.rope, qkv);
  }
  launch_paged_attention(params.attention, qkv, workspace);
}
#endif

// The number of query heads of qkv. A token has the query heads, then the key heads, then the value
// heads.
Size read_num_heads(const Argument& qkv, const PagedKv& kv) {
  const int64_t all = qkv.size(1) / kv.head_size, num_heads = all - 2 * kv.num_kv_heads;
  if (qkv.size(1) % kv.head_size != 0 || kv.num_kv_heads <= 0 || num_heads <= 0 ||
      num_heads % kv.num_kv_heads != 0) {
    qkv.fail(
        "expected (num_heads + 2 * num_kv_heads) * head_size elements a token, num_heads a "
        "multiple of num_kv_heads = " +
        std::to_string(kv.num_kv_heads) + " and head_size = " + std::to_string(kv.head_size) +
        " (from key_cache), got shape " + qkv.shape_text());
  }
  return Size("num_heads", num_heads, "qkv");
}

void fused_decode_attention(const Tensor& out, const Tensor& qkv, const std::optional<Tensor>& bias,
                            const Tensor& positions, const Tensor& cos_sin_cache, bool is_neox,
                            const Tensor& key_cache, const Tensor& value_cache,
                            const Tensor& slot_mapping, const Tensor& block_tables,
                            const Tensor& seq_lens, double scale, const Text& layout,
                            const std::optional<Tensor>& k_scale,
                            const std::optional<Tensor>& v_scale,
                            const std::optional<Tensor>& q_weight,
                            const std::optional<Tensor>& k_weight, double epsilon,
                            const std::optional<Tensor>& alibi_slopes, int64_t sliding_window,
                            double softcap, const std::optional<Tensor>& sinks,
                            const std::optional<Tensor>& workspace, int64_t fixed_split_size) {
  Expect expect("fused_decode_attention");
  Size num_seqs("num_seqs"), width("(num_heads + 2 * num_kv_heads) * head_size");
  CacheSizes sizes;
  const Argument x =
      expect.tensor("qkv", qkv).floating().shape({&num_seqs, &width}).inner_contiguous().written();
  const KvLayout kv_layout = cache_layout(expect, layout);
  Argument k = expect.tensor("key_cache", key_cache);
  Argument v = expect.tensor("value_cache", value_cache);
  PagedKv kv = paged_cache(x, k, v, kv_layout, sizes);
  k.written();
  v.written();
  check_head_size(k, kv.head_size, kv.dtype);
  Queries queries;
  queries.query = x;
  queries.num_heads = read_num_heads(x, kv);
  Arguments read, written;
  const void* biases = read_vector(expect, "bias", or_null(bias), x, width, read);
  const void* q_gain = read_vector(expect, "q_weight", or_null(q_weight), x, sizes.head_size, read);
  const void* k_gain = read_vector(expect, "k_weight", or_null(k_weight), x, sizes.head_size, read);
  const float checked_epsilon = expect.finite_not_negative("epsilon", epsilon);
  const RopeTables tables =
      rope_tables(expect, "positions", positions, cos_sin_cache, num_seqs, sizes.head_size);
  const Argument slots =
      expect.tensor("slot_mapping", slot_mapping).int64().shape({&num_seqs}).inner_contiguous();
  const int64_t num_slots = count_slots(k, kv.num_blocks, kv.block_size);
  set_scales(expect, kv, k_scale, v_scale, read);
  PagedAttentionParams attention =
      read_scores(expect, queries.num_heads, scale, softcap, alibi_slopes, sinks, read);
  attention.kv = kv;
  read_window_and_split(expect, attention, sliding_window, fixed_split_size);
  queries.out = expect.tensor("out", out).same_dtype(x);
  queries.out.shape({&num_seqs, &queries.num_heads, &sizes.head_size}).written();
  require_contiguous_heads(queries.out, num_seqs);
  void* scratch = read_workspace(expect, workspace, written);
  RopeAndCacheParams rope = pack_rope(expect, tables, x, kv.head_size, checked_epsilon, is_neox);
  check_slots(expect, slots, num_slots);
  read_pages(expect, attention, block_tables, seq_lens, num_seqs, read);
  read.add(tables.positions, tables.cos_sin_cache, slots);
  written.add(v, k, x, queries.out);
  expect.apart(written, read);
  if (num_seqs == 0) return;

  const int64_t heads = queries.num_heads, kv_heads = kv.num_kv_heads;
  rope.query = qkv_heads(x, kv.head_size, 0, heads, q_gain, biases);
  rope.key = qkv_heads(x, kv.head_size, heads, kv_heads, k_gain, biases);
  rope.value = qkv_heads(x, kv.head_size, heads + kv_heads, kv_heads, nullptr, biases);
  store_in(rope, kv, slots);
  queries.num_seqs = queries.num_tokens = num_seqs;
  set_queries(attention, queries);
  launch_fused({.rope = rope, .attention = attention}, qkv, scratch);
}

}  // namespace
}  // namespace vllm_kernels

VLLM_KERNELS_IMPL(library) {
  library.impl("fused_decode_attention", TORCH_BOX(&vllm_kernels::fused_decode_attention));
}
