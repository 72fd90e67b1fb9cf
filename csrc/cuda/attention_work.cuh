// How paged_attention's work is cut: evenly, on the device, from lengths that only the device knows.
//
// A segment is what one block of query rows attends to: (sequence, KV head, chunk of the query rows
// that share the head). Its tokens lie in stages of `stage_tokens`; all stages of all segments are
// numbered in order, and block c of a fixed grid takes the c-th of `blocks` equal parts. A part may
// begin and end inside of a segment: such pieces are merged by the last of their blocks to finish.
// Where a part begins follows from seq_lens alone, so the results of a batch are the same every time.
#pragma once
#include "cuda/fast_divisor.cuh"
#include "ops/paged_attention.h"

namespace vllm_kernels::cuda {

struct WorkShape {
  int group;        // query heads of a KV head
  int row_shift;    // log2 of the query rows of a chunk, at most
  int stage_shift;  // log2 of the tokens of a stage
  int rounds;       // of find_part(): sequences / threads, rounded up
  FastDivisor group_divisor;
  FastDivisor blocks;  // of the grid

  __device__ __forceinline__ int rows() const { return 1 << row_shift; }
  __device__ __forceinline__ int stage_tokens() const { return 1 << stage_shift; }
};

// One sequence as the partition sees it.
struct SequenceWork {
  int seq;
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
  work.seq = seq;
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

// The parts of all blocks: the first `longer` have one stage more.
struct PartSizes {
  uint32_t least;
  uint32_t longer;
  __device__ __forceinline__ PartSizes(uint32_t total, const WorkShape& shape, uint32_t blocks) {
    least = shape.blocks.divide(total);
    longer = total - least * blocks;
  }
  __device__ __forceinline__ uint32_t begin(uint32_t block) const {
    return block * least + min(block, longer);
  }
  __device__ __forceinline__ uint32_t size(uint32_t block) const {
    return least + (block < longer ? 1 : 0);
  }
  // The block whose part holds stage number `stage`.
  __device__ __forceinline__ uint32_t block_of(uint32_t stage) const {
    const uint32_t border = longer * (least + 1);
    return stage < border ? stage / (least + 1) : longer + (stage - border) / max(least, 1u);
  }
};

// Shared memory of find_part().
struct PartScratch {
  uint32_t sums[32];
  int seq;
  uint32_t before;  // stages before the sequence
};

// By all threads of the block. Batches of more sequences than threads take several rounds.
__device__ __forceinline__ uint32_t find_part(const PagedAttentionParams& p, const WorkShape& shape,
                                              PartScratch& scratch, PartSizes* sizes,
                                              int* found_seq, uint32_t* found_before) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const auto stages_of = [&](int seq) -> uint32_t {
    if (seq >= p.num_seqs) return 0;
    const SequenceWork work = sequence_work(p, shape, seq);
    return static_cast<uint32_t>(work.stages) * work.chunks * p.kv.num_kv_heads;
  };
  // Inclusive sum over the block's threads; *all gets that of the whole round.
  const auto scan = [&](uint32_t mine, uint32_t* all) {
    uint32_t sum = mine;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const uint32_t other = __shfl_up_sync(0xffffffffu, sum, distance);
      if (lane >= distance) sum += other;
    }
    if (lane == 31) scratch.sums[warp] = sum;
    __syncthreads();
    // Each warp sums the warps' sums for itself.
    uint32_t of_warp = lane < warps ? scratch.sums[lane] : 0;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const uint32_t other = __shfl_up_sync(0xffffffffu, of_warp, distance);
      if (lane >= distance) of_warp += other;
    }
    *all = __shfl_sync(0xffffffffu, of_warp, 31);
    const uint32_t before = __shfl_sync(0xffffffffu, of_warp, (warp + 31) % 32);
    return warp == 0 ? sum : sum + before;
  };
  uint32_t total = 0, mine = 0, sum = 0;
#pragma unroll 1
  for (int round = 0; round < shape.rounds; ++round) {
    if (round > 0) __syncthreads();
    uint32_t all;
    mine = stages_of(round * blockDim.x + threadIdx.x);
    sum = scan(mine, &all);
    total += all;
  }
  *sizes = PartSizes(total, shape, gridDim.x);
  const uint32_t begin = sizes->begin(blockIdx.x);
  uint32_t before = 0;
#pragma unroll 1
  for (int round = 0; round < shape.rounds; ++round) {
    uint32_t all = total;
    if (shape.rounds > 1) {
      __syncthreads();
      mine = stages_of(round * blockDim.x + threadIdx.x);
      sum = scan(mine, &all);
    }
    const uint32_t from = before + sum - mine;
    if (mine > 0 && begin >= from && begin < before + sum) {
      scratch.seq = round * blockDim.x + threadIdx.x;
      scratch.before = from;
    }
    before += all;
  }
  __syncthreads();
  *found_seq = scratch.seq;
  *found_before = scratch.before;
  return total;
}

// Walks through a part.
struct WorkCursor {
  SequenceWork sequence;
  int kv_head;
  int chunk;
  int stage;  // of the segment, from 0

  // To stage number `index` of the sequence.
  __device__ __forceinline__ void set(const SequenceWork& work, uint32_t index) {
    sequence = work;
    const uint32_t segment = index / static_cast<uint32_t>(work.stages);
    stage = static_cast<int>(index - segment * work.stages);
    kv_head = static_cast<int>(work.chunks == 1 ? segment : segment / work.chunks);
    chunk = static_cast<int>(segment) - kv_head * work.chunks;
  }
  // `stage` may lie behind the segment.
  __device__ __forceinline__ void advance(const PagedAttentionParams& p, const WorkShape& shape,
                                          int stages) {
    stage += stages;
    while (stage >= sequence.stages) {
      stage -= sequence.stages;
      if (++chunk < sequence.chunks) continue;
      chunk = 0;
      if (++kv_head < p.kv.num_kv_heads) continue;
      kv_head = 0;
      do {  // a sequence without query tokens has no segments
        if (sequence.seq + 1 >= p.num_seqs) {  // behind the last part
          stage = 0;
          return;
        }
        sequence = sequence_work(p, shape, sequence.seq + 1);
      } while (sequence.chunks == 0);
    }
  }
};

}  // namespace vllm_kernels::cuda
