// Binding of rope_and_cache: query, key, value [num_tokens, heads, head_size]. The query is updated
// in place; key and value go into the paged cache. ops/rope_and_cache.h has the rules.
#include "torch_ops/rope/rope_and_cache.h"

#include "torch_ops/base/check.h"
#include "torch_ops/base/device.h"
#include "torch_ops/base/index_check.h"
#include "torch_ops/cache/paged_kv.h"
#include "torch_ops/cache/slots.h"

namespace vllm_kernels {
namespace {

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
  expect_rope_head_size(expect, "query: head_size", sizes.head_size);
  expect_rope_heads(expect, "query: num_heads", num_heads);
  const Argument k = expect.tensor("key", key)
                         .same_dtype(q)
                         .shape({&num_tokens, &sizes.num_kv_heads, &sizes.head_size})
                         .inner_contiguous();
  expect_rope_heads(expect, "key: num_kv_heads", sizes.num_kv_heads);
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
  const auto weight = [&](const char* name, const std::optional<Tensor>& tensor) -> const void* {
    if (!tensor.has_value()) return nullptr;
    const Argument w =
        expect.tensor(name, *tensor).same_dtype(q).shape({&sizes.head_size}).inner_contiguous();
    read.add(w);
    return w.data();
  };
  RopeAndCacheParams params{};
  params.query = projected_heads(q);
  params.key = projected_heads(k);
  params.value = projected_heads(v);
  params.query.weight = weight("q_weight", q_weight);
  params.key.weight = weight("k_weight", k_weight);
  expect_epsilon(expect, epsilon);
  expect.apart(q, read);
  expect.apart(kc, read);
  expect.apart(vc, read);
  expect.apart(kc, vc);
  expect.apart(q, kc);
  expect.apart(q, vc);
  const int64_t num_slots = count_slots(kc, kv.num_blocks, kv.block_size);
  if (num_tokens == 0) return;
  check_index(expect, tables.positions,
              {.noun = "a position", .low = 0, .high = tables.cos_sin_cache.size(0)});
  check_slots(expect, slots, num_slots);

  set_tables(params, tables);
  params.stores = true;
  params.slot_mapping = slots.as<const int64_t>();
  params.num_slots = slots.numel();
  if (params.num_slots == 0) params.key.count = params.value.count = 0;  // nothing is stored
  params.num_tokens = num_tokens;
  params.kv = kv;
  params.head_size = static_cast<int32_t>(sizes.head_size);
  params.epsilon = static_cast<float>(epsilon);
  params.is_neox = is_neox;
  params.dtype = q.dtype();
  params.op = "rope_and_cache";
  launch(params, query);
}

}  // namespace
}  // namespace vllm_kernels

VLLM_KERNELS_IMPL(library) {
  library.impl("rope_and_cache", TORCH_BOX(&vllm_kernels::rope_and_cache));
}
