// Decode attention: one query token a sequence. paged_attention_v1 and _v2 run here, and
// paged_attention where fits_decode_kernel() says so.
//   query [num_seqs, num_heads, head_size], out the same; K and V in pages (ops/paged_kv.h)
//
// paged_attention_decode.h tells how a call is cut into tasks. A task walks over blocks of pages
// (decode_tiles.h) with an online softmax:
//   1. scores = K q for all query heads of the KV head      K is read once
//   2. row_max, p = exp(scores - row_max), row_sum
//   3. out = out * rescale + V p                            V is read once
// Step 1 prefetches the block's V, and step 3 prefetches the next block's K.
//
// A page of layout vllm interleaves tokens and dimensions, so page_dot.h multiplies whole pages. In
// layouts NHD and HND a token's head is a contiguous row, and row_dot.h multiplies rows.
//
// A tile that one task has whole goes to epilogue(). Other tiles are stored as partials, which
// paged_attention_combine.cpp combines in a second launch.
#include "cpu/attention/paged_attention_decode.h"

#include "cpu/attention/epilogue.h"
#include "cpu/attention/page_dot.h"
#include "cpu/attention/row_dot.h"
#include "cpu/attention/score_mod.h"
#include "cpu/attention/token_scales.h"
#include "cpu/base/dispatch.h"
#include "cpu/base/vec_math.h"
#include "cpu/kernels.h"

namespace vllm_kernels::cpu {
namespace {

// Max bytes of K of a block. With its V and the next block's K it fits into L2.
constexpr size_t kMaxKeyBytes = 32 << 10;
constexpr int kMaxSmallPageTokens = kMaxTokenRows;  // of a block, unless a page is larger
constexpr int kMinBlockTokens = 32;

// One task's state: at most 400 KiB of stack. Groups and head sizes below the maximum touch less.
template <typename Cache, bool kTokenRows>
class DecodeTask {
 public:
  DecodeTask(const DecodePlan& plan, int64_t task)
      : plan_(plan),
        p_(plan.params),
        task_(task),
        head_size_(p_.head_size()),
        row_elements_(p_.kv.head_size),
        head_vectors_(kTokenRows
                          ? (head_size_ + Rows::kStep - 1) / Rows::kStep * Rows::kStep / kLanes
                          : (head_size_ + kLanes - 1) / kLanes),
        block_size_(kTokenRows ? 1 : p_.kv.block_size),
        sparse_(p_.sparse.on()),
        token_scales_(p_) {}

  void run() {
    PageBlock blocks[2];
    int block_tokens = kMaxSmallPageTokens;
    while (block_tokens > kMinBlockTokens &&
           block_tokens * row_elements_ * sizeof(Cache) > kMaxKeyBytes) {
      block_tokens /= 2;
    }
    if (block_tokens < block_size_) block_tokens = block_size_;
    if (kTokenRows && p_.kv.layout == KvLayout::kNHD) block_tokens = kMinBlockTokens;
    PageBlockIterator from(plan_, plan_.first_grain(task_), plan_.first_grain(task_ + 1),
                           block_tokens);
    bool more = from.next(blocks[0]);
    if (more) prefetch(blocks[0]);
    for (int i = 0; more; i ^= 1) {
      const PageBlock& block = blocks[i];
      PageBlock& next = blocks[i ^ 1];
      more = from.next(next);
      if (!more) next.pages = 0;
      if (block.starts_split) begin_split(block.split);
      if (block.pages > 0) {
        if constexpr (kTokenRows) {
          add_token_block(block, next);
        } else {
          add_page_block(block, next);
        }
      }
      if (block.ends_split) end_split(block.split);
    }
  }

 private:
  using Rows = TokenLanes<Cache>;
  using Values = ValueLanes<Cache>;
  using Packed = std::conditional_t<kTokenRows, Rows, Values>;
  using Prob = typename Packed::Operand;

  void prefetch(const PageBlock& block) {
    if constexpr (kTokenRows) {
      LinePrefetcher(block.key, block.pages, span_bytes(block)).finish();
      LinePrefetcher(block.value, block.pages, span_bytes(block)).finish();
      return;
    }
    const int64_t bytes = static_cast<int64_t>(row_elements_) * block_size_ * sizeof(Cache);
    for (int page = 0; page < block.pages; ++page) prefetch_span(block.key[page], bytes);
  }

  void begin_split(const Split& split) {
    clear(split);
    if constexpr (!kTokenRows) {
      logit_scale_ = KeyLanes<Cache>::kScale * p_.scale * scale_of(p_.kv, true, split.kv_head);
    }
    const int64_t token = query_token(p_, split.seq);
    if (token < 0) return;
    alignas(64) float rows[4 * kMaxHeadSize];
    for_row_blocks(0, split.heads, [&](auto heads, int first) {
      constexpr int H = decltype(heads)::value;
      dispatch_float(p_.dtype, [&](auto tag) {
        const auto* query = static_cast<const decltype(tag)*>(p_.query) + token * p_.query_stride;
        upcast(query + int64_t{split.first_head + first} * head_size_, H * head_size_, rows);
      });
      if constexpr (kHasTokenZeros<Cache>) {
        for (int i = 0; i < H; ++i) {
          query_sum_[first + i] = p_.scale * sum_of(rows + i * head_size_, head_size_);
        }
      }
      if constexpr (kTokenRows) {
        for (int i = 0; i < H; ++i) {
          Rows::pack_query(rows + i * head_size_, head_size_, query_ + (first + i) * row_stride());
        }
      } else {
        pack_query<Cache, H>(rows, row_elements_, query_ + first * head_size_);
      }
    });
  }

  // --- layouts NHD and HND

  int row_stride() const { return head_vectors_ * kLanes; }  // of query_ and out_
  int span_bytes(const PageBlock& block) const {
    return block.split.kv_heads * row_elements_ * static_cast<int>(sizeof(Cache));
  }

  // Prefetches the next block meanwhile.
  void add_token_block(const PageBlock& block, const PageBlock& next) {
    LinePrefetcher next_keys(next.key, next.pages, span_bytes(next));
    LinePrefetcher next_values(next.value, next.pages, span_bytes(next));
    const int tokens = (block.tokens + Rows::kTokens - 1) / Rows::kTokens * Rows::kTokens;
    const int group = block.split.heads / block.split.kv_heads;
    if (needs_distances(p_)) set_distances(block);
    for (int kv_head = 0; kv_head < block.split.kv_heads; ++kv_head) {
      const int64_t offset = kv_head * int64_t{sizeof(Cache)} * row_elements_;
      read_token_scales(block, tokens, block.split.kv_head + kv_head);
      const float scale =
          Rows::kScale * p_.scale * scale_of(p_.kv, true, block.split.kv_head + kv_head);
      for_row_blocks(0, group, [&](auto heads, int group_head) {
        constexpr int H = decltype(heads)::value;
        const int first = kv_head * group + group_head;
        const float* query = query_ + first * row_stride();
        float* out = reinterpret_cast<float*>(out_) + first * row_stride();
        // With for_prefetching_row_blocks() GCC's code is 2% to 8% slower.
        const auto add = [&](auto prefetches) {
          score_token_rows<Rows, H, prefetches>(block.key, offset, block.tokens, row_elements_,
                                                query, row_stride(), scale, next_keys, scores_,
                                                kMaxBlockTokens);
          float rescales[H];
          for (int head = 0; head < H; ++head) {
            prefetch_token_scales(next, next.split.kv_head + kv_head, group_head + head, group);
            rescales[head] = softmax_head<H>(block, tokens, first, head);
          }
          add_token_rows<Rows, H, prefetches>(
              block.value, offset, block.tokens, row_elements_, reinterpret_cast<float*>(probs_),
              kMaxBlockTokens / Rows::kPair, rescales, next_values, out, row_stride());
        };
        group_head == 0 ? add(std::true_type{}) : add(std::false_type{});
      });
    }
    next_keys.finish();
    next_values.finish();
  }

  // --- both

  void clear(const Split& split) {
    for (int head = 0; head < split.heads; ++head) {
      row_max_[head] = -kInfinity;
      row_sum_[head] = 0.0f;
      exact_sum_[head] = 0.0f;
      zero_sum_[head] = 0.0f;
    }
    for (int i = 0; i < split.heads * head_vectors_; ++i) out_[i] = Vec{};
  }

  // --- layout vllm

  void add_page_block(const PageBlock& block, const PageBlock& next) {
    const int loads = block.tokens / Values::kTokens;
    const int tail_tokens = block.tokens % Values::kTokens;
    const int pages_per_load = Values::kTokens > block_size_ ? Values::kTokens / block_size_ : 1;
    if (pages_per_load == 1) {
      add_page_block<1>(block, next, loads, tail_tokens);
    } else if (pages_per_load == 2) {
      if constexpr (Values::kTokens > kMinBlockSize)
        add_page_block<2>(block, next, loads, tail_tokens);
    } else {
      if constexpr (Values::kTokens > 2 * kMinBlockSize)
        add_page_block<4>(block, next, loads, tail_tokens);
    }
  }

  template <int kPagesPerLoad>
  void add_page_block(const PageBlock& block, const PageBlock& next, int loads, int tail_tokens) {
    // Where the tokens of each load are in V.
    ValueRows rows;
    rows.stride = static_cast<int64_t>(block_size_) * sizeof(Cache);
    rows.loads = loads;
    rows.tail = nullptr;
    rows.tail_stride = Values::kBytes;
    constexpr int kTokensPerPage = Values::kTokens / kPagesPerLoad;
    const int num_rows = (loads + (tail_tokens > 0)) * kPagesPerLoad;
    for (int i = 0, token = 0; i < num_rows; ++i, token += kTokensPerPage) {
      int page = token / block_size_;
      if (page > block.pages) page = block.pages;
      rows.rows[i] = block.value[page] + token % block_size_ * sizeof(Cache);
    }
    if (tail_tokens > 0) {
      copy_tail<Cache, kPagesPerLoad>(rows.rows + loads * kPagesPerLoad, rows.stride, tail_tokens,
                                      row_elements_, tail_);
      rows.tail = tail_;
    }
    const int tokens = (loads + (tail_tokens > 0)) * Values::kTokens;
    const PageBlock& ahead = next.pages > 0 ? next : block;
    if (needs_distances(p_)) set_distances(block);
    read_token_scales(block, tokens, block.split.kv_head);
    for_prefetching_row_blocks(0, block.split.heads, [&](auto heads, auto prefetches, int first) {
      constexpr int H = decltype(heads)::value;
      score_pages<Cache, H, prefetches>(block, query_ + first * head_size_, row_elements_,
                                        block_size_, logit_scale_, scores_);
      float rescales[kLanes];
      for (int head = 0; head < H; ++head) {
        prefetch_token_scales(next, next.split.kv_head, first + head, block.split.heads);
        const float rescale = softmax_head<H>(block, tokens, first, head);
        for (int i = 0; i < kLanes / H; ++i) rescales[head * (kLanes / H) + i] = rescale;
      }
      add_values<Cache, H, kPagesPerLoad, prefetches>(rows, probs_, load(rescales), head_size_,
                                                      ahead, out_ + first * head_vectors_);
    });
  }

  // --- both

  // Reads a KV head's scales of the block; `tokens`: with those past its end.
  void read_token_scales(const PageBlock& block, int tokens, int32_t kv_head) {
    if (!token_scales_.any()) return;
    for_each_page(block, 0, block.tokens, [&](int64_t page, int slot, int count, int at) {
      token_scales_.read(page, kv_head, slot, count, at);
    });
    token_scales_.clear(block.tokens, tokens);
  }
  // Prefetches slice `slice` of `slices` of the next block's, between the products: then no lines
  // of K and V are on their way.
  void prefetch_token_scales(const PageBlock& next, int32_t kv_head, int slice, int slices) {
    if (!token_scales_.any() || next.pages == 0) return;
    for_each_page(next, next.tokens * slice / slices, next.tokens * (slice + 1) / slices,
                  [&](int64_t page, int slot, int count, int) {
                    token_scales_.prefetch(page, kv_head, slot, count);
                  });
  }
  // Calls body(page, first slot, slots, first token) for tokens [at, end) of the block.
  template <typename Body>
  void for_each_page(const PageBlock& block, int at, int end, const Body& body) const {
    const int32_t* table = p_.block_tables + block.split.seq * p_.block_table_stride;
    const int page_tokens = p_.kv.block_size, shift = __builtin_ctz(page_tokens);
    while (at < end) {
      const int32_t position =
          kTokenRows ? block.position[at] : block.position[at >> shift] + (at & (page_tokens - 1));
      const int slot = position & (page_tokens - 1);
      const int count = min_int32(page_tokens - slot, end - at);
      body(table[position >> shift], slot, count, at);
      at += count;
    }
  }

  void set_distances(const PageBlock& block) {
    for (int page = 0; page < block.pages; ++page) {
      for (int slot = 0; slot < block_size_; ++slot) {
        distances_[page * block_size_ + slot] =
            static_cast<float>(block.position[page] + slot - block.split.seq_len + 1);
      }
    }
  }

  // Replaces the scores of one head by p = exp(score - row_max), packed for add_values() or
  // add_token_rows(). `tokens` is block.tokens rounded up to whole loads. Returns the factor by
  // which earlier sums must be rescaled.
  template <int H>
  float softmax_head(const PageBlock& block, int tokens, int first, int head) {
    float* scores = scores_ + head * kMaxBlockTokens;
    const int tile_head = first + head;
    const int global_head = block.split.first_head + tile_head;
    if (token_scales_.any()) {
      for (int t = 0; t < block.tokens; t += kLanes) {
        store(scores + t, token_scales_.score(t, load(scores + t), query_sum_[tile_head]));
      }
    }
    if (p_.modifies_scores()) {
      for (int t = 0; t < block.tokens; t += kLanes) {
        store(scores + t, modify_scores(p_, global_head, load(scores + t),
                                        [&] { return load(distances_ + t); }));
      }
    }
    if (sparse_) {
      const int offset =
          p_.sparse.head_offset(global_head, block.split.kv_head, p_.num_heads, p_.kv.num_kv_heads);
      for (int page = 0; page < block.pages; ++page) {
        if (p_.sparse.is_visible(block.position[page], block.split.seq_len, offset)) continue;
        for (int i = 0; i < block_size_; ++i) scores[page * block_size_ + i] = -kInfinity;
      }
    }
    for (int t = block.tokens; t < tokens; ++t) scores[t] = -kInfinity;

    Vec lane_max = splat(-kInfinity);
    for (int t = 0; t < tokens; t += kLanes) lane_max = maximum(load(scores + t), lane_max);
    const float old_max = row_max_[tile_head];
    const float block_max = largest(lane_max);
    const float new_max = block_max > old_max ? block_max : old_max;
    const Vec shift = splat(new_max == -kInfinity ? 0.0f : new_max);
    Vec sums = {}, exact_sums = {}, zeros = {};
    constexpr int kTokens = Packed::kTokens, kStep = kTokenRows ? 1 : H;
    Prob* probs = probs_ + head * (kTokenRows ? kMaxBlockTokens / kTokens : 1);
    for (int t = 0; t < tokens; t += kTokens) {
      Vec e[kTokens / kLanes];
      for (int i = 0; i < kTokens / kLanes; ++i) {
        const Vec prob = exp(load(scores + t + i * kLanes) - shift);
        e[i] = Packed::round(prob);
        sums += e[i];
        if (p_.lse != nullptr) exact_sums += prob;
        if constexpr (kHasTokenZeros<Cache>) {
          zeros = fma(e[i], token_scales_.value_zero(t + i * kLanes), zeros);
        }
        if (token_scales_.any()) e[i] *= token_scales_.value(t + i * kLanes);
      }
      Prob operands[Packed::kOperands];
      Packed::pack(e, operands);
      for (int i = 0; i < Packed::kOperands; ++i, probs += kStep) *probs = operands[i];
    }
    const float rescale = rescale_factor(old_max, new_max);
    row_max_[tile_head] = new_max;
    row_sum_[tile_head] = row_sum_[tile_head] * rescale + sum(sums);
    if constexpr (kHasTokenZeros<Cache>) {
      zero_sum_[tile_head] = zero_sum_[tile_head] * rescale + sum(zeros);
    }
    if (p_.lse != nullptr) {
      exact_sum_[tile_head] = exact_sum_[tile_head] * rescale + sum(exact_sums);
    }
    return rescale;
  }

  // Copies out_ to rows of head_size. In layout vllm a vector of out_ is [H][kLanes / H], and the
  // values of an element are neighbours.
  void unpack_out(const Split& split, float* to) {
    if constexpr (kTokenRows) {
      for (int head = 0; head < split.heads; ++head) {
        const float* from = reinterpret_cast<const float*>(out_) + head * row_stride();
        for (int d = 0; d < head_size_; ++d) to[head * head_size_ + d] = from[d] * Packed::kScale;
      }
      return;
    }
    for_row_blocks(0, split.heads, [&](auto heads, int first) {
      constexpr int H = decltype(heads)::value;
      constexpr int kDims = kLanes / H;
      const float* from = reinterpret_cast<const float*>(out_ + first * head_vectors_);
      for (int d = 0; d < head_size_; d += kDims, from += kLanes) {
        const int count = head_size_ - d < kDims ? head_size_ - d : kDims;
        for (int head = 0; head < H; ++head) {
          for (int i = 0; i < count; ++i) {
            const int dim = (d + i) % kValues<Cache> * row_elements_ + (d + i) / kValues<Cache>;
            to[(first + head) * head_size_ + dim] = from[head * kDims + i] * Packed::kScale;
          }
        }
      }
    });
  }

  void end_split(const Split& split) {
    unpack_out(split, unpacked_);
    if constexpr (kHasTokenZeros<Cache>) {
      for (int i = 0; i < split.heads * head_size_; ++i) unpacked_[i] += zero_sum_[i / head_size_];
    }
    const auto state_of = [&](int head) -> RowState {
      return {row_max_[head], row_sum_[head], exact_sum_[head], unpacked_ + head * head_size_};
    };
    cpu::end_split(plan_, task_, split.starts_tile, split.ends_tile, split.rows(p_), state_of);
  }

  const DecodePlan& plan_;
  const PagedAttentionParams& p_;
  const int64_t task_;
  const int head_size_;
  const int row_elements_;  // of K and V, for head_size_ values
  const int head_vectors_;  // of one head in out_
  const int block_size_;
  const bool sparse_;
  BlockScales<Cache, kMaxBlockTokens> token_scales_;
  float logit_scale_ = 1.0f;

  alignas(64) float query_[kMaxTileHeads * kMaxHeadSize];  // packed, by head blocks
  alignas(64) float scores_[4 * kMaxBlockTokens];          // of one head block
  alignas(64) Prob probs_[4 * kMaxBlockTokens * sizeof(float) / sizeof(Prob)];
  alignas(64) float distances_[kMaxBlockTokens + kLanes];  // token - last token, for ALiBi
  alignas(64) Vec out_[kMaxTileHeads * kMaxHeadSize / kLanes];
  alignas(64) char tail_[kMaxHeadSize * Values::kBytes];
  float row_max_[kMaxTileHeads];
  float row_sum_[kMaxTileHeads];
  float exact_sum_[kMaxTileHeads];
  float zero_sum_[kMaxTileHeads];                 // of p times V's zero
  float query_sum_[kMaxTileHeads];                // of the query, times the softmax scale
  float unpacked_[kMaxTileHeads * kMaxHeadSize];  // unpack_out() of the split that just ended
};

template <typename Cache, bool kTokenRows>
__attribute__((noinline)) void run_task(const DecodePlan& plan, int64_t task) {
  DecodeTask<Cache, kTokenRows>(plan, task).run();
}

template <typename Cache>
void run_task(const DecodePlan& plan, int64_t task) {
  if (plan.params.kv.layout == KvLayout::kVllm) return run_task<Cache, false>(plan, task);
  run_task<Cache, true>(plan, task);
}

Loop loop_of(const DecodePlan& plan) {
  return {.count = plan.tasks};
}

#if defined(__AVX512BF16__)
// Only bfloat16 caches use dot products of bfloat16. Other caches run the kernel of avx512.
void run(const DecodePlan& plan, int64_t begin, int64_t end) {
  if (plan.params.kv.dtype != DType::kBFloat16) {
    return kernel_at<DecodePlan, Level::avx512>().run(plan, begin, end);
  }
  for (int64_t task = begin; task < end; ++task) run_task<BFloat16>(plan, task);
}
#else
void run(const DecodePlan& plan, int64_t begin, int64_t end) {
  for (int64_t task = begin; task < end; ++task) {
    dispatch_attention_cache(plan.params.kv.dtype,
                             [&](auto tag) { run_task<decltype(tag)>(plan, task); });
  }
}
#endif

}  // namespace

VLLM_KERNELS_CPU_KERNEL(DecodePlan, loop_of, run)

}  // namespace vllm_kernels::cpu
