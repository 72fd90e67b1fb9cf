// Decode attention with an online softmax over tiles of pages. A tile's K is read once for all the
// query heads of its KV head, then its V; while one of them is multiplied the other is prefetched.
#include "cpu/attention/paged_attention_decode.h"

#include "cpu/attention/epilogue.h"
#include "cpu/attention/page_dot.h"
#include "cpu/attention/row_dot.h"
#include "cpu/base/dispatch.h"
#include "cpu/base/int8.h"
#include "cpu/base/vec_math.h"
#include "cpu/kernels.h"

namespace vllm_kernels::cpu {
namespace {

// K of a tile, at most: with its V and the next K it stays in the second-level cache.
constexpr size_t kTileBytes = 32 << 10;
constexpr int kMostTileTokens = kMostRowTokens;  // where pages are not larger
constexpr int kMinTileTokens = 32;

// Calls body(integral_constant H, first) for head blocks of 4, 2 and 1 that cover `heads` heads.
template <typename Body>
inline void for_head_blocks(int heads, Body&& body) {
  int head = 0;
  for (; head + 4 <= heads; head += 4) body(std::integral_constant<int, 4>{}, head);
  if (head + 2 <= heads) {
    body(std::integral_constant<int, 2>{}, head);
    head += 2;
  }
  if (head < heads) body(std::integral_constant<int, 1>{}, head);
}

// A finished part of a row: not yet divided by sum.
struct Partial {
  float maximum[kMaxHeads];
  float sum[kMaxHeads];
  float out[kMaxHeads * kMaxHeadSize];  // [heads][head_size]
};

// One task's state. About 400 KiB of stack at most, touched as far as the group and head size
// reach.
template <typename Cache, bool kTokenRows>
class Attention {
 public:
  Attention(const PagedAttentionWork& work, int64_t task)
      : work_(work),
        p_(work.params),
        task_(task),
        head_size_(p_.kv.head_size),
        head_vectors_(kTokenRows
                          ? (head_size_ + Rows::kStep - 1) / Rows::kStep * Rows::kStep / kLanes
                          : (head_size_ + kLanes - 1) / kLanes),
        block_size_(kTokenRows ? 1 : p_.kv.block_size),
        sparse_(p_.sparse.on()) {}

  void run() {
    Tile tiles[2];
    int tile_tokens = kMostTileTokens;
    while (tile_tokens > kMinTileTokens && tile_tokens * head_size_ * sizeof(Cache) > kTileBytes) {
      tile_tokens /= 2;
    }
    if (tile_tokens < block_size_) tile_tokens = block_size_;
    if (kTokenRows && p_.kv.layout == KvLayout::kNHD) tile_tokens = kMinTileTokens;
    Tiles from(work_, work_.first_unit(task_), work_.first_unit(task_ + 1), tile_tokens);
    bool more = from.next(tiles[0]);
    if (more) prefetch(tiles[0]);
    for (int i = 0; more; i ^= 1) {
      const Tile& tile = tiles[i];
      Tile& next = tiles[i ^ 1];
      more = from.next(next);
      if (!more) next.pages = 0;
      if (tile.starts_segment) begin_segment(tile.segment);
      if (tile.pages > 0) {
        if constexpr (kTokenRows) {
          add_token_tile(tile, next);
        } else {
          add_tile(tile, next);
        }
      }
      if (tile.ends_segment) end_segment(tile.segment);
    }
  }

 private:
  using Rows = TokenLanes<Cache>;
  using Values = ValueLanes<Cache>;
  using Packed = std::conditional_t<kTokenRows, Rows, Values>;
  using Weight = typename Packed::Part;

  void prefetch(const Tile& tile) {
    if constexpr (kTokenRows) {
      LineFetch(tile.key, tile.pages, span_bytes(tile)).rest();
      LineFetch(tile.value, tile.pages, span_bytes(tile)).rest();
      return;
    }
    const int64_t bytes = static_cast<int64_t>(head_size_) * block_size_ * sizeof(Cache);
    for (int page = 0; page < tile.pages; ++page) prefetch_span(tile.key[page], bytes);
  }

  void begin_segment(const Segment& segment) {
    clear(segment);
    if constexpr (!kTokenRows) {
      logit_scale_ = KeyLanes<Cache>::kScale * p_.scale * key_scale(p_.kv, segment.kv_head);
    }
    const int64_t token = query_token(p_, segment.seq);
    if (token < 0) return;
    alignas(64) float rows[4 * kMaxHeadSize];
    for_head_blocks(segment.heads, [&](auto heads, int first) {
      constexpr int H = decltype(heads)::value;
      dispatch_float(p_.dtype, [&](auto tag) {
        const auto* query = static_cast<const decltype(tag)*>(p_.query) + token * p_.query_stride +
                            static_cast<int64_t>(segment.first_head + first) * head_size_;
        const int count = H * head_size_;
        int i = 0;
        for (; i + kLanes <= count; i += kLanes) store(rows + i, load(query + i));
        if (i < count) store_partial(rows + i, load_partial(query + i, count - i), count - i);
      });
      if constexpr (kTokenRows) {
        for (int i = 0; i < H; ++i) {
          Rows::pack_query(rows + i * head_size_, head_size_, query_ + (first + i) * row_stride());
        }
      } else {
        pack_query<Cache, H>(rows, head_size_, query_ + first * head_size_);
      }
    });
  }

  // --- token rows

  int row_stride() const { return head_vectors_ * kLanes; }  // of query_ and out_
  int span_bytes(const Tile& tile) const {
    return tile.segment.kv_heads * head_size_ * static_cast<int>(sizeof(Cache));
  }

  // While it is multiplied, the next tile is fetched.
  void add_token_tile(const Tile& tile, const Tile& next) {
    LineFetch next_keys(next.key, next.pages, span_bytes(next));
    LineFetch next_values(next.value, next.pages, span_bytes(next));
    const int tokens = (tile.tokens + Rows::kTokens - 1) / Rows::kTokens * Rows::kTokens;
    const int group = tile.segment.heads / tile.segment.kv_heads;
    if (p_.alibi_slopes != nullptr) set_distances(tile);
    for (int kv_head = 0; kv_head < tile.segment.kv_heads; ++kv_head) {
      const int64_t offset = kv_head * int64_t{sizeof(Cache)} * head_size_;
      const float scale =
          Rows::kScale * p_.scale * key_scale(p_.kv, tile.segment.kv_head + kv_head);
      for_head_blocks(group, [&](auto heads, int block) {
        constexpr int H = decltype(heads)::value;
        const int first = kv_head * group + block;
        const float* query = query_ + first * row_stride();
        float* out = reinterpret_cast<float*>(out_) + first * row_stride();
        const auto of = [&](auto fetches) {
          score_token_rows<Rows, H, fetches>(tile.key, offset, tile.tokens, head_size_, query,
                                             row_stride(), scale, next_keys, scores_, kTileTokens);
          float factors[H];
          for (int head = 0; head < H; ++head) factors[head] = weigh<H>(tile, tokens, first, head);
          add_token_rows<Rows, H, fetches>(
              tile.value, offset, tile.tokens, head_size_, reinterpret_cast<float*>(weights_),
              kTileTokens / Rows::kPair, factors, next_values, out, row_stride());
        };
        block == 0 ? of(std::true_type{}) : of(std::false_type{});
      });
    }
    next_keys.rest();
    next_values.rest();
  }

  // --- both

  void clear(const Segment& segment) {
    for (int head = 0; head < segment.heads; ++head) {
      maximum_[head] = -kInfinity;
      sum_[head] = 0.0f;
    }
    for (int i = 0; i < segment.heads * head_vectors_; ++i) out_[i] = Vec{};
  }

  // --- pages of layout vllm

  void add_tile(const Tile& tile, const Tile& next) {
    const int units = tile.tokens / Values::kTokens;
    const int rest = tile.tokens % Values::kTokens;
    const int pieces = Values::kTokens > block_size_ ? Values::kTokens / block_size_ : 1;
    if (pieces == 1) {
      add_tile<1>(tile, next, units, rest);
    } else if (pieces == 2) {
      if constexpr (Values::kTokens > kMinBlockSize) add_tile<2>(tile, next, units, rest);
    } else {
      if constexpr (Values::kTokens > 2 * kMinBlockSize) add_tile<4>(tile, next, units, rest);
    }
  }

  template <int kPieces>
  void add_tile(const Tile& tile, const Tile& next, int units, int rest) {
    // Where the units' tokens lie in V.
    ValueRows rows;
    rows.stride = static_cast<int64_t>(block_size_) * sizeof(Cache);
    rows.units = units;
    rows.tail = nullptr;
    rows.tail_stride = Values::kBytes;
    constexpr int kPieceTokens = Values::kTokens / kPieces;
    const int all = (units + (rest > 0)) * kPieces;
    for (int i = 0, token = 0; i < all; ++i, token += kPieceTokens) {
      int page = token / block_size_;
      if (page > tile.pages) page = tile.pages;
      rows.rows[i] = tile.value[page] + token % block_size_ * sizeof(Cache);
    }
    if (rest > 0) {
      copy_tail<Cache, kPieces>(rows.rows + units * kPieces, rows.stride, rest, head_size_, tail_);
      rows.tail = tail_;
    }
    const int tokens = (units + (rest > 0)) * Values::kTokens;
    const Tile& ahead = next.pages > 0 ? next : tile;
    if (p_.alibi_slopes != nullptr) set_distances(tile);
    for_head_blocks(tile.segment.heads, [&](auto heads, int first) {
      constexpr int H = decltype(heads)::value;
      const float* query = query_ + first * head_size_;
      if (first == 0) {
        score_tile<Cache, H, true>(tile, query, head_size_, block_size_, logit_scale_, scores_);
      } else {
        score_tile<Cache, H, false>(tile, query, head_size_, block_size_, logit_scale_, scores_);
      }
      float factors[kLanes];
      for (int head = 0; head < H; ++head) {
        const float factor = weigh<H>(tile, tokens, first, head);
        for (int i = 0; i < kLanes / H; ++i) factors[head * (kLanes / H) + i] = factor;
      }
      Vec* out = out_ + first * head_vectors_;
      if (first == 0) {
        add_values<Cache, H, kPieces, true>(rows, weights_, load(factors), head_size_, ahead, out);
      } else {
        add_values<Cache, H, kPieces, false>(rows, weights_, load(factors), head_size_, ahead, out);
      }
    });
  }

  // --- both

  void set_distances(const Tile& tile) {
    for (int page = 0; page < tile.pages; ++page) {
      for (int slot = 0; slot < block_size_; ++slot) {
        distances_[page * block_size_ + slot] =
            static_cast<float>(tile.position[page] + slot - tile.segment.seq_len + 1);
      }
    }
  }

  // Scores of one head to weights exp(score - maximum), packed for add_values(). `tokens` is
  // tile.tokens in whole units. Returns what earlier sums are to be multiplied with.
  template <int H>
  float weigh(const Tile& tile, int tokens, int first, int head) {
    float* scores = scores_ + head * kTileTokens;
    const int row_head = first + head;
    const int global_head = tile.segment.first_head + row_head;
    if (p_.softcap > 0.0f) {
      for (int t = 0; t < tile.tokens; t += kLanes) {
        store(scores + t, tanh(load(scores + t) / p_.softcap) * p_.softcap);
      }
    }
    if (p_.alibi_slopes != nullptr) {
      const Vec slope = splat(p_.alibi_slopes[global_head]);
      for (int t = 0; t < tile.tokens; t += kLanes) {
        store(scores + t, fma(slope, load(distances_ + t), load(scores + t)));
      }
    }
    if (sparse_) {
      const int offset = p_.sparse.head_offset(global_head, tile.segment.kv_head, p_.num_heads,
                                               p_.kv.num_kv_heads);
      for (int page = 0; page < tile.pages; ++page) {
        if (p_.sparse.is_visible(tile.position[page], tile.segment.seq_len, offset)) continue;
        for (int i = 0; i < block_size_; ++i) scores[page * block_size_ + i] = -kInfinity;
      }
    }
    for (int t = tile.tokens; t < tokens; ++t) scores[t] = -kInfinity;

    Vec maxima = splat(-kInfinity);
    for (int t = 0; t < tokens; t += kLanes) maxima = maximum(load(scores + t), maxima);
    const float before = maximum_[row_head];
    const float tile_max = largest(maxima);
    const float updated = tile_max > before ? tile_max : before;
    const Vec shift = splat(updated == -kInfinity ? 0.0f : updated);
    Vec sums = {};
    constexpr int kTokens = Packed::kTokens, kStep = kTokenRows ? 1 : H;
    Weight* weights = weights_ + head * (kTokenRows ? kTileTokens / kTokens : 1);
    for (int t = 0; t < tokens; t += kTokens) {
      Vec e[kTokens / kLanes];
      for (int i = 0; i < kTokens / kLanes; ++i) {
        const Vec weight = exp(load(scores + t + i * kLanes) - shift);
        e[i] = Packed::round(weight);
        sums += p_.lse == nullptr ? e[i] : weight;  // lse has float's precision
      }
      Weight parts[Packed::kParts];
      Packed::pack(e, parts);
      for (int part = 0; part < Packed::kParts; ++part, weights += kStep) *weights = parts[part];
    }
    const float factor = decay(before, updated);
    maximum_[row_head] = updated;
    sum_[row_head] = sum_[row_head] * factor + sum(sums);
    return factor;
  }

  // The segment's sums, from vectors of [H][kLanes / H] to rows.
  void unpack_out(const Segment& segment, float* to) {
    if constexpr (kTokenRows) {
      for (int head = 0; head < segment.heads; ++head) {
        const float* from = reinterpret_cast<const float*>(out_) + head * row_stride();
        for (int d = 0; d < head_size_; ++d) to[head * head_size_ + d] = from[d] * Packed::kScale;
      }
      return;
    }
    for_head_blocks(segment.heads, [&](auto heads, int first) {
      constexpr int H = decltype(heads)::value;
      constexpr int kDims = kLanes / H;
      const float* from = reinterpret_cast<const float*>(out_ + first * head_vectors_);
      for (int d = 0; d < head_size_; d += kDims, from += kLanes) {
        const int count = head_size_ - d < kDims ? head_size_ - d : kDims;
        for (int head = 0; head < H; ++head) {
          for (int i = 0; i < count; ++i) {
            to[(first + head) * head_size_ + d + i] = from[head * kDims + i] * Packed::kScale;
          }
        }
      }
    });
  }

  void end_segment(const Segment& segment) {
    for (int head = 0; head < segment.heads; ++head) {
      row_.maximum[head] = maximum_[head];
      row_.sum[head] = sum_[head];
    }
    unpack_out(segment, row_.out);
    if (segment.starts_row && segment.ends_row) {
      const int64_t token = query_token(p_, segment.seq);
      for (int head = 0; token >= 0 && head < segment.heads; ++head) {
        finish(p_, token, segment.first_head + head,
               {.maximum = row_.maximum[head],
                .sum = row_.sum[head],
                .values = row_.out + head * head_size_});
      }
      return;
    }
    const int back = segment.starts_row ? 1 : 0;
    float* slot = work_.partials + (2 * task_ + back) * work_.partial_size();
    for (int head = 0; head < segment.heads; ++head, slot += head_size_ + 2) {
      slot[0] = row_.sum[head];
      slot[1] = row_.maximum[head];
      for (int d = 0; d < head_size_; ++d) slot[2 + d] = row_.out[head * head_size_ + d];
    }
  }

  const PagedAttentionWork& work_;
  const PagedAttentionParams& p_;
  const int64_t task_;
  const int head_size_;
  const int head_vectors_;  // a head of out_
  const int block_size_;
  const bool sparse_;
  float logit_scale_ = 1.0f;

  alignas(64) float query_[kMaxHeads * kMaxHeadSize];  // pack_query()'s, block after block
  alignas(64) float scores_[4 * kTileTokens];          // of the head block at hand
  alignas(64) Weight weights_[4 * kTileTokens * sizeof(float) / sizeof(Weight)];
  alignas(64) float distances_[kTileTokens + kLanes];  // token position - last position
  alignas(64) Vec out_[kMaxHeads * kMaxHeadSize / kLanes];
  alignas(64) char tail_[kMaxHeadSize * Values::kBytes];
  float maximum_[kMaxHeads];
  float sum_[kMaxHeads];
  Partial row_;  // of the segment that just ended
};

template <typename Cache, bool kTokenRows>
__attribute__((noinline)) void run_task(const PagedAttentionWork& work, int64_t task) {
  Attention<Cache, kTokenRows>(work, task).run();
}

template <typename Cache>
void run_task(const PagedAttentionWork& work, int64_t task) {
  if (work.params.kv.layout == KvLayout::kVllm) return run_task<Cache, false>(work, task);
  run_task<Cache, true>(work, task);
}

int64_t num_tasks(const PagedAttentionWork& work) {
  return work.tasks;
}

#if defined(__AVX512BF16__)
// Dot products of bfloat16 are for bfloat16 caches; the others have nothing from this level.
void run(const PagedAttentionWork& work, int64_t begin, int64_t end) {
  if (work.params.kv.dtype != DType::kBFloat16) {
    return kernel_at<PagedAttentionWork, Level::avx512>().run(work, begin, end);
  }
  for (int64_t task = begin; task < end; ++task) run_task<BFloat16>(work, task);
}
#else
void run(const PagedAttentionWork& work, int64_t begin, int64_t end) {
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
#endif

// --- merge ---------------------------------------------------------------------------------------

constexpr int64_t kMergesPerTask = 8;

int64_t num_merge_tasks(const PagedAttentionMerge& merge) {
  return ceil_div(merge.work.tasks, kMergesPerTask);
}

// Merges the row that starts in `task` and goes on in later ones.
void merge_row(const PagedAttentionWork& work, int64_t task) {
  const int64_t end = work.first_unit(task + 1);
  Segments segments(work, work.first_unit(task), end);
  Segment segment{}, last{};
  while (segments.next(segment)) last = segment;
  if (!last.starts_row || last.ends_row) return;
  // How many later tasks have a part of it.
  int64_t parts = 0;
  for (bool ended = false; !ended; ++parts) {
    Segments later(work, work.first_unit(task + 1 + parts), work.first_unit(task + 2 + parts));
    later.next(segment);
    ended = segment.ends_row;
  }
  const PagedAttentionParams& p = work.params;
  const int head_size = p.kv.head_size;
  const auto slot = [&](int64_t part, int head) {
    const int64_t at = part == 0 ? 2 * task + 1 : 2 * (task + part);
    return work.partials + at * work.partial_size() + static_cast<int64_t>(head) * (head_size + 2);
  };
  for (int head = 0; head < last.heads; ++head) {
    float maximum = -kInfinity;
    for (int64_t part = 0; part <= parts; ++part) {
      if (slot(part, head)[1] > maximum) maximum = slot(part, head)[1];
    }
    alignas(64) float out[kMaxHeadSize] = {};
    float sum = 0.0f;
    for (int64_t part = 0; part <= parts; ++part) {
      const float* from = slot(part, head);
      const float share = decay(from[1], maximum);
      sum += share * from[0];
      for (int d = 0; d < head_size; ++d) out[d] += share * from[2 + d];
    }
    finish(p, query_token(p, last.seq), last.first_head + head,
           {.maximum = maximum, .sum = sum, .values = out});
  }
}

void run_merge(const PagedAttentionMerge& merge, int64_t begin, int64_t end) {
  const PagedAttentionWork& work = merge.work;
  for (int64_t task = begin * kMergesPerTask; task < end * kMergesPerTask; ++task) {
    if (task + 1 < work.tasks) merge_row(work, task);
  }
}

}  // namespace
}  // namespace vllm_kernels::cpu

VLLM_KERNELS_CPU_KERNEL(vllm_kernels::cpu::PagedAttentionWork, vllm_kernels::cpu::num_tasks,
                        vllm_kernels::cpu::run)
VLLM_KERNELS_CPU_KERNEL(vllm_kernels::cpu::PagedAttentionMerge, vllm_kernels::cpu::num_merge_tasks,
                        vllm_kernels::cpu::run_merge)
