#include "ops/reshape_and_cache.h"

#include "torch_ops/check.h"
#include "torch_ops/device.h"
#include "torch_ops/index_check.h"
#include "torch_ops/paged_kv.h"

namespace vllm_kernels {
namespace {

void write(const char* op, KvLayout layout, const Tensor& key, const Tensor& value,
           const Tensor& key_cache, const Tensor& value_cache, const Tensor& slot_mapping,
           const Text& kv_cache_dtype, const Tensor& k_scale, const Tensor& v_scale) {
  Expect expect(op);
  Size num_tokens("num_tokens");
  CacheSizes sizes;
  const Argument k = expect.tensor("key", key)
                         .floating()
                         .shape({&num_tokens, &sizes.num_kv_heads, &sizes.head_size})
                         .inner_contiguous();
  const Argument v = expect.tensor("value", value)
                         .same_dtype(k)
                         .shape({&num_tokens, &sizes.num_kv_heads, &sizes.head_size})
                         .inner_contiguous();
  const DType stored = cache_dtype(expect, kv_cache_dtype, k.dtype(), "kv_cache_dtype",
                                   Int8Cache::kTaken);
  Argument kc = expect.tensor("key_cache", key_cache);
  Argument vc = expect.tensor("value_cache", value_cache);
  PagedKv kv = (layout == KvLayout::kVllm ? vllm_layout : flash_layout)(kc, vc, stored,
                                                                        kv_cache_dtype, sizes);
  kc.written();
  vc.written();
  const Argument slots =
      expect.tensor("slot_mapping", slot_mapping).int64().rank(1, 1).inner_contiguous();
  if (slots.numel() > num_tokens) {
    slots.fail("expected at most num_tokens = " + std::to_string(num_tokens.value) +
               " (from key) slots, got shape " + slots.shape_text());
  }
  Argument ks = expect.tensor("k_scale", k_scale), vs = expect.tensor("v_scale", v_scale);
  set_head_scales(kv, ks, vs);
  for (const Argument* cache : {&kc, &vc}) {
    expect.apart(*cache, k);
    expect.apart(*cache, v);
    expect.apart(*cache, slots);
  }
  expect.apart(kc, vc);
  const int64_t num_slots = kv.num_blocks * kv.block_size;
  expect.that(num_slots <= INT32_MAX, "key_cache: expected num_blocks * block_size < 2^31, got " +
                                          std::to_string(num_slots));
  if (slots.numel() == 0 || k.numel() == 0) return;
  check_index(expect, slots,
              {.noun = "a slot", .low = 0, .high = num_slots, .skip = true, .unique = true});

  const ReshapeAndCacheParams params{.key = k.data(),
                                     .value = v.data(),
                                     .key_token_stride = k.stride(0),
                                     .key_head_stride = k.stride(1),
                                     .value_token_stride = v.stride(0),
                                     .value_head_stride = v.stride(1),
                                     .kv = kv,
                                     .slot_mapping = slots.as<const int64_t>(),
                                     .num_tokens = slots.numel(),
                                     .dtype = k.dtype()};
  launch(params, key);
}

void reshape_and_cache(const Tensor& key, const Tensor& value, const Tensor& key_cache,
                       const Tensor& value_cache, const Tensor& slot_mapping,
                       const Text& kv_cache_dtype, const Tensor& k_scale, const Tensor& v_scale) {
  write("reshape_and_cache", KvLayout::kVllm, key, value, key_cache, value_cache, slot_mapping,
        kv_cache_dtype, k_scale, v_scale);
}

void reshape_and_cache_flash(const Tensor& key, const Tensor& value, const Tensor& key_cache,
                             const Tensor& value_cache, const Tensor& slot_mapping,
                             const Text& kv_cache_dtype, const Tensor& k_scale,
                             const Tensor& v_scale) {
  write("reshape_and_cache_flash", KvLayout::kNHD, key, value, key_cache, value_cache, slot_mapping,
        kv_cache_dtype, k_scale, v_scale);
}

}  // namespace
}  // namespace vllm_kernels

VLLM_KERNELS_IMPL(library) {
  library.impl("reshape_and_cache", TORCH_BOX(&vllm_kernels::reshape_and_cache));
  library.impl("reshape_and_cache_flash", TORCH_BOX(&vllm_kernels::reshape_and_cache_flash));
}
