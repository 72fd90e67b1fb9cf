// sparq_attention (ops/pages/sparq_attention.h), before its attention, two kernels:
//   scores     a task is up to kTaskHeads KV heads of a sequence's next kTaskTokens tokens: the dot
//              product of the chosen chunks of K with one vector a KV head, the sum of its query
//              heads; with a mean also with each of these. Heads of a page lie next to each other
//   selection  a task is some rows: the kept units in order, and with a mean their weights
//
// In layout vllm a chunk of a page is one run of 16 bytes a token, and pages are multiplied as
// decode does it (page_lanes.h). In the other layouts a chunk is 16 or 32 bytes of a token's row.
#include "ops/pages/sparq_attention.h"

#include <cmath>

#include "cpu/attention/page_lanes.h"
#include "cpu/base/dispatch.h"
#include "cpu/base/vec_math.h"
#include "cpu/kernels.h"
#include "cpu/pages/choose_pages.h"

namespace vllm_kernels::cpu {
namespace {

constexpr int32_t kTaskTokens = 512;    // whole units
constexpr int32_t kAhead = 2 * kLanes;  // tokens between a row's prefetch and its use
constexpr int32_t kTaskHeads = 8;
constexpr float kLowest = -__builtin_inff();

// --- the query's part: chunks and weights

// A query head of the group, NaN as 0.
void read_head(const SparqParams& p, int32_t seq, int32_t head, float* q) {
  const SelectPagesParams& u = p.units;
  dispatch_float(u.dtype, [&](auto model) {
    const auto* from = static_cast<const decltype(model)*>(u.query) + seq * u.query_seq_stride +
                       head * u.query_head_stride;
    for_each_vector(0, u.head_size, [&](int64_t i, auto lanes) {
      const Vec x = load(from + i, lanes);
      store(q + i, select(x == x, x, Vec{}), lanes);
    });
  });
}

float magnitude(const float* q, int32_t count) {
  Vec sums = {};
  int32_t i = 0;
  for (; i + kLanes <= count; i += kLanes) sums += absolute(load(q + i));
  float rest = 0.0f;
  for (; i < count; ++i) rest += std::fabs(q[i]);
  return count < kLanes ? rest : rest + sum(sums);
}

// What a row's tokens are multiplied with.
struct RowQuery {
  int32_t first_head;  // of the group
  int32_t chunks[kMaxSparqChunks];
  int64_t offsets[kMaxSparqChunks];  // elements from component 0
  alignas(64) float weights[kMaxSparqHeadSize];

  void choose(const SparqParams& p, int32_t seq, int32_t kv_head) {
    first_head = kv_head * p.group();
    const int32_t size = p.units.head_size, count = size / p.chunk;
    alignas(64) float sums[kMaxSparqHeadSize] = {}, q[kMaxSparqHeadSize];
    for (int32_t i = 0; i < p.group(); ++i) {
      read_head(p, seq, first_head + i, q);
      for_each_vector(0, size, [&](int64_t d, auto lanes) {
        store(sums + d, load(sums + d, lanes) + absolute(load(q + d, lanes)), lanes);
      });
    }
    for (int32_t c = 0; c < count; ++c) sums[c] = magnitude(sums + c * p.chunk, p.chunk);
    uint64_t chosen = 0;
    for (int32_t i = 0; i < p.num_chunks; ++i) {
      int32_t best = -1;
      for (int32_t c = 0; c < count; ++c) {
        const bool is_free = (chosen >> c & 1) == 0;
        if (is_free && (best < 0 || sums[c] > sums[best])) best = c;
      }
      chosen |= uint64_t{1} << best;
    }
    for (int32_t i = 0; chosen != 0; ++i, chosen &= chosen - 1) {
      chunks[i] = __builtin_ctzll(chosen);
      offsets[i] = p.chunk_offset(chunks[i]);
    }
  }

  // weights becomes that of query heads [begin, end) of the group: scale_g q_g, added up.
  void set_weights(const SparqParams& p, int32_t seq, int32_t begin, int32_t end) {
    float q[kMaxSparqHeadSize];
    std::memset(weights, 0, sizeof(weights));
    for (int32_t head = begin; head < end; ++head) {
      read_head(p, seq, first_head + head, q);
      float chosen_norm = 0.0f;
      for (int32_t c = 0; c < p.num_chunks; ++c)
        chosen_norm += magnitude(q + chunks[c] * p.chunk, p.chunk);
      const float norm = magnitude(q, p.units.head_size);
      const float factor = chosen_norm > 0.0f ? p.scale * std::sqrt(norm / chosen_norm) : p.scale;
      for (int32_t c = 0; c < p.num_chunks; ++c) {
        for (int32_t i = 0; i < p.chunk; ++i) {
          weights[c * p.chunk + i] += factor * q[chunks[c] * p.chunk + i];
        }
      }
    }
  }
};

// --- scores of tokens

// The tokens and KV heads of a task.
struct TaskTokens {
  const SparqParams& p;
  const RowQuery* queries;  // [heads]
  int32_t first_head, heads;
  const int32_t* ids;  // of the pages, from the first token on
  int32_t tokens;
  float (*scores)[kTaskTokens + kLanes];  // [heads]
};

// The tokens of one page in layout vllm, a multiple of kLanes. Of what comes `next` the first line
// of each run is prefetched: the processor fetches the others, and all lines took longer.
template <typename T>
inline void score_page(const T* key, const int64_t* offsets, const T* next,
                       const int64_t* next_offsets, int32_t tokens, int32_t chunks,
                       const float* packed, float scale, float* scores) {
  using Keys = KeyLanes<T>;
  for (int32_t first = 0; first < tokens; first += kLanes) {
    Vec sums[Keys::kWidth] = {};
    const float* query = packed;
    for (int32_t c = 0; c < chunks; ++c) {
      const T* from = key + offsets[c] + first * Keys::kChunk;
      if (first == 0) __builtin_prefetch(next + next_offsets[c], 0, 2);
      typename Keys::Operand operands[Keys::kWidth][Keys::kOperands];
#pragma GCC unroll 16
      for (int i = 0; i < Keys::kWidth; ++i) {
        Keys::load_operands(from + i * Keys::kTokens * Keys::kChunk, operands[i]);
      }
#pragma GCC unroll 4
      for (int operand = 0; operand < Keys::kOperands; ++operand, query += Keys::kWidth) {
        const auto q = Keys::query(query);
#pragma GCC unroll 16
        for (int i = 0; i < Keys::kWidth; ++i) {
          sums[i] = Keys::multiply_add(operands[i][operand], q, sums[i]);
        }
      }
    }
    store(scores + first, sum_tokens<Keys::kWidth>(sums) * scale);
  }
}

template <typename T>
void score_pages(const TaskTokens& task) {
  using Keys = KeyLanes<T>;
  const SparqParams& p = task.p;
  const PagedKv& kv = p.kv;
  alignas(64) float packed[kTaskHeads][kMaxSparqHeadSize];
  for (int32_t head = 0; head < task.heads; ++head) {
    float* to = packed[head];
    for (int32_t c = 0; c < p.num_chunks; ++c) {
      for (int operand = 0; operand < Keys::kOperands; ++operand, to += Keys::kWidth) {
        Keys::pack(task.queries[head].weights + c * p.chunk, operand, to);
      }
    }
  }
  const T* keys = static_cast<const T*>(kv.key) + task.first_head * kv.key_head_stride;
  const auto pages = static_cast<int32_t>(ceil_div(task.tokens, kv.block_size));
  for (int32_t page = 0; page < pages; ++page) {
    const T* key = keys + task.ids[page] * kv.key_block_stride;
    const T* next_page = keys + task.ids[page + 1 < pages ? page + 1 : page] * kv.key_block_stride;
    for (int32_t head = 0; head < task.heads; ++head, key += kv.key_head_stride) {
      const bool last = head + 1 == task.heads;
      score_page(key, task.queries[head].offsets, last ? next_page : key + kv.key_head_stride,
                 task.queries[last ? 0 : head + 1].offsets, kv.block_size, p.num_chunks,
                 packed[head], Keys::kScale * scale_of(kv, true, task.first_head + head),
                 task.scores[head] + page * kv.block_size);
    }
  }
}

// kLanes tokens by their rows.
template <typename T>
inline void score_rows(const SparqParams& p, const T* const* rows, int64_t head_offset,
                       const RowQuery& query, float scale, float* scores) {
  Vec sums[kLanes] = {};
  for (int32_t c = 0; c < p.num_chunks; ++c) {
    const int64_t offset = head_offset + query.offsets[c];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) __builtin_prefetch(rows[kAhead + i] + offset, 0, 2);
    for_each_vector(0, p.chunk, [&](int64_t d, auto lanes) {
      const Vec weights = load(query.weights + c * p.chunk + d, lanes);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        sums[i] = fma(load(rows[i] + offset + d, lanes), weights, sums[i]);
      }
    });
  }
  store(scores, sum_each(sums) * scale);
}

// Any layout and page size.
template <typename T>
void score_rows(const TaskTokens& task) {
  const PagedKv& kv = task.p.kv;
  const T* rows[kTaskTokens + kAhead + kLanes];
  const T* keys = static_cast<const T*>(kv.key) + task.first_head * kv.key_head_stride;
  const int32_t shift = __builtin_ctz(kv.block_size);
  for (int32_t i = 0; i < task.tokens + kAhead + kLanes; ++i) {
    const int32_t token = i < task.tokens ? i : task.tokens - 1;
    rows[i] = keys + task.ids[token >> shift] * kv.key_block_stride +
              (token & (kv.block_size - 1)) * kv.key_token_stride;
  }
  for (int32_t first = 0; first < task.tokens; first += kAhead) {
    for (int32_t head = 0; head < task.heads; ++head) {
      const float scale = scale_of(kv, true, task.first_head + head);
      for (int32_t at = first; at < first + kAhead && at < task.tokens; at += kLanes) {
        score_rows(task.p, rows + at, head * kv.key_head_stride, task.queries[head], scale,
                   task.scores[head] + at);
      }
    }
  }
}

// --- scores of units

// Of `count` tokens, those of whole units; the last unit may be part full.
void store_orders(const SelectPagesParams& u, const float* scores, int32_t tokens,
                  int32_t first_unit, int32_t all_units, uint32_t* orders) {
  for (int32_t at = 0, unit = first_unit; at < tokens; at += u.block_size, ++unit) {
    const int32_t end = at + u.block_size < tokens ? at + u.block_size : tokens;
    Vec highest = splat(kLowest);  // maximum() leaves out NaN
    int32_t i = at;
    for (; i + kLanes <= end; i += kLanes) highest = maximum(load(scores + i), highest);
    float best = largest(highest);
    for (; i < end; ++i) best = scores[i] > best ? scores[i] : best;
    orders[unit] = u.always_kept(unit, all_units) ? SelectPagesParams::kAlwaysKept
                                                  : SelectPagesParams::order_of(best);
  }
}

// log of the sum of exp(scores) over the lanes where `kept` is set, in two passes. score_of(i)
// gives a vector of scores from i on, -inf past the end.
template <typename ScoreOf>
inline float log_sum_exp(int32_t count, const ScoreOf& score_of) {
  Vec highest = splat(kLowest), sums = {};
  for (int32_t i = 0; i < count; i += kLanes) highest = maximum(score_of(i), highest);
  const float shift = largest(highest);
  if (shift == kLowest) return kLowest;
  for (int32_t i = 0; i < count; i += kLanes) sums += exp(score_of(i) - splat(shift));
  return shift + std::log(sum(sums));
}

// `count` scores from `from` on as a vector, -inf past them.
inline Vec load_or_lowest(const float* from, int32_t count) {
  if (count >= kLanes) return load(from);
  float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = i < count ? from[i] : kLowest;
  return load(lanes);
}

void store_unit_lse(const SelectPagesParams& u, const float* scores, int32_t tokens, float* lse) {
  for (int32_t at = 0; at < tokens; at += u.block_size, ++lse) {
    const int32_t count = tokens - at < u.block_size ? tokens - at : u.block_size;
    *lse = count == 1 ? scores[at] : log_sum_exp(count, [&](int32_t i) {
      return load_or_lowest(scores + at + i, count - i);
    });
  }
}

// --- tasks

// Tasks of a sequence: groups of KV heads, each with ranges of tokens.
int64_t head_groups(const SparqParams& p) {
  return ceil_div(p.units.num_kv_heads, kTaskHeads);
}
int64_t token_ranges(const SparqParams& p) {
  return ceil_div(int64_t{p.units.max_pages} * p.units.block_size, kTaskTokens);
}

float* unit_lse_of(const SparqParams& p, int64_t row, int32_t head) {
  return p.unit_lse + (row * p.group() + head) * p.units.score_words();
}

template <typename T>
void score_tokens(const SparqParams& p, int32_t seq, int32_t first_head, int64_t first) {
  const SelectPagesParams& u = p.units;
  const int64_t length = u.length_of(seq), rest = length - first;
  const int32_t units = u.pages_of(length), heads_left = u.num_kv_heads - first_head;
  if (units <= u.budget || rest <= 0) return;
  const int32_t heads = heads_left < kTaskHeads ? heads_left : kTaskHeads;
  const auto tokens = static_cast<int32_t>(rest < kTaskTokens ? rest : kTaskTokens);
  const auto first_unit = static_cast<int32_t>(first / u.block_size);
  RowQuery queries[kTaskHeads];
  alignas(64) float scores[kTaskHeads][kTaskTokens + kLanes];
  const int32_t* ids = u.block_tables + seq * u.block_tables_stride + first / p.kv.block_size;
  const TaskTokens task{p, queries, first_head, heads, ids, tokens, scores};
  const int64_t row = int64_t{seq} * u.num_kv_heads + first_head;
  const auto score = [&](int32_t begin, int32_t end) {
    for (int32_t head = 0; head < heads; ++head) queries[head].set_weights(p, seq, begin, end);
    const bool whole_pages = p.kv.layout == KvLayout::kVllm && p.kv.block_size % kLanes == 0;
    whole_pages ? score_pages<T>(task) : score_rows<T>(task);
  };
  for (int32_t head = 0; head < heads; ++head) queries[head].choose(p, seq, first_head + head);
  score(0, p.group());
  for (int32_t head = 0; head < heads; ++head) {
    store_orders(u, scores[head], tokens, first_unit, units, scores_of(u, row + head));
  }
  if (p.unit_lse == nullptr) return;
  for (int32_t i = 0; i < p.group(); ++i) {
    score(i, i + 1);
    for (int32_t head = 0; head < heads; ++head) {
      store_unit_lse(u, scores[head], tokens, unit_lse_of(p, row + head, i) + first_unit);
    }
  }
}

Loop scores_loop(const SparqScoresParams& p) {
  return {.count = p.sparq.units.num_seqs * head_groups(p.sparq) * token_ranges(p.sparq)};
}

void run_scores(const SparqScoresParams& p, int64_t begin, int64_t end) {
  const int64_t ranges = token_ranges(p.sparq), groups = head_groups(p.sparq);
  dispatch_cache(p.sparq.kv.dtype, [&](auto stored) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t group = task / ranges;
      score_tokens<decltype(stored)>(p.sparq, static_cast<int32_t>(group / groups),
                                     static_cast<int32_t>(group % groups) * kTaskHeads,
                                     task % ranges * kTaskTokens);
    }
  });
}

// The log-sum-exp of kept units and of the others, from the marks of choose_pages().
void store_weights(const SparqParams& p, int64_t row, int32_t units) {
  const uint32_t* marks = scores_of(p.units, row);
  for (int32_t head = 0; head < p.group(); ++head) {
    const int64_t at = head * p.units.num_rows() + row;
    const float* lse = unit_lse_of(p, row, head);
    const auto sum_of = [&](uint32_t mark) {
      return log_sum_exp(units, [&](int32_t i) {
        const VecInt wanted = (VecInt)(load_ordered(marks + i) == mark);
        return select(wanted, load_or_lowest(lse + i, units - i), splat(kLowest));
      });
    };
    const bool all = units <= p.units.budget;
    p.kept_lse[at] = all ? 0.0f : sum_of(1);
    p.rest_lse[at] = all ? kLowest : sum_of(0);
  }
}

Loop choice_loop(const SparqParams& p) {
  return {.count = p.units.num_rows(), .per_task = rows_per_task(8 * int64_t{p.units.max_pages})};
}

void run_choice(const SparqParams& p, int64_t begin, int64_t end) {
  const SelectPagesParams& u = p.units;
  for (int64_t row = begin; row < end; ++row) {
    const auto seq = static_cast<int32_t>(row / u.num_kv_heads);
    const auto head = static_cast<int32_t>(row % u.num_kv_heads);
    const int64_t length = u.length_of(seq);
    const int32_t* ids = u.block_tables + seq * u.block_tables_stride;
    const int32_t units = u.pages_of(length);
    p.lens[row] = u.kept_length(length, units);
    choose_pages(u, row, [&](int32_t unit) { return p.entry_of(ids, head, unit); });
    if (p.kept_lse != nullptr) store_weights(p, row, units);
  }
}

}  // namespace

VLLM_KERNELS_CPU_KERNEL(SparqScoresParams, scores_loop, run_scores)
VLLM_KERNELS_CPU_KERNEL(SparqParams, choice_loop, run_choice)

}  // namespace vllm_kernels::cpu
