// How paged_attention's work is cut, on the device, from lengths that only the device knows.
//
// A segment is what one block of query rows attends to: (sequence, KV head, chunk of the query rows
// that share the head). Its tokens lie in stages of `stage_tokens`. A segment is an item, or several
// where it is split: pieces of almost equal length whose results are merged by the last to finish.
// Each block of a fixed grid takes item number blockIdx.x first, then whatever comes next.
//
// With at least as many blocks as segments the items are about as many as the blocks. With more
// segments nothing is gained by equal parts, for memory is the limit and every block's share of it
// grows when others are done: only segments so long that one could come last by itself are split.
// How a segment is split follows from seq_lens alone, so a batch gives the same result every time.
//
// Every warp finds items for itself: lanes are sequences, 32 at a time. That takes no barrier.
#pragma once
#include "cuda/fast_divisor.cuh"
#include "cuda/paged_attention_workspace.h"
#include "ops/paged_attention.h"

namespace vllm_kernels::cuda {

struct WorkShape {
  int group;        // query heads of a KV head
  int row_shift;    // log2 of the query rows of a chunk, at most
  int stage_shift;  // log2 of the tokens of a stage
  int least_piece;  // stages: shorter pieces are not worth a block
  int fixed_piece;  // stages, 0: as the batch demands. With it the batch does not matter.
  FastDivisor group_divisor;

  __device__ __forceinline__ int rows() const { return 1 << row_shift; }
  __device__ __forceinline__ int stage_tokens() const { return 1 << stage_shift; }
};

// With more segments than blocks: tokens below which a segment is not split.
constexpr int kWholeTokens = 2048;

struct SequenceWork {
  int seq_len;      // tokens
  int first_query;  // row of query
  int query_len;
  int first_stage;  // stages before it are outside of every query token's window
  int stages;       // of each of its segments; at least 1, so that every output row is written
  int chunks;       // of query rows; its segments are KV heads x chunks
};

__device__ __forceinline__ SequenceWork sequence_work(const PagedAttentionParams& p,
                                                      const WorkShape& shape, int seq) {
  SequenceWork work;
  work.seq_len = usable_seq_len(p, seq);
  const QueryRange queries = query_range(p, seq);
  work.first_query = queries.first;
  work.query_len = queries.count;
  // The first query token's window decides where to begin.
  const int first_position = work.seq_len - work.query_len;
  const int begin = p.sliding_window > 0 ? max(0, first_position - p.sliding_window + 1) : 0;
  work.first_stage = begin >> shape.stage_shift;
  const int end = (work.seq_len + shape.stage_tokens() - 1) >> shape.stage_shift;
  work.stages = max(1, end - work.first_stage);
  work.chunks = (work.query_len * shape.group + shape.rows() - 1) >> shape.row_shift;
  return work;
}

struct WorkItem {
  int seq;
  int kv_head;
  int chunk;
  int piece;     // of the segment
  int pieces;    // 1: not split
  int slot;      // of the segment's piece 0 in the workspace
  int stage;     // the item's first, from the sequence's first_stage on
  int stages;    // of the item
  SequenceWork sequence;
};

class WorkPlan {
 public:
  // All lanes of a warp.
  __device__ __forceinline__ WorkPlan(const PagedAttentionParams& p, const WorkShape& shape,
                                      int lane)
      : rounds_((p.num_seqs + 31) / 32) {
    uint32_t stages = 0, segments = 0, items = 0;
#pragma unroll 1
    for (int i = 0; i < 2 * rounds_; ++i) {  // all rounds twice: the sums, then the items
      const bool again = i >= rounds_;
      load(p, shape, again ? i - rounds_ : i, lane, i == 0);
      if (again) {
        items += items_of_lane() * p.kv.num_kv_heads;
        continue;
      }
      stages += static_cast<uint32_t>(work_.stages) * work_.chunks;
      segments += work_.chunks;
      if (i + 1 == rounds_) choose_pieces(p, shape, warp_sum(stages), warp_sum(segments));
    }
    items_ = warp_sum(items);
  }

  __device__ __forceinline__ uint32_t items() const { return items_; }

  // Items are asked for in rising order. All lanes of a warp.
  __device__ __forceinline__ WorkItem find(const PagedAttentionParams& p, const WorkShape& shape,
                                           uint32_t index, int lane) {
    WorkItem item;
#pragma unroll 1
    for (;; ++round_) {
      load(p, shape, round_, lane, false);
      const int pieces = pieces_of_lane();
      const uint32_t mine = items_of_lane() * p.kv.num_kv_heads;
      const uint32_t slots = pieces > 1 ? mine : 0;
      const uint32_t until = inclusive_sum(mine, lane);
      const uint32_t slots_until = inclusive_sum(slots, lane);
      const uint32_t in_round = __shfl_sync(0xffffffffu, until, 31);
      if (index - before_ >= in_round) {
        before_ += in_round;
        slots_before_ += __shfl_sync(0xffffffffu, slots_until, 31);
        continue;
      }
      const int owner = __ffs(__ballot_sync(0xffffffffu, index - before_ < until)) - 1;
      const auto of_owner = [&](int value) { return __shfl_sync(0xffffffffu, value, owner); };
      item.seq = round_ * 32 + owner;
      item.pieces = of_owner(pieces);
      item.sequence = {.seq_len = of_owner(work_.seq_len),
                       .first_query = of_owner(work_.first_query),
                       .query_len = of_owner(work_.query_len),
                       .first_stage = of_owner(work_.first_stage),
                       .stages = of_owner(work_.stages),
                       .chunks = of_owner(work_.chunks)};
      const uint32_t local = index - before_ - of_owner(until - mine);
      uint32_t segment = local;
      item.piece = 0;
      item.stage = 0;
      item.stages = item.sequence.stages;
      if (item.pieces > 1) {
        segment = local / static_cast<uint32_t>(item.pieces);
        item.piece = static_cast<int>(local - segment * item.pieces);
        // The first `longer` pieces have one stage more.
        const int least = item.sequence.stages / item.pieces;
        const int longer = item.sequence.stages - least * item.pieces;
        item.stage = item.piece * least + min(item.piece, longer);
        item.stages = least + (item.piece < longer ? 1 : 0);
      }
      item.slot = static_cast<int>(slots_before_ + of_owner(slots_until - slots) +
                                   segment * item.pieces);
      item.kv_head = static_cast<int>(segment);
      item.chunk = 0;
      if (item.sequence.chunks > 1) {
        item.kv_head = static_cast<int>(segment / static_cast<uint32_t>(item.sequence.chunks));
        item.chunk = static_cast<int>(segment) - item.kv_head * item.sequence.chunks;
      }
      return item;
    }
  }

 private:
  // Lane's sequence of a round; where there is one round only, it is loaded once.
  __device__ __forceinline__ void load(const PagedAttentionParams& p, const WorkShape& shape,
                                       int round, int lane, bool first) {
    if (rounds_ == 1 && !first) return;
    const int seq = round * 32 + lane;
    work_ = {};
    if (seq < p.num_seqs) work_ = sequence_work(p, shape, seq);
  }
  __device__ __forceinline__ int pieces_of_lane() const {
    return max(1, static_cast<int>(static_cast<float>(work_.stages) * pieces_a_stage_));
  }
  // Of one KV head.
  __device__ __forceinline__ uint32_t items_of_lane() const {
    return static_cast<uint32_t>(work_.chunks * pieces_of_lane());
  }
  __device__ __forceinline__ void choose_pieces(const PagedAttentionParams& p,
                                                const WorkShape& shape, uint32_t stages,
                                                uint32_t segments) {
    const float heads = p.kv.num_kv_heads, blocks = gridDim.x;
    float piece = __fdividef(heads * static_cast<float>(stages), blocks);
    float least = static_cast<float>(shape.least_piece);
    if (heads * static_cast<float>(segments) > blocks) {
      piece *= 1.0f / kPiecesPerBlock;
      least = static_cast<float>(kWholeTokens >> shape.stage_shift);
    }
    // The sum of all pieces of split segments is at most kPiecesPerBlock * blocks.
    pieces_a_stage_ = __fdividef(1.0f, fmaxf(ceilf(piece), least));
    if (shape.fixed_piece > 0) pieces_a_stage_ = 1.0f / static_cast<float>(shape.fixed_piece);
  }
  static __device__ __forceinline__ uint32_t warp_sum(uint32_t value) {
    return __reduce_add_sync(0xffffffffu, value);
  }
  static __device__ __forceinline__ uint32_t inclusive_sum(uint32_t sum, int lane) {
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const uint32_t other = __shfl_up_sync(0xffffffffu, sum, distance);
      if (lane >= distance) sum += other;
    }
    return sum;
  }

  int rounds_;
  SequenceWork work_;     // this lane's, of the round at hand
  float pieces_a_stage_;  // rounded down: how often a segment is split
  uint32_t items_;
  int round_ = 0;   // of the last item
  uint32_t before_ = 0, slots_before_ = 0;  // items and slots of the rounds before it
};

}  // namespace vllm_kernels::cuda
