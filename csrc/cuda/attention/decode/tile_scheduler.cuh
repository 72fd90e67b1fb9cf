// The decode kernels' tile scheduler. It runs on the device, because only the device knows the
// sequence lengths.
//
// A query tile is (sequence, KV head, m_block), where an m_block is a block of packed query rows.
// In form kLines it has several KV heads, and p.kv.num_kv_heads counts these groups. Its KV range
// is a number of stages of stage_tokens() tokens. A query tile is one work tile, or several if it
// is split. Its splits have almost equal lengths. Their partials are combined by the last CTA to
// finish, or by the CTA of the last split (flag-in-data). Each CTA of the grid takes work
// tile blockIdx.x first, and then the next one that is left.
//
// split_rule.h says how many splits a query tile has. Work tiles of long sequences come first, so
// that the last ones are short. Very short ones are mixed with longer ones: a tail of only short
// ones would leave memory idle.
//
// The splits depend on the batch's lengths and on the host's bound on them, max_seq_len. So two
// equal calls give the same result. With fixed_split_size they depend only on the sequence's own
// length, so the result is the same in any batch.
//
// Each warp computes the schedule by itself, with one sequence per lane and 32 sequences per round.
// That needs no barrier.
//
// Early reads: seq_lens and query_start_loc, if may_speculate() says so. validate() checks them
// after the PDL wait.
#pragma once
#include <cstddef>

#include "cuda/attention/common/divide.h"
#include "cuda/attention/common/heuristics.h"
#include "cuda/attention/common/kernel_choice.h"
#include "cuda/attention/common/scheduling.cuh"
#include "cuda/attention/common/workspace.h"
#include "cuda/attention/decode/split_rule.h"
#include "cuda/base/fast_divmod.cuh"
#include "cuda/base/ptx.cuh"
#include "cuda/base/reduce.cuh"
#include "ops/paged_attention.h"

namespace vllm_kernels::cuda {

// The first 64 bytes are one line of the constant cache. All but the rarely read end of `splits`
// fits: one line more makes short launches 0.1 us longer (docs/lab, decode/waves.md).
struct WorkShape {
  int group;              // query heads per KV head
  int row_shift;          // log2 of the max query rows of an m_block
  int stage_shift;        // log2 of the tokens of a stage
  int slots;              // workspace slots for partials with semaphores
  bool may_flag_in_data;  // result of may_flag_in_data()
  bool has_tree_mask;
  uint16_t min_stages_of_waves;  // result of min_stages_of_waves()
  FastDivisor group_divisor;
  SplitRule splits;

  __device__ __forceinline__ int rows() const { return 1 << row_shift; }
  __device__ __forceinline__ int stage_tokens() const { return 1 << stage_shift; }
};
static_assert(offsetof(WorkShape, splits) + offsetof(SplitRule, min_wave_stages) == 64);
// It begins a line: on sm_90 a kernel's parameters are at 0x210, and these come before.
static_assert((0x210 + sizeof(PagedAttentionParams)) % 64 == 0);

// Stages of a split where the caller gives its tokens (PagedAttentionParams::fixed_split_size).
__device__ __forceinline__ int fixed_split_stages(const PagedAttentionParams& p, int stage_shift) {
  const int stages = p.fixed_split_size >> stage_shift;
  return stages > 0 ? stages : 1;
}

struct SequenceWork {
  int seq_len;      // tokens
  int first_query;  // row of the query tensor
  int query_len;
  int first_stage;  // earlier stages are outside of every query token's window
  int m_blocks;     // blocks of packed query rows; the sequence has num_kv_heads * m_blocks query
                    // tiles
  int stages;       // of a query tile; without query tokens 0, else at least 1, so that every
                    // output row is written
};

// A sequence's indices as they are in memory, unchecked.
struct SequenceIndices {
  int32_t seq_len;
  int32_t first_query, end_query;
};

// `bypass_l1`: L1 is not coherent with the primary kernel's writes.
__device__ __forceinline__ SequenceIndices load_indices(const PagedAttentionParams& p, int seq,
                                                        bool bypass_l1) {
  const auto load = [&](const int32_t* at) {
    // Two registers: with one, the next load would wait for this one.
    int32_t from_l2 = 0, from_l1 = 0;
    if (bypass_l1) {
      from_l2 = __ldcg(at);
    } else {
      from_l1 = *at;
    }
    return opaque(from_l2) | opaque(from_l1);
  };
  SequenceIndices indices = {.seq_len = load(&p.seq_lens[seq]), .first_query = 0, .end_query = 0};
  if (p.query_start_loc != nullptr) {
    indices.first_query = load(&p.query_start_loc[seq]);
    indices.end_query = load(&p.query_start_loc[seq + 1]);
    if (p.has_cumulative_lens) {
      indices.seq_len = length_between(indices.seq_len, load(&p.seq_lens[seq + 1]));
    }
  }
  return indices;
}

__device__ __forceinline__ SequenceWork sequence_work(const PagedAttentionParams& p,
                                                      const WorkShape& shape, int seq,
                                                      const SequenceIndices& indices) {
  SequenceWork work;
  work.seq_len = usable_length(p, indices.seq_len);
  const RowRange queries = p.query_start_loc == nullptr
                               ? RowRange{.first = seq, .count = 1}
                               : query_range(p, indices.first_query, indices.end_query);
  work.first_query = queries.first;
  work.query_len = queries.count;
  // The first query token's window decides where the KV range begins.
  int begin = 0;
  if (p.sliding_window > 0) {
    begin = first_position(p, seq, work.seq_len, work.query_len) - p.sliding_window + 1;
    begin = p.stripe.any() ? min(p.stripe.count_before(begin), work.seq_len) : max(0, begin);
  }
  work.m_blocks = (work.query_len * shape.group + shape.rows() - 1) >> shape.row_shift;
  work.first_stage = begin >> shape.stage_shift;
  const int end = (work.seq_len + shape.stage_tokens() - 1) >> shape.stage_shift;
  work.stages = work.m_blocks > 0 ? max(1, end - work.first_stage) : 0;
  return work;
}

struct WorkTile {
  int seq;
  int kv_head;
  int m_block;
  int split;          // index of the split within its query tile
  int num_splits;     // 1: not split
  bool flag_in_data;  // whether partials go by split_exchange.cuh; then no CTA has two work tiles
  int slot;           // workspace slot of the query tile's split 0; the other splits follow
  int stage;          // first stage of the split, counted from sequence.first_stage
  int stages;         // of this work tile
  SequenceWork sequence;
};

// The WorkShape of a decode launch. `padded`: head size of a partial's rows in the workspace.
inline WorkShape work_shape(const PagedAttentionParams& p, const KernelChoice& choice,
                            int stage_shift, int padded) {
  const int group = p.num_heads / p.kv.num_kv_heads, row_shift = choice.row_shift(),
            ctas = static_cast<int>(choice.grid.x);
  const SplitRule rule = split_rule(p, choice, stage_shift);
  return {
      .group = group,
      .row_shift = row_shift,
      .stage_shift = stage_shift,
      .slots = workspace_slots(row_shift, padded),
      .may_flag_in_data = may_flag_in_data(ctas, row_shift, padded),
      .has_tree_mask = p.tree_mask.any(),
      .min_stages_of_waves = min_stages_of_waves(rule, p.kv.num_kv_heads / choice.kv_heads, ctas),
      .group_divisor = FastDivisor(group),
      .splits = rule};
}

// The indices of a lane's sequences lane, lane + 32, ..., for batches of up to kKept rounds. With
// several rounds, each sequence has one query token.
template <int kKept>
struct KeptIndices {
  int32_t seq_lens[kKept];  // all but [0] only with several rounds
  int32_t first_query, end_query;

  __device__ __forceinline__ void load(const PagedAttentionParams& p, int lane) {
    const int last = p.num_seqs - 1;
    // opaque(): no address stays in registers from before.
    set(load_indices(p, opaque(min(lane, last)), true));
    if (kKept == 1 || one_round(p)) return;
#pragma unroll
    for (int round = 1; round < kKept; ++round) {
      seq_lens[round] = __ldcg(&p.seq_lens[opaque(min(round * 32 + lane, last))]);
    }
  }
  __device__ __forceinline__ void set(const SequenceIndices& only) {
    seq_lens[0] = only.seq_len;
    first_query = only.first_query;
    end_query = only.end_query;
  }
  __device__ __forceinline__ SequenceIndices of(int round) const {
    int32_t seq_len = seq_lens[0];
#pragma unroll
    for (int i = 1; i < kKept; ++i) seq_len = round == i ? seq_lens[i] : seq_len;
    return {.seq_len = seq_len, .first_query = first_query, .end_query = end_query};
  }
};

// kKept: max rounds of a batch whose indices a lane keeps in registers. kSmallBatches: whether
// small batches, rounds and one wave count (split_rule.h).
template <int kKept, bool kSmallBatches>
class TileScheduler {
 public:
  using Indices = KeptIndices<kKept>;

  // Whether this batch's indices are kept.
  static __device__ __forceinline__ bool keeps(const PagedAttentionParams& p) {
    return one_round(p) || (kKept > 1 && p.query_start_loc == nullptr && p.num_seqs <= 32 * kKept);
  }
  // Whether the schedule is made speculatively, before the primary kernel has ended.
  static __device__ __forceinline__ bool may_speculate(const PagedAttentionParams& p) {
#if defined(VLLM_KERNELS_HAS_SM90)
    return keeps(p) && !p.kv_ready && !p.concurrent && !p.stripe.any();
#else
    return false;
#endif
  }

  // Makes the schedule. All lanes of a warp.
  __device__ __forceinline__ void build(const PagedAttentionParams& p, const WorkShape& shape,
                                        int lane) {
    const int rounds = rounds_of(p);
    if (indices_cached(p)) kept_.load(p, lane);
    fixed_split_stages_ = p.fixed_split_size > 0 ? fixed_split_stages(p, shape.stage_shift) : 0;
    round_ = 0;
    before_ = 0;
    BatchStages batch = {};
    uint32_t work_tiles = 0;
#pragma unroll 1
    for (int pass = 0;; ++pass) {  // first sums, then work tiles
#pragma unroll 1
      for (int round = 0; round < rounds; ++round) {
        load(p, shape, round, lane, pass == 0 && round == 0);
        if (pass > 0) {
          work_tiles += tiles_of_lane() * p.kv.num_kv_heads;
          continue;
        }
        batch.all += static_cast<uint32_t>(work_.stages) * work_.m_blocks;
        batch.query_tiles += work_.m_blocks;
        batch.longest = max(batch.longest, static_cast<uint32_t>(work_.stages));
      }
      if (pass > 0) break;
      batch = {
          .all = __reduce_add_sync(0xffffffffu, batch.all),
          .longest = __reduce_max_sync(0xffffffffu, batch.longest),
          .query_tiles = __reduce_add_sync(0xffffffffu, batch.query_tiles) * p.kv.num_kv_heads};
      longest_ = batch.longest;
      splits_per_stage_ = splits_per_stage<kSmallBatches>(shape.splits, batch, p.kv.num_kv_heads,
                                                          gridDim.x, shape.stage_shift);
    }
    num_tiles_ = __reduce_add_sync(0xffffffffu, work_tiles);
    if (fixed_split_stages_ == 0) {
      change_waves<kSmallBatches>(
          shape.splits, batch, p.kv.num_kv_heads, gridDim.x, num_tiles_, shape.min_stages_of_waves,
          splits_per_stage_,
          [&](float max_stages, bool& is_long) {
            return count_tiles(p, shape, lane, max_stages, is_long);
          },
          [&] { return longest_tile(); });
    }
    if (num_tiles_ > static_cast<uint32_t>(shape.slots)) {  // no room for partials: do not split
      // This may also drop fixed_split_size: check_fixed_split() cannot know of sequences whose
      // query tokens overlap.
      fixed_split_stages_ = 0;
      splits_per_stage_ = 0.0f;
      num_tiles_ = batch.query_tiles;
    }
    class_ = 0;
  }

  __device__ __forceinline__ uint32_t num_tiles() const { return num_tiles_; }

  // All lanes: whether the speculative schedule was right, given the indices in memory now.
  __device__ __forceinline__ bool validate(const PagedAttentionParams& p, const WorkShape& shape,
                                           const Indices& now, int lane) const {
    bool same = true;
    if constexpr (kKept == 1) {
      const SequenceWork work = sequence_work(p, shape, lane, now.of(0));
      same = lane >= p.num_seqs || work.seq_len == work_.seq_len &&
                                       work.first_query == work_.first_query &&
                                       work.query_len == work_.query_len;
    } else if (one_round(p)) {
      // No branch: a lane that skips the comparison has loads in flight. ptxas waits for them
      // later, and then for the query on the same scoreboard, which costs 0.1 us (b1_c1k).
      same = (lane >= p.num_seqs) |
             ((now.seq_lens[0] == kept_.seq_lens[0]) & (now.first_query == kept_.first_query) &
              (now.end_query == kept_.end_query));
    } else {
#pragma unroll
      for (int i = 0; i < kKept; ++i) same = same && now.seq_lens[i] == kept_.seq_lens[i];
    }
    return __all_sync(0xffffffffu, same);
  }

  // Finds work tile `index`. Indices must ascend from call to call. All lanes of a warp.
  __device__ __forceinline__ WorkTile get_tile(const PagedAttentionParams& p,
                                               const WorkShape& shape, uint32_t index, int lane) {
    WorkTile work_tile;
#pragma unroll 1
    for (;;) {
      load(p, shape, round_, lane, false);
      const int num_splits = splits_of_lane();
      const uint32_t stages = work_.stages, heads = p.kv.num_kv_heads;
      // If no CTA takes two work tiles, all are in one class.
      const bool of_class = (stages <= longest_ >> class_ && stages > longest_ >> (class_ + 1)) ||
                            (stages <= longest_ >> kLengthClasses && class_ == kShortestClass) ||
                            num_tiles_ <= gridDim.x;
      const uint32_t mine = of_class ? tiles_of_lane() * heads : 0;
      const uint32_t until = inclusive_sum(mine, lane);
      const uint32_t in_round = __shfl_sync(0xffffffffu, until, 31);
      if (index - before_ >= in_round) {
        before_ += in_round;
        if (++round_ == rounds_of(p)) {
          round_ = 0;
          ++class_;
        }
        continue;
      }
      const int owner = __ffs(__ballot_sync(0xffffffffu, index - before_ < until)) - 1;
      const auto of_owner = [&](int value) { return __shfl_sync(0xffffffffu, value, owner); };
      work_tile.seq = round_ * 32 + owner;
      work_tile.num_splits = of_owner(num_splits);
      work_tile.sequence = {.seq_len = of_owner(work_.seq_len),
                            .first_query = of_owner(work_.first_query),
                            .query_len = of_owner(work_.query_len),
                            .first_stage = of_owner(work_.first_stage),
                            .m_blocks = of_owner(work_.m_blocks),
                            .stages = of_owner(work_.stages)};
      const int local = static_cast<int>(index - before_) - of_owner(until - mine);
      int query_tile = local;
      work_tile.flag_in_data = shape.may_flag_in_data && num_tiles_ <= gridDim.x;
      work_tile.split = 0;
      work_tile.stage = 0;
      work_tile.stages = work_tile.sequence.stages;
      if (work_tile.num_splits > 1) {
        int share = 0;
        if (work_tile.flag_in_data) {
          // Split-major order. The CTA of the last split waits for the others, so it needs the
          // query tile's highest index. So last splits go to the last CTAs. These start late,
          // because the previous launch combined its splits on their SMs.
          const int query_tiles = work_tile.sequence.m_blocks * heads;
          work_tile.split = divide(local, query_tiles);
          query_tile = local - work_tile.split * query_tiles;
          share = combine_share<kSmallBatches>(shape.splits, work_tile.sequence.stages,
                                               work_tile.num_splits, fixed_split_stages_ > 0);
        } else {
          query_tile = divide(local, work_tile.num_splits);
          work_tile.split = local - query_tile * work_tile.num_splits;
        }
        const StageRange range = stages_of_split(work_tile.sequence.stages, work_tile.num_splits,
                                                 work_tile.split, share);
        work_tile.stage = range.first;
        work_tile.stages = range.count;
      }
      work_tile.slot = static_cast<int>(index) - local + query_tile * work_tile.num_splits;
      work_tile.kv_head = query_tile;
      work_tile.m_block = 0;
      if (work_tile.sequence.m_blocks > 1) {
        work_tile.kv_head = divide(query_tile, work_tile.sequence.m_blocks);
        work_tile.m_block = query_tile - work_tile.kv_head * work_tile.sequence.m_blocks;
      }
      return work_tile;
    }
  }

 private:
  // Whether rounds are read from kept_. (With a single round, work_ stays valid.)
  static __device__ __forceinline__ bool indices_cached(const PagedAttentionParams& p) {
    return kKept > 1 && !one_round(p) && keeps(p);
  }
  // Loads this lane's sequence of a round. A single round is loaded only once.
  __device__ __forceinline__ void load(const PagedAttentionParams& p, const WorkShape& shape,
                                       int round, int lane, bool first) {
    if (one_round(p) && !first) return;
    const int seq = round * 32 + lane;
    work_ = {};
    if (seq >= p.num_seqs) return;
    const SequenceIndices indices =
        indices_cached(p) ? kept_.of(round) : load_indices(p, seq, one_round(p));
    if (kKept > 1 && first && one_round(p)) kept_.set(indices);
    work_ = sequence_work(p, shape, seq, indices);
  }
  __device__ __forceinline__ int splits_of_lane() const {
    if (fixed_split_stages_ > 0)
      return divide(work_.stages + fixed_split_stages_ - 1, fixed_split_stages_);
    return splits_of(work_.stages, splits_per_stage_);
  }
  // Sets num_tiles_ for other splits, and whether a work tile has more than `max_stages`. It is
  // code of its own. As further passes of build() it delayed all other batches by up to 0.2 us.
  __device__ __forceinline__ uint32_t count_tiles(const PagedAttentionParams& p,
                                                  const WorkShape& shape, int lane,
                                                  float max_stages, bool& is_long) {
    num_tiles_ = 0;
#pragma unroll 1
    for (int round = 0; round < rounds_of(p); ++round) {
      load(p, shape, round, lane, false);
      is_long |= work_.stages > splits_of_lane() * max_stages;
      num_tiles_ += tiles_of_lane() * p.kv.num_kv_heads;
    }
    is_long = __any_sync(0xffffffffu, is_long);
    num_tiles_ = __reduce_add_sync(0xffffffffu, num_tiles_);
    return num_tiles_;
  }
  // Stages of the longest work tile in the last round. (With more rounds that is a sample.)
  __device__ __forceinline__ float longest_tile() const {
    const float stages = fast_quotient(work_.stages, splits_of_lane());
    return __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(stages)));
  }
  // Work tiles of one KV head of this lane's sequence.
  __device__ __forceinline__ uint32_t tiles_of_lane() const {
    return static_cast<uint32_t>(work_.m_blocks * splits_of_lane());
  }

  Indices kept_;
  int fixed_split_stages_;  // stages of a split by fixed_split_size, else 0
  SequenceWork work_;       // this lane's sequence of the current round
  float splits_per_stage_;  // splits of a query tile per stage of it; the product is rounded down
  uint32_t longest_;        // stages of the longest sequence
  uint32_t num_tiles_;
  int class_;        // length class of the last work tile
  int round_;        // round of the last work tile
  uint32_t before_;  // work tiles in earlier classes and rounds
};

// The packed query rows of a work tile.
struct TileRows {
  int first;  // among the sequence's query_len * group rows
  int count;
  int position;  // of the sequence's query token 0
  // Tokens of the sequence that are visible to any row, and to every row; after store_rows(), of
  // the cache. With a tree mask, every row sees those before the query tokens.
  VisibleTokens any, every;
};

__device__ __forceinline__ TileRows tile_rows(const PagedAttentionParams& p, const WorkShape& shape,
                                              const WorkTile& work_tile) {
  TileRows rows;
  rows.first = work_tile.m_block << shape.row_shift;
  rows.count = min(shape.rows(), work_tile.sequence.query_len * shape.group - rows.first);
  const SequenceWork& sequence = work_tile.sequence;
  rows.position = first_position(p, work_tile.seq, sequence.seq_len, sequence.query_len);
  const int low = rows.position + static_cast<int>(shape.group_divisor.divide(rows.first));
  const int high =
      rows.position + static_cast<int>(shape.group_divisor.divide(rows.first + rows.count - 1));
  const int seen = shape.has_tree_mask ? rows.position - 1 : low;  // up to here by every row
  rows.any = {.begin = 0, .end = high + 1};
  rows.every = {.begin = 0, .end = seen + 1};
  if (p.sliding_window > 0) {
    rows.any.begin = max(0, low - p.sliding_window + 1);
    rows.every.begin = max(0, high - p.sliding_window + 1);
  }
  return rows;
}

// Writes `rows` to shared memory. Where the cache has a shard, the ranges become those of its
// tokens. They do so in shared memory: the scheduler warp has few registers.
__device__ __forceinline__ void store_rows(const PagedAttentionParams& p, const TileRows& rows,
                                           int seq_len, TileRows& to) {
  to = rows;
  if (!p.stripe.any()) return;
  const auto stored = [&](VisibleTokens range) -> VisibleTokens {
    return {min(p.stripe.count_before(range.begin), seq_len),
            min(p.stripe.count_before(range.end), seq_len)};
  };
  to.any = stored(to.any);
  to.every = stored(to.every);
}

// A row's query token (within its sequence) and query head (of the model).
struct QueryRow {
  int token;
  int head;
};
__device__ __forceinline__ QueryRow query_row_of(const WorkShape& shape, const WorkTile& work_tile,
                                                 const TileRows& rows, int row) {
  const int index = rows.first + row;
  const int token = shape.group_divisor.divide(index);
  return {.token = token, .head = work_tile.kv_head * shape.group + index - token * shape.group};
}

}  // namespace vllm_kernels::cuda
