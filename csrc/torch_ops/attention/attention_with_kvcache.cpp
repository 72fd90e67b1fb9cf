// Binding of attention_with_kvcache: query [batch, length, num_heads, head_size] or [num_tokens,
// num_heads, head_size] over a cache, behind whose tokens it puts new ones -> a new tensor like
// query. Three launches: the indices of ops/attention_with_kvcache.h, reshape_and_cache's writer
// and paged_attention's kernel. CUDA has the first two in one for few new tokens. Where nothing is
// appended and every index is given, cumulative or not, there is the last one alone.
#include "ops/attention_with_kvcache.h"

#include <bit>
#include <cmath>

#include "ops/reshape_and_cache.h"
#include "torch_ops/attention/attention_arguments.h"
#include "torch_ops/base/allocate.h"
#include "torch_ops/base/device.h"
#include "torch_ops/base/index_check.h"
#include "torch_ops/cache/paged_kv.h"

namespace vllm_kernels {
namespace {

using Folded = std::array<int64_t, 6>;

// The caches, as pages.
struct Caches {
  Argument key;
  Argument value;
  CacheSizes sizes;
  PagedKv kv;
  Argument tables;         // pages only
  int64_t row_blocks = 0;  // rows only, as KvcacheIndicesParams has it
  int64_t max_blocks = 0;
};

// What attention reads of the caller's indices, or of those in `made`.
struct Indices {
  std::optional<Tensor> seq_lens, query_starts, tables, slots;
};

// New tokens [batch, new_tokens, num_kv_heads, head_size] of the query's dtype.
struct NewTokens {
  Argument key;
  Argument value;
  Folded folded[2];
  int64_t each = 0;  // of a sequence
};

void read_caches(Expect& expect, Caches& caches, const Argument& query, const Tensor& key_cache,
                 const Tensor& value_cache, const Tensor* block_tables, int64_t num_seqs,
                 const Text& layout) {
  const KvLayout kv_layout = cache_layout(expect, layout);
  caches.key = expect.tensor("key_cache", key_cache);
  caches.value = expect.tensor("value_cache", value_cache);
  if (block_tables != nullptr) {
    caches.kv = paged_cache(query, caches.key, caches.value, kv_layout, caches.sizes);
    Size rows("num_seqs", num_seqs, "seq_lens"), columns("max_blocks_per_seq");
    caches.tables = expect.tensor("block_tables", *block_tables).int32();
    caches.tables.shape({&rows, &columns}).inner_contiguous();
    // A null pointer would stand for a cache of rows.
    if (columns == 0 && num_seqs > 0) {
      caches.tables.fail("expected pages, got shape " + caches.tables.shape_text());
    }
    caches.max_blocks = columns;
    return;
  }
  expect.that(kv_layout == KvLayout::kNHD,
              "layout: expected \"NHD\", which caches of rows have, got \"" + layout.value + "\"");
  const RowCache rows = row_cache(query, caches.key, caches.value, num_seqs, caches.sizes);
  caches.kv = rows.kv;
  caches.row_blocks = rows.row_blocks;
  caches.max_blocks = rows.length / rows.kv.block_size;
}

void read_new_tokens(Expect& expect, NewTokens& tokens, const Argument& query, const Tensor& key,
                     const Tensor& value, int64_t num_seqs, Caches& caches) {
  CacheSizes& sizes = caches.sizes;
  Size batch("batch", num_seqs, "seq_lens"), each("new_tokens");
  const auto read = [&](const char* name, const Tensor& tensor, Folded& folded) {
    Argument rows = expect.tensor(name, tensor).same_dtype(query);
    rows.shape({&batch, &each, &sizes.num_kv_heads, &sizes.head_size}).inner_contiguous();
    return rows.fold_tokens(folded);
  };
  tokens.key = read("key", key, tokens.folded[0]);
  tokens.value = read("value", value, tokens.folded[1]);
  tokens.each = each;
  caches.key.written();
  caches.value.written();
}

// Makes memory for the indices that `p` lacks.
Indices make_indices(KvcacheIndicesParams& p, const Tensor& query, bool has_query_starts,
                     bool needs_slots) {
  Indices made;
  const auto memory = [&](std::optional<Tensor>& tensor, std::initializer_list<int64_t> sizes,
                          int32_t dtype) {
    tensor.emplace(empty(sizes, dtype, query));
    return tensor->data();
  };
  const int32_t int32 = aoti_torch_dtype_int32();
  p.seq_lens = static_cast<int32_t*>(memory(made.seq_lens, {p.num_seqs}, int32));
  if (!has_query_starts && p.query_len != 1) {
    p.query_starts =
        static_cast<int32_t*>(memory(made.query_starts, {int64_t{p.num_seqs} + 1}, int32));
  }
  if (p.block_tables == nullptr) {
    p.tables =
        static_cast<int32_t*>(memory(made.tables, {p.num_seqs, p.max_blocks_per_seq}, int32));
  }
  if (needs_slots) {
    p.slots = static_cast<int64_t*>(
        memory(made.slots, {int64_t{p.num_seqs} * p.new_tokens}, aoti_torch_dtype_int64()));
  }
  return made;
}

// Fills the struct of the indices.
KvcacheIndicesParams read_lengths(Expect& expect, const Argument& lengths, bool cumulative,
                                  const Caches& caches, bool pages, int64_t query_len,
                                  int64_t new_tokens) {
  KvcacheIndicesParams p{};
  p.lengths = lengths.as<const int32_t>();
  p.cumulative = cumulative;
  if (pages) {
    p.block_tables = caches.tables.as<const int32_t>();
    p.block_table_stride = caches.tables.stride(0);
  }
  p.row_blocks = caches.row_blocks;
  p.max_blocks_per_seq = int32_size(caches.key, "max_blocks_per_seq", caches.max_blocks);
  p.block_shift = std::countr_zero(static_cast<uint64_t>(caches.kv.block_size));
  p.num_seqs = int32_size(lengths, "num_seqs", lengths.size(0) - (cumulative ? 1 : 0));
  p.query_len = clamped_int32(query_len);
  p.new_tokens = clamped_int32(new_tokens);
  const int64_t capacity = caches.max_blocks * caches.kv.block_size;
  if (cumulative) {
    check_index(expect, lengths,
                {.noun = "not before the one before, nor more tokens past it than the cache holds,",
                 .low = INT32_MIN,
                 .high = int64_t{INT32_MAX} + 1,
                 .max_increase = capacity});
  } else {
    check_index(expect, lengths,
                {.noun = "a length that leaves room for the new tokens, or a negative one,",
                 .low = INT32_MIN,
                 .high = capacity - new_tokens + 1});
  }
  return p;
}

// The writing of the new tokens, without their slots.
ReshapeAndCacheParams pack_write(const Expect& expect, const NewTokens& tokens,
                                 const Caches& caches, int64_t num_seqs) {
  return {.key = tokens.key.data(),
          .value = tokens.value.data(),
          .key_token_stride = tokens.key.stride(0),
          .key_head_stride = tokens.key.stride(1),
          .value_token_stride = tokens.value.stride(0),
          .value_head_stride = tokens.value.stride(1),
          .kv = caches.kv,
          .slot_mapping = nullptr,
          .num_tokens = num_seqs * tokens.each,
          .dtype = tokens.key.dtype(),
          .op = expect.op()};
}

// Whether one launch computes indices and writes.
bool is_one_launch([[maybe_unused]] const ReshapeAndCacheParams& write) {
#if defined(VLLM_KERNELS_DEVICE_CUDA)
  return !check_mode() && cuda::may_append(write);
#else
  return false;
#endif
}

// Writes the new tokens. `slots`: null where the same launch computes all indices.
void write_tokens(Expect& expect, KvcacheAppendParams& append, const Caches& caches,
                  const Tensor* slots, const Tensor& query) {
  const int64_t num_slots = count_slots(caches.key, caches.kv.num_blocks, caches.kv.block_size);
#if defined(VLLM_KERNELS_DEVICE_CUDA)
  if (slots == nullptr) return launch(append, query);
#endif
  const Argument to = expect.tensor("slots", *slots);
  check_slots(expect, to, num_slots);
  append.write.slot_mapping = to.as<const int64_t>();
  launch(append.write, query);
}

// Query and result as tokens [num_tokens, num_heads, head_size].
void read_tokens(Expect& expect, Queries& queries, const Argument& query, const Tensor& result,
                 Size& head_size, Folded (&folded)[2]) {
  queries.query = query;
  queries.out = expect.tensor("out", result);
  if (query.dim() == 4) {
    queries.query.fold_tokens(folded[0]);
    queries.out.fold_tokens(folded[1]);
  }
  queries.query.shape({&queries.num_tokens, &queries.num_heads, &head_size});
  require_contiguous_heads(queries.query, queries.num_tokens);
}

torch::stable::Tensor attention_with_kvcache(
    const Tensor& query, const Tensor& key_cache, const Tensor& value_cache, const Tensor& seq_lens,
    const std::optional<Tensor>& block_tables, const std::optional<Tensor>& key,
    const std::optional<Tensor>& value, const std::optional<Tensor>& query_start_loc,
    int64_t max_query_len, std::optional<double> scale, int64_t sliding_window,
    int64_t window_right, double softcap, const std::optional<Tensor>& sinks, bool cumulative,
    const Text& layout) {
  Expect expect("attention_with_kvcache");
  const Argument x = expect.tensor("query", query).floating().rank(3, 4);
  const bool even = x.dim() == 4;
  const int64_t query_len = even ? x.size(1) : 1;
  expect.that(!even || !query_start_loc,
              "query_start_loc: expected None for query of 4 dimensions");
  Tensor result = empty(x.sizes(), x.scalar_type(), query);
  Folded folded[2];
  Caches caches;
  Queries queries;
  read_tokens(expect, queries, x, result, caches.sizes.head_size, folded);

  Argument lengths = expect.tensor("seq_lens", seq_lens).int32().rank(1, 1).contiguous();
  const int64_t num_seqs = lengths.size(0) - (cumulative ? 1 : 0);
  if (num_seqs < 0) lengths.fail("expected num_seqs + 1 elements, got shape [0]");
  if (even && x.size(0) != num_seqs) {
    x.fail("expected batch " + std::to_string(num_seqs) + " of seq_lens, got shape " +
           x.shape_text());
  }
  const bool pages = block_tables.has_value();
  read_caches(expect, caches, queries.query, key_cache, value_cache, or_null(block_tables),
              num_seqs, layout);
  check_sizes(queries, caches.kv, "key_cache");
  expect.that(key.has_value() == value.has_value(), "expected key and value together, got one");
  NewTokens tokens;
  if (key) read_new_tokens(expect, tokens, queries.query, *key, *value, num_seqs, caches);

  Arguments read, written;
  PagedAttentionParams params =
      read_scores(expect, queries.num_heads, scale.value_or(1.0 / std::sqrt(caches.kv.head_size)),
                  softcap, std::nullopt, sinks, read);
  params.kv = caches.kv;
  read_window_and_split(expect, params, sliding_window, 0);
  params.window_right = right_window(expect, window_right);

  Indices made;
  KvcacheAppendParams append{};
  if (tokens.each > 0) append.write = pack_write(expect, tokens, caches, num_seqs);
  const bool at_once = is_one_launch(append.write);
  const bool computes = kOnCpu || check_mode() || key || !pages || query_len != 1;
  params.has_cumulative_lens = cumulative && query_start_loc && !computes;
  if (computes || (cumulative && !query_start_loc)) {
    append.indices =
        read_lengths(expect, lengths, cumulative, caches, pages, query_len, tokens.each);
    made = make_indices(append.indices, query, query_start_loc.has_value(),
                        tokens.each > 0 && !at_once);
    if (!at_once) launch(append.indices, query);
  }
  const Tensor* starts = made.query_starts ? &*made.query_starts : or_null(query_start_loc);
  const int64_t longest = even ? query_len : max_query_len > 0 ? max_query_len : queries.num_tokens;
  read_query_start_loc(expect, params, queries, starts, starts == nullptr ? 1 : longest, read);
  if (cumulative) {
    Size ends("num_seqs + 1", queries.num_seqs + 1, queries.num_seqs.source);
    lengths.shape({&ends});
  }
  read_pages(expect, params, made.tables ? *made.tables : *block_tables,
             made.seq_lens ? *made.seq_lens : seq_lens, queries.num_seqs, read);
  read.add(queries.query, lengths);
  if (key) {
    read.add(tokens.key, tokens.value);
    written.add(caches.value, caches.key);
    expect.apart(written, read);
  }
  if (append.write.num_tokens > 0) {
    write_tokens(expect, append, caches, or_null(made.slots), query);
  }
  params.zero_unowned = query_start_loc.has_value();
  if (!is_done(params, queries, result, nullptr)) {
    set_queries(params, queries);
    launch_paged_attention(params, query, nullptr);
  }
  return torch::stable::Tensor(result.release());
}

}  // namespace
}  // namespace vllm_kernels

VLLM_KERNELS_IMPL(library) {
  library.impl("attention_with_kvcache", TORCH_BOX(&vllm_kernels::attention_with_kvcache));
}
