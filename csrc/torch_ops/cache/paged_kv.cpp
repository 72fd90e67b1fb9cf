// The checks of paged_kv.h: shape, strides and dtype of caches of each layout, packed into a
// PagedKv.
#include "torch_ops/cache/paged_kv.h"

namespace vllm_kernels {
namespace {

// Requires the page of a head to be contiguous: the dimensions from outer_dims on. The outer
// strides are free, so padding is allowed. Pages that share memory are harmless in a cache that is
// only read; written() refuses them in the others.
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
  kv.num_kv_heads = int32_size(cache, "num_kv_heads", sizes.num_kv_heads);
  kv.head_size = int32_size(cache, "head_size", sizes.head_size);
  kv.block_size = int32_size(cache, "block_size", sizes.block_size);
  kv.dtype = dtype;
  kv.layout = layout;
  kv.x = 16 / size_of(dtype);
}

// Checks the size of a float32 scale. `elements` is the size of the scale before, or 0.
void check_scale_size(const PagedKv& kv, const Argument& scale, int64_t elements) {
  if (scale.numel() != 1 && !(scale.dim() == 1 && scale.size(0) == kv.num_kv_heads)) {
    scale.fail("expected one element, or num_kv_heads = " + std::to_string(kv.num_kv_heads) +
               ", got shape " + scale.shape_text());
  }
  if (elements != 0 && scale.numel() != elements) {
    scale.fail("expected " + std::to_string(elements) + " elements (from k_scale), got shape " +
               scale.shape_text());
  }
}

// Checks and packs caches whose dtype is checked already. head_size, bound by the argument
// `source`, is a multiple of x.
PagedKv vllm_keys(Argument& key, DType dtype, CacheSizes& sizes, const char* source) {
  const int64_t x = 16 / size_of(dtype);
  Size chunks("head_size / x", sizes.head_size / x, source);
  Size chunk("x = 16 bytes / element size", x, nullptr);
  const Argument& k =
      key.shape({&sizes.num_blocks, &sizes.num_kv_heads, &chunks, &sizes.block_size, &chunk});
  PagedKv kv;
  set_sizes(kv, k, sizes, dtype, KvLayout::kVllm);
  require_page_contiguous(k, 2);
  kv.key = k.mutable_data();
  kv.key_block_stride = k.stride(0);
  kv.key_head_stride = k.stride(1);
  kv.key_chunk_stride = x * kv.block_size;
  kv.key_token_stride = x;
  return kv;
}

void require_whole_chunks(const Argument& of, DType dtype, int64_t head_size) {
  const int64_t x = 16 / size_of(dtype);
  if (head_size % x == 0) return;
  of.fail("expected head_size to be a multiple of " + std::to_string(x) + " for a " +
          name_of(dtype) + " cache, got " + std::to_string(head_size));
}

PagedKv vllm_pages(Argument& key, Argument& value, DType dtype, CacheSizes& sizes) {
  const Argument& v =
      value.shape({&sizes.num_blocks, &sizes.num_kv_heads, &sizes.head_size, &sizes.block_size});
  require_whole_chunks(v, dtype, sizes.head_size);
  PagedKv kv = vllm_keys(key, dtype, sizes, "value_cache");
  require_page_contiguous(v, 2);
  kv.value = v.mutable_data();
  kv.value_block_stride = v.stride(0);
  kv.value_head_stride = v.stride(1);
  kv.value_dim_stride = kv.block_size;
  kv.value_token_stride = 1;
  return kv;
}

// Packs rows of head_size elements. `token` and `head` are the indices of these dimensions.
void set_rows(PagedKv& kv, const Argument& k, const Argument& v, int64_t token, int64_t head) {
  kv.key = k.mutable_data();
  kv.value = v.mutable_data();
  kv.key_token_stride = k.stride(token);
  kv.key_head_stride = k.stride(head);
  kv.key_chunk_stride = kv.x;
  kv.value_token_stride = v.stride(token);
  kv.value_head_stride = v.stride(head);
  kv.value_dim_stride = 1;
}

// Catches a cache of another layout than the argument says, by the rank of its keys: "vllm" has 5
// dimensions, NHD and HND have 4.
void require_layout(const Argument& key, KvLayout layout) {
  const bool is_vllm = layout == KvLayout::kVllm;
  if (key.dim() == (is_vllm ? 5 : 4)) return;
  const std::string rows = layout == KvLayout::kNHD ? "block_size, num_kv_heads, head_size"
                                                    : "num_kv_heads, block_size, head_size";
  const std::string name = is_vllm ? "vllm" : layout == KvLayout::kNHD ? "NHD" : "HND";
  key.fail("expected shape [num_blocks, " +
           (is_vllm ? "num_kv_heads, head_size / x, block_size, x" : rows) + "] (from layout = \"" +
           name + "\"), got shape " + key.shape_text() +
           "; give layout=\"vllm\", \"NHD\" or \"HND\", as the cache has it");
}

// NHD and HND differ in the order of two dimensions.
PagedKv row_pages(Argument& key, Argument& value, DType dtype, KvLayout layout, CacheSizes& sizes) {
  const bool token_first = layout == KvLayout::kNHD;
  const int64_t token = token_first ? 1 : 2, head = token_first ? 2 : 1;
  Size& second = token_first ? sizes.block_size : sizes.num_kv_heads;
  Size& third = token_first ? sizes.num_kv_heads : sizes.block_size;
  const Argument& k =
      key.shape({&sizes.num_blocks, &second, &third, &sizes.head_size}).inner_contiguous();
  const Argument& v =
      value.shape({&sizes.num_blocks, &second, &third, &sizes.head_size}).inner_contiguous();

  PagedKv kv;
  set_sizes(kv, k, sizes, dtype, layout);
  kv.key_block_stride = k.stride(0);
  kv.value_block_stride = v.stride(0);
  set_rows(kv, k, v, token, head);
  return kv;
}

PagedKv pages(Argument& key, Argument& value, DType dtype, KvLayout layout, CacheSizes& sizes) {
  return layout == KvLayout::kVllm ? vllm_pages(key, value, dtype, sizes)
                                   : row_pages(key, value, dtype, layout, sizes);
}

}  // namespace

PagedKv contiguous_kv(const Argument& query, Argument& key, Argument& value, Size& head_size) {
  key.cache_of(query);
  value.same_dtype(key);
  Size num_keys("num_keys"), num_kv_heads("num_kv_heads");
  const Argument& k = key.shape({&num_keys, &num_kv_heads, &head_size}).inner_contiguous();
  const Argument& v = value.shape({&num_keys, &num_kv_heads, &head_size}).inner_contiguous();
  int32_size(k, "num_keys", num_keys);
  CacheSizes sizes;
  sizes.num_blocks.value = num_keys > 0 ? 1 : 0;
  sizes.num_kv_heads.value = num_kv_heads;
  sizes.block_size.value = num_keys > 0 ? int64_t{num_keys} : 1;
  sizes.head_size.value = head_size;

  PagedKv kv;
  set_sizes(kv, k, sizes, key.dtype(), KvLayout::kNHD);
  set_rows(kv, k, v, 0, 1);
  return kv;
}

RowCache row_cache(const Argument& query, Argument& key, Argument& value, int64_t batch,
                   CacheSizes& sizes) {
  key.cache_of(query);
  value.same_dtype(key);
  Size rows("batch_cache"), length("seqlen_cache");
  const auto read = [&](Argument& cache) {  // returns the tokens from one row to the next
    cache.shape({&rows, &length, &sizes.num_kv_heads, &sizes.head_size}).inner_contiguous();
    if (rows <= 1) return int64_t{length};
    const int64_t token = cache.stride(1);
    if (token == 0 || cache.stride(0) % token != 0) {
      cache.fail("expected rows that are whole numbers of tokens apart, got shape " +
                 cache.shape_text());
    }
    return cache.stride(0) / token;
  };
  const int64_t row = read(key);
  if (read(value) != row) value.fail("expected rows as far apart as those of key_cache");
  if (rows < batch || length < 1) {
    key.fail("expected a row of tokens for each of " + std::to_string(batch) +
             " sequences, got shape " + key.shape_text());
  }
  int64_t page = 256;
  while (length % page != 0 || row % page != 0) page /= 2;
  sizes.num_blocks.value = rows > 0 ? ((rows - 1) * row + length) / page : 0;
  sizes.block_size.value = page;

  RowCache cache{.length = length, .row_blocks = row / page};
  set_sizes(cache.kv, key, sizes, key.dtype(), KvLayout::kNHD);
  int32_size(key, "pages", sizes.num_blocks);  // ids of pages are int32
  cache.kv.key_block_stride = page * key.stride(1);
  cache.kv.value_block_stride = page * value.stride(1);
  set_rows(cache.kv, key, value, 1, 2);
  return cache;
}

DType cache_dtype(const Expect& expect, std::string_view text, DType model, std::string_view name,
                  Int8Cache int8) {
  if (text == "auto") return model;
  if (text == "fp8" || text == "fp8_e4m3") return DType::kFp8E4M3;
  if (text == "fp8_e5m2") return DType::kFp8E5M2;
  if (text == "int8" && int8 == Int8Cache::kTaken) return DType::kInt8;
  const char* known = int8 == Int8Cache::kTaken
                          ? "\"auto\", \"fp8\", \"fp8_e4m3\", \"fp8_e5m2\" or \"int8\""
                          : "\"auto\", \"fp8\", \"fp8_e4m3\" or \"fp8_e5m2\"";
  expect.fail(std::string(name) + ": expected " + known + ", got \"" + std::string(text) + "\"");
}

PagedKv cache_of_dtype(Argument& key_cache, Argument& value_cache, DType dtype,
                       std::string_view kv_cache_dtype, KvLayout layout, CacheSizes& sizes) {
  value_cache.cache_dtype(dtype, kv_cache_dtype);
  key_cache.cache_dtype(dtype, kv_cache_dtype);
  return pages(key_cache, value_cache, dtype, layout, sizes);
}

KvLayout cache_layout(const Expect& expect, std::string_view text) {
  if (text == "vllm") return KvLayout::kVllm;
  if (text == "NHD") return KvLayout::kNHD;
  if (text == "HND") return KvLayout::kHND;
  expect.fail("layout: expected \"vllm\", \"NHD\" or \"HND\", got \"" + std::string(text) + "\"");
}

PagedKv key_pages(Argument& key_cache, DType dtype, KvLayout layout, CacheSizes& sizes,
                  const char* source) {
  require_layout(key_cache, layout);
  if (layout != KvLayout::kVllm) return row_pages(key_cache, key_cache, dtype, layout, sizes);
  require_whole_chunks(key_cache, dtype, sizes.head_size);
  return vllm_keys(key_cache, dtype, sizes, source);
}

PagedKv cache_pages(Argument& key_cache, Argument& value_cache, DType dtype, KvLayout layout,
                    CacheSizes& sizes) {
  require_layout(key_cache, layout);
  return pages(key_cache, value_cache, dtype, layout, sizes);
}

PagedKv int4_pages(const Argument& named, Argument& key_cache, Argument& value_cache,
                   KvLayout layout, CacheSizes& sizes) {
  const int64_t head_size = sizes.head_size;
  if (head_size < 32 || head_size > 256 || head_size % 32 != 0) {
    named.fail("expected a head_size of 32 to 256 in steps of 32 for an int4 cache, got " +
               std::to_string(head_size));
  }
  sizes.head_size = Size("head_size / 2", head_size / 2, sizes.head_size.source);
  key_cache.uint8();
  value_cache.uint8();
  return cache_pages(key_cache, value_cache, DType::kInt4x2, layout, sizes);
}

Argument token_zeros(Expect& expect, const char* name, const Tensor& zeros,
                     const Argument& scales) {
  const Argument z = expect.tensor(name, zeros).float32().same_shape(scales);
  for (int64_t d = 0; d < z.dim(); ++d) {
    if (z.size(d) <= 1 || z.stride(d) == scales.stride(d)) continue;
    z.fail("expected the strides of " + std::string(scales.name()) + ", which has " +
           std::to_string(scales.stride(d)) + " at dimension " + std::to_string(d) + ", got " +
           std::to_string(z.stride(d)));
  }
  return z;
}

PagedKv paged_cache(const Argument& query, Argument& key_cache, Argument& value_cache,
                    KvLayout layout, CacheSizes& sizes, bool is_int4) {
  if (!is_int4 || query.is_e4m3()) value_cache.same_dtype(key_cache.cache_of(query));
  const PagedKv kv = is_int4
                         ? int4_pages(query, key_cache, value_cache, layout, sizes)
                         : cache_pages(key_cache, value_cache, key_cache.dtype(), layout, sizes);
  const int64_t block_size = sizes.block_size;
  if (block_size < 1 || block_size > 256 || (block_size & (block_size - 1)) != 0) {
    key_cache.fail("expected a block_size of 1, 2, 4, 8, 16, 32, 64, 128 or 256, got " +
                   std::to_string(block_size) + " in shape " + key_cache.shape_text());
  }
  return kv;
}

const float* read_head_scale(const Expect& expect, const PagedKv& kv, const Argument& scale,
                             Arguments& read, int64_t elements) {
  check_scale_size(kv, scale, elements);
  check_scale(expect, scale);
  read.add(scale);
  return scale.as<const float>();
}

void set_scales(Expect& expect, PagedKv& kv, const std::optional<Tensor>& k_scale,
                const std::optional<Tensor>& v_scale, Arguments& read) {
  int64_t elements = 0;  // of the scale read first
  const auto pointer = [&](const char* name, const std::optional<Tensor>& scale) -> const float* {
    if (!scale) return nullptr;
    const Argument s = expect.tensor(name, *scale).float32().contiguous();
    if (size_of(kv.dtype) != 1) {
      s.fail(std::string("expected None: only 8-bit caches have scales, this one is ") +
             name_of(kv.dtype));
    }
    const float* checked = read_head_scale(expect, kv, s, read, elements);
    elements = s.numel();
    return checked;
  };
  kv.k_scale = pointer("k_scale", k_scale);
  kv.v_scale = pointer("v_scale", v_scale);
  kv.scale_stride = elements > 1 ? 1 : 0;
}

bool both_or_neither(const Expect& expect, const char* key_name, const std::optional<Tensor>& key,
                     const char* value_name, const std::optional<Tensor>& value) {
  if (key.has_value() == value.has_value()) return key.has_value();
  expect.fail(std::string(key ? value_name : key_name) + ": expected a tensor, as " +
              (key ? key_name : value_name) + " is one, got None");
}

TokenScales token_scales(Expect& expect, const PagedKv& kv, CacheSizes& sizes,
                         const TokenScaleTensors& tensors, Arguments& read) {
  const bool any = both_or_neither(expect, "k_token_scales", tensors.k_scales, "v_token_scales",
                                   tensors.v_scales);
  const bool zeros =
      both_or_neither(expect, "k_token_zeros", tensors.k_zeros, "v_token_zeros", tensors.v_zeros);
  if (zeros && kv.dtype != DType::kInt4x2) {
    expect.fail(std::string("k_token_zeros: expected None: only int4 caches, which are uint8, have "
                            "a zero a token, this one is ") +
                name_of(kv.dtype));
  }
  expect.that(any || !zeros,
              "k_token_scales: expected a tensor, as k_token_zeros is one, got None");
  if (!any) return {};
  const auto scales = [&](const char* name, const Tensor& tensor) {
    const Argument s = expect.tensor(name, tensor).float32();
    if (kv.dtype != DType::kInt8 && kv.dtype != DType::kInt4x2) {
      s.fail(std::string("expected None: only int8 and int4 caches have a scale a token, this one "
                         "is ") +
             name_of(kv.dtype));
    }
    return expect.tensor(name, tensor)
        .shape({&sizes.num_blocks, &sizes.num_kv_heads, &sizes.block_size})
        .inner_contiguous();
  };
  const Argument k = scales("k_token_scales", *tensors.k_scales);
  const Argument v = scales("v_token_scales", *tensors.v_scales);
  if (kv.k_scale != nullptr || kv.v_scale != nullptr) {
    expect.fail(std::string(kv.k_scale != nullptr ? "k_scale" : "v_scale") +
                ": expected None: every token has its own scale (from k_token_scales)");
  }
  read.add(k, v);
  TokenScales result{.key = k.as<const float>(),
                     .value = v.as<const float>(),
                     .key_block_stride = k.stride(0),
                     .key_head_stride = k.stride(1),
                     .value_block_stride = v.stride(0),
                     .value_head_stride = v.stride(1)};
  if (zeros) {
    const Argument kz = token_zeros(expect, "k_token_zeros", *tensors.k_zeros, k);
    const Argument vz = token_zeros(expect, "v_token_zeros", *tensors.v_zeros, v);
    result.key_zero = kz.as<const float>();
    result.value_zero = vz.as<const float>();
    read.add(kz, vz);
  }
  return result;
}

void set_scales(const Expect& expect, PagedKv& kv, Argument& k_scale, Argument& v_scale) {
  k_scale.one_element();
  v_scale.one_element();
  set_head_scales(expect, kv, k_scale, v_scale);
}

void set_head_scales(const Expect& expect, PagedKv& kv, Argument& k_scale, Argument& v_scale) {
  check_scale_size(kv, k_scale.float32().contiguous(), 0);
  check_scale_size(kv, v_scale.float32().contiguous(), k_scale.numel());
  if (size_of(kv.dtype) != 1) return;
  check_scale(expect, k_scale);
  check_scale(expect, v_scale);
  kv.k_scale = k_scale.as<const float>();
  kv.v_scale = v_scale.as<const float>();
  kv.scale_stride = k_scale.numel() > 1 ? 1 : 0;
}

}  // namespace vllm_kernels
