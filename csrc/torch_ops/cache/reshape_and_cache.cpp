// Bindings of reshape_and_cache, reshape_and_cache_flash and reshape_and_cache_per_token_quant: key
// and value [num_tokens, num_kv_heads, head_size] into a paged cache. paged_kv.h checks the caches
// and the slots.
#include "ops/reshape_and_cache.h"
#include "ops/reshape_and_cache_per_token_quant.h"

#include "torch_ops/base/check.h"
#include "torch_ops/base/device.h"
#include "torch_ops/cache/paged_kv.h"

namespace vllm_kernels {
namespace {

// The arguments that all writers share: key and value [num_tokens, num_kv_heads, head_size]. The
// caller checks the dtype of the caches.
struct Tokens {
  Tokens(const char* op, const Tensor& key_tensor, const Tensor& value_tensor)
      : expect(op),
        key(expect.tensor("key", key_tensor)
                .floating()
                .shape({&num_tokens, &sizes.num_kv_heads, &sizes.head_size})
                .inner_contiguous()),
        value(expect.tensor("value", value_tensor)
                  .same_dtype(key)
                  .shape({&num_tokens, &sizes.num_kv_heads, &sizes.head_size})
                  .inner_contiguous()) {}

  // Checks the values of slot_mapping and fills the struct. Called after all other checks.
  ReshapeAndCacheParams pack(const Argument& key_cache, const PagedKv& kv,
                             const Argument& slots) const {
    const int64_t num_slots = count_slots(key_cache, kv.num_blocks, kv.block_size);
    const bool nothing = slots.numel() == 0 || key.numel() == 0;
    if (!nothing) check_slots(expect, slots, num_slots);
    return {.key = key.data(),
            .value = value.data(),
            .key_token_stride = key.stride(0),
            .key_head_stride = key.stride(1),
            .value_token_stride = value.stride(0),
            .value_head_stride = value.stride(1),
            .kv = kv,
            .slot_mapping = slots.as<const int64_t>(),
            .num_tokens = nothing ? 0 : slots.numel(),
            .dtype = key.dtype(),
            .op = expect.op()};
  }

  Expect expect;
  Size num_tokens{"num_tokens"};
  CacheSizes sizes;
  Argument key;
  Argument value;
};

void write(const char* op, KvLayout layout, const Tensor& key, const Tensor& value,
           const Tensor& key_cache, const Tensor& value_cache, const Tensor& slot_mapping,
           const Text& kv_cache_dtype, const Tensor& k_scale, const Tensor& v_scale) {
  Tokens tokens(op, key, value);
  Expect& expect = tokens.expect;
  const DType stored =
      cache_dtype(expect, kv_cache_dtype, tokens.key.dtype(), "kv_cache_dtype", Int8Cache::kTaken);
  Argument kc = expect.tensor("key_cache", key_cache);
  Argument vc = expect.tensor("value_cache", value_cache);
  PagedKv kv = cache_of_dtype(kc, vc, stored, kv_cache_dtype, layout, tokens.sizes);
  kc.written();
  vc.written();
  const Argument slots = read_slots(expect, slot_mapping, tokens.num_tokens);
  Argument ks = expect.tensor("k_scale", k_scale), vs = expect.tensor("v_scale", v_scale);
  set_head_scales(expect, kv, ks, vs);
  expect.apart({vc, kc}, {tokens.key, tokens.value, slots, ks, vs});
  const ReshapeAndCacheParams params = tokens.pack(kc, kv, slots);
  if (params.num_tokens > 0) launch(params, key);
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

void reshape_and_cache_per_token_quant(const Tensor& key, const Tensor& value,
                                       const Tensor& key_cache, const Tensor& value_cache,
                                       const Tensor& key_scales, const Tensor& value_scales,
                                       const Tensor& slot_mapping, const Text& layout,
                                       const std::optional<Tensor>& key_zeros,
                                       const std::optional<Tensor>& value_zeros) {
  Tokens tokens("reshape_and_cache_per_token_quant", key, value);
  Expect& expect = tokens.expect;
  CacheSizes& sizes = tokens.sizes;
  const KvLayout kv_layout = cache_layout(expect, layout);
  const bool zeros = both_or_neither(expect, "key_zeros", key_zeros, "value_zeros", value_zeros);
  Argument kc = expect.tensor("key_cache", key_cache);
  Argument vc = expect.tensor("value_cache", value_cache);
  if (!zeros) {
    kc.int8();
    vc.int8();
  }
  const PagedKv kv = zeros ? int4_pages(tokens.key, kc, vc, kv_layout, sizes)
                           : cache_pages(kc, vc, DType::kInt8, kv_layout, sizes);
  const auto scales = [&](const char* name, const Tensor& tensor) {
    return expect.tensor(name, tensor)
        .float32()
        .shape({&sizes.num_blocks, &sizes.num_kv_heads, &sizes.block_size})
        .inner_contiguous()
        .written();
  };
  const Argument ks = scales("key_scales", key_scales), vs = scales("value_scales", value_scales);
  const Argument slots = read_slots(expect, slot_mapping, tokens.num_tokens);
  Arguments written(kc.written(), vc.written(), ks, vs);
  ReshapeAndCachePerTokenQuantParams params{.key_scales = ks.as<float>(),
                                            .value_scales = vs.as<float>(),
                                            .key_scales_block_stride = ks.stride(0),
                                            .key_scales_head_stride = ks.stride(1),
                                            .value_scales_block_stride = vs.stride(0),
                                            .value_scales_head_stride = vs.stride(1)};
  if (zeros) {
    const Argument kz = token_zeros(expect, "key_zeros", *key_zeros, ks);
    const Argument vz = token_zeros(expect, "value_zeros", *value_zeros, vs);
    params.key_zeros = kz.as<float>();
    params.value_zeros = vz.as<float>();
    written.add(kz, vz);
  }
  expect.apart(written, {tokens.key, tokens.value, slots});
  params.write = tokens.pack(kc, kv, slots);
  if (params.write.num_tokens > 0) launch(params, key);
}

}  // namespace
}  // namespace vllm_kernels

VLLM_KERNELS_IMPL(library) {
  library.impl("reshape_and_cache", TORCH_BOX(&vllm_kernels::reshape_and_cache));
  library.impl("reshape_and_cache_flash", TORCH_BOX(&vllm_kernels::reshape_and_cache_flash));
  library.impl("reshape_and_cache_per_token_quant",
               TORCH_BOX(&vllm_kernels::reshape_and_cache_per_token_quant));
}
