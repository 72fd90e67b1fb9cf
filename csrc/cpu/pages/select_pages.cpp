// select_pages (ops/pages/select_pages.h), two kernels:
//   scores     a task is a row's next kTaskPages pages: one dot product a page
//   selection  a task is some rows: the threshold by a histogram, then the kept pages in order
#include "ops/pages/select_pages.h"

#include "cpu/kernels.h"
#include "cpu/sampling/vec_sampling.h"

namespace vllm_kernels::cpu {
namespace {

constexpr int32_t kTaskPages = 64;
constexpr int32_t kComponents = 256;  // whose weights are on the stack

uint32_t* scores_of(const SelectPagesParams& p, int64_t row) {
  return p.scores + 2 * row * p.score_words();
}

// --- scores

Loop scores_loop(const PageScoresParams& p) {
  return {.count = p.select.num_rows() * ceil_div(p.select.max_pages, kTaskPages)};
}

// Weights of `count` components from `first` on, padded with zeros to whole vectors.
struct Weights {
  float low[kComponents], high[kComponents];

  template <typename T>
  void fill(const SelectPagesParams& p, int32_t seq, int32_t kv_head, int32_t first,
            int32_t count) {
    const int32_t group = p.num_heads / p.num_kv_heads;
    const T* query = static_cast<const T*>(p.query) + seq * p.query_seq_stride +
                     int64_t{kv_head} * group * p.query_head_stride + first;
    for_each_vector(0, count, [&](int64_t i, auto lanes) {
      Vec lows = {}, highs = {};
      for (int32_t head = 0; head < group; ++head) {
        const Vec q = load(query + head * p.query_head_stride + i, lanes);
        lows += minimum(q, Vec{});  // 0 for NaN
        highs += maximum(q, Vec{});
      }
      store(low + i, lows);
      store(high + i, highs);
    });
  }
};

// Adds the products of one KV head to the sums of `count` pages.
template <typename T>
void add_head(const SelectPagesParams& p, int32_t seq, int32_t kv_head, const int32_t* ids,
              int32_t count, Vec* sums) {
  for (int32_t first = 0; first < p.head_size; first += kComponents) {
    const int32_t left = p.head_size - first;
    const int32_t size = left < kComponents ? left : kComponents;
    Weights weights;
    weights.fill<T>(p, seq, kv_head, first, size);
    const T* bounds = static_cast<const T*>(p.bounds) + int64_t{2} * kv_head * p.head_size + first;
    for (int32_t page = 0; page < count; ++page) {
      const T* low = bounds + ids[page] * p.bounds_block_stride;
      const T* high = low + p.head_size;
      if (page + 2 < count) {  // a row of bounds is too short for the hardware's prefetcher
        const T* next = bounds + ids[page + 2] * p.bounds_block_stride;
        prefetch_span(reinterpret_cast<const char*>(next), 2 * p.head_size * sizeof(T));
      }
      Vec of_low = {}, of_high = {};
      for_each_vector(0, size, [&](int64_t i, auto lanes) {
        of_low = fma(load(low + i, lanes), load(weights.low + i), of_low);
        of_high = fma(load(high + i, lanes), load(weights.high + i), of_high);
      });
      sums[page] += of_low + of_high;
    }
  }
}

template <typename T>
void score_pages(const SelectPagesParams& p, int64_t row, int32_t first) {
  const auto seq = static_cast<int32_t>(row / p.num_row_heads);
  const int32_t pages = p.pages_of(p.length_of(seq));
  if (pages <= p.budget || first >= pages) return;
  const int32_t count = pages - first < kTaskPages ? pages - first : kTaskPages;
  const int32_t* ids = p.block_tables + seq * p.block_tables_stride + first;
  const auto head = static_cast<int32_t>(row % p.num_row_heads);
  Vec sums[kTaskPages] = {};
  for (int32_t i = 0; i < p.heads_of_row(); ++i) add_head<T>(p, seq, head + i, ids, count, sums);
  uint32_t* scores = scores_of(p, row) + first;
  for (int32_t page = 0; page < count; ++page) {
    scores[page] = p.always_kept(first + page, pages) ? SelectPagesParams::kAlwaysKept
                                                      : p.order_of(sum(sums[page]));
  }
}

void run_scores(const PageScoresParams& p, int64_t begin, int64_t end) {
  const int64_t per_row = ceil_div(p.select.max_pages, kTaskPages);
  dispatch_float(p.select.dtype, [&](auto model) {
    for (int64_t task = begin; task < end; ++task) {
      const auto first = static_cast<int32_t>(task % per_row) * kTaskPages;
      score_pages<decltype(model)>(p.select, task / per_row, first);
    }
  });
}

// --- selection

Loop select_loop(const SelectPagesParams& p) {
  return {.count = p.num_rows(), .per_task = rows_per_task(8 * int64_t{p.max_pages})};
}

void select_row(const SelectPagesParams& p, int64_t row) {
  const auto seq = static_cast<int32_t>(row / p.num_row_heads);
  const int64_t head = row % p.num_row_heads, length = p.length_of(seq);
  const int32_t pages = p.pages_of(length);
  const int32_t* ids = p.block_tables + seq * p.block_tables_stride;
  int32_t* table = p.tables + seq * p.tables_seq_stride + head * p.tables_head_stride;
  if (head == 0) p.lens[seq] = p.kept_length(length);
  int32_t kept = 0;
  if (pages <= p.budget) {
    for (; kept < pages; ++kept) table[kept] = ids[kept];
  } else {
    uint32_t* scores = scores_of(p, row);
    for (int64_t i = pages; i < padded(pages); ++i) scores[i] = 0;
    const Radix found = select_by_count(scores, pages, p.budget, scores + p.score_words());
    int64_t ties = p.budget - static_cast<int64_t>(found.before);
    for (int32_t page = 0; page < pages; ++page) {
      const bool is_equal = scores[page] == found.prefix;
      if (scores[page] < found.prefix || (is_equal && ties == 0)) continue;
      if (is_equal) --ties;
      table[kept++] = ids[page];
    }
  }
  for (; kept < p.budget; ++kept) table[kept] = 0;
}

void run_select(const SelectPagesParams& p, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) select_row(p, row);
}

}  // namespace

VLLM_KERNELS_CPU_KERNEL(PageScoresParams, scores_loop, run_scores)
VLLM_KERNELS_CPU_KERNEL(SelectPagesParams, select_loop, run_select)

}  // namespace vllm_kernels::cpu
