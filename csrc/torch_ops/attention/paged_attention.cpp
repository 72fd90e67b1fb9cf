// Binding of paged_attention: query [num_tokens, num_heads, head_size] over a paged cache -> out of
// that shape, lse [num_tokens, num_heads]. Also the definitions of attention_arguments.h, which all
// attention bindings share. ops/paged_attention.h has the formula.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <memory>

#include "ops/report.h"
#include "torch_ops/attention/attention_arguments.h"
#include "torch_ops/base/allocate.h"
#include "torch_ops/base/device.h"
#include "torch_ops/base/index_check.h"
#include "torch_ops/cache/paged_kv.h"

namespace vllm_kernels {
namespace {

// Reads the mask of a call that is causal, without a window, and has a bit for each query token.
TreeMask read_tree_mask(Expect& expect, const PagedAttentionParams& params, const Tensor& tree_mask,
                        Queries& queries, Arguments& read) {
  Argument mask = expect.tensor("tree_mask", tree_mask).shape({&queries.num_tokens}).contiguous();
  if (!mask.is_int64()) mask.int32();
  const TreeMask tree = {.words = mask.as<const uint32_t>(), .halves = mask.is_int64() ? 2 : 1};
  expect.that(params.window_right == 0 && params.sliding_window == 0,
              "tree_mask: expected causal=True and sliding_window=0");
  expect.that(params.max_query_len <= tree.bits(),
              "tree_mask: expected max_query_len <= " + std::to_string(tree.bits()) + " for " +
                  (mask.is_int64() ? "int64" : "int32") + ", got " +
                  std::to_string(params.max_query_len));
  read.add(mask);
  return tree;
}

// Reads which tokens of the sequences the cache has.
Stripe read_stripe(Expect& expect, const PagedAttentionParams& params, const Tensor& total_seq_lens,
                   int64_t shards, int64_t shard, int64_t interleave, Size& num_seqs,
                   Arguments& read) {
  const auto number = [&](const char* name, int64_t value, int64_t low, int64_t high) {
    expect.that(value >= low && value <= high,
                std::string(name) + ": expected " + std::to_string(low) + " to " +
                    std::to_string(high) + ", got " + std::to_string(value));
    return clamped_int32(value);
  };
  const int32_t others = number("shards", shards, 1, 1 << 16) - 1;
  number("interleave", interleave, 1, 1 << 14);
  const uint64_t period = interleave;
  expect.that(std::has_single_bit(period),
              "interleave: expected a power of two, got " + std::to_string(interleave));
  const Argument lens =
      expect.tensor("total_seq_lens", total_seq_lens).int32().shape({&num_seqs}).contiguous();
  expect.that(!params.tree_mask.any(), "total_seq_lens: expected no tree_mask");
  check_index(expect, lens,
              {.noun = "a length",
               .high = int64_t{std::numeric_limits<int32_t>::max()} + 1,
               .query_start_loc = params.window_right == 0 ? params.query_start_loc : nullptr});
  read.add(lens);
  return {.total_lens = lens.as<const int32_t>(),
          .others = others,
          .shard = number("shard", shard, 0, shards - 1),
          .shift = std::countr_zero(period)};
}

// Whether a sequence has one query token, its last, and places in the sequence have no part in
// scores. Then the query token attends to all that a shard stores.
bool needs_no_stripe(const PagedAttentionParams& params) {
  return params.max_query_len == 1 && params.sliding_window == 0 && params.alibi_slopes == nullptr;
}

// Whether the bytes of a uint8 cache are int4, which the caller says with zeros.
bool is_int4(const Argument& key_cache, const TokenScaleTensors& of_tokens) {
  if (key_cache.scalar_type() != aoti_torch_dtype_uint8()) return false;
  if (of_tokens.k_scales && !of_tokens.any_zeros()) {
    key_cache.fail("expected int8, or k_token_zeros and v_token_zeros for int4, got uint8 alone");
  }
  return of_tokens.any_zeros();
}

void paged_attention(const Tensor& out, const std::optional<Tensor>& lse, const Tensor& query,
                     const Tensor& key_cache, const Tensor& value_cache, const Tensor& block_tables,
                     const Tensor& seq_lens, const std::optional<Tensor>& query_start_loc,
                     double scale, const std::optional<Tensor>& alibi_slopes,
                     int64_t sliding_window, double softcap, const std::optional<Tensor>& sinks,
                     const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale,
                     const Text& layout, int64_t max_query_len,
                     const std::optional<Tensor>& workspace, int64_t fixed_split_size,
                     bool kv_ready, int64_t window_right, const std::optional<Tensor>& kv_indptr,
                     int64_t max_pages, const std::optional<Tensor>& k_token_scales,
                     const std::optional<Tensor>& v_token_scales,
                     const std::optional<Tensor>& tree_mask, bool zero_unowned,
                     const std::optional<Tensor>& k_token_zeros,
                     const std::optional<Tensor>& v_token_zeros,
                     const std::optional<Tensor>& total_seq_lens, int64_t shards, int64_t shard,
                     int64_t interleave, const std::optional<Tensor>& q_scale) {
  Expect expect("paged_attention");
  CacheSizes sizes;
  Arguments read, written;
  Queries queries =
      read_queries(expect, out, lse, query, sizes.head_size, written, EightBitQuery::kTaken);
  const KvLayout kv_layout = cache_layout(expect, layout);
  Argument k = expect.tensor("key_cache", key_cache);
  Argument v = expect.tensor("value_cache", value_cache);
  const TokenScaleTensors of_tokens{k_token_scales, v_token_scales, k_token_zeros, v_token_zeros};
  PagedKv kv = paged_cache(queries.query, k, v, kv_layout, sizes, is_int4(k, of_tokens));
  // NHD and HND have as many dimensions: a wrong one shows here, if at all.
  check_sizes(queries, kv,
              kv_layout == KvLayout::kNHD   ? "dimension 2 of key_cache in layout \"NHD\""
              : kv_layout == KvLayout::kHND ? "dimension 1 of key_cache in layout \"HND\""
                                            : "key_cache");
  set_scales(expect, kv, k_scale, v_scale, read);
  PagedAttentionParams params =
      read_scores(expect, queries.num_heads, scale, softcap, alibi_slopes, sinks, read);
  params.kv = kv;
  read_query_scale(expect, kv, queries, q_scale, read);
  params.token_scales = token_scales(expect, kv, sizes, of_tokens, read);
  params.kv_ready = kv_ready && !kv_indptr;  // page_list.cu writes the tables just before
  read_window_and_split(expect, params, sliding_window, fixed_split_size);
  params.window_right = right_window(expect, window_right);
  void* scratch = read_workspace(expect, workspace, written);
  read_query_start_loc(expect, params, queries, or_null(query_start_loc), max_query_len, read);
  if (tree_mask) params.tree_mask = read_tree_mask(expect, params, *tree_mask, queries, read);
  if (total_seq_lens) {
    expect.that(!kv_indptr, "total_seq_lens: expected no kv_indptr");
    params.stripe = read_stripe(expect, params, *total_seq_lens, shards, shard, interleave,
                                queries.num_seqs, read);
  } else {
    const auto plain = [&](const char* name, int64_t value, int64_t expected) {
      expect.that(value == expected, std::string(name) + ": expected " + std::to_string(expected) +
                                         " without total_seq_lens, got " + std::to_string(value));
    };
    plain("shards", shards, 1);
    plain("shard", shard, 0);
    plain("interleave", interleave, 1);
  }
  PageListParams list{};
  if (kv_indptr) {
    list = read_page_list(expect, params, block_tables, seq_lens, *kv_indptr, max_pages,
                          queries.num_seqs, read);
  } else {
    read_pages(expect, params, block_tables, seq_lens, queries.num_seqs, read);
    if (total_seq_lens) {
      check_total_lens(expect, expect.tensor("total_seq_lens", *total_seq_lens), params.stripe,
                       params.seq_lens);
      if (needs_no_stripe(params)) params.stripe = {};
    }
  }
  read.add(queries.query, k, v);
  expect.apart(written, read);
  read_zero_unowned(params, queries, zero_unowned);
  if (is_done(params, queries, out, or_null(lse))) return;
  set_queries(params, queries);
  const BlockTables made = kv_indptr ? make_tables(expect, params, list, query) : BlockTables();
  launch_paged_attention(params, query, scratch, queries.e4m3);
}

// One query token a sequence, and a new tensor for the result: the call of an eager engine, with
// the arguments that it needs. (From Python every argument costs 0.1 us.)
torch::stable::Tensor paged_attention_result(const Tensor& query, const Tensor& key_cache,
                                             const Tensor& value_cache, const Tensor& block_tables,
                                             const Tensor& seq_lens, std::optional<double> scale,
                                             const Text& layout, int64_t sliding_window,
                                             double softcap) {
  const Argument x = Expect("paged_attention").tensor("query", query).floating().rank(3, 3);
  Tensor out = empty(x.sizes(), x.scalar_type(), query);
  const double factor = scale.value_or(1.0 / std::sqrt(x.size(2)));
  paged_attention(out, {}, query, key_cache, value_cache, block_tables, seq_lens, {}, factor, {},
                  sliding_window, softcap, {}, {}, {}, layout, 1, {}, 0, false, 0, {}, -1, {}, {},
                  {}, false, {}, {}, {}, 1, 0, 1, {});
  return torch::stable::Tensor(out.release());
}

}  // namespace

// --- what the ops share (torch_ops/attention/attention_arguments.h)

#if defined(VLLM_KERNELS_DEVICE_CUDA)
void launch_paged_attention(const PagedAttentionParams& params, const Tensor& query,
                            void* workspace, const E4M3Query& e4m3) {
  run_on_stream(query, [&](cuda::Stream stream) {
    const int64_t bytes = cuda::attention_scratch_bytes(params, e4m3);
    // torch's allocator gives the memory to later work of this stream only.
    std::optional<Tensor> scratch;
    if (bytes > 0) scratch = empty({&bytes, 1}, aoti_torch_dtype_uint8(), query);
    cuda::launch_paged_attention(params, e4m3, workspace, scratch ? scratch->data() : nullptr,
                                 stream);
  });
}

void launch_decode(const PagedAttentionParams& params, const Tensor& query) {
  launch_paged_attention(params, query, nullptr);
}
#else
bool report_cpu_kernel(const char* op, const char* kernel) {
  return report(op, [&] {
    return std::string("CPU, ") + kernel + " kernel, level " + cpu::level_name(cpu::level());
  });
}

// In two launches where several threads share a tile: partials, then their combination.
template <typename Combine, typename Plan>
void launch_plan(Plan plan, const Tensor& query) {
  if (plan.tasks == 1) return launch(plan, query);
  const std::unique_ptr<float[]> partials(new float[2 * plan.tasks * plan.partial_size()]);
  plan.partials = partials.get();
  launch(plan, query);
  launch(Combine{plan}, query);
}

void run_decode(const PagedAttentionParams& params, const Tensor& query) {
  launch_plan<cpu::DecodeCombine>(cpu::plan_decode(params, torch::stable::get_num_threads()),
                                  query);
}

void launch_decode(const PagedAttentionParams& params, const Tensor& query) {
  if (params.query == nullptr) return;  // a meta tensor
  if (!report_cpu_kernel("paged_attention", "decode")) run_decode(params, query);
}

// Gives `params` its e4m3 query in 16 bits, which it returns.
std::unique_ptr<uint16_t[]> upcast_query(PagedAttentionParams& params, const Tensor& query,
                                         const E4M3Query& e4m3) {
  const int64_t size = int64_t{params.num_tokens} * params.num_heads * params.head_size();
  auto upcast = std::make_unique_for_overwrite<uint16_t[]>(size);
  launch(UpcastQueryParams{.out = upcast.get(),
                           .query = params.query,
                           .query_stride = params.query_stride,
                           .scales = e4m3,
                           .num_tokens = params.num_tokens,
                           .num_heads = params.num_heads,
                           .num_kv_heads = params.kv.num_kv_heads,
                           .head_size = params.head_size(),
                           .dtype = params.dtype},
         query);
  params = with_upcast_query(params, upcast.get());
  return upcast;
}

void launch_paged_attention(const PagedAttentionParams& given, const Tensor& query, void*,
                            const E4M3Query& e4m3) {
  if (given.query == nullptr) return;  // a meta tensor
  PagedAttentionParams params = cpu::tighten_bounds(given);
  const bool decodes = cpu::fits_decode_kernel(params);
  if (report_cpu_kernel("paged_attention",
                        decodes ? "decode" : "general (several query tokens, windows, any mask)"))
    return;
  cpu::clear_unowned_rows(params);
  std::unique_ptr<uint16_t[]> upcast;
  if (e4m3.on) upcast = upcast_query(params, query, e4m3);
  if (decodes) return run_decode(params, query);
  launch_plan<cpu::PagedAttentionCombine>(
      cpu::plan_paged_attention(params, torch::stable::get_num_threads()), query);
}
#endif

Queries read_queries(Expect& expect, const Tensor& out, const std::optional<Tensor>& lse,
                     const Tensor& query, Size& head_size, Arguments& written, EightBitQuery e4m3) {
  Queries queries;
  Size &num_tokens = queries.num_tokens, &num_heads = queries.num_heads;
  Argument& q = queries.query = expect.tensor("query", query);
  q.floating(e4m3 == EightBitQuery::kTaken);
  require_contiguous_heads(q.shape({&num_tokens, &num_heads, &head_size}), num_tokens);
  Argument& o = queries.out = expect.tensor("out", out);
  queries.e4m3.on = q.is_e4m3();
  queries.e4m3.on ? o.one_of({DType::kFloat16, DType::kBFloat16}) : o.same_dtype(q);
  require_contiguous_heads(o.same_shape(q), num_tokens);
  written.add(queries.out.written());
  if (lse) {
    queries.lse = expect.tensor("lse", *lse).float32().shape({&num_tokens, &num_heads});
    written.add(queries.lse->contiguous().written());
  }
  return queries;
}

void read_query_scale(Expect& expect, const PagedKv& kv, Queries& queries,
                      const std::optional<Tensor>& q_scale, Arguments& read) {
  if (!q_scale) return;
  const Argument scale = expect.tensor("q_scale", *q_scale).float32().contiguous();
  if (!queries.query.is_e4m3()) {
    scale.fail(std::string("expected None: only float8_e4m3fn queries have a scale, this one is ") +
               name_of(queries.query.dtype()));
  }
  queries.e4m3.scale = read_head_scale(expect, kv, scale, read);
  queries.e4m3.scale_stride = scale.numel() > 1 ? 1 : 0;
}

void read_query_start_loc(Expect& expect, PagedAttentionParams& params, Queries& queries,
                          const Tensor* query_start_loc, int64_t max_query_len, Arguments& read) {
  const int32_t longest =
      number_of_tokens(expect, max_query_len, 0, "max_query_len: expected a length >= 0");
  if (query_start_loc == nullptr) {
    queries.num_seqs =
        Size("num_seqs = num_tokens", queries.num_tokens, "query, without query_start_loc");
    return;
  }
  const Argument starts =
      expect.tensor("query_start_loc", *query_start_loc).int32().rank(1, 1).contiguous();
  if (starts.size(0) < 1) starts.fail("expected num_seqs + 1 elements, got shape [0]");
  queries.num_seqs = Size("num_seqs", starts.size(0) - 1, "query_start_loc");
  check_index(expect, starts,
              {.noun = "a token of query, at most max_query_len past the one before,",
               .high = queries.num_tokens + 1,
               .max_increase = longest});
  params.query_start_loc = starts.as<const int32_t>();
  params.max_query_len = longest;
  read.add(starts);
}

void set_queries(PagedAttentionParams& params, const Queries& queries) {
  params.out = queries.out.mutable_data();
  params.query = queries.query.data();
  params.query_stride = queries.query.stride(0);
  params.num_seqs = int32_size(queries.query, "num_seqs", queries.num_seqs);
  params.num_heads = int32_size(queries.query, "num_heads", queries.num_heads);
  params.dtype = queries.out.dtype();
  params.num_tokens = int32_size(queries.query, "num_tokens", queries.num_tokens);
  params.out_stride = queries.out.stride(0);
  params.lse = queries.lse ? queries.lse->as<float>() : nullptr;
  // Nothing comes after a sequence's last token.
  if (params.max_query_len <= 1) params.window_right = 0;
}

void read_zero_unowned(PagedAttentionParams& params, Queries& queries, bool zero_unowned) {
  params.zero_unowned = zero_unowned;
  if (!zero_unowned) return;
  queries.out.contiguous();
  if (reinterpret_cast<uintptr_t>(queries.out.data()) % 16 != 0) {
    queries.out.fail("expected memory aligned to 16 bytes for zero_unowned");
  }
}

bool is_done(const PagedAttentionParams& params, const Queries& queries, const Tensor& out,
             const Tensor* lse) {
  if (queries.num_tokens == 0) return true;
  if (queries.num_seqs > 0) return false;
  if (queries.out.is_meta()) return true;
  if (params.zero_unowned) STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_zero_(out.get()));
  if (lse != nullptr) {
    constexpr double kNothing = -std::numeric_limits<double>::infinity();
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_aten_fill__Scalar(lse->get(), kNothing));
  }
  return true;
}

void check_sizes(const Queries& queries, const PagedKv& kv, const char* source) {
  const int64_t heads = queries.num_heads;
  if (kv.num_kv_heads <= 0 || heads <= 0 || heads % kv.num_kv_heads != 0) {
    queries.query.fail(
        "expected num_heads to be a multiple of num_kv_heads = " + std::to_string(kv.num_kv_heads) +
        " (from " + source + "), got shape " + queries.query.shape_text());
  }
  check_head_size(queries.query, kv.head_values(), kv.dtype);
}

void require_contiguous_heads(const Argument& heads, const Size& num_tokens) {
  if (heads.stride(2) != 1 || (heads.size(1) > 1 && heads.stride(1) != heads.size(2))) {
    heads.fail(std::string("expected contiguous heads (only the stride of ") + num_tokens.name +
               " is free), got shape " + heads.shape_text() + " with stride " +
               std::to_string(heads.stride(1)) + " between heads; call .contiguous()");
  }
}

void check_head_size(const Argument& named, int64_t head_size, DType dtype) {
  const int64_t step = size_of(dtype) == 1 ? 16 : 8;
  if (head_size < 32 || head_size > 256 || head_size % step != 0) {
    named.fail("expected a head_size of 32 to 256 in steps of " + std::to_string(step) + " for a " +
               name_of(dtype) + " cache, got " + std::to_string(head_size));
  }
}

PagedAttentionParams read_scores(Expect& expect, Size& num_heads, double scale, double softcap,
                                 const std::optional<Tensor>& alibi_slopes,
                                 const std::optional<Tensor>& sinks, Arguments& read) {
  if (!(softcap >= 0.0) || std::isinf(softcap)) {
    expect.fail("softcap: expected a finite number >= 0 (0: none), got " + std::to_string(softcap));
  }
  PagedAttentionParams params{};
  params.scale = expect.finite("scale", scale);
  params.softcap = expect.finite("softcap", softcap);
  params.alibi_slopes = read_per_head(expect, "alibi_slopes", alibi_slopes, num_heads, read);
  params.sinks = read_per_head(expect, "sinks", sinks, num_heads, read);
  return params;
}

int32_t number_of_tokens(const Expect& expect, int64_t value, int64_t low, const char* expected) {
  if (value < low) expect.fail(std::string(expected) + ", got " + std::to_string(value));
  return clamped_int32(value);
}

void read_window_and_split(const Expect& expect, PagedAttentionParams& params,
                           int64_t sliding_window, int64_t fixed_split_size) {
  params.sliding_window = window_of(number_of_tokens(
      expect, sliding_window, 0, "sliding_window: expected a number of tokens >= 0 (0: none)"));
  params.fixed_split_size = split_size(expect, fixed_split_size);
}

int32_t split_size(const Expect& expect, int64_t fixed_split_size) {
  return number_of_tokens(
      expect, fixed_split_size, 0,
      "fixed_split_size: expected a number of tokens >= 0 (0: as suits the batch)");
}

int32_t right_window(const Expect& expect, int64_t window_right) {
  const int32_t tokens = number_of_tokens(
      expect, window_right, -1, "window_right: expected a number of tokens >= 0 (-1: all)");
  return tokens < 0 ? std::numeric_limits<int32_t>::max() : tokens;
}

int32_t window_of(int64_t sliding_window) {
  // Positions may be negative (more query tokens than tokens): position - window stays in range.
  constexpr int64_t kLongest = int64_t{1} << 30;
  return clamped_int32(std::min(sliding_window, kLongest));
}

const float* read_per_head(Expect& expect, const char* name, const std::optional<Tensor>& values,
                           Size& num_heads, Arguments& read) {
  if (!values) return nullptr;
  const Argument argument = expect.tensor(name, *values).float32().shape({&num_heads}).contiguous();
  read.add(argument);
  return argument.as<const float>();
}

void* read_workspace(Expect& expect, const std::optional<Tensor>& workspace, Arguments& written) {
  if (!workspace) return nullptr;
  const Argument scratch = expect.tensor("workspace", *workspace).uint8().contiguous();
  constexpr int64_t bytes = kPagedAttentionWorkspaceBytes;
  if (!kOnCpu &&
      (scratch.numel() < bytes || reinterpret_cast<uintptr_t>(scratch.data()) % 256 != 0)) {
    scratch.fail("expected at least " + std::to_string(bytes) +
                 " bytes, aligned to 256 (vllm_kernels.paged_attention_workspace gives them), got "
                 "shape " +
                 scratch.shape_text());
  }
  written.add(scratch);
  return scratch.mutable_data();
}

void read_pages(Expect& expect, PagedAttentionParams& params, const Tensor& block_tables,
                const Tensor& seq_lens, Size& num_seqs, Arguments& read, int64_t max_seq_len) {
  Size max_blocks("max_blocks_per_seq");
  const Argument tables = expect.tensor("block_tables", block_tables)
                              .int32()
                              .shape({&num_seqs, &max_blocks})
                              .inner_contiguous();
  Size ends("num_seqs + 1", num_seqs + 1, num_seqs.source);
  const Argument lens = expect.tensor("seq_lens", seq_lens)
                            .int32()
                            .shape({params.has_cumulative_lens ? &ends : &num_seqs})
                            .contiguous();
  params.max_blocks_per_seq = int32_size(tables, "max_blocks_per_seq", max_blocks);
  const int64_t table_tokens = max_blocks * params.kv.block_size;
  params.block_tables = tables.as<const int32_t>();
  params.block_table_stride = tables.stride(0);
  params.seq_lens = lens.as<const int32_t>();
  params.max_seq_len = std::min(max_seq_len, table_tokens);
  // Not causal, all query tokens see the same tokens, however many there are.
  // A shard may have fewer tokens than the sequence has query tokens.
  const bool counts_queries = params.window_right == 0 && !params.stripe.any();
  const int32_t* starts = counts_queries ? params.query_start_loc : nullptr;
  check_index(expect, lens,
              {.noun = "a length that fits block_tables",
               .high = table_tokens + 1,
               .query_start_loc = starts});
  if (max_seq_len < table_tokens) {
    check_index(expect, lens, {.noun = "a length up to max_seq_len", .high = max_seq_len + 1});
  }
  check_index(expect, tables, {.noun = "a block", .high = params.kv.num_blocks},
              {.tokens_per_column = params.kv.block_size,
               .row_lengths = params.seq_lens,
               .query_start_loc = params.query_start_loc,
               .sliding_window = params.sliding_window,
               .stripe = params.stripe});
  read.add(tables, lens);
}

}  // namespace vllm_kernels

VLLM_KERNELS_IMPL(library) {
  library.impl("paged_attention", TORCH_BOX(&vllm_kernels::paged_attention));
  library.impl("paged_attention.result", TORCH_BOX(&vllm_kernels::paged_attention_result));
}
