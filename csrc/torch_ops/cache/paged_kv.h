// From cache tensors to a PagedKv, with every check that needs only shapes, strides and dtypes.
#pragma once
#include <optional>
#include <string_view>

#include "ops/paged_kv.h"
#include "torch_ops/base/check.h"

namespace vllm_kernels {

// The sizes that the cache tensors and their callers share.
struct CacheSizes {
  Size num_blocks{"num_blocks"};
  Size num_kv_heads{"num_kv_heads"};
  Size head_size{"head_size"};
  Size block_size{"block_size"};
};

// What a kv_cache_dtype string stores for a model of dtype `model`:
// "auto" the model's own; "fp8", "fp8_e4m3" e4m3; "fp8_e5m2" e5m2; for ops that take it, "int8".
enum class Int8Cache : uint8_t { kRefused, kTaken };
DType cache_dtype(const Expect& expect, std::string_view text, DType model,
                  std::string_view name = "kv_cache_dtype", Int8Cache int8 = Int8Cache::kRefused);

// key_cache [num_blocks, num_kv_heads, head_size / x, block_size, x] and
// value_cache [num_blocks, num_kv_heads, head_size, block_size]; the pages of a head are
// contiguous, the two outer strides are free. head_size and num_kv_heads may be bound already.
PagedKv vllm_layout(Argument& key_cache, Argument& value_cache, DType dtype,
                    std::string_view kv_cache_dtype, CacheSizes& sizes);

// key_cache, value_cache [num_blocks, block_size, num_kv_heads, head_size]; the three outer strides
// are free.
PagedKv flash_layout(Argument& key_cache, Argument& value_cache, DType dtype,
                     std::string_view kv_cache_dtype, CacheSizes& sizes);

// "vllm", "NHD" or "HND".
KvLayout cache_layout(const Expect& expect, std::string_view text);

// The caches of a model whose dtype is that of `query`, their own dtype read from the tensors. A
// page has 1, 2, 4, .. or 256 tokens. Free strides: as above, with HND those of its three outer
// dimensions [num_blocks, num_kv_heads, block_size].
PagedKv paged_cache(const Argument& query, Argument& key_cache, Argument& value_cache,
                    KvLayout layout, CacheSizes& sizes);

// Caches of any layout and page size whose dtype was checked.
PagedKv cache_pages(Argument& key_cache, Argument& value_cache, DType dtype, KvLayout layout,
                    CacheSizes& sizes);

// Keys and values without pages, [num_keys, num_kv_heads, head_size] with free outer strides: one
// block in layout NHD. dtypes: as paged_cache() has them.
PagedKv contiguous_kv(const Argument& query, Argument& key, Argument& value, Size& head_size);

// k_scale, v_scale of an 8-bit cache: float32 of one element, or one a KV head; null stands for 1.
// `read` gets those given.
void set_scales(Expect& expect, PagedKv& kv, const std::optional<Tensor>& k_scale,
                const std::optional<Tensor>& v_scale, Arguments& read);

// k_scale, v_scale: float32 of one element on the cache's device; read for 8-bit caches only.
void set_scales(PagedKv& kv, Argument& k_scale, Argument& v_scale);

// The same, or both of them [num_kv_heads].
void set_head_scales(PagedKv& kv, Argument& k_scale, Argument& v_scale);

}  // namespace vllm_kernels
