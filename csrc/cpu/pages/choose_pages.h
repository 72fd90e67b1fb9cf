// The choice of the best pages of a row by their scores (ops/pages/select_pages.h). See
// cpu/base/vec.h for the anonymous namespace.
#pragma once
#include "cpu/sampling/vec_sampling.h"
#include "ops/pages/select_pages.h"

namespace vllm_kernels::cpu {
namespace {

inline uint32_t* scores_of(const SelectPagesParams& p, int64_t row) {
  return p.scores + 2 * row * p.score_words();
}

// Writes a row's table of kept pages: entry_of(page). If pages are left out, it replaces their
// scores by 0 and those of kept ones by 1.
template <typename EntryOf>
inline void choose_pages(const SelectPagesParams& p, int64_t row, const EntryOf& entry_of) {
  const auto seq = static_cast<int32_t>(row / p.num_row_heads);
  const int64_t head = row % p.num_row_heads;
  const int32_t pages = p.pages_of(p.length_of(seq));
  int32_t* table = p.tables + seq * p.tables_seq_stride + head * p.tables_head_stride;
  int32_t kept = 0;
  if (pages <= p.budget) {
    for (; kept < pages; ++kept) table[kept] = entry_of(kept);
  } else {
    uint32_t* scores = scores_of(p, row);
    for (int64_t i = pages; i < padded(pages); ++i) scores[i] = 0;
    const Radix found = select_by_count(scores, pages, p.budget, scores + p.score_words());
    int64_t ties = p.budget - static_cast<int64_t>(found.before);
    for (int32_t page = 0; page < pages; ++page) {
      const bool is_equal = scores[page] == found.prefix;
      const bool is_kept = scores[page] > found.prefix || (is_equal && ties > 0);
      if (is_equal && is_kept) --ties;
      if (is_kept) table[kept++] = entry_of(page);
      scores[page] = is_kept ? 1 : 0;
    }
  }
  for (; kept < p.budget; ++kept) table[kept] = 0;
}

}  // namespace
}  // namespace vllm_kernels::cpu
