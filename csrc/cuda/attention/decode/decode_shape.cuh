// DecodeShape, what the host tells the decode kernel, and the constants of its instantiations.
// write_row() writes a row of its output.
#pragma once
#include "cuda/attention/common/combine.cuh"
#include "cuda/attention/common/kv_pipeline.cuh"
#include "cuda/attention/common/score_mod.cuh"
#include "cuda/attention/common/split_exchange.cuh"
#include "cuda/attention/decode/tile_scheduler.cuh"
#include "cuda/base/vec.cuh"

namespace vllm_kernels::cuda {

// Tiles of 8 query rows per warp (decode_row_blocks).
template <int kMaxHeadSize, bool kMultiWarp>
constexpr int kRowTiles = decode_row_blocks(kMaxHeadSize, kMultiWarp);

// Tiles of 16 tokens per stage (decode_stage_tokens).
template <typename Cache, int kMaxHeadSize, bool kMultiWarp>
constexpr int kTokenTiles = decode_stage_tokens(sizeof(Cache), kMaxHeadSize, kMultiWarp) / 16;

// Whether there is a kernel whose warps halve stages (KernelChoice::halves_stages).
template <typename Cache, int kMaxHeadSize, KvForm kForm>
constexpr bool kMayHalveStages = kForm == KvForm::kPackedBoxes && sizeof(Cache) == 1 &&
                                 kMaxHeadSize > 128 && !kHasTokenScales<Cache>;

// Max threads (decode_threads, lines_threads).
template <typename Cache, int kMaxHeadSize, bool kMultiWarp, KvForm kForm = KvForm::kPackedPages>
constexpr int kDecodeThreads =
    kForm == KvForm::kLines ? lines_threads(kMaxHeadSize)
                            : decode_threads(sizeof(Cache), kMaxHeadSize, kMultiWarp);

// Whether wgmma decode has the work of several warps a pipeline, on an architecture that has wgmma.
template <typename Cache, int kMaxHeadSize>
constexpr bool kHasWgmmaDecode = kMaxHeadSize <= kWgmmaMaxHeadSize && !kHasZeros<Cache>;

struct DecodeShape {
  WorkShape work;
  PipelineLayout pipeline;
  KvStageLayout stage_layout;
  int consumer_shift;  // log2 of the warps of a consumer; halved stages: 0
  int warp_shift;      // log2 of the query rows of a warp, at most
  int combine_rows;    // rows of a warp combined at a time; a thread has 4 dimensions of one row
  FastDivisor fours;   // groups of 4 dimensions of a head
  ScoreCap cap;
};

// A row of the work tile's KV head `head`.
__device__ __forceinline__ QueryRow row_of_head(const WorkShape& shape, const WorkTile& work_tile,
                                                const TileRows& rows, int head, int row) {
  QueryRow query_row = query_row_of(shape, work_tile, rows, row);
  query_row.head += head * shape.group;
  return query_row;
}

// A row's 4 dimensions from `d` on, and its log-sum-exp. `head`: of the work tile's KV heads.
template <typename Cache>
__device__ __forceinline__ void write_row(const PagedAttentionParams& p, const WorkShape& shape,
                                          const WorkTile& work_tile, const TileRows& rows, int head,
                                          int row, int d, const RowState& state) {
  const QueryRow query_row = row_of_head(shape, work_tile, rows, head, row);
  const RowResult result =
      row_result(p, work_tile.kv_head + head, query_row.head, state.row_max, state.sum);
  const float scale = result.scale;
  const float values[4] = {state.out.x * scale, state.out.y * scale, state.out.z * scale,
                           state.out.w * scale};
  const int64_t token = work_tile.sequence.first_query + query_row.token;
  const int64_t at = token * p.out_stride +
                     static_cast<int64_t>(query_row.head) * kValuesOf<Cache> * p.kv.head_size + d;
  if (p.dtype == DType::kFloat16) {
    store4<Half>(p.out, at, values);
  } else {
    store4<BFloat16>(p.out, at, values);
  }
  if (p.lse != nullptr && d == 0) p.lse[token * p.num_heads + query_row.head] = result.lse;
}

}  // namespace vllm_kernels::cuda
