// Bindings of rope_and_cache and fused_qk_norm_rope. ops/rope_and_cache.h has the rules.
//   rope_and_cache      query, key, value [num_tokens, heads, head_size]. The query is updated in
//                       place; key and value go into the paged cache.
//   fused_qk_norm_rope  qkv [num_tokens, (num_heads_q + num_heads_k + num_heads_v) * head_dim],
//                       query and key updated in place: RopeAndCacheParams without a cache.
#include "torch_ops/rope/rope_and_cache.h"

#include "torch_ops/base/check.h"
#include "torch_ops/base/device.h"
#include "torch_ops/cache/paged_kv.h"

namespace vllm_kernels {
namespace {

void expect_head_size(const Expect& expect, const char* name, int64_t head_size) {
  expect.that(head_size >= 1 && head_size <= kMaxRopeHeadSize,
              std::string(name) + ": expected 1 to " + std::to_string(kMaxRopeHeadSize) + ", got " +
                  std::to_string(head_size));
}

// The kernels number the heads of a launch (8192 tokens) in 31 bits.
constexpr int64_t kMaxRopeHeads = 65536;

void expect_heads(const Expect& expect, const char* name, int64_t count, int64_t min_count = 1) {
  expect.that(count >= min_count && count <= kMaxRopeHeads,
              std::string(name) + ": expected " + std::to_string(min_count) + " to " +
                  std::to_string(kMaxRopeHeads) + " heads, got " + std::to_string(count));
}

// Packs heads [num_tokens, count, head_size]; the strides of tokens and heads are free.
ProjectedHeads projected_heads(const Argument& x, const void* weight) {
  return {.data = x.mutable_data(),
          .token_stride = x.stride(0),
          .head_stride = x.stride(1),
          .weight = weight,
          .count = int32_size(x, "heads", x.size(1))};
}

void rope_and_cache(const Tensor& positions, const Tensor& query, const Tensor& key,
                    const Tensor& value, const Tensor& cos_sin_cache, bool is_neox,
                    const Tensor& key_cache, const Tensor& value_cache, const Tensor& slot_mapping,
                    const Text& layout, const std::optional<Tensor>& k_scale,
                    const std::optional<Tensor>& v_scale, const std::optional<Tensor>& q_weight,
                    const std::optional<Tensor>& k_weight, double epsilon) {
  Expect expect("rope_and_cache");
  Size num_tokens("num_tokens"), num_heads("num_heads");
  CacheSizes sizes;
  const Argument q = expect.tensor("query", query)
                         .floating()
                         .shape({&num_tokens, &num_heads, &sizes.head_size})
                         .inner_contiguous()
                         .written();
  expect_head_size(expect, "query: head_size", sizes.head_size);
  expect_heads(expect, "query: num_heads", num_heads);
  const Argument k = expect.tensor("key", key)
                         .same_dtype(q)
                         .shape({&num_tokens, &sizes.num_kv_heads, &sizes.head_size})
                         .inner_contiguous();
  expect_heads(expect, "key: num_kv_heads", sizes.num_kv_heads);
  const Argument v = expect.tensor("value", value)
                         .same_dtype(q)
                         .shape({&num_tokens, &sizes.num_kv_heads, &sizes.head_size})
                         .inner_contiguous();
  const RopeTables tables =
      rope_tables(expect, "positions", positions, cos_sin_cache, num_tokens, sizes.head_size);
  Argument kc = expect.tensor("key_cache", key_cache);
  Argument vc = expect.tensor("value_cache", value_cache);
  PagedKv kv = paged_cache(q, kc, vc, cache_layout(expect, layout), sizes);
  kc.written();
  vc.written();
  const Argument slots = read_slots(expect, slot_mapping, num_tokens);
  Arguments read;
  read.add(k, v, tables.positions, tables.cos_sin_cache, slots);
  set_scales(expect, kv, k_scale, v_scale, read);
  const void* q_gain = read_vector(expect, "q_weight", or_null(q_weight), q, sizes.head_size, read);
  const void* k_gain = read_vector(expect, "k_weight", or_null(k_weight), q, sizes.head_size, read);
  const float checked_epsilon = expect.finite_not_negative("epsilon", epsilon);
  expect.apart({vc, kc, q}, read);
  const int64_t num_slots = count_slots(kc, kv.num_blocks, kv.block_size);
  if (num_tokens == 0) return;
  RopeAndCacheParams params =
      pack_rope(expect, tables, q, sizes.head_size, checked_epsilon, is_neox);
  check_slots(expect, slots, num_slots);

  params.query = projected_heads(q, q_gain);
  params.key = projected_heads(k, k_gain);
  params.value = projected_heads(v, nullptr);
  store_in(params, kv, slots);
  if (params.num_slots == 0) params.key.count = params.value.count = 0;  // nothing is stored
  launch(params, query);
}

void fused_qk_norm_rope(const Tensor& qkv, int64_t num_heads_q, int64_t num_heads_k,
                        int64_t num_heads_v, int64_t head_dim, double eps, const Tensor& q_weight,
                        const Tensor& k_weight, const Tensor& cos_sin_cache, bool is_neox,
                        const Tensor& position_ids) {
  Expect expect("fused_qk_norm_rope");
  expect_head_size(expect, "head_dim", head_dim);
  expect_heads(expect, "num_heads_q", num_heads_q, 0);
  expect_heads(expect, "num_heads_k", num_heads_k, 0);
  expect_heads(expect, "num_heads_v", num_heads_v, 0);
  Size num_tokens("num_tokens"), head_size("head_dim", head_dim, nullptr);
  Size width("(num_heads_q + num_heads_k + num_heads_v) * head_dim",
             (num_heads_q + num_heads_k + num_heads_v) * head_dim, nullptr);
  const Argument x = expect.tensor("qkv", qkv)
                         .floating()
                         .shape({&num_tokens, &width})
                         .inner_contiguous()
                         .written();
  Arguments read;
  const void* q_gain = read_vector(expect, "q_weight", &q_weight, x, head_size, read);
  const void* k_gain = read_vector(expect, "k_weight", &k_weight, x, head_size, read);
  const RopeTables tables =
      rope_tables(expect, "position_ids", position_ids, cos_sin_cache, num_tokens, head_dim);
  const float checked_eps = expect.finite_not_negative("eps", eps);
  read.add(tables.positions, tables.cos_sin_cache);
  expect.apart(x, read);
  if (x.numel() == 0 || num_heads_q + num_heads_k == 0) return;

  RopeAndCacheParams params = pack_rope(expect, tables, x, head_dim, checked_eps, is_neox);
  params.query = qkv_heads(x, head_dim, 0, num_heads_q, q_gain);
  params.key = qkv_heads(x, head_dim, num_heads_q, num_heads_k, k_gain);
  launch(params, qkv);
}

}  // namespace
}  // namespace vllm_kernels

VLLM_KERNELS_IMPL(library) {
  library.impl("rope_and_cache", TORCH_BOX(&vllm_kernels::rope_and_cache));
  library.impl("fused_qk_norm_rope", TORCH_BOX(&vllm_kernels::fused_qk_norm_rope));
}
