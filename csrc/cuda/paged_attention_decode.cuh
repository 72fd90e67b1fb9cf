// paged_attention on tensor cores: one launch of one block a multiprocessor for any batch.
//
// A block takes an equal part of the batch's stages (attention_work.cuh); its warps take the stages
// in turn, each through a ring of its own (kv_ring.cuh), which runs on across the borders of
// segments. At the end of a segment, or of the part, the warps' results are merged in shared memory
// and written: as output where the block had the whole segment, else to the workspace, where the
// segment's last block to finish merges all pieces in order.
#pragma once
#include <algorithm>

#include "cuda/kv_ring.cuh"
#include "cuda/launch.cuh"
#include "cuda/paged_attention_workspace.h"

namespace vllm_kernels::cuda {

constexpr int kMaxDecodeWarps = 16;
constexpr int kStartBytes = 192;  // of what a warp notes of one of its first stages

struct DecodeShape {
  WorkShape work;
  RingLayout ring;
  int tile_tokens;    // tokens of a page as it lies in a stage of form kChunks: 8, 16 or 32
  FastDivisor fours;  // groups of 4 dimensions of a head
  float cap;          // softcap in log2 units
  float cap_inverse;  // 2 / softcap
};

// The query rows of a segment.
struct SegmentRows {
  int first;          // of the sequence's query_len * group rows
  int count;
  int position;       // of the sequence's query token 0
  int low, high;      // positions of the segment's first and last query token
  int kv_head;
};

__device__ __forceinline__ SegmentRows segment_rows(const WorkShape& shape, const WorkCursor& at) {
  const SequenceWork& work = at.sequence;
  SegmentRows rows;
  rows.first = at.chunk << shape.row_shift;
  rows.count = min(shape.rows(), work.query_len * shape.group - rows.first);
  rows.position = work.seq_len - work.query_len;
  rows.low = rows.position + static_cast<int>(shape.group_divisor.divide(rows.first));
  rows.high =
      rows.position + static_cast<int>(shape.group_divisor.divide(rows.first + rows.count - 1));
  rows.kv_head = at.kv_head;
  return rows;
}

// A row's query token (of the sequence) and head (of the model).
struct RowPlace {
  int token;
  int head;
};
__device__ __forceinline__ RowPlace place_of_row(const WorkShape& shape, const SegmentRows& rows,
                                                 int row) {
  const int index = rows.first + row;
  const int token = shape.group_divisor.divide(index);
  return {.token = token, .head = rows.kv_head * shape.group + index - token * shape.group};
}

// What is known of a row after some of its tokens: logits in log2 units, relative to `maximum`.
struct RowState {
  float maximum = kNoMaximum;
  float sum = 0.0f;
  float4 out = {0.0f, 0.0f, 0.0f, 0.0f};  // of 4 dimensions

  __device__ __forceinline__ void add(float weight, float other_sum, float4 other) {
    sum += weight * other_sum;
    out.x += weight * other.x;
    out.y += weight * other.y;
    out.z += weight * other.z;
    out.w += weight * other.w;
  }
};

template <typename T>
__device__ __forceinline__ void store4(void* out, int64_t at, const float (&values)[4]) {
  struct alignas(4 * sizeof(T)) Four {
    T data[4];
  } four;
#pragma unroll
  for (int j = 0; j < 4; ++j) four.data[j] = from_float<T>(values[j]);
  *reinterpret_cast<Four*>(static_cast<T*>(out) + at) = four;
}

// A row's 4 dimensions from `d` on, and its log-sum-exp.
__device__ __forceinline__ void write_row(const PagedAttentionParams& p, const WorkShape& shape,
                                          const SequenceWork& work, const SegmentRows& rows,
                                          int row, int d, const RowState& state) {
  const RowPlace place = place_of_row(shape, rows, row);
  float total = state.sum, factor = 1.0f, maximum = state.maximum;
  if (p.sinks != nullptr) {
    const float sink = p.sinks[place.head] * kLog2E;
    maximum = fmaxf(maximum, sink);
    factor = exp2_approx(state.maximum - maximum);
    total = total * factor + exp2_approx(sink - maximum);
  }
  const bool eight = size_of(p.kv.dtype) == 1;
  const float v_scale = eight && p.kv.v_scale != nullptr
                            ? p.kv.v_scale[rows.kv_head * p.kv.scale_stride]
                            : 1.0f;
  // total is 0 where every token was masked: the result is 0. NaN passes through.
  const float scale = total == 0.0f ? 0.0f : __fdividef(factor * v_scale, total);
  const float values[4] = {state.out.x * scale, state.out.y * scale, state.out.z * scale,
                           state.out.w * scale};
  const int64_t token = work.first_query + place.token;
  const int64_t at =
      token * p.out_stride + static_cast<int64_t>(place.head) * p.kv.head_size + d;
  if (p.dtype == DType::kFloat16) {
    store4<Half>(p.out, at, values);
  } else {
    store4<BFloat16>(p.out, at, values);
  }
  if (p.lse != nullptr && d == 0) {
    p.lse[token * p.num_heads + place.head] =
        total == 0.0f ? -INFINITY : (maximum + __log2f(total)) * kLn2;
  }
}

template <typename Cache, int kMaxHeadSize, int kTiles>
constexpr int kDecodeThreads = kTiles == 1 && kMaxHeadSize <= 128 ? 384 : 256;

template <typename Cache, int kMaxHeadSize, int kTiles, PageForm kForm>
__global__ void __launch_bounds__(kDecodeThreads<Cache, kMaxHeadSize, kTiles>, 1)
    paged_attention_decode_kernel(const __grid_constant__ PagedAttentionParams p,
                                  const __grid_constant__ DecodeShape shape,
                                  const __grid_constant__ DecodeWorkspace workspace) {
  extern __shared__ __align__(128) char shared[];
  __shared__ uint64_t barriers[kMaxDecodeWarps * kMaxRingStages];
  __shared__ uint32_t present[kMaxDecodeWarps * kMaxRingStages];
  __shared__ __align__(16) uint4 zeros;
  __shared__ PartScratch scratch;
  __shared__ bool merges;
  // In shared memory, not in registers, which the tiles need. Three pieces: some threads may still
  // write the last one when the next but one is put down.
  __shared__ WorkCursor pieces_at[3];
  __shared__ SegmentRows pieces_rows[3];
  __shared__ WorkCursor fills_at[kMaxDecodeWarps];  // each warp's next segment to fill from
  launch_dependents();
  wait_for_predecessor();

  const int warps = blockDim.x / 32;
  const int warp = in_register(threadIdx.x / 32), lane = in_register(threadIdx.x % 32);
  const int head_size = p.kv.head_size;
  const int stage_shift = shape.work.stage_shift, stage_tokens = shape.work.stage_tokens();
  if (threadIdx.x == 0) zeros = uint4{0, 0, 0, 0};
  KvRing<Cache, kForm> ring(shape.ring,
                            shared_address(shared) + warp * shape.ring.stages * shape.ring.stage_bytes,
                            barriers + warp * kMaxRingStages, present + warp * kMaxRingStages, lane);

  PartSizes sizes(0, shape.work, gridDim.x);
  int seq;
  uint32_t before;
  find_part(p, shape.work, scratch, &sizes, &seq, &before);  // has barriers, which publish zeros
  const uint32_t part_begin = sizes.begin(blockIdx.x);
  const int part = sizes.size(blockIdx.x);
  if (part == 0) return;
  WorkCursor& fill_cursor = fills_at[warp];
  if (lane == 0) {
    fill_cursor.set(sequence_work(p, shape.work, seq), part_begin - before);
    if (warp == 0) {
      pieces_at[0] = fill_cursor;
      pieces_rows[0] = segment_rows(shape.work, fill_cursor);
    }
    fill_cursor.advance(p, shape.work, warp);
  }
  __syncthreads();
  FillPoint filling;
  filling.set(p, stage_shift, fill_cursor);
  const auto advance = [&](FillPoint& point) {
    point.stage += warps;
    if (point.stage < point.stages) return;
    __syncwarp();
    if (lane == 0) {
      fill_cursor.stage = point.stage;
      fill_cursor.advance(p, shape.work, 0);
    }
    __syncwarp();
    point.set(p, stage_shift, fill_cursor);
  };

  float* merge_out =
      reinterpret_cast<float*>(shared + warps * shape.ring.stages * shape.ring.stage_bytes);

  // This warp's stages: number warp, warp + warps, ... of the part.
  const int fills = (part - warp + warps - 1) / warps;
  int filled = 0;
  {
    // The first stages' blocks are fetched together.
    const int starts = min(shape.ring.stages, fills);
    struct Start {
      int32_t blocks[32];
      FillPoint at;
    };
    static_assert(sizeof(Start) <= kStartBytes);
    Start* list = reinterpret_cast<Start*>(merge_out) + warp * kMaxRingStages;
#pragma unroll 1
    for (int i = 0; i < starts; ++i) {
      const int32_t* entry = ring.entry_of(stage_shift, filling);
      list[i].blocks[lane] = -1;
      if (entry != nullptr) copy4_async(shared_address(&list[i].blocks[lane]), entry);
      if (lane == 0) list[i].at = filling;
      advance(filling);
    }
    wait_all_copies();
    __syncwarp();
#pragma unroll 1
    for (; filled < starts; ++filled) {
      ring.fill(p.kv, stage_shift, list[filled].at, list[filled].blocks[lane]);
    }
  }
  int32_t next_block = -1;
  const auto fetch_next_block = [&] {
    const int32_t* entry = filled < fills ? ring.entry_of(stage_shift, filling) : nullptr;
    next_block = entry != nullptr ? *entry : -1;
  };
  fetch_next_block();

  using Tile = AttentionTile<Cache, kMaxHeadSize, kTiles, kForm>;
  __shared__ uint2 shared_query[Tile::kSharedQuerySize];
  Tile tile;
  tile.shared_query = shared_query;
  tile.head_size = head_size;
  tile.set_addresses(shape.tile_tokens, shape.ring.page_bytes, lane, shared_address(&zeros));

  const int pitch = head_size + 4;  // floats
  float* merge_max = merge_out + warps * 8 * pitch;
  float* merge_sum = merge_max + warps * 8;

#pragma unroll 1
  for (int done = 0, now = 0, i = warp; done < part;) {
    const int following = now == 2 ? 0 : now + 1;
    const WorkCursor& at = pieces_at[now];
    const SequenceWork& work = at.sequence;
    const int piece = min(part - done, work.stages - at.stage);
    const bool whole = piece == work.stages;
    const SegmentRows& rows = pieces_rows[now];
    if (threadIdx.x == 0) {  // the barriers of the merge come before anybody reads it
      WorkCursor& next = pieces_at[following];
      next = at;
      next.advance(p, shape.work, piece);
      pieces_rows[following] = segment_rows(shape.work, next);
    }
    tile.tiles = (rows.count + 7) / 8;

    const auto load_query = [&](auto tag) {
      using Query = decltype(tag);
      const auto start = [&](int row) -> const Query* {
        if (row >= rows.count) return nullptr;
        const RowPlace place = place_of_row(shape.work, rows, row);
        return static_cast<const Query*>(p.query) +
               (work.first_query + place.token) * p.query_stride +
               static_cast<int64_t>(place.head) * head_size;
      };
      const float k_scale = !Tile::kWide && p.kv.k_scale != nullptr
                                ? p.kv.k_scale[rows.kv_head * p.kv.scale_stride]
                                : 1.0f;
      tile.template load_query<Query>(start, p.scale * k_scale * kLog2E, lane);
    };
    if constexpr (Tile::kWide) {
      load_query(Cache{});
    } else {
      p.dtype == DType::kFloat16 ? load_query(Half{}) : load_query(BFloat16{});
    }
    if constexpr (Tile::kSharedQuery) __syncwarp();
    tile.clear();

    const bool plain_scores = p.alibi_slopes == nullptr && p.softcap == 0.0f;
    const int window = p.sliding_window;
    const int begin = window > 0 ? max(0, rows.low - window + 1) : 0;  // tokens that any row sees
    const int end = rows.high + 1;
    const int first_token = (work.first_stage + at.stage) << stage_shift;  // of the piece
    int first = 0;                                                         // of the tile at hand
    // Tiles in [plain_begin, plain_end) need no mask and no adjustment.
    const int plain_begin = !plain_scores ? INT32_MAX : window > 0 ? rows.high - window + 1 : 0;
    const int plain_end = rows.low + 1;
    const auto adjust = [&](float score, int t, int j, int token) {
      const int row = min(Tile::row_of(lane, t, j), rows.count - 1);
      const RowPlace place = place_of_row(shape.work, rows, row);
      const int distance = first + token - rows.position - place.token;  // 0: the query's own
      if (distance > 0 || (window > 0 && distance <= -window)) return -INFINITY;
      if (p.softcap > 0.0f) {
        // cap * tanh(score / cap); its absolute error, a few 2^-22 of cap, is what counts in a logit.
        score = shape.cap - __fdividef(2.0f * shape.cap, 1.0f + exp2_approx(score * shape.cap_inverse));
      }
      if (p.alibi_slopes != nullptr) {
        score += p.alibi_slopes[place.head] * kLog2E * static_cast<float>(distance);
      }
      return score;
    };

#pragma unroll 1
    for (; i < piece; i += warps) {
      ring.wait();
      const uint32_t there = ring.present();
      const int stage_first = first_token + (i << stage_shift);
#pragma unroll 1
      for (int t = 0; t * 16 < stage_tokens; ++t) {
        first = stage_first + t * 16;
        uint32_t tokens = there;
        const bool plain = first >= plain_begin && first + 16 <= plain_end;
        if (!plain || there != 0xffffu) {
          if (stage_tokens > 16) tokens = there != 0 ? 0xffffu : 0u;
          if (first < begin) tokens &= begin - first < 16 ? 0xffffu << (begin - first) : 0u;
          if (end - first < 16) tokens &= end > first ? (1u << (end - first)) - 1 : 0u;
          tokens &= 0xffffu;
          if (tokens == 0) continue;
        }
        tile.step(ring.key() + t * tile.key_tile, ring.value() + t * tile.value_tile, tokens,
                  plain, adjust, lane);
      }
      ring.release();
      if (filled < fills) {
        ring.fill(p.kv, stage_shift, filling, next_block);
        advance(filling);
        ++filled;
        fetch_next_block();
      }
    }
    tile.reduce_sums();

    // The piece of a segment that begins before this part goes to slot 0, one that ends behind it
    // to slot 1.
    const int64_t slot = static_cast<int64_t>(blockIdx.x) * 2 + (at.stage > 0 ? 0 : 1);
    float* piece_out = workspace.out + (slot << shape.work.row_shift) * head_size;
    float2* piece_stats = workspace.stats + (slot << shape.work.row_shift);
    const int fours = head_size / 4;
#pragma unroll 1
    for (int t = 0; t < tile.tiles; ++t) {
      const int tile_rows = min(8, rows.count - t * 8);
      __syncthreads();
      tile.store(t, tile_rows, merge_out + warp * 8 * pitch, pitch, merge_max + warp * 8,
                 merge_sum + warp * 8, lane);
      __syncthreads();
#pragma unroll 1
      for (int i = threadIdx.x; i < tile_rows * fours; i += blockDim.x) {
        const int row = shape.fours.divide(i), d = (i - row * fours) * 4;
        RowState state;
        for (int w = 0; w < warps; ++w) state.maximum = fmaxf(state.maximum, merge_max[w * 8 + row]);
        for (int w = 0; w < warps; ++w) {
          state.add(exp2_approx(merge_max[w * 8 + row] - state.maximum), merge_sum[w * 8 + row],
                    *reinterpret_cast<const float4*>(&merge_out[(w * 8 + row) * pitch + d]));
        }
        if (whole) {
          write_row(p, shape.work, work, rows, t * 8 + row, d, state);
        } else {
          *reinterpret_cast<float4*>(&piece_out[(t * 8 + row) * head_size + d]) = state.out;
          if (d == 0) piece_stats[t * 8 + row] = {state.maximum, state.sum};
        }
      }
    }
    if (!whole) {
      const uint32_t segment_begin = part_begin + done - at.stage;
      const uint32_t first_block =
          at.stage > 0 ? sizes.block_of(segment_begin) : static_cast<uint32_t>(blockIdx.x);
      const uint32_t pieces = sizes.block_of(segment_begin + work.stages - 1) - first_block + 1;
      __threadfence();
      __syncthreads();
      if (threadIdx.x == 0) {
        merges = atomicInc(&workspace.counters[first_block], pieces - 1) == pieces - 1;
      }
      __syncthreads();
      if (merges) {
        __threadfence();
        const auto piece_at = [&](uint32_t index) {
          return (static_cast<int64_t>(first_block + index) * 2 + (index == 0)) << shape.work.row_shift;
        };
#pragma unroll 1
        for (int i = threadIdx.x; i < rows.count * fours; i += blockDim.x) {
          const int row = shape.fours.divide(i), d = (i - row * fours) * 4;
          RowState state;
#pragma unroll 4
          for (uint32_t n = 0; n < pieces; ++n) {
            state.maximum = fmaxf(
                state.maximum, __ldcg(&workspace.stats[piece_at(n) + row].x));
          }
#pragma unroll 4
          for (uint32_t n = 0; n < pieces; ++n) {
            const int64_t from = piece_at(n) + row;
            const float2 stats = __ldcg(&workspace.stats[from]);
            state.add(exp2_approx(stats.x - state.maximum), stats.y,
                      __ldcg(reinterpret_cast<const float4*>(&workspace.out[from * head_size + d])));
          }
          write_row(p, shape.work, work, rows, row, d, state);
        }
      }
    }
    done += piece;
    i -= piece;
    now = following;
  }
}

template <typename Cache, int kMaxHeadSize, int kTiles, PageForm kForm>
void launch_decode(const PagedAttentionParams& p, const DecodeWorkspace& workspace, void* stream) {
  const DeviceInfo& device = current_device_info();
  const PagedKv& kv = p.kv;
  constexpr int kBytes = sizeof(Cache);
  constexpr bool kRows = kForm == PageForm::kRows;
  DecodeShape shape;
  shape.work.group = p.num_heads / kv.num_kv_heads;
  shape.work.row_shift = std::bit_width(8u * kTiles) - 1;
  shape.fours = FastDivisor(kv.head_size / 4);
  shape.cap = p.softcap * kLog2E;
  shape.cap_inverse = p.softcap > 0.0f ? 2.0f / p.softcap : 0.0f;
  shape.work.group_divisor = FastDivisor(shape.work.group);
  shape.ring.page_shift = std::bit_width(static_cast<uint32_t>(kv.block_size)) - 1;
  shape.ring.whole_pages = !kRows && kv.block_size <= 32;
  shape.ring.pages_per_stage = kv.block_size == 8 ? 2 : 1;
  shape.work.stage_shift = shape.ring.whole_pages && kv.block_size == 32 ? 5 : 4;
  shape.tile_tokens = shape.ring.whole_pages ? kv.block_size : 16;
  shape.ring.page_bytes = kv.head_size * shape.tile_tokens * kBytes;
  shape.ring.value_offset = kRows ? 16 * row_pitch(kv.head_size, kBytes)
                                  : (kv.head_size * kBytes) << shape.work.stage_shift;
  shape.ring.stage_bytes = (2 * shape.ring.value_offset + 127) / 128 * 128;
  const int row_chunks = kv.head_size * kBytes / 16;
  shape.ring.row_lanes = std::min(32, row_chunks & -row_chunks);  // the largest power of two in it

  const auto kernel = paged_attention_decode_kernel<Cache, kMaxHeadSize, kTiles, kForm>;
  using Tile = AttentionTile<Cache, kMaxHeadSize, kTiles, kForm>;
  constexpr int kStatic = 4096 + (Tile::kSharedQuery ? Tile::kSharedQuerySize * 8 : 0);
  const int memory = device.shared_memory_per_block - kStatic;
  const auto merge_bytes = [&](int warps) { return warps * std::max(8 * (kv.head_size + 6) * 4, kMaxRingStages * kStartBytes); };
  const auto stages_for = [&](int warps) {
    return (memory - merge_bytes(warps)) / (warps * shape.ring.stage_bytes);
  };
  int warps = kDecodeThreads<Cache, kMaxHeadSize, kTiles> / 32;
  const int least_stages = getenv("VK_ST") ? atoi(getenv("VK_ST")) : 3;
  if (getenv("VK_W")) warps = std::min(warps, atoi(getenv("VK_W")));
  while (warps > 1 && stages_for(warps) < least_stages) warps = warps > 4 ? warps - 4 : warps / 2;
  shape.ring.stages = std::clamp(stages_for(warps), 2, kMaxRingStages);
  const size_t bytes =
      static_cast<size_t>(warps) * shape.ring.stages * shape.ring.stage_bytes + merge_bytes(warps);

  shape.work.rounds = (p.num_seqs + warps * 32 - 1) / (warps * 32);
  const unsigned blocks = std::min<unsigned>(device.multiprocessors, workspace.max_blocks);
  shape.work.blocks = FastDivisor(blocks);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(bytes)),
        "paged_attention: shared memory");
  launch_kernel("paged_attention", kernel, dim3(blocks), dim3(warps * 32), bytes, stream, p, shape,
                workspace);
}

// For one cache type: layouts, padded head sizes, and 1 or several tiles of 8 query rows.
template <typename Cache>
void launch_decode(const PagedAttentionParams& p, const DecodeWorkspace& workspace, void* stream) {
  const int64_t rows = int64_t{p.max_query_len} * (p.num_heads / p.kv.num_kv_heads);
  const auto with_form = [&](auto form) {
    constexpr PageForm kForm = decltype(form)::value;
    if (p.kv.head_size <= 64) {
      return rows <= 8 ? launch_decode<Cache, 64, 1, kForm>(p, workspace, stream)
                       : launch_decode<Cache, 64, 4, kForm>(p, workspace, stream);
    }
    if (p.kv.head_size <= 128) {
      return rows <= 8 ? launch_decode<Cache, 128, 1, kForm>(p, workspace, stream)
                       : launch_decode<Cache, 128, 4, kForm>(p, workspace, stream);
    }
    return rows <= 8 ? launch_decode<Cache, 256, 1, kForm>(p, workspace, stream)
                     : launch_decode<Cache, 256, 2, kForm>(p, workspace, stream);
  };
  if (p.kv.layout == KvLayout::kVllm) {
    with_form(std::integral_constant<PageForm, PageForm::kChunks>{});
  } else {
    with_form(std::integral_constant<PageForm, PageForm::kRows>{});
  }
}

}  // namespace vllm_kernels::cuda
