// The general attention kernel: any number of query tokens, windows and masks, pages of any layout
// or contiguous keys.
//   query, out [num_tokens, num_heads, head_size]; K and V in pages (ops/paged_kv.h), or
//   [rows, num_kv_heads, head_size]
//
// paged_attention.h tells how a call is cut into tasks. A task walks over the KV range of each work
// tile in blocks of kKvBlockTokens tokens, with an online softmax. It has three ways to multiply:
//   packed      at least kMinPackedRows rows: packs K, then V, for packed_gemm.h
//   token rows  few rows in NHD, HND or contiguous keys: multiplies in place, by row_dot.h
//   upcast      few rows in layout vllm: upcasts a KV block to floats, then multiplies
// Packed bfloat16 stays bfloat16 where the level has dot products of it.
//
// A tile that one task has whole goes to epilogue(). Other tiles are stored as partials, which
// paged_attention_combine.cpp combines in a second launch.
#include "cpu/attention/paged_attention.h"

#include "cpu/attention/epilogue.h"
#include "cpu/attention/kv_blocks.h"
#include "cpu/attention/packed_gemm.h"
#include "cpu/attention/page_lanes.h"
#include "cpu/attention/row_dot.h"
#include "cpu/attention/score_mod.h"
#include "cpu/attention/token_scales.h"
#include "cpu/attention/visible_range.h"
#include "cpu/base/dispatch.h"
#include "cpu/base/vec_math.h"
#include "cpu/kernels.h"

namespace vllm_kernels::cpu {
namespace {

constexpr int kMinPackedRows = 12;  // of a tile; for fewer rows packing costs more than it gains
constexpr int kRowBuffers = kQueryTileRows + kMaxBlockRows;

// One task's state, about 1.1 MiB of stack.
template <typename Cache>
class PagedAttentionTask {
  static constexpr int kKvBlockWords = KvBlockLoader<Cache>::kWords;
  static constexpr int kProbStride = kKvBlockWords;  // between packed rows of p
  static constexpr int kKvBlockVectors = kKvBlockTokens / kLanes;

 public:
  PagedAttentionTask(const PagedAttentionPlan& plan, int64_t task)
      : plan_(plan),
        p_(plan.params),
        kv_(plan.params.kv),
        task_(task),
        head_size_(p_.head_size()),
        loader_(plan.params),
        stride_(loader_.stride),
        token_scales_(p_) {}

  void run() {
    const int64_t begin = plan_.first_grain(task_), end = plan_.first_grain(task_ + 1);
    for_each_query_tile(plan_, begin, end, [&](const QueryTile& tile) { run(tile, begin, end); });
  }

 private:
  void run(const QueryTile& tile, int64_t begin, int64_t end) {
    const bool starts = tile.first_grain >= begin, ends = tile.first_grain + tile.num_grains <= end;
    const int64_t skipped = starts ? 0 : begin - tile.first_grain;
    const int64_t first = tile.begin + skipped * plan_.grain_tokens;
    const int64_t last =
        ends ? tile.end : tile.begin + (end - tile.first_grain) * plan_.grain_tokens;
    begin_tile(tile);
    if (!packed_) {
      loader_.template prefetch<true>(
          tile, {.first = static_cast<int32_t>(first), .count = kv_block_size(last - first)});
    }
    for (int64_t token = first; token < last; token += kKvBlockTokens) {
      const int64_t next = token + kKvBlockTokens;
      add_kv_block(tile,
                   {.first = static_cast<int32_t>(token), .count = kv_block_size(last - token)},
                   {.first = static_cast<int32_t>(next), .count = kv_block_size(last - next)});
    }
    if constexpr (kHasTokenZeros<Cache>) add_zeros(tile.queries * tile.heads);
    end_split(plan_, task_, starts, ends, tile.rows(), [&](int row) -> RowState {
      return {row_max_[row], row_sum_[row], row_sum_[row], out_ + row * stride_};
    });
  }

  void begin_tile(const QueryTile& tile) {
    const int rows = tile.queries * tile.heads;
    packed_ = rows >= kMinPackedRows;
    loader_.begin_tile(packed_);
    const int words = loader_.words;
    dispatch_float(p_.dtype, [&](auto tag) {
      for (int row = 0; row < rows; ++row) {
        const int64_t token = tile.first_token + row / tile.heads;
        const int64_t head = tile.first_head + row % tile.heads;
        loader_.copy_row(static_cast<const decltype(tag)*>(p_.query) + token * p_.query_stride +
                             head * head_size_,
                         query_ + row * words);
      }
    });
    for (int row = 0; row < rows; ++row) {
      row_sum_[row] = zero_sum_[row] = 0.0f;
      row_max_[row] = -kInfinity;
      if constexpr (kHasTokenZeros<Cache>) {
        query_sum_[row] = p_.scale * sum_of(query_ + row * words, head_size_);
      }
    }
    const int buffer_rows = packed_ ? rows + kMaxBlockRows : rows;  // whole gemm blocks
    for (int i = rows * words; i < buffer_rows * words; ++i) query_[i] = 0.0f;
    for (int i = 0; i < buffer_rows * stride_; ++i) out_[i] = 0.0f;
    score_scale_ = p_.scale * scale_of(kv_, true, tile.kv_head);
  }

  // Adds the sums of p times V's zero, which are the same in every dimension.
  void add_zeros(int rows) {
    for (int row = 0; row < rows; ++row) {
      float* out = out_ + row * stride_;
      for (int d = 0; d < stride_; d += kLanes) store(out + d, load(out + d) + zero_sum_[row]);
    }
  }

  // Prefetches V while K is multiplied, and the next K while V is multiplied.
  void add_kv_block(const QueryTile& tile, KvBlock kv_block, KvBlock next) {
    if (token_scales_.any()) read_token_scales(tile, kv_block, next);
    if (packed_) return add_kv_block_packed(tile, kv_block, next);
    if (kv_.layout != KvLayout::kVllm) return add_kv_block_token_rows(tile, kv_block, next);
    loader_.template prefetch<false>(tile, kv_block);
    loader_.upcast_keys(tile, kv_block);
    for (int query = 0; query < tile.queries; ++query) {
      set_visible(tile, query, kv_block.first, kv_block.count);
      for (int head = 0; head < tile.heads; ++head) {
        if (any_visible(query)) score_row(tile, query, head, kv_block.first);
      }
    }
    loader_.template prefetch<true>(tile, next);
    loader_.upcast_values(tile, kv_block);
    for (int query = 0; query < tile.queries; ++query) {
      if (!any_visible(query)) continue;
      for (int head = 0; head < tile.heads; ++head) {
        add_columns(query * tile.heads + head, visible_[query]);
      }
    }
  }

  void read_token_scales(const QueryTile& tile, KvBlock kv_block, KvBlock next) {
    loader_.for_each_page(tile, kv_block, [&](int64_t page, int slot, int slots, int at) {
      token_scales_.read(page, tile.kv_head, slot, slots, at);
    });
    token_scales_.clear(kv_block.count, kKvBlockTokens);
    loader_.for_each_page(tile, next, [&](int64_t page, int slot, int slots, int) {
      token_scales_.prefetch(page, tile.kv_head, slot, slots);
    });
  }

  void add_kv_block_token_rows(const QueryTile& tile, KvBlock kv_block, KvBlock next) {
    const int rows = tile.queries * tile.heads;
    VisibleRange any = {.begin = kKvBlockTokens, .end = 0};  // by any query
    bool same_visible = true;
    for (int query = 0; query < tile.queries; ++query) {
      set_visible(tile, query, kv_block.first, kv_block.count);
      const VisibleRange visible = visible_[query];
      same_visible =
          same_visible && visible.begin == visible_[0].begin && visible.end == visible_[0].end;
      if (visible.begin >= visible.end) continue;
      any = {.begin = min_int32(any.begin, visible.begin), .end = max_int32(any.end, visible.end)};
    }
    loader_.template row_pointers<true>(tile, kv_block, keys_);
    loader_.template row_pointers<false>(tile, kv_block, values_);
    loader_.template row_pointers<true>(tile, next, next_keys_);
    const int bytes = kv_.head_size * static_cast<int>(sizeof(Cache));
    LinePrefetcher values(values_, kv_block.count, bytes), next_keys(next_keys_, next.count, bytes);
    const int begin = any.begin / kLanes * kLanes;
    for_prefetching_row_blocks(0, rows, [&](auto num_rows, auto prefetches, int row) {
      score_token_rows<FloatTokenLanes<Cache>, num_rows, prefetches>(
          keys_ + begin, 0, any.end - begin, kv_.head_size, query_ + row * stride_, stride_, 1.0f,
          values, probs_ + row * kKvBlockTokens + begin, kKvBlockTokens);
    });
    values.finish();
    for (int row = 0; row < rows; ++row) {
      const int query = row / tile.heads;
      if (any_visible(query)) softmax_row(tile, query, row % tile.heads, kv_block.first);
    }
    const int step = same_visible ? rows : tile.heads;
    for (int first = 0; first < rows; first += step) {
      const VisibleRange visible = visible_[first / tile.heads];
      if (visible.begin >= visible.end) continue;
      for_prefetching_row_blocks(first, first + step, [&](auto num_rows, auto prefetches, int row) {
        add_token_rows<FloatTokenLanes<Cache>, num_rows, prefetches>(
            values_ + visible.begin, 0, visible.end - visible.begin, kv_.head_size,
            probs_ + row * kKvBlockTokens + visible.begin, kKvBlockTokens, rescale_ + row,
            next_keys, out_ + row * stride_, stride_);
      });
    }
    next_keys.finish();
  }

  void add_kv_block_packed(const QueryTile& tile, KvBlock kv_block, KvBlock next) {
    const int rows = tile.queries * tile.heads;
    loader_.template prefetch<false>(tile, kv_block);
    loader_.pack_keys(tile, kv_block);
    gemm<Cache, false>({.a = query_,
                        .a_stride = loader_.words,
                        .b = loader_.packed,
                        .b_stride = kKvBlockTokens,
                        .words = loader_.words,
                        .c = probs_,
                        .c_stride = kKvBlockTokens},
                       rows, kKvBlockTokens);
    bool all_visible = true;
    for (int query = 0; query < tile.queries; ++query) {
      set_visible(tile, query, kv_block.first, kv_block.count);
      all_visible =
          all_visible && visible_[query].begin <= 0 && visible_[query].end == kv_block.count;
      for (int head = 0; head < tile.heads; ++head) {
        softmax_packed_row(tile, query, head, kv_block.first);
      }
    }
    loader_.template prefetch<true>(tile, next);
    loader_.pack_values(tile, kv_block);
    for (int row = 0; row < rows; ++row) {
      if (rescale_[row] == 1.0f) continue;
      float* out = out_ + row * stride_;
      for (int d = 0; d < stride_; d += kLanes) store(out + d, load(out + d) * rescale_[row]);
    }
    if (all_visible || all_finite<Cache>(loader_.staged, kKvBlockWords * stride_)) {
      add_pv(rows, loader_.staged, probs_, out_);
    } else {
      add_pv_visible(tile);
    }
  }

  // out += P V for the packed V of a KV block.
  void add_pv(int rows, const float* values, const float* probs, float* out) const {
    gemm<Cache, true>({.a = probs,
                       .a_stride = kProbStride,
                       .b = values,
                       .b_stride = stride_,
                       .words = kKvBlockWords,
                       .c = out,
                       .c_stride = stride_},
                      rows, stride_);
  }

  // The same where V has infinities or NaNs, since 0 * V would be NaN. Handles each query token by
  // itself and zeroes the V that is not visible to it.
  void add_pv_visible(const QueryTile& tile) {
    constexpr int kRows = 24;
    alignas(64) float out[(kRows + kMaxBlockRows) * kMaxHeadSize];
    for (int query = 0; query < tile.queries; ++query) {
      const VisibleRange visible = visible_[query];
      if (visible.begin >= visible.end) continue;
      for (int word = 0; word < kKvBlockWords; ++word) {
        const uint32_t keep = word_mask<Cache>(word, visible);
        for (int d = 0; d < stride_; d += kLanes) {
          const VecUint bits = as_bits(load(loader_.staged + word * stride_ + d)) & keep;
          store(loader_.packed + word * stride_ + d, as_float(bits));
        }
      }
      const int first = query * tile.heads, end = first + tile.heads;
      for (int row = first; row < end; row += kRows) {
        const int rows = min_int32(kRows, end - row);
        std::memcpy(out, out_ + row * stride_, sizeof(float) * rows * stride_);
        add_pv(rows, loader_.packed, probs_ + row * kProbStride, out);
        std::memcpy(out_ + row * stride_, out, sizeof(float) * rows * stride_);
      }
    }
  }

  bool any_visible(int query) const { return visible_[query].begin < visible_[query].end; }

  void set_visible(const QueryTile& tile, int query, int32_t first, int count) {
    const int64_t position = tile.first_position + query;
    const VisibleTokens visible = visible_stored_tokens(p_, position, position, tile.keys.count);
    const int begin = visible.begin - first, end = visible.end - first;
    visible_[query] = {.begin = begin > 0 ? begin : 0, .end = end < count ? end : count};
  }

  // --- scores and softmax

  void score_row(const QueryTile& tile, int query, int head, int32_t first) {
    const int row = query * tile.heads + head;
    const VisibleRange visible = visible_[query];
    float* probs = probs_ + row * kKvBlockTokens;
    for (int token = visible.begin / kLanes * kLanes; token < visible.end; token += kLanes) {
      store(probs + token, dot(query_ + row * stride_, token));
    }
    softmax_row(tile, query, head, first);
  }

  // The softmax of scores in probs_, for the packed GEMM: a whole KV block, p as packed words.
  void softmax_packed_row(const QueryTile& tile, int query, int head, int32_t first) {
    const int row = query * tile.heads + head;
    const VisibleRange visible = visible_[query];
    float* probs = probs_ + row * kKvBlockTokens;
    const bool any = visible.begin < visible.end;
    const bool all_visible = !p_.tree_mask.any() || first + kKvBlockTokens <= tile.first_new;
    if (visible.begin == 0 && visible.end == kKvBlockTokens && plain_scores_ && all_visible) {
      return softmax_full_row(row);
    }
    if (any) {
      softmax_row(tile, query, head, first);
    } else {
      rescale_[row] = 1.0f;
    }
    const int begin = any ? visible.begin / kLanes * kLanes : kKvBlockTokens;
    const int end = any ? (visible.end + kLanes - 1) / kLanes * kLanes : kKvBlockTokens;
    for (int token = 0; token < begin; token += kLanes) store(probs + token, Vec{});
    for (int token = end; token < kKvBlockTokens; token += kLanes) store(probs + token, Vec{});
    if constexpr (kPairs<Cache>) {
      Vec all[kKvBlockVectors];
      for (int i = 0; i < kKvBlockVectors; ++i) all[i] = load(probs + i * kLanes);
      store_probs(row, all);
    }
  }
  // The same where the whole KV block is visible and the scores are only scaled.
  void softmax_full_row(int row) {
    const float* scores = probs_ + row * kKvBlockTokens;
    Vec all[kKvBlockVectors];
    Vec lane_max = splat(-kInfinity), sums = {};
#pragma GCC unroll 4
    for (int i = 0; i < kKvBlockVectors; ++i) {
      all[i] = load(scores + i * kLanes) * score_scale_;
      if (token_scales_.any()) {
        all[i] = token_scales_.score(i * kLanes, all[i], query_sum_[row]);
      }
      lane_max = maximum(all[i], lane_max);
    }
    const float new_max = raised_max(row, lane_max);
    const Vec shift = splat(new_max == -kInfinity ? 0.0f : new_max);
    Vec zeros = {};
#pragma GCC unroll 4
    for (int i = 0; i < kKvBlockVectors; ++i) {
      all[i] = exp(all[i] - shift);
      sums += all[i];
      if constexpr (kHasTokenZeros<Cache>) {
        zeros = fma(all[i], token_scales_.value_zero(i * kLanes), zeros);
      }
      if (token_scales_.any()) all[i] *= token_scales_.value(i * kLanes);
    }
    store_probs(row, all);
    update_row(row, new_max, sums, zeros);
  }

  // row_max with the scores of a KV block.
  float raised_max(int row, Vec lane_max) const {
    lane_max = reduce_lanes(lane_max, [](Vec a, Vec b) { return maximum(a, b); });
    return lane_max[0] > row_max_[row] ? lane_max[0] : row_max_[row];
  }
  // Sets row_max and adds the sums of a KV block's p to row_sum, those of p times zero to zero_sum.
  void update_row(int row, float new_max, Vec sums, Vec zeros) {
    rescale_[row] = rescale_factor(row_max_[row], new_max);
    row_max_[row] = new_max;
    sums = reduce_lanes(sums, [](Vec a, Vec b) { return a + b; });
    row_sum_[row] = row_sum_[row] * rescale_[row] + sums[0];
    if constexpr (kHasTokenZeros<Cache>) {
      zero_sum_[row] = zero_sum_[row] * rescale_[row] + sum(zeros);
    }
  }

  // Stores a row of p as packed words. bfloat16 pairs take half of the row's space.
  void store_probs(int row, const Vec* all) {
    float* to = probs_ + row * kProbStride;
#if defined(__AVX512BF16__)
    if constexpr (kPairs<Cache>) {
#pragma GCC unroll 4
      for (int i = 0; i < kKvBlockVectors; i += 2, to += kLanes) {
        store_raw(to, _mm512_cvtne2ps_pbh((__m512)all[i + 1], (__m512)all[i]));
      }
      return;
    }
#endif
#pragma GCC unroll 4
    for (int i = 0; i < kKvBlockVectors; ++i) store(to + i * kLanes, all[i]);
  }

  // Replaces the scores in probs_ by p = exp(score - row_max), 0 for tokens that are not visible.
  // Sets rescale_[row], the factor by which earlier sums must be rescaled.
  void softmax_row(const QueryTile& tile, int query, int head, int32_t first) {
    const int row = query * tile.heads + head;
    const VisibleRange visible = visible_[query];
    const int from = visible.begin / kLanes * kLanes;
    float* probs = probs_ + row * kKvBlockTokens;
    const float position = static_cast<float>(first - tile.first_position - query);  // of token 0
    Vec lane_max = splat(-kInfinity);
    for (int token = from; token < visible.end; token += kLanes) {
      const Vec numbers = lanes_ + splat(static_cast<float>(token));
      Vec score = load(probs + token) * score_scale_;
      if (token_scales_.any()) score = token_scales_.score(token, score, query_sum_[row]);
      score = modify_scores(p_, tile.first_head + head, score, [&] {
        if (!p_.stripe.any()) return numbers + splat(position);
        return stripe_distances(p_.stripe, first + token, tile.first_position + query);
      });
      score = select(is_visible(numbers, visible), score, splat(-kInfinity));
      if (p_.tree_mask.any())
        score = masked_by_tree(p_.tree_mask, tile, query, first + token, score);
      lane_max = maximum(score, lane_max);
      store(probs + token, score);
    }
    const float new_max = raised_max(row, lane_max);
    const Vec shift = splat(new_max == -kInfinity ? 0.0f : new_max);
    Vec sums = {}, zeros = {};
    for (int token = from; token < visible.end; token += kLanes) {
      const Vec score = load(probs + token);
      Vec prob = exp(score - shift);
      sums += prob;
      if (token_scales_.any()) {  // a scale that the query token does not see may be NaN
        const VecInt keep = score != splat(-kInfinity);
        if constexpr (kHasTokenZeros<Cache>) {
          zeros += select(keep, prob * token_scales_.value_zero(token), Vec{});
        }
        prob = select(keep, prob * token_scales_.value(token), Vec{});
      }
      store(probs + token, prob);
    }
    update_row(row, new_max, sums, zeros);
  }

  // q . k of tokens [token, token + kLanes).
  Vec dot(const float* query, int token) const {
    Vec sums[kLanes] = {};
    const float* key = loader_.staged + token * stride_;
    for (int d = 0; d < stride_; d += kLanes) {
      const Vec q = load(query + d);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) sums[i] = fma(load(key + i * stride_ + d), q, sums[i]);
    }
    return sum_each(sums);
  }

  // --- values

  // V in columns: a lane is a token. V of tokens that are not visible may be NaN and is masked.
  void add_columns(int row, VisibleRange visible) {
    const int from = visible.begin / kLanes * kLanes;
    const float* probs = probs_ + row * kKvBlockTokens;
    float* out = out_ + row * stride_;
    for (int d = 0; d < head_size_; d += kLanes) {
      Vec sums[kLanes] = {};
      for (int token = from; token < visible.end; token += kLanes) {
        const Vec prob = load(probs + token);
        const VecInt keep = is_visible(lanes_ + splat(static_cast<float>(token)), visible);
        const float* value = loader_.staged + d * kKvBlockTokens + token;
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) {
          const VecInt bits = (VecInt)load(value + i * kKvBlockTokens) & keep;
          sums[i] = fma(as_float(bits), prob, sums[i]);
        }
      }
      store(out + d, fma(load(out + d), splat(rescale_[row]), sum_each(sums)));
    }
  }

  const PagedAttentionPlan& plan_;
  const PagedAttentionParams& p_;
  const PagedKv& kv_;
  const int64_t task_;
  const int head_size_;
  KvBlockLoader<Cache> loader_;
  const int stride_;  // between rows of out_, and of V
  BlockScales<Cache, kKvBlockTokens> token_scales_;
  const Vec lanes_ = lane_numbers();
  float score_scale_ = 1.0f;
  const bool plain_scores_ = !p_.modifies_scores();
  bool packed_ = false;

  alignas(64) float query_[kRowBuffers * kMaxHeadSize];  // [rows][loader_.words]
  alignas(64) float out_[kRowBuffers * kMaxHeadSize];    // [rows][stride_], not divided by row_sum_
  alignas(64) float probs_[kRowBuffers * kKvBlockTokens];  // [rows][kKvBlockTokens]: scores, then p
  float row_max_[kQueryTileRows];
  float row_sum_[kQueryTileRows];
  float zero_sum_[kQueryTileRows];   // of p times V's zero
  float query_sum_[kQueryTileRows];  // of the query, times the softmax scale
  float rescale_[kQueryTileRows];
  VisibleRange visible_[kQueryTileRows];
  const char* keys_[kKvBlockTokens + kLanes];  // rows of the KV block's tokens
  const char* values_[kKvBlockTokens + kLanes];
  const char* next_keys_[kKvBlockTokens + kLanes];
};

template <typename Cache>
__attribute__((noinline)) void run_task(const PagedAttentionPlan& plan, int64_t task) {
  if constexpr (kPairs<Cache>) configure_amx_tiles();
  PagedAttentionTask<Cache>(plan, task).run();
  if constexpr (kPairs<Cache>) release_amx_tiles();
}

Loop loop_of(const PagedAttentionPlan& plan) {
  return {.count = plan.tasks};
}

void run(const PagedAttentionPlan& plan, int64_t begin, int64_t end) {
  for (int64_t task = begin; task < end; ++task) {
    dispatch_attention_cache(plan.params.kv.dtype,
                             [&](auto tag) { run_task<decltype(tag)>(plan, task); });
  }
}

}  // namespace

VLLM_KERNELS_CPU_KERNEL(PagedAttentionPlan, loop_of, run)

}  // namespace vllm_kernels::cpu
