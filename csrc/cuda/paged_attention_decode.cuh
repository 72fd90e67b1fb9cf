// paged_attention on tensor cores: one launch of one block a multiprocessor for any batch.
//
// A block takes items (attention_work.cuh) one after the other. Its warps take an item's stages in
// turn, each through a ring of its own (kv_ring.cuh); at the end their results are merged in shared
// memory and written: as output where the item is a whole segment, else to the workspace, where the
// segment's last block to finish merges all pieces in order.
#pragma once
#ifndef VK_MARK
#define VK_MARK(n)
#endif
#include <algorithm>

#include "cuda/kv_ring.cuh"
#include "cuda/launch.cuh"
#include "cuda/paged_attention_workspace.h"

namespace vllm_kernels::cuda {

constexpr int kMaxDecodeWarps = 12;

struct DecodeShape {
  WorkShape work;
  RingLayout ring;
  int tile_tokens;    // form kChunks: tokens of a page as it lies in a stage, 8, 16 or 32
  FastDivisor fours;  // groups of 4 dimensions of a head
  float cap;          // softcap in log2 units
  float cap_inverse;  // 2 / softcap
};

// The query rows of an item.
struct ItemRows {
  int first;      // of the sequence's query_len * group rows
  int count;
  int position;   // of the sequence's query token 0
  int low, high;  // positions of the item's first and last query token
};

__device__ __forceinline__ ItemRows item_rows(const WorkShape& shape, const WorkItem& item) {
  ItemRows rows;
  rows.first = item.chunk << shape.row_shift;
  rows.count = min(shape.rows(), item.sequence.query_len * shape.group - rows.first);
  rows.position = item.sequence.seq_len - item.sequence.query_len;
  rows.low = rows.position + static_cast<int>(shape.group_divisor.divide(rows.first));
  rows.high =
      rows.position + static_cast<int>(shape.group_divisor.divide(rows.first + rows.count - 1));
  return rows;
}

// A row's query token (of the sequence) and head (of the model).
struct RowPlace {
  int token;
  int head;
};
__device__ __forceinline__ RowPlace place_of_row(const WorkShape& shape, const WorkItem& item,
                                                 const ItemRows& rows, int row) {
  const int index = rows.first + row;
  const int token = shape.group_divisor.divide(index);
  return {.token = token, .head = item.kv_head * shape.group + index - token * shape.group};
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
  // stats(i) and partial(i): those of part i of `parts`, of which 8 are read at a time.
  template <typename Stats, typename Partial>
  __device__ __forceinline__ void merge(int parts, const Stats& stats, const Partial& partial) {
#pragma unroll 1
    for (int first = 0; first < parts; first += 8) {
      float2 s[8];
      float4 o[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int part = min(first + i, parts - 1);
        s[i] = stats(part);
        o[i] = partial(part);
      }
      float updated = maximum;
#pragma unroll
      for (int i = 0; i < 8; ++i) updated = fmaxf(updated, s[i].x);
      const float factor = exp2_approx(maximum - updated);
      maximum = updated;
      sum *= factor;
      out = {out.x * factor, out.y * factor, out.z * factor, out.w * factor};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (first + i < parts) add(exp2_approx(s[i].x - maximum), s[i].y, o[i]);
      }
    }
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
                                          const WorkItem& item, const ItemRows& rows, int row,
                                          int d, const RowState& state) {
  const RowPlace place = place_of_row(shape, item, rows, row);
  float total = state.sum, factor = 1.0f, maximum = state.maximum;
  if (p.sinks != nullptr) {
    const float sink = p.sinks[place.head] * kLog2E;
    maximum = fmaxf(maximum, sink);
    factor = exp2_approx(state.maximum - maximum);
    total = total * factor + exp2_approx(sink - maximum);
  }
  const bool eight = size_of(p.kv.dtype) == 1;
  const float v_scale = eight && p.kv.v_scale != nullptr
                            ? p.kv.v_scale[item.kv_head * p.kv.scale_stride]
                            : 1.0f;
  // total is 0 where every token was masked: the result is 0. NaN passes through.
  const float scale = total == 0.0f ? 0.0f : __fdividef(factor * v_scale, total);
  const float values[4] = {state.out.x * scale, state.out.y * scale, state.out.z * scale,
                           state.out.w * scale};
  const int64_t token = item.sequence.first_query + place.token;
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

// 16-bit pages: 8 warps with a ring of 3 pages each; 8-bit pages are half as long and take more work.
template <typename Cache, int kMaxHeadSize, int kTiles>
constexpr int kDecodeThreads = sizeof(Cache) == 1 && kTiles == 1 && kMaxHeadSize <= 128 ? 384 : 256;

template <typename Cache, int kMaxHeadSize, int kTiles, PageForm kForm>
__global__ void __launch_bounds__(kDecodeThreads<Cache, kMaxHeadSize, kTiles>, 1)
    paged_attention_decode_kernel(const __grid_constant__ PagedAttentionParams p,
                                  const __grid_constant__ DecodeShape shape,
                                  const __grid_constant__ DecodeWorkspace workspace) {
  using Tile = AttentionTile<Cache, kMaxHeadSize, kTiles, kForm>;
  // The warps' rings; after an item's loop their results, [warps][rows][pitch] floats.
  extern __shared__ __align__(128) char shared[];
  __shared__ uint64_t barriers[kMaxDecodeWarps * kMaxRingStages];
  __shared__ uint32_t present[kMaxDecodeWarps * kMaxRingStages];
  __shared__ uint2 shared_query[Tile::kSharedQuerySize];
  __shared__ float2 warp_stats[kMaxDecodeWarps * kTiles * 8];
  __shared__ __align__(16) uint4 zeros;
  __shared__ uint32_t next_item;
  __shared__ bool is_last;
  VK_MARK(0);
  launch_dependents();

  const int warps = blockDim.x / 32;
  const int warp = in_register(threadIdx.x / 32), lane = in_register(threadIdx.x % 32);
  const int head_size = p.kv.head_size;
  const int stage_shift = shape.work.stage_shift, stage_tokens = shape.work.stage_tokens();
  if (threadIdx.x == 0) zeros = uint4{0, 0, 0, 0};
  KvRing<Cache, kForm> ring(
      shape.ring, shared_address(shared) + warp * shape.ring.stages * shape.ring.stage_bytes,
      barriers + warp * kMaxRingStages, present + warp * kMaxRingStages, lane);
  Tile tile;
  tile.shared_query = shared_query;
  tile.head_size = head_size;
  tile.set_addresses(shape.tile_tokens, shape.ring.page_bytes, lane, shared_address(&zeros));
  __syncthreads();  // zeros are there
  wait_for_predecessor();
  VK_MARK(1);

  WorkPlan plan(p, shape.work, lane);
  const uint32_t items = plan.items();
#pragma unroll 1
  for (uint32_t index = blockIdx.x; index < items;) {
    const WorkItem item = plan.find(p, shape.work, index, lane);
    const SequenceWork& work = item.sequence;
    VK_MARK(2);
    ring.start(p, stage_shift, item, work.first_stage + item.stage + warp, warps,
               max(0, item.stages - warp + warps - 1) / warps);
#pragma unroll 1
    for (int i = 0; i < shape.ring.stages; ++i) ring.fill(p.kv);
    VK_MARK(3);
    uint32_t following = items;
    if (items > gridDim.x && threadIdx.x == 0) {
      following = gridDim.x + atomicInc(workspace.next, items - 1);
    }

    const ItemRows rows = item_rows(shape.work, item);
    tile.tiles = (rows.count + 7) / 8;
    const auto load_query = [&](auto tag) {
      using Query = decltype(tag);
      const auto start = [&](int row) -> const Query* {
        if (row >= rows.count) return nullptr;
        const RowPlace place = place_of_row(shape.work, item, rows, row);
        return static_cast<const Query*>(p.query) +
               (work.first_query + place.token) * p.query_stride +
               static_cast<int64_t>(place.head) * head_size;
      };
      const float k_scale = !Tile::kWide && p.kv.k_scale != nullptr
                                ? p.kv.k_scale[item.kv_head * p.kv.scale_stride]
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
    VK_MARK(4);

    const bool plain_scores = p.alibi_slopes == nullptr && p.softcap == 0.0f;
    const int window = p.sliding_window;
    const int begin = window > 0 ? max(0, rows.low - window + 1) : 0;  // tokens that any row sees
    const int end = rows.high + 1;
    // Tiles in [plain_begin, plain_end) need no mask and no adjustment.
    const int plain_begin = !plain_scores ? INT32_MAX : window > 0 ? rows.high - window + 1 : 0;
    const int plain_end = rows.low + 1;
    int first = 0;  // token of the tile at hand
    const auto adjust = [&](float score, int t, int j, int token) {
      const int row = min(Tile::row_of(lane, t, j), rows.count - 1);
      const RowPlace place = place_of_row(shape.work, item, rows, row);
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

    const int first_token = (work.first_stage + item.stage) << stage_shift;
#pragma unroll 1
    for (int i = warp; i < item.stages; i += warps) {
      ring.wait();
      if (i == 0) VK_MARK(5);
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
      ring.fill(p.kv);
    }
    VK_MARK(6);
    tile.reduce_sums();

    const int pitch = (head_size + 15) / 16 * 16 + 4;  // floats; no two lanes of a store in a bank
    float* results = reinterpret_cast<float*>(shared);
    fence_async_proxy();
    __syncthreads();  // all rings are empty
    tile.store(rows.count, results + warp * rows.count * pitch, pitch,
               warp_stats + warp * rows.count, lane);
    if (threadIdx.x == 0) next_item = following;
    __syncthreads();
    index = next_item;
    const int64_t slot_rows = static_cast<int64_t>(item.slot) << shape.work.row_shift;
    const int fours = head_size / 4;
#pragma unroll 1
    for (int i = threadIdx.x; i < rows.count * fours; i += blockDim.x) {
      const int row = shape.fours.divide(i), d = (i - row * fours) * 4;
      RowState state;
      state.merge(
          warps, [&](int w) { return warp_stats[w * rows.count + row]; },
          [&](int w) {
            return *reinterpret_cast<const float4*>(&results[(w * rows.count + row) * pitch + d]);
          });
      if (item.pieces == 1) {
        write_row(p, shape.work, item, rows, row, d, state);
      } else {
        const int64_t to = slot_rows + (static_cast<int64_t>(item.piece) << shape.work.row_shift) + row;
        *reinterpret_cast<float4*>(&workspace.out[to * head_size + d]) = state.out;
        if (d == 0) workspace.stats[to] = {state.maximum, state.sum};
      }
    }
    VK_MARK(7);
    fence_async_proxy();  // bulk copies may write where the results lie
    __syncthreads();
    if (item.pieces == 1) continue;
    if (threadIdx.x == 0) {
      is_last = atomic_inc_acquire_release(&workspace.finished[item.slot], item.pieces - 1) ==
                static_cast<uint32_t>(item.pieces - 1);
    }
    __syncthreads();
    VK_MARK(8);
    if (!is_last) continue;
#pragma unroll 1
    for (int i = threadIdx.x; i < rows.count * fours; i += blockDim.x) {
      const int row = shape.fours.divide(i), d = (i - row * fours) * 4;
      const auto at = [&](int piece) {
        return slot_rows + (static_cast<int64_t>(piece) << shape.work.row_shift) + row;
      };
      RowState state;
      state.merge(
          item.pieces, [&](int piece) { return __ldcg(&workspace.stats[at(piece)]); },
          [&](int piece) {
            return __ldcg(
                reinterpret_cast<const float4*>(&workspace.out[at(piece) * head_size + d]));
          });
      write_row(p, shape.work, item, rows, row, d, state);
    }
    VK_MARK(9);
  }
}

template <typename Cache, int kMaxHeadSize, int kTiles, PageForm kForm>
void launch_decode(const PagedAttentionParams& p, const DecodeWorkspace& workspace, void* stream) {
  const DeviceInfo& device = current_device_info();
  const PagedKv& kv = p.kv;
  constexpr int kBytes = sizeof(Cache), kRows = 8 * kTiles;
  static_assert(kRows <= kMaxDecodeRows && kRows * kMaxHeadSize * 4 <= kMaxDecodeRowBytes);
  constexpr bool kByRow = kForm == PageForm::kRows;
  DecodeShape shape;
  shape.fours = FastDivisor(kv.head_size / 4);
  shape.cap = p.softcap * kLog2E;
  shape.cap_inverse = p.softcap > 0.0f ? 2.0f / p.softcap : 0.0f;

  RingLayout& ring = shape.ring;
  ring.page_shift = std::bit_width(static_cast<uint32_t>(kv.block_size)) - 1;
  ring.whole_pages = !kByRow && kv.block_size <= 32;
  const int stage_shift = ring.whole_pages && kv.block_size == 32 ? 5 : 4;
  ring.split_shift = std::max(0, stage_shift - ring.page_shift);
  shape.tile_tokens = ring.whole_pages ? kv.block_size : 16;
  ring.page_bytes = kv.head_size * shape.tile_tokens * kBytes;
  ring.value_offset =
      kByRow ? 16 * row_pitch(kv.head_size, kBytes) : (kv.head_size * kBytes) << stage_shift;
  ring.stage_bytes = (2 * ring.value_offset + 127) / 128 * 128;

  const auto kernel = paged_attention_decode_kernel<Cache, kMaxHeadSize, kTiles, kForm>;
  using Tile = AttentionTile<Cache, kMaxHeadSize, kTiles, kForm>;
  constexpr int kStatic = 6144 + (Tile::kSharedQuery ? Tile::kSharedQuerySize * 8 : 0);
  const int memory = device.shared_memory_per_block - kStatic;
  int warps = kDecodeThreads<Cache, kMaxHeadSize, kTiles> / 32;
  const auto stages_for = [&](int count) { return memory / (count * ring.stage_bytes); };
  while (warps > 2 && stages_for(warps) < 3) warps -= 2;
  ring.stages = std::clamp(stages_for(warps), 2, kMaxRingStages);
  const int results = warps * kRows * ((kv.head_size + 15) / 16 * 16 + 4) * 4;
  const int bytes = std::max(warps * ring.stages * ring.stage_bytes, results);

  shape.work = {.group = p.num_heads / kv.num_kv_heads,
                .row_shift = std::bit_width(static_cast<unsigned>(kRows)) - 1,
                .stage_shift = stage_shift,
                .least_piece = warps,
                .fixed_piece = 0,
                .group_divisor = FastDivisor(p.num_heads / kv.num_kv_heads)};
  const int blocks = std::min(device.multiprocessors, kMaxDecodeBlocks);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
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
