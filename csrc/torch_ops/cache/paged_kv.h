// From cache tensors to a PagedKv, with all checks that need only shapes, strides and dtypes.
#pragma once
#include <optional>
#include <string_view>

#include "ops/paged_kv.h"
#include "torch_ops/base/check.h"
#include "torch_ops/base/index_check.h"

namespace vllm_kernels {

// The sizes that the cache tensors and their callers share.
struct CacheSizes {
  Size num_blocks{"num_blocks"};
  Size num_kv_heads{"num_kv_heads"};
  Size head_size{"head_size"};
  Size block_size{"block_size"};
};

// The stored dtype of a kv_cache_dtype string, for a model of dtype `model`. "auto": the model's.
// "fp8" and "fp8_e4m3": e4m3. "fp8_e5m2": e5m2. "int8": int8, for ops with kTaken.
enum class Int8Cache : uint8_t { kRefused, kTaken };
DType cache_dtype(const Expect& expect, std::string_view text, DType model,
                  std::string_view name = "kv_cache_dtype", Int8Cache int8 = Int8Cache::kRefused);

// Caches of the dtype that a kv_cache_dtype string names. head_size and num_kv_heads may be bound
// already.
//   vllm      key_cache [num_blocks, num_kv_heads, head_size / x, block_size, x], value_cache
//             [num_blocks, num_kv_heads, head_size, block_size]. The page of a head is contiguous;
//             the two outer strides are free.
//   NHD, HND  both [num_blocks, block_size, num_kv_heads, head_size], or with the two middle
//             dimensions swapped. The three outer strides are free.
PagedKv cache_of_dtype(Argument& key_cache, Argument& value_cache, DType dtype,
                       std::string_view kv_cache_dtype, KvLayout layout, CacheSizes& sizes);

// Parses "vllm", "NHD" or "HND".
KvLayout cache_layout(const Expect& expect, std::string_view text);

// Caches of a model with the dtype of `query`; their own dtype is read from the tensors, or they
// are of int4. Those of an e4m3 query are e4m3. A page has 1, 2, 4, ... or 256 tokens.
PagedKv paged_cache(const Argument& query, Argument& key_cache, Argument& value_cache,
                    KvLayout layout, CacheSizes& sizes, bool is_int4 = false);

// Caches of any layout and page size, whose dtype is checked already.
PagedKv cache_pages(Argument& key_cache, Argument& value_cache, DType dtype, KvLayout layout,
                    CacheSizes& sizes);

// Int4 caches (uint8) of any layout and page size. `head_size`, bound by the argument `named`, is
// the number of values. On return sizes.head_size is the number of elements.
PagedKv int4_pages(const Argument& named, Argument& key_cache, Argument& value_cache,
                   KvLayout layout, CacheSizes& sizes);

// The zeros of an int4 cache: float32, with the shape and strides of its scales
// [num_blocks, num_kv_heads, block_size].
Argument token_zeros(Expect& expect, const char* name, const Tensor& zeros, const Argument& scales);

// K alone, of a dtype that is checked already; V is null or K. `source` has bound num_blocks,
// num_kv_heads and head_size.
PagedKv key_pages(Argument& key_cache, DType dtype, KvLayout layout, CacheSizes& sizes,
                  const char* source);

// Keys and values without pages, [num_keys, num_kv_heads, head_size] with free outer strides, as
// one page in layout NHD. Dtypes as for paged_cache().
PagedKv contiguous_kv(const Argument& query, Argument& key, Argument& value, Size& head_size);

// Keys and values of a row for each sequence, [batch_cache, length, num_kv_heads, head_size], as
// pages in layout NHD. A page has as many tokens as kernels and strides let, and the rows of both
// are equally many tokens apart. `batch`: rows that are used, the first ones.
struct RowCache {
  PagedKv kv{};
  int64_t length = 0;      // tokens of a row
  int64_t row_blocks = 0;  // pages from one row to the next
};
RowCache row_cache(const Argument& query, Argument& key, Argument& value, int64_t batch,
                   CacheSizes& sizes);

// k_scale and v_scale of an 8-bit cache: float32, finite and > 0, one element or one per KV head.
// None stands for 1. A scale that is given is added to `read`.
void set_scales(Expect& expect, PagedKv& kv, const std::optional<Tensor>& k_scale,
                const std::optional<Tensor>& v_scale, Arguments& read);

// The values of a contiguous float32 scale of one element or [num_kv_heads], finite and > 0, which
// is added to `read`. `elements`: as many as k_scale has, or 0.
const float* read_head_scale(const Expect& expect, const PagedKv& kv, const Argument& scale,
                             Arguments& read, int64_t elements = 0);

// Requires an argument of keys and its twin of values to be both tensors or both None. Returns
// whether they are tensors.
bool both_or_neither(const Expect& expect, const char* key_name, const std::optional<Tensor>& key,
                     const char* value_name, const std::optional<Tensor>& value);

// The arguments k_token_scales, v_token_scales, k_token_zeros and v_token_zeros.
struct TokenScaleTensors {
  const std::optional<Tensor>&k_scales, &v_scales, &k_zeros, &v_zeros;

  // Zeros say that a cache is int4, which uint8 does not.
  bool any_zeros() const { return k_zeros || v_zeros; }
};

// k_token_scales and v_token_scales of an int8 or int4 cache: float32 [num_blocks, num_kv_heads,
// block_size], the two outer strides are free. Both or neither, and then no other scales. Zeros of
// an int4 cache, and of no other one.
TokenScales token_scales(Expect& expect, const PagedKv& kv, CacheSizes& sizes,
                         const TokenScaleTensors& tensors, Arguments& read);

// k_scale and v_scale: one float32 each, on the cache's device. Only 8-bit caches use them.
void set_scales(const Expect& expect, PagedKv& kv, Argument& k_scale, Argument& v_scale);

// The same, or both [num_kv_heads].
void set_head_scales(const Expect& expect, PagedKv& kv, Argument& k_scale, Argument& v_scale);

// --- for every op that writes tokens into a paged cache

// slot_mapping: int64 [n], n <= num_tokens.
inline Argument read_slots(Expect& expect, const Tensor& slot_mapping, const Size& num_tokens) {
  const Argument slots =
      expect.tensor("slot_mapping", slot_mapping).int64().rank(1, 1).inner_contiguous();
  if (slots.numel() > num_tokens) {
    slots.fail("expected at most num_tokens = " + std::to_string(num_tokens.value) + " (from " +
               num_tokens.source + ") slots, got shape " + slots.shape_text());
  }
  return slots;
}

// The number of slots of a cache. Kernels number slots in 31 bits.
inline int64_t count_slots(const Argument& cache, int64_t num_blocks, int64_t block_size) {
  if (block_size > 0 && num_blocks > INT32_MAX / block_size) {
    cache.fail("expected num_blocks * block_size < 2^31, got " + std::to_string(num_blocks) +
               " * " + std::to_string(block_size));
  }
  return num_blocks * block_size;
}

inline void check_slots(const Expect& expect, const Argument& slots, int64_t num_slots) {
  check_index(expect, slots,
              {.noun = "a slot", .low = 0, .high = num_slots, .skip = true, .unique = true});
}

}  // namespace vllm_kernels
