#include "torch_ops/paged_kv.h"

namespace vllm_kernels {
namespace {

// Blocks and heads must not share memory in a cache that is written; for one that is read it does
// not matter. Padding between them is fine.
void require_page_contiguous(const Argument& cache, int64_t outer_dims) {
  int64_t expected = 1;
  for (int64_t d = cache.dim() - 1; d >= outer_dims; --d) {
    if (cache.size(d) > 1 && cache.stride(d) != expected) {
      cache.fail("expected the page of a head to be contiguous (the last " +
                 std::to_string(cache.dim() - outer_dims) + " dimensions), got stride " +
                 std::to_string(cache.stride(d)) + " at dimension " + std::to_string(d) +
                 " of shape " + cache.shape_text());
    }
    expected *= cache.size(d);
  }
}

void set_sizes(PagedKv& kv, const Argument& cache, const CacheSizes& sizes, DType dtype,
               KvLayout layout) {
  if (sizes.block_size < 1) {
    cache.fail("expected block_size >= 1, got shape " + cache.shape_text());
  }
  kv.num_blocks = sizes.num_blocks;
  kv.num_kv_heads = static_cast<int32_t>(sizes.num_kv_heads);
  kv.head_size = static_cast<int32_t>(sizes.head_size);
  kv.block_size = static_cast<int32_t>(sizes.block_size);
  kv.dtype = dtype;
  kv.layout = layout;
  kv.x = 16 / size_of(dtype);
}

}  // namespace

DType cache_dtype(const Expect& expect, std::string_view text, DType model, std::string_view name) {
  if (text == "auto") return model;
  if (text == "fp8" || text == "fp8_e4m3") return DType::kFp8E4M3;
  if (text == "fp8_e5m2") return DType::kFp8E5M2;
  expect.fail(std::string(name) +
              ": expected \"auto\", \"fp8\", \"fp8_e4m3\" or \"fp8_e5m2\", got \"" +
              std::string(text) + "\"");
}

PagedKv vllm_layout(Expect& expect, const Tensor& key_cache, const Tensor& value_cache, DType dtype,
                    std::string_view kv_cache_dtype, CacheSizes& sizes) {
  const int64_t x = 16 / size_of(dtype);
  const Argument v =
      expect.tensor("value_cache", value_cache)
          .cache_dtype(dtype, kv_cache_dtype)
          .shape({&sizes.num_blocks, &sizes.num_kv_heads, &sizes.head_size, &sizes.block_size});
  if (sizes.head_size % x != 0) {
    v.fail("expected head_size to be a multiple of " + std::to_string(x) + " for a " +
           name_of(dtype) + " cache, got " + std::to_string(sizes.head_size));
  }
  Size chunks("head_size / x", sizes.head_size / x, "value_cache");
  Size chunk("x = 16 bytes / element size", x, nullptr);
  const Argument k =
      expect.tensor("key_cache", key_cache)
          .cache_dtype(dtype, kv_cache_dtype)
          .shape({&sizes.num_blocks, &sizes.num_kv_heads, &chunks, &sizes.block_size, &chunk});
  PagedKv kv;
  set_sizes(kv, k, sizes, dtype, KvLayout::kVllm);
  require_page_contiguous(k, 2);
  require_page_contiguous(v, 2);
  kv.key = k.mutable_data();
  kv.value = v.mutable_data();
  kv.key_block_stride = k.stride(0);
  kv.key_head_stride = k.stride(1);
  kv.key_chunk_stride = x * kv.block_size;
  kv.key_token_stride = x;
  kv.value_block_stride = v.stride(0);
  kv.value_head_stride = v.stride(1);
  kv.value_dim_stride = kv.block_size;
  kv.value_token_stride = 1;
  return kv;
}

PagedKv flash_layout(Expect& expect, const Tensor& key_cache, const Tensor& value_cache,
                     DType dtype, std::string_view kv_cache_dtype, CacheSizes& sizes) {
  const auto read = [&](const char* name, const Tensor& cache) {
    return expect.tensor(name, cache)
        .cache_dtype(dtype, kv_cache_dtype)
        .shape({&sizes.num_blocks, &sizes.block_size, &sizes.num_kv_heads, &sizes.head_size})
        .inner_contiguous();
  };
  const Argument k = read("key_cache", key_cache);
  const Argument v = read("value_cache", value_cache);

  PagedKv kv;
  set_sizes(kv, k, sizes, dtype, KvLayout::kNHD);
  kv.key = k.mutable_data();
  kv.value = v.mutable_data();
  kv.key_block_stride = k.stride(0);
  kv.key_token_stride = k.stride(1);
  kv.key_head_stride = k.stride(2);
  kv.key_chunk_stride = kv.x;
  kv.value_block_stride = v.stride(0);
  kv.value_token_stride = v.stride(1);
  kv.value_head_stride = v.stride(2);
  kv.value_dim_stride = 1;
  return kv;
}

void set_scales(Expect& expect, PagedKv& kv, const Tensor& k_scale, const Tensor& v_scale) {
  const auto read = [&](const char* name, const Tensor& scale) {
    const Argument s = expect.tensor(name, scale).float32();
    if (s.numel() != 1) s.fail("expected one element, got shape " + s.shape_text());
    return s.as<const float>();
  };
  kv.k_scale = read("k_scale", k_scale);
  kv.v_scale = read("v_scale", v_scale);
}

}  // namespace vllm_kernels
