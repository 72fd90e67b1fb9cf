// Bindings of cp_gather_cache (also named gather_cache), gather_and_maybe_dequant_cache and
// gather_paged_kv.
// paged_kv.h checks the caches. ops/gather_cache.h has the rules.
#include "ops/gather_cache.h"

#include <algorithm>

#include "torch_ops/base/check.h"
#include "torch_ops/base/device.h"
#include "torch_ops/base/index_check.h"
#include "torch_ops/cache/paged_kv.h"

namespace vllm_kernels {
namespace {

// block_table int32 [>= num_seqs, blocks_per_seq]; cu_seq_lens int32 [num_seqs + 1]; seq_starts
// int32 [num_seqs] or none. num_seqs comes from cu_seq_lens; a `batch_size` that is given must
// agree.
class GatherTables {
 public:
  GatherTables(Expect& expect, const char* table_name, const Tensor& block_table,
               const Tensor& cu_seq_lens, const std::optional<Tensor>& seq_starts,
               std::optional<int64_t> batch_size = std::nullopt)
      : expect_(expect),
        table_(expect.tensor(table_name, block_table).int32().rank(2, 2).inner_contiguous()),
        ends_(expect.tensor("cu_seq_lens", cu_seq_lens).int32().rank(1, 1).contiguous()),
        num_seqs_(ends_.size(0) - 1) {
    if (batch_size && *batch_size != num_seqs_) {
      ends_.fail(
          "expected batch_size + 1 = " + std::to_string(std::min(*batch_size, INT64_MAX - 1) + 1) +
          " elements, got shape " + ends_.shape_text());
    }
    if (num_seqs_ < 0) ends_.fail("expected num_seqs + 1 elements, got shape [0]");
    if (table_.size(0) < num_seqs_) {
      table_.fail("expected at least num_seqs = " + std::to_string(num_seqs_) +
                  " (from cu_seq_lens) rows, got shape " + table_.shape_text());
    }
    if (seq_starts) {
      Size seqs("num_seqs", num_seqs_, "cu_seq_lens");
      starts_ = expect.tensor("seq_starts", *seq_starts).int32().shape({&seqs}).contiguous();
    }
  }

  Arguments read() const {
    Arguments all(table_, ends_);
    if (starts_) all.add(*starts_);
    return all;
  }
  bool any() const { return num_seqs_ > 0; }

  // Packs the tables and checks their values (check_index). A sequence longer than its block table
  // is an error on the CPU. On CUDA its rows past the table are filled with zeros.
  PagedTokens pack(int64_t num_blocks, int32_t block_size, int64_t num_rows) const {
    constexpr int64_t kMaxRows = INT32_MAX - 64;
    if (num_rows > kMaxRows) {
      expect_.fail("expected fewer than 2^31 - 64 rows, got " + std::to_string(num_rows));
    }
    const int32_t columns = int32_size(table_, "blocks_per_seq", table_.size(1));
    const int64_t capacity = int64_t{columns} * block_size;  // tokens of a sequence
    const PagedTokens tokens{.block_table = table_.as<const int32_t>(),
                             .block_table_stride = table_.stride(0),
                             .blocks_per_seq = columns,
                             .cu_seq_lens = ends_.as<const int32_t>(),
                             .seq_starts = starts_ ? starts_->as<const int32_t>() : nullptr,
                             .num_seqs = int32_size(ends_, "num_seqs", num_seqs_),
                             .num_rows = clamped_int32(num_rows),
                             .num_blocks = num_blocks,
                             .block_size = block_size};
    check_index(expect_, ends_,
                {.noun = "a row", .low = 0, .high = num_rows + 1, .max_increase = capacity});
    if (starts_)
      check_index(expect_, *starts_, {.noun = "a token", .low = 0, .high = capacity + 1});
    if (kOnCpu && starts_ && !starts_->is_meta()) {
      for (int64_t seq = 0; seq < num_seqs_; ++seq) {
        const int64_t length = tokens.cu_seq_lens[seq + 1] - tokens.cu_seq_lens[seq];
        if (length == 0 || tokens.seq_starts[seq] + length <= capacity) continue;
        expect_.fail("seq_starts[" + std::to_string(seq) +
                     "] = " + std::to_string(tokens.seq_starts[seq]) + ": expected at most " +
                     std::to_string(capacity - length) + ", for the sequence has " +
                     std::to_string(length) + " tokens and its blocks " + std::to_string(capacity));
      }
    }
    check_index(expect_, table_, {.noun = "a block", .low = 0, .high = num_blocks},
                {.rows = num_seqs_,
                 .tokens_per_column = tokens.block_size,
                 .cumulative_lengths = tokens.cu_seq_lens,
                 .row_starts = tokens.seq_starts});
    return tokens;
  }

 private:
  const Expect& expect_;
  Argument table_;
  Argument ends_;
  std::optional<Argument> starts_;
  int64_t num_seqs_;
};

// The elements of an entry: the dimensions from outer_dims on, which must be contiguous.
int64_t entry_elements(const Argument& argument, int64_t outer_dims) {
  int64_t elements = 1;
  for (int64_t d = argument.dim() - 1; d >= outer_dims; --d) {
    if (argument.size(d) > 1 && argument.stride(d) != elements) {
      argument.fail("expected contiguous entries, got stride " +
                    std::to_string(argument.stride(d)) + " at dimension " + std::to_string(d) +
                    " of shape " + argument.shape_text());
    }
    elements *= argument.size(d);
  }
  return elements;
}

// Packs src_cache [num_blocks, block_size, entry...] as the K of one head in layout NHD, and dst
// [num_rows, entry...]. One element of the tensors counts as `unit` elements of PagedKv.
GatherCacheParams entries(const Expect& expect, const Argument& src, const Argument& dst,
                          DType stored, DType rows, int64_t unit) {
  const int64_t elements = entry_elements(src, 2);
  if (entry_elements(dst, 1) != elements) {
    dst.fail("expected entries of " + std::to_string(elements) +
             " elements (from src_cache), got shape " + dst.shape_text());
  }
  const int32_t block_size = int32_size(src, "block_size", src.size(1));
  count_slots(src, src.size(0), block_size);
  constexpr int64_t kMaxEntryBytes = int64_t{64} << 20;
  if (elements * unit >= kMaxEntryBytes) {
    src.fail("expected entries of less than 64 MiB, got shape " + src.shape_text());
  }
  GatherCacheParams params{.op = expect.op(), .dtype = rows};
  PagedKv& kv = params.kv;
  kv.key = src.mutable_data();
  kv.num_blocks = src.size(0);
  kv.num_kv_heads = 1;
  kv.head_size = int32_size(src, "an entry's elements", elements * unit);
  kv.block_size = block_size;
  kv.dtype = stored;
  kv.layout = KvLayout::kNHD;
  kv.x = 16 / size_of(stored);
  kv.key_block_stride = src.stride(0) * unit;
  kv.key_token_stride = src.stride(1) * unit;
  kv.key_chunk_stride = kv.x;
  params.key = dst.mutable_data();
  params.key_row_stride = dst.stride(0) * unit;
  return params;
}

void gather_entries(const char* op, const Tensor& src_cache, const Tensor& dst,
                    const Tensor& block_table, const Tensor& cu_seq_lens, int64_t batch_size,
                    const std::optional<Tensor>& seq_starts) {
  Expect expect(op);
  const Argument src = expect.tensor("src_cache", src_cache).rank(3, 8);
  const Argument out = expect.tensor("dst", dst).rank(2, 7).same_dtype(src).written();
  GatherCacheParams params =
      entries(expect, src, out, DType::kInt8, DType::kInt8, src.element_size());
  GatherTables tables(expect, "block_table", block_table, cu_seq_lens, seq_starts, batch_size);
  Arguments read = tables.read();
  read.add(src);
  expect.apart(out, read);
  if (out.numel() == 0 || !tables.any()) return;
  params.tokens = tables.pack(src.size(0), params.kv.block_size, out.size(0));
  launch(params, src_cache);
}

void cp_gather_cache(const Tensor& src_cache, const Tensor& dst, const Tensor& block_table,
                     const Tensor& cu_seq_lens, int64_t batch_size,
                     const std::optional<Tensor>& seq_starts) {
  gather_entries("cp_gather_cache", src_cache, dst, block_table, cu_seq_lens, batch_size,
                 seq_starts);
}

void gather_cache(const Tensor& src_cache, const Tensor& dst, const Tensor& block_table,
                  const Tensor& cu_seq_lens, int64_t batch_size,
                  const std::optional<Tensor>& seq_starts) {
  gather_entries("gather_cache", src_cache, dst, block_table, cu_seq_lens, batch_size, seq_starts);
}

void gather_and_maybe_dequant_cache(const Tensor& src_cache, const Tensor& dst,
                                    const Tensor& block_table, const Tensor& cu_seq_lens,
                                    const Tensor& token_to_seq, int64_t num_tokens,
                                    const Text& kv_cache_dtype, const Tensor& scale,
                                    const std::optional<Tensor>& seq_starts) {
  Expect expect("gather_and_maybe_dequant_cache");
  Argument src = expect.tensor("src_cache", src_cache).rank(3, 8);
  const Argument out = expect.tensor("dst", dst).rank(2, 7).floating().written();
  const DType stored =
      cache_dtype(expect, kv_cache_dtype, out.dtype(), "kv_cache_dtype", Int8Cache::kTaken);
  src.cache_dtype(stored, kv_cache_dtype);
  GatherCacheParams params = entries(expect, src, out, stored, out.dtype(), 1);
  const Argument s = expect.tensor("scale", scale).float32().one_element();
  if (size_of(stored) == 1) check_scale(expect, s);
  params.kv.k_scale = s.as<const float>();
  const Argument seqs = expect.tensor("token_to_seq", token_to_seq).int32().rank(1, 1).contiguous();
  expect.that(num_tokens >= 0 && num_tokens <= out.size(0) && num_tokens <= seqs.size(0),
              "num_tokens: expected one in [0, " +
                  std::to_string(std::min(out.size(0), seqs.size(0))) +
                  "] (rows of dst, elements of token_to_seq), got " + std::to_string(num_tokens));
  GatherTables tables(expect, "block_table", block_table, cu_seq_lens, seq_starts);
  Arguments read = tables.read();
  read.add(src, seqs, s);
  expect.apart(out, read);
  if (out.numel() == 0 || num_tokens == 0 || !tables.any()) return;
  params.tokens = tables.pack(src.size(0), params.kv.block_size, out.size(0));
  params.tokens.num_rows = clamped_int32(num_tokens);
  params.tokens.token_to_seq = seqs.as<const int32_t>();
  check_index(expect, seqs, {.noun = "a sequence", .low = 0, .high = params.tokens.num_seqs},
              {.rows = num_tokens});
  launch(params, src_cache);
}

// k_scale and v_scale: one element, [num_kv_heads], or [num_blocks, num_kv_heads, block_size]. None
// stands for 1. A token's own scale may be 0 or NaN (reshape_and_cache_per_token_quant).
void set_gather_scales(Expect& expect, GatherCacheParams& params, CacheSizes& sizes,
                       const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale,
                       Arguments& read) {
  PagedKv& kv = params.kv;
  const bool wanted = kv.dtype != params.dtype;
  int64_t elements = 0;
  const auto pointer = [&](const char* name, const std::optional<Tensor>& scale) -> const float* {
    if (!scale) return nullptr;
    Argument s = expect.tensor(name, *scale).float32().contiguous();
    if (!wanted) {
      s.fail(std::string("expected None: only 8-bit caches have scales, this one is ") +
             name_of(kv.dtype));
    }
    if (s.dim() == 3) {
      s.shape({&sizes.num_blocks, &sizes.num_kv_heads, &sizes.block_size});
    } else if (s.numel() != 1 && !(s.dim() == 1 && s.size(0) == kv.num_kv_heads)) {
      s.fail("expected one element, num_kv_heads = " + std::to_string(kv.num_kv_heads) +
             " or [num_blocks, num_kv_heads, block_size], got shape " + s.shape_text());
    }
    if (elements != 0 && s.numel() != elements) {
      s.fail("expected " + std::to_string(elements) + " elements (from k_scale), got shape " +
             s.shape_text());
    }
    elements = s.numel();
    read.add(s);
    if (s.dim() != 3) check_scale(expect, s);
    if (s.dim() == 3) {
      params.scale_block_stride = int64_t{kv.num_kv_heads} * kv.block_size;
      params.scale_head_stride = kv.block_size;
      params.scale_token_stride = 1;
    } else if (elements > 1) {
      params.scale_head_stride = 1;
    }
    return s.as<const float>();
  };
  kv.k_scale = pointer("k_scale", k_scale);
  kv.v_scale = pointer("v_scale", v_scale);
}

// k_zero and v_zero of an int4 cache, whose scales are [num_blocks, num_kv_heads, block_size].
void set_gather_zeros(Expect& expect, GatherCacheParams& params,
                      const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale,
                      const std::optional<Tensor>& k_zero, const std::optional<Tensor>& v_zero,
                      Arguments& read) {
  if (params.kv.dtype != DType::kInt4x2) return;
  expect.that(k_scale && v_scale && k_zero && v_zero,
              "k_zero: expected all of k_scale, v_scale, k_zero and v_zero for an int4 cache, "
              "got None for some");
  const Argument ks = expect.tensor("k_scale", *k_scale).rank(3, 3);
  const Argument vs = expect.tensor("v_scale", *v_scale).rank(3, 3);
  const Argument kz = token_zeros(expect, "k_zero", *k_zero, ks);
  const Argument vz = token_zeros(expect, "v_zero", *v_zero, vs);
  params.k_zero = kz.as<const float>();
  params.v_zero = vz.as<const float>();
  read.add(kz, vz);
}

void gather_paged_kv(const Tensor& key, const Tensor& value, const Tensor& key_cache,
                     const Tensor& value_cache, const Tensor& block_tables,
                     const Tensor& cu_seq_lens, const std::optional<Tensor>& seq_starts,
                     const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale,
                     const Text& layout, const std::optional<Tensor>& k_zero,
                     const std::optional<Tensor>& v_zero) {
  Expect expect("gather_paged_kv");
  CacheSizes sizes;
  Size num_rows("num_rows");
  Argument k = expect.tensor("key", key).floating().written();
  Argument v = expect.tensor("value", value).same_dtype(k).written();
  for (Argument* rows : {&k, &v}) {
    rows->shape({&num_rows, &sizes.num_kv_heads, &sizes.head_size}).inner_contiguous();
  }
  const KvLayout kv_layout = cache_layout(expect, layout);
  Argument kc = expect.tensor("key_cache", key_cache);
  Argument vc = expect.tensor("value_cache", value_cache);
  const bool is_int4 = k_zero || v_zero;
  if (!is_int4) vc.same_dtype(kc.cache_of(k));
  GatherCacheParams params{.op = expect.op(),
                           .kv = is_int4 ? int4_pages(k, kc, vc, kv_layout, sizes)
                                         : cache_pages(kc, vc, kc.dtype(), kv_layout, sizes),
                           .key = k.mutable_data(),
                           .value = v.mutable_data(),
                           .key_row_stride = k.stride(0),
                           .key_head_stride = k.stride(1),
                           .value_row_stride = v.stride(0),
                           .value_head_stride = v.stride(1),
                           .dtype = k.dtype()};
  count_slots(kc, params.kv.num_blocks, params.kv.block_size);
  GatherTables tables(expect, "block_tables", block_tables, cu_seq_lens, seq_starts);
  Arguments read = tables.read();
  read.add(kc, vc);
  set_gather_scales(expect, params, sizes, k_scale, v_scale, read);
  set_gather_zeros(expect, params, k_scale, v_scale, k_zero, v_zero, read);
  expect.apart({v, k}, read);
  if (k.numel() == 0 || !tables.any()) return;
  params.tokens = tables.pack(params.kv.num_blocks, params.kv.block_size, num_rows);
  launch(params, key);
}

}  // namespace
}  // namespace vllm_kernels

VLLM_KERNELS_IMPL(library) {
  library.impl("cp_gather_cache", TORCH_BOX(&vllm_kernels::cp_gather_cache));
  library.impl("gather_cache", TORCH_BOX(&vllm_kernels::gather_cache));
  library.impl("gather_and_maybe_dequant_cache",
               TORCH_BOX(&vllm_kernels::gather_and_maybe_dequant_cache));
  library.impl("gather_paged_kv", TORCH_BOX(&vllm_kernels::gather_paged_kv));
}
