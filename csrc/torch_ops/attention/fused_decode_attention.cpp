// Binding of fused_decode_attention: qkv [num_seqs, (num_heads + 2 * num_kv_heads) * head_size] ->
// out [num_seqs, num_heads, head_size]. It fills the params of rope_and_cache and of
// paged_attention. On CUDA one launcher gets both; on the CPU the two ops run in turn.
#include "ops/fused_decode_attention.h"

#include "torch_ops/attention/attention_arguments.h"
#include "torch_ops/base/check.h"
#include "torch_ops/base/device.h"
#include "torch_ops/base/index_check.h"
#include "torch_ops/cache/paged_kv.h"
#include "torch_ops/cache/slots.h"
#include "torch_ops/rope/rope_and_cache.h"

namespace vllm_kernels {
namespace {

#if defined(VLLM_KERNELS_DEVICE_CUDA)
void launch_fused(const FusedDecodeAttentionParams& params, const Tensor& qkv,
                  const Argument* workspace) {
  if (cuda::check_mode()) raise_bad_index();
  const int32_t device = qkv.device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  cuda::launch(params, workspace == nullptr ? nullptr : workspace->mutable_data(),
               current_stream(device));
}
#else
void launch_fused(const FusedDecodeAttentionParams& params, const Tensor& qkv,
                  const Argument* workspace) {
  if (!report_cpu_kernel("fused_decode_attention", "rope_and_cache, then paged_attention's")) {
    launch(params.rope, qkv);
  }
  launch_paged_attention(params.attention, qkv, workspace);
}
#endif

// The query heads of qkv. A token's heads are those of the query, then of the key, then of the
// value.
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

// Requires every written tensor apart from the tensors read, and from the other written ones.
void require_apart(const Expect& expect, const Arguments& read,
                   std::initializer_list<const Argument*> written) {
  for (const Argument* const* one = written.begin(); one != written.end(); ++one) {
    if (*one == nullptr) continue;
    expect.apart(**one, read);
    for (const Argument* const* other = written.begin(); other != one; ++other) {
      expect.apart(**other, **one);
    }
  }
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
  check_head_size(k, kv);
  Size num_heads = read_num_heads(x, kv);
  Arguments read;
  const auto optional = [&](const char* name, const std::optional<Tensor>& tensor,
                            Size& size) -> const void* {
    if (!tensor) return nullptr;
    const Argument a = expect.tensor(name, *tensor).same_dtype(x).shape({&size}).inner_contiguous();
    read.add(a);
    return a.data();
  };
  const void* biases = optional("bias", bias, width);
  const void* query_weight = optional("q_weight", q_weight, sizes.head_size);
  const void* key_weight = optional("k_weight", k_weight, sizes.head_size);
  expect_epsilon(expect, epsilon);
  const RopeTables tables =
      rope_tables(expect, "positions", positions, cos_sin_cache, num_seqs, sizes.head_size);
  const Argument slots =
      expect.tensor("slot_mapping", slot_mapping).int64().shape({&num_seqs}).inner_contiguous();
  const int64_t num_slots = count_slots(k, kv.num_blocks, kv.block_size);
  set_scales(expect, kv, k_scale, v_scale, read);
  check_numbers(expect, sliding_window, softcap, fixed_split_size);
  const float* slopes = read_per_head(expect, "alibi_slopes", alibi_slopes, num_heads, read);
  const float* sink_logits = read_per_head(expect, "sinks", sinks, num_heads, read);
  Argument o = expect.tensor("out", out).same_dtype(x);
  o.shape({&num_seqs, &num_heads, &sizes.head_size}).written();
  require_contiguous_heads(o, num_seqs);
  const std::optional<Argument> scratch = read_workspace(expect, workspace);
  const Argument* scratch_or_null = scratch ? &*scratch : nullptr;
  check_index(expect, tables.positions,
              {.noun = "a position", .low = 0, .high = tables.cos_sin_cache.size(0)});
  check_slots(expect, slots, num_slots);
  const int32_t window = window_of(sliding_window);
  const Pages pages = read_pages(expect, block_tables, seq_lens, num_seqs, kv, nullptr, window);
  read.add(tables.positions, tables.cos_sin_cache, slots, pages.tables, pages.lens);
  require_apart(expect, read, {&o, &x, &k, &v, scratch_or_null});
  if (num_seqs == 0) return;

  // `count` heads of qkv from head `first` on.
  const auto heads = [&](int64_t first, int64_t count, const void* weight) -> ProjectedHeads {
    const int64_t offset = first * kv.head_size * x.element_size();  // bytes
    return {.data = x.as<char>() + offset,
            .token_stride = x.stride(0),
            .head_stride = kv.head_size,
            .bias = biases == nullptr ? nullptr : static_cast<const char*>(biases) + offset,
            .weight = weight,
            .count = static_cast<int32_t>(count)};
  };
  RopeAndCacheParams rope{};
  rope.query = heads(0, num_heads, query_weight);
  rope.key = heads(num_heads, kv.num_kv_heads, key_weight);
  rope.value = heads(num_heads + kv.num_kv_heads, kv.num_kv_heads, nullptr);
  set_tables(rope, tables);
  rope.stores = true;
  rope.slot_mapping = slots.as<const int64_t>();
  rope.num_slots = num_seqs;
  rope.num_tokens = num_seqs;
  rope.kv = kv;
  rope.head_size = kv.head_size;
  rope.epsilon = static_cast<float>(epsilon);
  rope.is_neox = is_neox;
  rope.dtype = x.dtype();
  rope.op = expect.op();

  PagedAttentionParams attention{};
  attention.out = o.mutable_data();
  attention.query = rope.query.data;
  attention.query_stride = rope.query.token_stride;
  attention.kv = kv;
  attention.block_tables = pages.tables.as<const int32_t>();
  attention.block_table_stride = pages.tables.stride(0);
  attention.max_blocks_per_seq = pages.max_blocks;
  attention.seq_lens = pages.lens.as<const int32_t>();
  attention.alibi_slopes = slopes;
  attention.num_seqs = static_cast<int32_t>(num_seqs);
  attention.num_heads = rope.query.count;
  attention.max_seq_len = static_cast<int64_t>(pages.max_blocks) * kv.block_size;
  attention.scale = static_cast<float>(scale);
  attention.dtype = x.dtype();
  attention.num_tokens = attention.num_seqs;
  attention.out_stride = o.stride(0);
  attention.sinks = sink_logits;
  attention.sliding_window = window;
  attention.softcap = static_cast<float>(softcap);
  attention.fixed_split_size = at_most_int32(fixed_split_size);
  launch_fused({.rope = rope, .attention = attention}, qkv, scratch_or_null);
}

}  // namespace
}  // namespace vllm_kernels

VLLM_KERNELS_IMPL(library) {
  library.impl("fused_decode_attention", TORCH_BOX(&vllm_kernels::fused_decode_attention));
}
