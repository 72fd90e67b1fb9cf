// Attention of any query tokens to pages of any layout, or to contiguous keys, with an online
// softmax over pieces of kPieceTokens tokens. For tiles of many rows a piece's K, then its V, is
// packed once and multiplied in blocks (bf16 as bf16 where there are products of it). For few rows
// it is widened to floats once in layout vllm, else once for every 4 of them, from where it lies.
#include "cpu/attention/paged_attention.h"

#include "cpu/attention/epilogue.h"
#include "cpu/attention/kv_blocks.h"
#include "cpu/attention/packed_gemm.h"
#include "cpu/attention/page_lanes.h"
#include "cpu/attention/row_dot.h"
#include "cpu/base/dispatch.h"
#include "cpu/base/vec_math.h"
#include "cpu/kernels.h"

namespace vllm_kernels::cpu {
namespace {

constexpr int kManyRows = 12;  // of a tile, from which packing pays
constexpr int kRowBuffers = kTileRows + kMostBlockRows;

inline Vec lane_numbers() {
  Vec lanes;
  for (int i = 0; i < kLanes; ++i) lanes[i] = static_cast<float>(i);
  return lanes;
}

// One task's state, about 1.1 MiB of stack.
template <typename Cache>
class GeneralAttention {
  static constexpr int kPieceWords = AttentionPieces<Cache>::kWords;
  static constexpr int kWeightStride = kPieceWords;  // of rows of weights, packed
  static constexpr int kPieceVectors = kPieceTokens / kLanes;

 public:
  GeneralAttention(const GeneralAttentionWork& work, int64_t task)
      : work_(work),
        p_(work.params),
        kv_(work.params.kv),
        task_(task),
        head_size_(kv_.head_size),
        pieces_(work.params),
        stride_(pieces_.stride) {}

  void run() {
    const int64_t begin = work_.first_unit(task_), end = work_.first_unit(task_ + 1);
    for_each_tile(work_, begin, end, [&](const AttentionTile& tile) { run(tile, begin, end); });
  }

 private:
  void run(const AttentionTile& tile, int64_t begin, int64_t end) {
    const bool starts = tile.first_unit >= begin, ends = tile.first_unit + tile.units <= end;
    const int64_t skipped = starts ? 0 : begin - tile.first_unit;
    const int64_t first = tile.begin + skipped * work_.unit_tokens;
    const int64_t last = ends ? tile.end : tile.begin + (end - tile.first_unit) * work_.unit_tokens;
    begin_tile(tile);
    if (!many_rows_) {
      pieces_.template prefetch<true>(
          tile, {.first = static_cast<int32_t>(first), .count = piece_size(last - first)});
    }
    for (int64_t token = first; token < last; token += kPieceTokens) {
      const int64_t next = token + kPieceTokens;
      add_piece(tile, {.first = static_cast<int32_t>(token), .count = piece_size(last - token)},
                {.first = static_cast<int32_t>(next), .count = piece_size(last - next)});
    }
    const int rows = tile.queries * tile.heads;
    if (starts && ends) {
      for (int row = 0; row < rows; ++row) {
        finish(p_, tile.first_token + row / tile.heads, tile.first_head + row % tile.heads,
               {.maximum = maximum_[row], .sum = sum_[row], .values = out_ + row * stride_});
      }
    } else {
      float* slot = work_.partials + (2 * task_ + (starts ? 1 : 0)) * work_.partial_size();
      for (int row = 0; row < rows; ++row, slot += head_size_ + 2) {
        slot[0] = sum_[row];
        slot[1] = maximum_[row];
        for (int d = 0; d < head_size_; ++d) slot[2 + d] = out_[row * stride_ + d];
      }
    }
  }

  void begin_tile(const AttentionTile& tile) {
    const int rows = tile.queries * tile.heads;
    many_rows_ = rows >= kManyRows;
    pieces_.begin_tile(many_rows_);
    const int words = pieces_.words;
    dispatch_float(p_.dtype, [&](auto tag) {
      for (int row = 0; row < rows; ++row) {
        const int64_t token = tile.first_token + row / tile.heads;
        const int64_t head = tile.first_head + row % tile.heads;
        pieces_.copy_row(static_cast<const decltype(tag)*>(p_.query) + token * p_.query_stride +
                             head * head_size_,
                         query_ + row * words);
      }
    });
    for (int row = 0; row < rows; ++row) {
      sum_[row] = 0.0f;
      maximum_[row] = -kInfinity;
    }
    const int blocks = many_rows_ ? rows + kMostBlockRows : rows;  // whole ones
    for (int i = rows * words; i < blocks * words; ++i) query_[i] = 0.0f;
    for (int i = 0; i < blocks * stride_; ++i) out_[i] = 0.0f;
    score_scale_ = p_.scale * key_scale(kv_, tile.kv_head);
  }

  // While one of K and V is multiplied, what comes next is fetched.
  void add_piece(const AttentionTile& tile, Piece piece, Piece next) {
    if (many_rows_) return add_piece_in_blocks(tile, piece, next);
    if (kv_.layout != KvLayout::kVllm) return add_piece_in_rows(tile, piece, next);
    pieces_.template prefetch<false>(tile, piece);
    pieces_.widen_keys(tile, piece.first, piece.count);
    for (int query = 0; query < tile.queries; ++query) {
      see_piece(tile, query, piece.first, piece.count);
      for (int head = 0; head < tile.heads; ++head) {
        if (sees_any(query)) score_row(tile, query, head, piece.first);
      }
    }
    pieces_.template prefetch<true>(tile, next);
    pieces_.widen_values(tile, piece.first, piece.count);
    for (int query = 0; query < tile.queries; ++query) {
      if (!sees_any(query)) continue;
      for (int head = 0; head < tile.heads; ++head) {
        add_columns(query * tile.heads + head, seen_[query]);
      }
    }
  }

  void add_piece_in_rows(const AttentionTile& tile, Piece piece, Piece next) {
    const int rows = tile.queries * tile.heads;
    Seen any = {.begin = kPieceTokens, .end = 0};  // by any query
    bool all_alike = true;
    for (int query = 0; query < tile.queries; ++query) {
      see_piece(tile, query, piece.first, piece.count);
      const Seen seen = seen_[query];
      all_alike = all_alike && seen.begin == seen_[0].begin && seen.end == seen_[0].end;
      if (seen.begin >= seen.end) continue;
      any = {.begin = smaller(any.begin, seen.begin), .end = larger(any.end, seen.end)};
    }
    pieces_.template find_rows<true>(tile, piece, keys_);
    pieces_.template find_rows<false>(tile, piece, values_);
    pieces_.template find_rows<true>(tile, next, next_keys_);
    const int bytes = head_size_ * static_cast<int>(sizeof(Cache));
    LineFetch values(values_, piece.count, bytes), next_keys(next_keys_, next.count, bytes);
    const int begin = any.begin / kLanes * kLanes;
    for_row_blocks(0, rows, [&](auto block, auto fetches, int row) {
      score_token_rows<FloatTokenLanes<Cache>, block, fetches>(
          keys_ + begin, 0, any.end - begin, head_size_, query_ + row * stride_, stride_, 1.0f,
          values, weights_ + row * kPieceTokens + begin, kPieceTokens);
    });
    values.rest();
    for (int row = 0; row < rows; ++row) {
      const int query = row / tile.heads;
      if (sees_any(query)) weigh_row(tile, query, row % tile.heads, piece.first);
    }
    const int together = all_alike ? rows : tile.heads;
    for (int first = 0; first < rows; first += together) {
      const Seen seen = seen_[first / tile.heads];
      if (seen.begin >= seen.end) continue;
      for_row_blocks(first, first + together, [&](auto block, auto fetches, int row) {
        add_token_rows<FloatTokenLanes<Cache>, block, fetches>(
            values_ + seen.begin, 0, seen.end - seen.begin, head_size_,
            weights_ + row * kPieceTokens + seen.begin, kPieceTokens, decay_ + row, next_keys,
            out_ + row * stride_, stride_);
      });
    }
    next_keys.rest();
  }

  // Calls body(integral_constant of 4, 2 or 1 rows, whether they are the first, row) for blocks
  // that cover the rows.
  template <typename Body>
  static void for_row_blocks(int begin, int end, Body&& body) {
    const auto of = [&](auto block, int row) {
      if (row == 0) {
        body(block, std::true_type{}, row);
      } else {
        body(block, std::false_type{}, row);
      }
    };
    int row = begin;
    for (; row + 4 <= end; row += 4) of(std::integral_constant<int, 4>{}, row);
    if (row + 2 <= end) {
      of(std::integral_constant<int, 2>{}, row);
      row += 2;
    }
    if (row < end) of(std::integral_constant<int, 1>{}, row);
  }

  void add_piece_in_blocks(const AttentionTile& tile, Piece piece, Piece next) {
    const int rows = tile.queries * tile.heads;
    pieces_.template prefetch<false>(tile, piece);
    pieces_.pack_keys(tile, piece);
    multiply<Cache, false>({.a = query_,
                            .a_stride = pieces_.words,
                            .b = pieces_.packed,
                            .b_stride = kPieceTokens,
                            .words = pieces_.words,
                            .c = weights_,
                            .c_stride = kPieceTokens},
                           rows, kPieceTokens);
    bool all_see_all = true;
    for (int query = 0; query < tile.queries; ++query) {
      see_piece(tile, query, piece.first, piece.count);
      all_see_all = all_see_all && seen_[query].begin <= 0 && seen_[query].end == piece.count;
      for (int head = 0; head < tile.heads; ++head) {
        weigh_in_blocks(tile, query, head, piece.first);
      }
    }
    pieces_.template prefetch<true>(tile, next);
    pieces_.pack_values(tile, piece);
    for (int row = 0; row < rows; ++row) {
      if (decay_[row] == 1.0f) continue;
      float* out = out_ + row * stride_;
      for (int d = 0; d < stride_; d += kLanes) store(out + d, load(out + d) * decay_[row]);
    }
    if (all_see_all || all_finite<Cache>(pieces_.wide, kPieceWords * stride_)) {
      add_weighted(rows, pieces_.wide, weights_, out_);
    } else {
      add_only_seen(tile);
    }
  }

  // out += weights V, of the packed values of a piece.
  void add_weighted(int rows, const float* values, const float* weights, float* out) const {
    multiply<Cache, true>({.a = weights,
                           .a_stride = kWeightStride,
                           .b = values,
                           .b_stride = stride_,
                           .words = kPieceWords,
                           .c = out,
                           .c_stride = stride_},
                          rows, stride_);
  }

  // The same where 0 * V may be NaN: query by query, with zeros for what it does not see.
  void add_only_seen(const AttentionTile& tile) {
    constexpr int kRows = 24;
    alignas(64) float out[(kRows + kMostBlockRows) * kMaxHeadSize];
    for (int query = 0; query < tile.queries; ++query) {
      const Seen seen = seen_[query];
      if (seen.begin >= seen.end) continue;
      for (int word = 0; word < kPieceWords; ++word) {
        const uint32_t keep = word_mask(word, seen);
        for (int d = 0; d < stride_; d += kLanes) {
          const VecUint bits = as_bits(load(pieces_.wide + word * stride_ + d)) & keep;
          store(pieces_.packed + word * stride_ + d, as_float(bits));
        }
      }
      const int first = query * tile.heads, end = first + tile.heads;
      for (int row = first; row < end; row += kRows) {
        const int rows = smaller(kRows, end - row);
        std::memcpy(out, out_ + row * stride_, sizeof(float) * rows * stride_);
        add_weighted(rows, pieces_.packed, weights_ + row * kWeightStride, out);
        std::memcpy(out_ + row * stride_, out, sizeof(float) * rows * stride_);
      }
    }
  }

  struct Seen {
    int begin, end;  // tokens of the piece
  };

  // The bits of word `word` of packed values that belong to tokens of `seen`.
  static uint32_t word_mask(int word, Seen seen) {
    const auto sees = [&](int token) { return token >= seen.begin && token < seen.end; };
    if constexpr (!kPairs<Cache>) return sees(word) ? ~0u : 0u;
    return (sees(2 * word) ? 0xffffu : 0u) | (sees(2 * word + 1) ? 0xffff0000u : 0u);
  }

  bool sees_any(int query) const { return seen_[query].begin < seen_[query].end; }

  void see_piece(const AttentionTile& tile, int query, int32_t first, int count) {
    const int64_t position = tile.first_position + query;
    const VisibleTokens seen = visible_tokens(p_, position, position, tile.keys.count);
    const int begin = seen.begin - first, end = seen.end - first;
    seen_[query] = {.begin = begin > 0 ? begin : 0, .end = end < count ? end : count};
  }

  // --- scores and weights

  void score_row(const AttentionTile& tile, int query, int head, int32_t first) {
    const int row = query * tile.heads + head;
    const Seen seen = seen_[query];
    float* weights = weights_ + row * kPieceTokens;
    for (int token = seen.begin / kLanes * kLanes; token < seen.end; token += kLanes) {
      store(weights + token, dot(query_ + row * stride_, token));
    }
    weigh_row(tile, query, head, first);
  }

  // The same of scores in weights_, but of a whole piece, and as words to multiply with.
  void weigh_in_blocks(const AttentionTile& tile, int query, int head, int32_t first) {
    const int row = query * tile.heads + head;
    const Seen seen = seen_[query];
    float* weights = weights_ + row * kPieceTokens;
    const bool any = seen.begin < seen.end;
    if (seen.begin == 0 && seen.end == kPieceTokens && plain_scores_) {
      return weigh_plain_row(row);
    }
    if (any) {
      weigh_row(tile, query, head, first);
    } else {
      decay_[row] = 1.0f;
    }
    const int begin = any ? seen.begin / kLanes * kLanes : kPieceTokens;
    const int end = any ? (seen.end + kLanes - 1) / kLanes * kLanes : kPieceTokens;
    for (int token = 0; token < begin; token += kLanes) store(weights + token, Vec{});
    for (int token = end; token < kPieceTokens; token += kLanes) store(weights + token, Vec{});
    if constexpr (kPairs<Cache>) {
      Vec all[kPieceVectors];
      for (int i = 0; i < kPieceVectors; ++i) all[i] = load(weights + i * kLanes);
      store_weights(row, all);
    }
  }

  // The same of a row that sees the whole piece, where a score is but the scaled product.
  void weigh_plain_row(int row) {
    const float* scores = weights_ + row * kPieceTokens;
    Vec all[kPieceVectors];
    Vec maxima = splat(-kInfinity), sums = {};
#pragma GCC unroll 4
    for (int i = 0; i < kPieceVectors; ++i) {
      all[i] = load(scores + i * kLanes) * score_scale_;
      maxima = maximum(all[i], maxima);
    }
    const float before = maximum_[row];
    maxima = combine_lanes(maxima, [](Vec a, Vec b) { return maximum(a, b); });
    const float updated = maxima[0] > before ? maxima[0] : before;
    const Vec shift = splat(updated == -kInfinity ? 0.0f : updated);
#pragma GCC unroll 4
    for (int i = 0; i < kPieceVectors; ++i) {
      all[i] = exp(all[i] - shift);
      sums += all[i];
    }
    store_weights(row, all);
    sums = combine_lanes(sums, [](Vec a, Vec b) { return a + b; });
    maximum_[row] = updated;
    decay_[row] = decay(before, updated);
    sum_[row] = sum_[row] * decay_[row] + sums[0];
  }

  // A row of weights as words to multiply with; of pairs, at most where the row's scores began.
  void store_weights(int row, const Vec* all) {
    float* to = weights_ + row * kWeightStride;
#if defined(__AVX512BF16__)
    if constexpr (kPairs<Cache>) {
#pragma GCC unroll 4
      for (int i = 0; i < kPieceVectors; i += 2, to += kLanes) {
        store_raw(to, _mm512_cvtne2ps_pbh((__m512)all[i + 1], (__m512)all[i]));
      }
      return;
    }
#endif
#pragma GCC unroll 4
    for (int i = 0; i < kPieceVectors; ++i) store(to + i * kLanes, all[i]);
  }

  // weights_[row] = exp(score - maximum) of the scores there, 0 where the row does not see;
  // decay_[row] what earlier sums are to be multiplied with.
  void weigh_row(const AttentionTile& tile, int query, int head, int32_t first) {
    const int row = query * tile.heads + head;
    const Seen seen = seen_[query];
    const int from = seen.begin / kLanes * kLanes;
    float* weights = weights_ + row * kPieceTokens;
    const float position = static_cast<float>(first - tile.first_position - query);  // of token 0
    Vec maxima = splat(-kInfinity);
    for (int token = from; token < seen.end; token += kLanes) {
      Vec score = load(weights + token) * score_scale_;
      if (p_.softcap > 0.0f) score = tanh(score / p_.softcap) * p_.softcap;
      const Vec numbers = lanes_ + splat(static_cast<float>(token));
      if (p_.alibi_slopes != nullptr) {
        const Vec slope = splat(p_.alibi_slopes[tile.first_head + head]);
        score = fma(-slope, absolute(numbers + splat(position)), score);
      }
      score = select(is_seen(numbers, seen), score, splat(-kInfinity));
      maxima = maximum(score, maxima);
      store(weights + token, score);
    }
    maxima = combine_lanes(maxima, [](Vec a, Vec b) { return maximum(a, b); });
    const float before = maximum_[row], piece = maxima[0];
    const float updated = piece > before ? piece : before;
    const Vec shift = splat(updated == -kInfinity ? 0.0f : updated);
    Vec sums = {};
    for (int token = from; token < seen.end; token += kLanes) {
      const Vec weight = exp(load(weights + token) - shift);
      sums += weight;
      store(weights + token, weight);
    }
    maximum_[row] = updated;
    decay_[row] = decay(before, updated);
    sums = combine_lanes(sums, [](Vec a, Vec b) { return a + b; });
    sum_[row] = sum_[row] * decay_[row] + sums[0];
  }

  static VecInt is_seen(Vec numbers, Seen seen) {
    return (VecInt)(numbers >= splat(static_cast<float>(seen.begin))) &
           (VecInt)(numbers < splat(static_cast<float>(seen.end)));
  }

  // q . k of the kLanes tokens from `token` on.
  Vec dot(const float* query, int token) const {
    Vec sums[kLanes] = {};
    const float* key = pieces_.wide + token * stride_;
    for (int d = 0; d < stride_; d += kLanes) {
      const Vec q = load(query + d);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) sums[i] = fma(load(key + i * stride_ + d), q, sums[i]);
    }
    return sum_each(sums);
  }

  // --- values

  // Values in columns: a lane is a token. What the row does not see may be anything, NaN too.
  void add_columns(int row, Seen seen) {
    const int from = seen.begin / kLanes * kLanes;
    const float* weights = weights_ + row * kPieceTokens;
    float* out = out_ + row * stride_;
    for (int d = 0; d < head_size_; d += kLanes) {
      Vec sums[kLanes] = {};
      for (int token = from; token < seen.end; token += kLanes) {
        const Vec weight = load(weights + token);
        const VecInt keep = is_seen(lanes_ + splat(static_cast<float>(token)), seen);
        const float* value = pieces_.wide + d * kPieceTokens + token;
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) {
          const VecInt bits = (VecInt)load(value + i * kPieceTokens) & keep;
          sums[i] = fma(as_float(bits), weight, sums[i]);
        }
      }
      store(out + d, fma(load(out + d), splat(decay_[row]), sum_each(sums)));
    }
  }

  const GeneralAttentionWork& work_;
  const PagedAttentionParams& p_;
  const PagedKv& kv_;
  const int64_t task_;
  const int head_size_;
  AttentionPieces<Cache> pieces_;
  const int stride_;  // of rows of out_ and V
  const Vec lanes_ = lane_numbers();
  float score_scale_ = 1.0f;
  const bool plain_scores_ = p_.softcap == 0.0f && p_.alibi_slopes == nullptr;
  bool many_rows_ = false;

  alignas(64) float query_[kRowBuffers * kMaxHeadSize];    // [rows][pieces_.words]
  alignas(64) float out_[kRowBuffers * kMaxHeadSize];      // [rows][stride_], not divided by sum_
  alignas(64) float weights_[kRowBuffers * kPieceTokens];  // [rows][kPieceTokens], or of words
  float maximum_[kTileRows];
  float sum_[kTileRows];
  float decay_[kTileRows];
  Seen seen_[kTileRows];
  const char* keys_[kPieceTokens + kLanes];  // rows of the piece's tokens
  const char* values_[kPieceTokens + kLanes];
  const char* next_keys_[kPieceTokens + kLanes];
};

template <typename Cache>
__attribute__((noinline)) void run_task(const GeneralAttentionWork& work, int64_t task) {
  if constexpr (kPairs<Cache>) take_tile_registers();
  GeneralAttention<Cache>(work, task).run();
  if constexpr (kPairs<Cache>) release_tile_registers();
}

int64_t num_tasks(const GeneralAttentionWork& work) {
  return work.tasks;
}

void run(const GeneralAttentionWork& work, int64_t begin, int64_t end) {
  for (int64_t task = begin; task < end; ++task) {
    switch (work.params.kv.dtype) {
      case DType::kFp8E4M3:
        run_task<Fp8E4M3>(work, task);
        break;
      case DType::kFp8E5M2:
        run_task<Fp8E5M2>(work, task);
        break;
      case DType::kInt8:
        run_task<Int8>(work, task);
        break;
      default:
        dispatch_float(work.params.kv.dtype,
                       [&](auto tag) { run_task<decltype(tag)>(work, task); });
    }
  }
}

}  // namespace
}  // namespace vllm_kernels::cpu

VLLM_KERNELS_CPU_KERNEL(vllm_kernels::cpu::GeneralAttentionWork, vllm_kernels::cpu::num_tasks,
                        vllm_kernels::cpu::run)
