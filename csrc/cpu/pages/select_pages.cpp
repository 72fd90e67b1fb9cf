// select_pages (ops/pages/select_pages.h), two kernels:
//   scores     a task is a row's next kTaskPages pages: one dot product a page
//   selection  a task is some rows: the threshold by a histogram, then the kept pages in order
#include "ops/pages/select_pages.h"

#include "cpu/kernels.h"
#include "cpu/pages/choose_pages.h"

namespace vllm_kernels::cpu {
namespace {

constexpr int32_t kTaskPages = 64;
constexpr int32_t kComponents = 2 * kMaxSelectHeadSize;  // whose weights are on the stack

// --- scores

Loop scores_loop(const PageScoresParams& p) {
  return {.count = p.select.num_rows() * ceil_div(p.select.max_pages, kTaskPages)};
}

// Weights of some KV heads, in the order of the bounds: [heads][2][head_size].
template <typename T>
void fill_weights(const SelectPagesParams& p, int32_t seq, int32_t first_head, int32_t heads,
                  float* weights) {
  const int32_t group = p.num_heads / p.num_kv_heads;
  const T* query = static_cast<const T*>(p.query) + seq * p.query_seq_stride +
                   int64_t{first_head} * group * p.query_head_stride;
  for (int32_t head = 0; head < heads; ++head, query += group * p.query_head_stride) {
    float* of_low = weights + int64_t{2} * head * p.head_size;
    for_each_vector(0, p.head_size, [&](int64_t i, auto lanes) {
      Vec lows = {}, highs = {};
      for (int32_t j = 0; j < group; ++j) {
        const Vec q = load(query + j * p.query_head_stride + i, lanes);
        lows += minimum(q, Vec{});  // 0 for NaN
        highs += maximum(q, Vec{});
      }
      store(of_low + i, lows, lanes);
      store(of_low + p.head_size + i, highs, lanes);
    });
  }
}

// Adds the products of some KV heads to the sums of `count` pages.
template <typename T>
void add_heads(const SelectPagesParams& p, int32_t seq, int32_t first_head, int32_t heads,
               const int32_t* ids, int32_t count, Vec* sums) {
  float weights[kComponents];
  fill_weights<T>(p, seq, first_head, heads, weights);
  const T* bounds = static_cast<const T*>(p.bounds) + int64_t{2} * first_head * p.head_size;
  const int64_t components = int64_t{2} * heads * p.head_size;
  for (int32_t page = 0; page < count; ++page) {
    const T* of_page = bounds + ids[page] * p.bounds_block_stride;
    if (page + 1 < count) {
      const T* next = bounds + ids[page + 1] * p.bounds_block_stride;
      prefetch_span(reinterpret_cast<const char*>(next), components * sizeof(T));
    }
    Vec even = {}, odd = {};
    int64_t i = 0;
    for (; i + 2 * kLanes <= components; i += 2 * kLanes) {
      even = fma(load(of_page + i), load(weights + i), even);
      odd = fma(load(of_page + i + kLanes), load(weights + i + kLanes), odd);
    }
    for_each_vector(i, components, [&](int64_t j, auto lanes) {
      even = fma(load(of_page + j, lanes), load(weights + j, lanes), even);
    });
    sums[page] += even + odd;
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
  const int32_t step = kMaxSelectHeadSize / p.head_size, heads = p.heads_of_row();
  for (int32_t i = 0; i < heads; i += step) {
    add_heads<T>(p, seq, head + i, heads - i < step ? heads - i : step, ids, count, sums);
  }
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
  const int32_t* ids = p.block_tables + seq * p.block_tables_stride;
  if (row % p.num_row_heads == 0) {
    const int64_t length = p.length_of(seq);
    p.lens[seq] = p.kept_length(length, p.pages_of(length));
  }
  choose_pages(p, row, [&](int32_t page) { return ids[page]; });
}

void run_select(const SelectPagesParams& p, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) select_row(p, row);
}

}  // namespace

VLLM_KERNELS_CPU_KERNEL(PageScoresParams, scores_loop, run_scores)
VLLM_KERNELS_CPU_KERNEL(SelectPagesParams, select_loop, run_select)

}  // namespace vllm_kernels::cpu
