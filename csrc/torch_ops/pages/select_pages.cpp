// Binding of select_pages: tables and lengths of the best pages. ops/pages/select_pages.h has the
// rules.
#include "ops/pages/select_pages.h"

#include <algorithm>

#include "torch_ops/base/allocate.h"
#include "torch_ops/base/check.h"
#include "torch_ops/base/device.h"
#include "torch_ops/base/index_check.h"
#include "torch_ops/pages/bounds.h"

namespace vllm_kernels {
namespace {

// Launches with scratch for the scores. On CUDA the allocator reuses it in the order of the stream.
void launch_with_scores(SelectPagesParams params, const Tensor& on) {
  if (on.is_meta()) return;
#if defined(VLLM_KERNELS_DEVICE_CUDA)
  const torch::stable::accelerator::DeviceGuard guard(on.device_index());
  const int64_t words = params.num_rows() * params.score_words();
#else
  const int64_t words = 2 * params.num_rows() * params.score_words();
#endif
  const Tensor scores = empty({&words, 1}, aoti_torch_dtype_int32(), on);
  params.scores = static_cast<uint32_t*>(scores.data());
  if constexpr (kOnCpu) launch(PageScoresParams{params}, on);
  launch(params, on);
}

// tables int32 [num_seqs, budget], or [num_seqs, num_kv_heads, budget], to be written.
Argument read_tables(Expect& expect, const Tensor& tables, Size& num_seqs, Size& num_kv_heads,
                     Size& budget) {
  Argument t = expect.tensor("tables", tables).int32().rank(2, 3);
  if (t.dim() == 2) {
    t.shape({&num_seqs, &budget});
  } else {
    t.shape({&num_seqs, &num_kv_heads, &budget});
  }
  return t.inner_contiguous().written();
}

// `budget` pages are the last dimension of tables.
void check_budget(const Expect& expect, int64_t budget, int64_t max_pages, int64_t sinks,
                  int64_t recent) {
  expect.that(budget >= std::min(max_pages, sinks + recent),
              "budget: expected at least sink_pages + recent_pages = " +
                  std::to_string(sinks + recent) + " pages, got " + std::to_string(budget));
}

// A number of pages; past `max_pages` its size does not matter.
int32_t read_pages(const Expect& expect, const char* name, int64_t value, int64_t low,
                   int64_t max_pages) {
  expect.that(value >= low, std::string(name) + ": expected a number >= " + std::to_string(low) +
                                ", got " + std::to_string(value));
  return clamped_int32(std::min(value, std::max(max_pages, low)));
}

void select_pages(const Tensor& tables, const Tensor& lens, const Tensor& query,
                  const Tensor& bounds, const Tensor& block_tables, const Tensor& seq_lens,
                  int64_t block_size, int64_t sink_pages, int64_t recent_pages) {
  Expect expect("select_pages");
  Size num_seqs("num_seqs"), num_heads("num_heads"), budget("budget"), max_pages("max_pages");
  CacheSizes sizes;
  const Argument q = expect.tensor("query", query)
                         .floating()
                         .shape({&num_seqs, &num_heads, &sizes.head_size})
                         .inner_contiguous();
  const Argument b = read_bounds(expect, bounds, sizes).same_dtype(q);
  if (sizes.head_size < 1 || sizes.head_size > kMaxSelectHeadSize) {
    b.fail("expected head_size of 1 to " + std::to_string(kMaxSelectHeadSize) + ", got shape " +
           b.shape_text());
  }
  if (sizes.num_kv_heads < 1 || num_heads % sizes.num_kv_heads != 0) {
    q.fail("expected num_heads to be a multiple of num_kv_heads = " +
           std::to_string(sizes.num_kv_heads) + " (from bounds), got " + std::to_string(num_heads));
  }
  const Argument given = expect.tensor("block_tables", block_tables)
                             .int32()
                             .shape({&num_seqs, &max_pages})
                             .inner_contiguous();
  const Argument lengths =
      expect.tensor("seq_lens", seq_lens).int32().shape({&num_seqs}).contiguous();
  const Argument t = read_tables(expect, tables, num_seqs, sizes.num_kv_heads, budget);
  const Argument l = expect.tensor("lens", lens).int32().shape({&num_seqs}).contiguous();
  expect.that(block_size >= 1 && block_size <= INT32_MAX,
              "block_size: expected one in [1, 2^31), got " + std::to_string(block_size));
  const int32_t sinks = read_pages(expect, "sink_pages", sink_pages, 0, max_pages);
  const int32_t recent = read_pages(expect, "recent_pages", recent_pages, 1, max_pages);
  check_budget(expect, budget, max_pages, sinks, recent);
  Argument(l).written();
  expect.apart({t, l}, {q, b, given, lengths});
  const bool each_head = t.dim() == 3;
  SelectPagesParams params{
      .tables = t.as<int32_t>(),
      .tables_seq_stride = t.stride(0),
      .tables_head_stride = each_head ? t.stride(1) : 0,
      .lens = l.as<int32_t>(),
      .query = q.data(),
      .query_seq_stride = q.stride(0),
      .query_head_stride = q.stride(1),
      .bounds = b.data(),
      .bounds_block_stride = b.stride(0),
      .block_tables = given.as<const int32_t>(),
      .block_tables_stride = given.stride(0),
      .seq_lens = lengths.as<const int32_t>(),
      .num_seqs = int32_size(q, "num_seqs", num_seqs),
      .num_heads = int32_size(q, "num_heads", num_heads),
      .num_kv_heads = int32_size(b, "num_kv_heads", sizes.num_kv_heads),
      .head_size = int32_size(b, "head_size", sizes.head_size),
      .num_row_heads = each_head ? int32_size(b, "num_kv_heads", sizes.num_kv_heads) : 1,
      .num_blocks = sizes.num_blocks,
      .block_size = clamped_int32(block_size),
      .max_pages = int32_size(given, "max_pages", max_pages),
      .budget = int32_size(t, "budget", budget),
      .sink_pages = sinks,
      .recent_pages = recent,
      .dtype = q.dtype()};
  if (num_seqs == 0) return;
  const int64_t table_tokens = int64_t{params.max_pages} * block_size;
  check_index(expect, lengths,
              {.noun = "a length that fits block_tables", .high = table_tokens + 1});
  check_index(expect, given, {.noun = "a block", .high = sizes.num_blocks},
              {.tokens_per_column = params.block_size, .row_lengths = params.seq_lens});
  launch_with_scores(params, query);
}

}  // namespace
}  // namespace vllm_kernels

VLLM_KERNELS_IMPL(library) {
  library.impl("select_pages", TORCH_BOX(&vllm_kernels::select_pages));
}
