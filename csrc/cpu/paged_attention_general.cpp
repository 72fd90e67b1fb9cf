// Attention of any query tokens to pages of any layout, with an online softmax over pieces of
// kPieceTokens tokens. A piece's K, then its V, is widened to floats once for all rows of a tile.
#include "cpu/paged_attention_general.h"

#include "cpu/attention_lanes.h"
#include "cpu/attention_output.h"
#include "cpu/dispatch.h"
#include "cpu/int8.h"
#include "cpu/kernels.h"
#include "cpu/vec_math.h"

namespace vllm_kernels::cpu {
namespace {

constexpr int kPieceTokens = 32;
constexpr int kMaxHeadSize = 256;
constexpr int kValueVectors = kLanes == 16 ? 4 : 2;  // accumulators a row, in add_values()

// Into the second-level cache.
inline void prefetch_span(const char* from, int64_t bytes) {
  for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(from + line, 0, 2);
}

inline Vec lane_numbers() {
  Vec lanes;
  for (int i = 0; i < kLanes; ++i) lanes[i] = static_cast<float>(i);
  return lanes;
}

template <typename T>
inline void widen(const T* from, int count, float* to) {  // to whole vectors
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, load(from + i));
  if (i < count) store(to + i, load_partial(from + i, count - i));
}

// One task's state, about 200 KiB of stack at most.
template <typename Cache>
class GeneralAttention {
 public:
  GeneralAttention(const GeneralAttentionWork& work, int64_t task)
      : work_(work),
        p_(work.params),
        kv_(work.params.kv),
        task_(task),
        head_size_(kv_.head_size),
        stride_((head_size_ + kLanes - 1) / kLanes * kLanes) {
    for (float& element : page_) element = 0.0f;
  }

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
    dispatch_float(p_.dtype, [&](auto tag) {
      for (int row = 0; row < rows; ++row) {
        const int64_t token = tile.first_token + row / tile.heads;
        const int64_t head = tile.first_head + row % tile.heads;
        widen(static_cast<const decltype(tag)*>(p_.query) + token * p_.query_stride +
                  head * head_size_,
              head_size_, query_ + row * stride_);
      }
    });
    for (int row = 0; row < rows; ++row) {
      sum_[row] = 0.0f;
      maximum_[row] = -kInfinity;
    }
    for (int i = 0; i < rows * stride_; ++i) out_[i] = 0.0f;
    score_scale_ = p_.scale * key_scale(kv_, tile.kv_head);
  }

  struct Piece {
    int32_t first;  // token of the sequence
    int count;
  };

  static int piece_size(int64_t tokens) { return tokens < 0 ? 0 : smaller(kPieceTokens, tokens); }

  // While one of K and V is multiplied, what comes next is fetched.
  void add_piece(const AttentionTile& tile, Piece piece, Piece next) {
    const int32_t first = piece.first;
    const int count = piece.count;
    prefetch<false>(tile, piece);
    widen_keys(tile, first, count);
    for (int query = 0; query < tile.queries; ++query) {
      see_piece(tile, query, first, count);
      for (int head = 0; head < tile.heads; ++head) {
        if (seen_[query].begin < seen_[query].end) score_row(tile, query, head, first);
      }
    }
    prefetch<true>(tile, next);
    widen_values(tile, first, count);
    for (int query = 0; query < tile.queries; ++query) {
      if (seen_[query].begin >= seen_[query].end) continue;
      const int row = query * tile.heads;
      if (kv_.layout == KvLayout::kVllm) {
        for (int head = 0; head < tile.heads; ++head) add_columns(row + head, seen_[query]);
      } else {
        add_rows(row, tile.heads, seen_[query]);
      }
    }
  }

  struct Seen {
    int begin, end;  // tokens of the piece
  };

  void see_piece(const AttentionTile& tile, int query, int32_t first, int count) {
    const int64_t position = tile.first_position + query;
    const SeenTokens seen = seen_tokens(p_, position, position, tile.keys.count);
    const int begin = seen.begin - first, end = seen.end - first;
    seen_[query] = {.begin = begin > 0 ? begin : 0, .end = end < count ? end : count};
  }

  // --- pages to floats

  // Calls body(block, first slot, number of slots, first token of the piece), page by page.
  template <typename Body>
  void for_each_page(const AttentionTile& tile, int32_t first, int count, Body&& body) {
    if (p_.key_start_loc != nullptr) {
      if (count > 0) body(int64_t{0}, tile.keys.first + first, count, 0);
      return;
    }
    const int32_t* table = p_.block_tables + tile.seq * p_.block_table_stride;
    for (int done = 0; done < count;) {
      const int32_t page = (first + done) / kv_.block_size, slot = (first + done) % kv_.block_size;
      const int slots = smaller(kv_.block_size - slot, count - done);
      body(static_cast<int64_t>(table[page]), slot, slots, done);
      done += slots;
    }
  }

  template <bool keys>
  void prefetch(const AttentionTile& tile, Piece piece) {
    for_each_page(tile, piece.first, piece.count, [&](int64_t block, int slot, int slots, int) {
      const int64_t at = keys ? kv_.key_offset(block, tile.kv_head, slot, 0)
                              : kv_.value_offset(block, tile.kv_head, slot, 0);
      const char* from =
          reinterpret_cast<const char*>(static_cast<const Cache*>(keys ? kv_.key : kv_.value) + at);
      const int64_t row = head_size_ * static_cast<int64_t>(sizeof(Cache));
      if (kv_.layout == KvLayout::kVllm) {
        if (slots == kv_.block_size) prefetch_span(from, row * slots);
        return;
      }
      const int64_t stride =
          (keys ? kv_.key_token_stride : kv_.value_token_stride) * int64_t{sizeof(Cache)};
      for (int i = 0; i < slots; ++i) prefetch_span(from + i * stride, row);
    });
  }

  void widen_keys(const AttentionTile& tile, int32_t first, int count) {
    const Cache* keys = static_cast<const Cache*>(kv_.key);
    for_each_page(tile, first, count, [&](int64_t block, int slot, int slots, int at) {
      const Cache* key = keys + kv_.key_offset(block, tile.kv_head, slot, 0);
      float* to = page_ + at * stride_;
      for (int i = 0; i < slots; ++i, key += kv_.key_token_stride, to += stride_) {
        if (kv_.layout != KvLayout::kVllm) {
          widen(key, head_size_, to);
          continue;
        }
        Cache row[kMaxHeadSize];  // from chunks of 16 bytes
        for (int d = 0, chunk = 0; d < head_size_; d += kv_.x, ++chunk) {
          std::memcpy(row + d, key + chunk * kv_.key_chunk_stride, 16);
        }
        widen(row, head_size_, to);
      }
    });
  }

  // Rows [token][stride_] as K's, or with layout vllm columns [head_size][kPieceTokens].
  void widen_values(const AttentionTile& tile, int32_t first, int count) {
    const Cache* values = static_cast<const Cache*>(kv_.value);
    for_each_page(tile, first, count, [&](int64_t block, int slot, int slots, int at) {
      const Cache* value = values + kv_.value_offset(block, tile.kv_head, slot, 0);
      if (kv_.layout != KvLayout::kVllm) {
        for (int i = 0; i < slots; ++i) {
          widen(value + i * kv_.value_token_stride, head_size_, page_ + (at + i) * stride_);
        }
        return;
      }
      for (int d = 0; d < head_size_; ++d, value += kv_.value_dim_stride) {
        float* to = page_ + d * kPieceTokens + at;
        int i = 0;
        for (; i + kLanes <= slots; i += kLanes) store(to + i, load(value + i));
        if (i < slots) store_partial(to + i, load_partial(value + i, slots - i), slots - i);
      }
    });
  }

  // --- scores and weights

  // weights_[row] = exp(score - maximum), 0 where the row does not see; decay_[row] what earlier
  // sums are to be multiplied with.
  void score_row(const AttentionTile& tile, int query, int head, int32_t first) {
    const int row = query * tile.heads + head;
    const Seen seen = seen_[query];
    const int from = seen.begin / kLanes * kLanes;
    float* weights = weights_ + row * kPieceTokens;
    const float position = static_cast<float>(first - tile.first_position - query);  // of token 0
    Vec maxima = splat(-kInfinity);
    for (int token = from; token < seen.end; token += kLanes) {
      Vec score = dot(query_ + row * stride_, token) * score_scale_;
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
    const float before = maximum_[row], piece = largest(maxima);
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
    sum_[row] = sum_[row] * decay_[row] + sum(sums);
  }

  static VecInt is_seen(Vec numbers, Seen seen) {
    return (VecInt)(numbers >= splat(static_cast<float>(seen.begin))) &
           (VecInt)(numbers < splat(static_cast<float>(seen.end)));
  }

  // q . k of the kLanes tokens from `token` on.
  Vec dot(const float* query, int token) const {
    Vec sums[kLanes] = {};
    const float* key = page_ + token * stride_;
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
        const float* value = page_ + d * kPieceTokens + token;
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) {
          const VecInt bits = (VecInt)load(value + i * kPieceTokens) & keep;
          sums[i] = fma(as_float(bits), weight, sums[i]);
        }
      }
      store(out + d, fma(load(out + d), splat(decay_[row]), sum_each(sums)));
    }
  }

  // Values in rows: a lane is a dimension.
  void add_rows(int row, int heads, Seen seen) {
    int head = 0;
    for (; head + 4 <= heads; head += 4) add_rows<4>(row + head, seen);
    for (; head < heads; ++head) add_rows<1>(row + head, seen);
  }

  template <int H>
  void add_rows(int row, Seen seen) {
    int d = 0;
    for (; d + kValueVectors * kLanes <= stride_; d += kValueVectors * kLanes) {
      add_rows<H, kValueVectors>(row, seen, d);
    }
    for (; d < stride_; d += kLanes) add_rows<H, 1>(row, seen, d);
  }

  template <int H, int kVectors>
  void add_rows(int row, Seen seen, int d) {
    Vec sums[H][kVectors];
    for (int head = 0; head < H; ++head) {
      for (int i = 0; i < kVectors; ++i) {
        sums[head][i] =
            load(out_ + (row + head) * stride_ + d + i * kLanes) * splat(decay_[row + head]);
      }
    }
    for (int token = seen.begin; token < seen.end; ++token) {
      Vec value[kVectors];
      for (int i = 0; i < kVectors; ++i) value[i] = load(page_ + token * stride_ + d + i * kLanes);
      for (int head = 0; head < H; ++head) {
        const Vec weight = splat(weights_[(row + head) * kPieceTokens + token]);
        for (int i = 0; i < kVectors; ++i) sums[head][i] = fma(value[i], weight, sums[head][i]);
      }
    }
    for (int head = 0; head < H; ++head) {
      for (int i = 0; i < kVectors; ++i) {
        store(out_ + (row + head) * stride_ + d + i * kLanes, sums[head][i]);
      }
    }
  }

  const GeneralAttentionWork& work_;
  const PagedAttentionParams& p_;
  const PagedKv& kv_;
  const int64_t task_;
  const int head_size_;
  const int stride_;  // head_size in whole vectors
  const Vec lanes_ = lane_numbers();
  float score_scale_ = 1.0f;

  alignas(64) float query_[kTileRows * kMaxHeadSize];    // [rows][stride_]
  alignas(64) float out_[kTileRows * kMaxHeadSize];      // [rows][stride_], not divided by sum_
  alignas(64) float page_[kPieceTokens * kMaxHeadSize];  // widen_keys()'s, widen_values()'s
  alignas(64) float weights_[kTileRows * kPieceTokens];  // [rows][kPieceTokens]
  float maximum_[kTileRows];
  float sum_[kTileRows];
  float decay_[kTileRows];
  Seen seen_[kTileRows];
};

template <typename Cache>
__attribute__((noinline)) void run_task(const GeneralAttentionWork& work, int64_t task) {
  GeneralAttention<Cache>(work, task).run();
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

// --- merge ---------------------------------------------------------------------------------------

int64_t num_merge_tasks(const GeneralAttentionMerge& merge) {
  return merge.work.tasks;
}

// Merges the tile that starts in `task` and goes on in later ones.
void merge_tile(const GeneralAttentionWork& work, int64_t task, const AttentionTile& tile) {
  const PagedAttentionParams& p = work.params;
  const int head_size = p.kv.head_size;
  int64_t last = task + 1;
  while (work.first_unit(last + 1) < tile.first_unit + tile.units) ++last;
  const auto slot = [&](int64_t part, int row) {
    const int64_t at = part == task ? 2 * part + 1 : 2 * part;
    return work.partials + at * work.partial_size() + static_cast<int64_t>(row) * (head_size + 2);
  };
  for (int row = 0; row < tile.queries * tile.heads; ++row) {
    float maximum = -kInfinity;
    for (int64_t part = task; part <= last; ++part) {
      if (slot(part, row)[1] > maximum) maximum = slot(part, row)[1];
    }
    alignas(64) float weighted[kMaxHeadSize] = {};
    float sum = 0.0f;
    for (int64_t part = task; part <= last; ++part) {
      const float* from = slot(part, row);
      const float share = decay(from[1], maximum);
      sum += share * from[0];
      for (int d = 0; d < head_size; ++d) weighted[d] += share * from[2 + d];
    }
    finish(p, tile.first_token + row / tile.heads, tile.first_head + row % tile.heads,
           {.maximum = maximum, .sum = sum, .values = weighted});
  }
}

void run_merge(const GeneralAttentionMerge& merge, int64_t begin, int64_t end) {
  const GeneralAttentionWork& work = merge.work;
  for (int64_t task = begin; task < end; ++task) {
    const int64_t after = work.first_unit(task + 1);
    for_each_tile(work, after - 1, after, [&](const AttentionTile& tile) {
      const bool starts = tile.first_unit >= work.first_unit(task);
      if (starts && tile.first_unit + tile.units > after) merge_tile(work, task, tile);
    });
  }
}

}  // namespace
}  // namespace vllm_kernels::cpu

VLLM_KERNELS_CPU_KERNEL(vllm_kernels::cpu::GeneralAttentionWork, vllm_kernels::cpu::num_tasks,
                        vllm_kernels::cpu::run)
VLLM_KERNELS_CPU_KERNEL(vllm_kernels::cpu::GeneralAttentionMerge,
                        vllm_kernels::cpu::num_merge_tasks, vllm_kernels::cpu::run_merge)
