// Binding of sparq_attention: query [num_seqs, num_heads, head_size] over a paged cache -> out of
// that shape. ops/pages/sparq_attention.h has the rules. Two launches on CUDA: the choice, and
// paged_attention's kernel with a sequence for each KV head; with a mean also merge_attn_states'.
#include "ops/pages/sparq_attention.h"

#include <algorithm>
#include <bit>
#include <numeric>

#include "ops/merge_attn_states.h"
#include "ops/report.h"
#include "torch_ops/attention/attention_arguments.h"
#include "torch_ops/base/allocate.h"
#include "torch_ops/base/device.h"
#include "torch_ops/cache/paged_kv.h"

namespace vllm_kernels {
namespace {

// --- the view of the cache with one KV head

// Elements from an entry to the next, and how many entries apart blocks, heads and units are.
struct Entries {
  int64_t stride, block, head, unit, count;

  Entries(const PagedKv& kv, int32_t units, int64_t block_stride, int64_t head_stride,
          int64_t token_stride) {
    block = kv.num_blocks > 1 ? block_stride : 0;
    head = kv.num_kv_heads > 1 ? head_stride : 0;
    unit = units > 1 ? token_stride : 0;
    stride = std::gcd(std::gcd(block, head), unit);
    if (stride == 0) stride = block_stride > 0 ? block_stride : 1;
    block /= stride;
    head /= stride;
    unit /= stride;
    count = kv.num_blocks == 0 ? 0
                               : (kv.num_blocks - 1) * block + (kv.num_kv_heads - 1) * head +
                                     (units - 1) * unit + 1;
  }
};

// `kv` as pages of one KV head and `unit` tokens; the steps go to `sparq`.
PagedKv merge_heads(SparqParams& sparq, const Argument& key, const Argument& value, PagedKv kv,
                    int32_t unit) {
  const int32_t units = kv.block_size / unit;
  const Entries k(kv, units, kv.key_block_stride, kv.key_head_stride, kv.key_token_stride);
  const Entries v(kv, units, kv.value_block_stride, kv.value_head_stride, kv.value_token_stride);
  if (k.block != v.block || k.head != v.head || k.unit != v.unit) {
    value.fail("expected blocks, KV heads and tokens as far apart as those of key_cache");
  }
  kv.num_blocks = int32_size(key, "places of pages of one KV head", k.count);
  kv.num_kv_heads = 1;
  kv.block_size = unit;
  kv.key_block_stride = kv.key_head_stride = k.stride;
  kv.value_block_stride = kv.value_head_stride = v.stride;
  sparq.unit_shift = clamped_int32(std::countr_zero(static_cast<uint64_t>(units)));
  sparq.block_step = clamped_int32(k.block);
  sparq.head_step = clamped_int32(k.head);
  sparq.unit_step = clamped_int32(k.unit);
  return kv;
}

// --- the choice

// Components of a chunk: 32 bytes of a row, a sector; 16 bytes in layout vllm and where 32 do not
// divide a row.
int32_t chunk_of(const PagedKv& kv) {
  const bool wide = kv.layout != KvLayout::kVllm && kv.head_size % (2 * kv.x) == 0;
  return wide ? 2 * kv.x : kv.x;
}

// Tokens of a unit.
int32_t unit_of(const Expect& expect, const Text& select, const PagedKv& kv) {
  if (select.value == "pages") return kv.block_size;
  expect.that(select.value == "tokens",
              "select: expected \"pages\" or \"tokens\", got \"" + select.value + "\"");
  expect.that(kv.layout != KvLayout::kVllm || kv.block_size == 1,
              "select: expected \"pages\" for layout \"vllm\", which interleaves the tokens of a "
              "page, got \"tokens\"");
  return 1;
}

// What the caller asks for, in units of `unit` tokens.
SelectPagesParams read_choice(const Expect& expect, const PagedAttentionParams& from, int32_t unit,
                              int64_t k, int64_t window, int64_t sink_tokens) {
  const int64_t most = int64_t{from.max_blocks_per_seq} * (from.kv.block_size / unit);
  const int64_t keep = number_of_tokens(expect, k, 1, "k: expected a number of tokens >= 1");
  const int64_t newest =
      number_of_tokens(expect, window, 0, "window: expected a number of tokens >= 0");
  const int64_t first =
      number_of_tokens(expect, sink_tokens, 0, "sink_tokens: expected a number of tokens >= 0");
  const int64_t sinks = (first + unit - 1) / unit;
  const int64_t recent = (std::max<int64_t>(newest, 1) + unit - 2) / unit + 1;
  const int64_t budget = std::min(keep / unit, most);
  expect.that(budget >= std::min(most, sinks + recent),
              "k: expected at least " + std::to_string((sinks + recent) * unit) +
                  " tokens, which hold sink_tokens and window in whole pages, got " +
                  std::to_string(k));
  return {.tables = nullptr,
          .tables_seq_stride = from.kv.num_kv_heads * budget,
          .tables_head_stride = budget,
          .lens = nullptr,
          .query = from.query,
          .query_seq_stride = from.query_stride,
          .query_head_stride = from.kv.head_size,
          .bounds = nullptr,
          .bounds_block_stride = 0,
          .block_tables = from.block_tables,
          .block_tables_stride = from.block_table_stride,
          .seq_lens = from.seq_lens,
          .num_seqs = from.num_seqs,
          .num_heads = from.num_heads,
          .num_kv_heads = from.kv.num_kv_heads,
          .head_size = from.kv.head_size,
          .num_row_heads = from.kv.num_kv_heads,
          .num_blocks = from.kv.num_blocks,
          .block_size = unit,
          .max_pages = clamped_int32(most),
          .budget = clamped_int32(budget),
          .sink_pages = clamped_int32(std::min(sinks, most)),
          .recent_pages = clamped_int32(std::min(recent, std::max<int64_t>(most, 1))),
          .dtype = from.dtype};
}

void read_chunks(const Expect& expect, SparqParams& sparq, int64_t r) {
  sparq.chunk = chunk_of(sparq.kv);
  const int32_t chunk = sparq.chunk, size = sparq.kv.head_size;
  expect.that(r >= chunk && r <= size && r % chunk == 0,
              "r: expected a multiple of " + std::to_string(chunk) +
                  ", the components of a chunk, up to head_size = " + std::to_string(size) +
                  ", got " + std::to_string(r));
  sparq.num_chunks = clamped_int32(r / chunk);
}

// The memory between the launches. On CUDA the allocator reuses it in the order of the stream.
Tensor make_scratch(SparqParams& sparq, bool has_mean, const Tensor& query) {
  SelectPagesParams& units = sparq.units;
  const int64_t rows = units.num_rows(), words = rows * units.score_words();
  const int64_t scores = (kOnCpu ? 2 : 1) * words, tables = rows * units.budget;
  const int64_t lse = has_mean ? sparq.group() * words : 0;
  const int64_t sums = has_mean ? sparq.group() * rows : 0;
  const int64_t all = scores + lse + 2 * sums + rows + tables;
  Tensor scratch = empty({&all, 1}, aoti_torch_dtype_int32(), query);
  auto* at = static_cast<int32_t*>(scratch.data());
  units.scores = reinterpret_cast<uint32_t*>(at);
  if (has_mean) {
    sparq.unit_lse = reinterpret_cast<float*>(at + scores);
    sparq.kept_lse = sparq.unit_lse + lse;
    sparq.rest_lse = sparq.kept_lse + sums;
  }
  sparq.lens = at + scores + lse + 2 * sums;
  units.tables = sparq.lens + rows;
  return scratch;
}

// --- attention

// A sequence for each row of the choice.
void attend_to(PagedAttentionParams& params, const SparqParams& sparq, const PagedKv& merged) {
  const SelectPagesParams& units = sparq.units;
  const int64_t row = int64_t{sparq.group()} * merged.head_size;
  params.kv = merged;
  params.num_seqs = params.num_tokens = clamped_int32(units.num_rows());
  params.num_heads = sparq.group();
  params.query_stride = params.out_stride = row;
  params.block_tables = units.tables;
  params.block_table_stride = units.budget;
  params.max_blocks_per_seq = units.budget;
  params.seq_lens = sparq.lens;
  params.max_seq_len = int64_t{units.budget} * units.block_size;
}

// out = alpha out + (1 - alpha) mean, by the log-sum-exp of both parts.
MergeAttnStatesParams blend_with(const PagedAttentionParams& params, const SparqParams& sparq,
                                 const Argument& mean) {
  const int64_t size = params.kv.head_size;
  return {.output = params.out,
          .output_token_stride = params.out_stride,
          .output_head_stride = size,
          .output_lse = nullptr,
          .prefix = {params.out, params.out_stride, size},
          .suffix = {mean.data(), size, 0},
          .prefix_lse = sparq.kept_lse,
          .suffix_lse = sparq.rest_lse,
          .num_tokens = params.num_tokens,
          .num_heads = params.num_heads,
          .head_size = params.kv.head_size,
          .dtype = params.dtype};
}

void sparq_attention(const Tensor& out, const std::optional<Tensor>& lse, const Tensor& query,
                     const Tensor& key_cache, const Tensor& value_cache, const Tensor& block_tables,
                     const Tensor& seq_lens, double scale, int64_t r, int64_t k, int64_t window,
                     int64_t sink_tokens, const Text& select,
                     const std::optional<Tensor>& mean_value, const std::optional<Tensor>& k_scale,
                     const std::optional<Tensor>& v_scale, const Text& layout,
                     const std::optional<Tensor>& workspace) {
  Expect expect("sparq_attention");
  CacheSizes sizes;
  Arguments read, written;
  Queries queries = read_queries(expect, out, lse, query, sizes.head_size, written);
  queries.query.contiguous();
  queries.out.contiguous();
  const KvLayout kv_layout = cache_layout(expect, layout);
  Argument key = expect.tensor("key_cache", key_cache);
  Argument value = expect.tensor("value_cache", value_cache);
  SparqParams sparq{};
  sparq.kv = paged_cache(queries.query, key, value, kv_layout, sizes);
  check_sizes(queries, sparq.kv, "key_cache");
  set_scales(expect, sparq.kv, k_scale, v_scale, read);
  expect.that(sparq.kv.scale_stride == 0,
              "k_scale and v_scale: expected one element, got one for each KV head");
  PagedAttentionParams params =
      read_scores(expect, queries.num_heads, scale, 0.0, std::nullopt, std::nullopt, read);
  params.kv = sparq.kv;
  void* memory = read_workspace(expect, workspace, written);
  read_query_start_loc(expect, params, queries, nullptr, 1, read);
  read_chunks(expect, sparq, r);
  const int32_t unit = unit_of(expect, select, sparq.kv);
  const PagedKv merged = merge_heads(sparq, key, value, sparq.kv, unit);
  std::optional<Argument> mean;
  if (mean_value) {
    mean = expect.tensor("mean_value", *mean_value).same_dtype(queries.query);
    mean->shape({&queries.num_seqs, &sizes.num_kv_heads, &sizes.head_size}).contiguous();
    read.add(*mean);
  }
  read_pages(expect, params, block_tables, seq_lens, queries.num_seqs, read);
  set_queries(params, queries);
  sparq.units = read_choice(expect, params, unit, k, window, sink_tokens);
  sparq.scale = params.scale;
  read.add(queries.query, key, value);
  expect.apart(written, read);
  if (queries.num_seqs == 0 || query.is_meta()) return;
  int32_size(queries.query, "num_seqs * num_kv_heads", sparq.units.num_rows());
  const Tensor scratch = make_scratch(sparq, mean.has_value(), query);
  const bool explained = report("sparq_attention", [&] {
    return "a choice of " + select.value + " for each KV head, then paged_attention's kernel";
  });
  if (!explained) {
    if constexpr (kOnCpu) launch(SparqScoresParams{sparq}, query);
    launch(sparq, query);
  }
  attend_to(params, sparq, merged);
  launch_paged_attention(params, query, memory);
  if (mean && !explained) launch(blend_with(params, sparq, *mean), query);
}

}  // namespace
}  // namespace vllm_kernels

VLLM_KERNELS_IMPL(library) {
  library.impl("sparq_attention", TORCH_BOX(&vllm_kernels::sparq_attention));
}
