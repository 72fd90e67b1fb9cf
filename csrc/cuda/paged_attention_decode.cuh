// paged_attention on tensor cores: one launch of one block a multiprocessor for any batch.
//
// A block takes items (attention_work.cuh) one after the other. Its warps take an item's stages in
// turn, each through a ring of its own (kv_ring.cuh). At the end each warp starts to fill its ring
// for the next item; then the warps' results are merged in shared memory and written: as output
// where the item is a whole segment, else to the workspace, where the segment's last block to
// finish merges all pieces in order.
#pragma once
#include <algorithm>

#include "cuda/kv_ring.cuh"
#include "cuda/launch.cuh"
#include "cuda/paged_attention_workspace.h"

namespace vllm_kernels::cuda {

constexpr int kMaxDecodeWarps = 12;

struct DecodeShape {
  WorkShape work;
  RingLayout ring;
  TileLayout tile;    // forms kPages and kParts
  int merge_rows;     // query rows that are merged at a time: a thread has 4 dimensions of one
  FastDivisor fours;  // groups of 4 dimensions of a head
  float cap;          // softcap in log2 units
  float cap_inverse;  // 2 / softcap
};

// The query rows of an item.
struct ItemRows {
  int first;  // of the sequence's query_len * group rows
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
  __device__ __forceinline__ void merge_far(int parts, const Stats& stats, const Partial& partial) {
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
  // Parts that lie in shared memory: stats [parts][rows], outs [parts][rows][pitch], at this row
  // and dimension of part 0.
  __device__ __forceinline__ void merge(int parts, int rows, const float2* stats, const float* outs,
                                        int pitch) {
    float updated = maximum;
#pragma unroll 4
    for (int i = 0; i < parts; ++i) updated = fmaxf(updated, stats[i * rows].x);
    const float factor = exp2_approx(maximum - updated);
    maximum = updated;
    sum *= factor;
    out = {out.x * factor, out.y * factor, out.z * factor, out.w * factor};
#pragma unroll 2
    for (int i = 0; i < parts; ++i) {
      const float2 part = stats[i * rows];
      add(exp2_approx(part.x - maximum), part.y,
          *reinterpret_cast<const float4*>(outs + i * rows * pitch));
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
  const float v_scale =
      eight && p.kv.v_scale != nullptr ? p.kv.v_scale[item.kv_head * p.kv.scale_stride] : 1.0f;
  // total is 0 where every token was masked: the result is 0. NaN passes through.
  const float scale = total == 0.0f ? 0.0f : __fdividef(factor * v_scale, total);
  const float values[4] = {state.out.x * scale, state.out.y * scale, state.out.z * scale,
                           state.out.w * scale};
  const int64_t token = item.sequence.first_query + place.token;
  const int64_t at = token * p.out_stride + static_cast<int64_t>(place.head) * p.kv.head_size + d;
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

// 16-bit pages: 8 warps with a ring of 3 pages each; 8-bit pages are half as long and take more
// work.
template <typename Cache, int kMaxHeadSize, int kTiles>
constexpr int kDecodeThreads = sizeof(Cache) == 1 && kTiles == 1 && kMaxHeadSize <= 128 ? 384 : 256;

template <typename Cache, int kMaxHeadSize, int kTiles, PageForm kForm>
__global__ void __launch_bounds__(kDecodeThreads<Cache, kMaxHeadSize, kTiles>, 1)
    paged_attention_decode_kernel(const __grid_constant__ PagedAttentionParams p,
                                  const __grid_constant__ DecodeShape shape,
                                  const __grid_constant__ RowMaps maps,
                                  const __grid_constant__ DecodeWorkspace workspace) {
  using Tile = AttentionTile<Cache, kMaxHeadSize, kTiles, kForm>;
  extern __shared__ __align__(1024) char shared[];  // the warps' rings, then their results
  __shared__ uint64_t barriers[kMaxDecodeWarps * kMaxRingStages];
  __shared__ uint32_t present[kMaxDecodeWarps * kMaxRingStages];
  __shared__ uint2 shared_query[Tile::kSharedQuerySize];
  __shared__ float2 warp_stats[kMaxDecodeWarps * 8];
  // Three items: some threads may still write out the last one when the next but one is put down.
  __shared__ WorkItem items[3];
  __shared__ ItemRows items_rows[3];
  __shared__ uint32_t next_index;  // thread 0 knows it first
  __shared__ uint64_t next_known;
  __shared__ bool is_last;
  launch_dependents();

  const int warps = blockDim.x / 32;
  const int warp = in_register(threadIdx.x / 32), lane = in_register(threadIdx.x % 32);
  const int head_size = p.kv.head_size, fours = head_size / 4;
  const int stage_shift = shape.work.stage_shift, stage_tokens = shape.work.stage_tokens();
  const int ring_bytes = shape.ring.stages * shape.ring.stage_bytes;
  KvRing<Cache, kForm> ring(shape.ring, maps, shared_address(shared) + warp * ring_bytes,
                            shared_address(barriers) + warp * kMaxRingStages * 8,
                            shared_address(present) + warp * kMaxRingStages * 4, lane);
  float* results = reinterpret_cast<float*>(shared + warps * ring_bytes);
  const int pitch = (head_size + 15) / 16 * 16 + 4;  // floats; no two lanes of a store in a bank
  if (threadIdx.x == 0) barrier_init(shared_address(&next_known), 1);
  Tile tile;
  tile.shared_query = shared_query;
  tile.head_size = head_size;
  tile.set_addresses(shape.tile, lane);
  if (head_size < kMaxHeadSize) {  // K past the head size is read as well, and never copied
    for (int i = threadIdx.x * 16; i < warps * ring_bytes; i += blockDim.x * 16) {
      *reinterpret_cast<uint4*>(shared + i) = uint4{0, 0, 0, 0};
    }
    fence_async_proxy();
    __syncthreads();
  }
  if (threadIdx.x == 0) {  // written anew before it is read
    store_shared(shared_address(&next_index), touch(p) ^ touch(shape) ^ touch(workspace));
  }
  wait_for_predecessor();

  WorkPlan<kTiles == 1> plan(p, shape.work, lane);
  const uint32_t count = plan.items();
  uint32_t index = blockIdx.x;  // of the item at hand
  uint32_t next_parity = 0;
  bool merges = false;  // the item before it
#pragma unroll 1
  for (int now = 0, last = 2;; last = now, now = now == 2 ? 0 : now + 1) {
    if (index < count) {
      const WorkItem item = plan.find(p, shape.work, index, lane);
      if (threadIdx.x == 0) {
        items[now] = item;
        items_rows[now] = item_rows(shape.work, item);
      }
      ring.start(p, stage_shift, item, item.sequence.first_stage + item.stage + warp, warps,
                 max(0, item.stages - warp + warps - 1) / warps);
#pragma unroll 1
      for (int i = 0; i < shape.ring.stages; ++i) ring.fill(p.kv);
    }

    if (merges) {
      const WorkItem& item = items[last];
      const ItemRows& rows = items_rows[last];
      const bool whole = item.pieces == 1;
      const int row = shape.fours.divide(threadIdx.x), d = (threadIdx.x - row * fours) * 4;
      const auto in_workspace = [&](int piece, int first) {  // its row
        return (static_cast<int64_t>(item.slot + piece) << shape.work.row_shift) + first + row;
      };
      tile.reduce_sums();
#pragma unroll 1
      for (int first = 0; first < rows.count; first += shape.merge_rows) {
        const int some = min(shape.merge_rows, rows.count - first);
        __syncthreads();  // nobody reads results any more
        tile.store(first, some, results + warp * some * pitch, pitch, warp_stats + warp * some,
                   lane);
        __syncthreads();
        if (row >= some) continue;
        RowState state;
        state.merge(warps, some, warp_stats + row, results + row * pitch + d, pitch);
        if (whole) {
          write_row(p, shape.work, item, rows, first + row, d, state);
        } else {
          const int64_t to = in_workspace(item.piece, first);
          *reinterpret_cast<float4*>(&workspace.out[to * head_size + d]) = state.out;
          if (d == 0) workspace.stats[to] = {state.maximum, state.sum};
        }
      }
      if (!whole) {
        __syncthreads();
        if (threadIdx.x == 0) {
          is_last = atomic_inc_acquire_release(&workspace.finished[item.slot], item.pieces - 1) ==
                    static_cast<uint32_t>(item.pieces - 1);
        }
        __syncthreads();
        if (is_last) {
#pragma unroll 1
          for (int first = 0; first < rows.count; first += shape.merge_rows) {
            if (row >= min(shape.merge_rows, rows.count - first)) continue;
            RowState state;
            state.merge_far(
                item.pieces,
                [&](int piece) { return __ldcg(&workspace.stats[in_workspace(piece, first)]); },
                [&](int piece) {
                  return __ldcg(reinterpret_cast<const float4*>(
                      &workspace.out[in_workspace(piece, first) * head_size + d]));
                });
            write_row(p, shape.work, item, rows, first + row, d, state);
          }
        }
      }
    } else {
      __syncthreads();  // items[now] is there
    }
    if (index >= count) return;
    merges = true;

    const WorkItem& item = items[now];
    const ItemRows rows = items_rows[now];
    tile.tiles = (rows.count + 7) / 8;
    const auto load_query = [&](auto tag) {
      using Query = decltype(tag);
      const auto start = [&](int row) -> const Query* {
        if (row >= rows.count) return nullptr;
        const RowPlace place = place_of_row(shape.work, item, rows, row);
        return static_cast<const Query*>(p.query) +
               (item.sequence.first_query + place.token) * p.query_stride +
               static_cast<int64_t>(place.head) * head_size;
      };
      const float k_scale = !Tile::kWide && p.kv.k_scale != nullptr
                                ? p.kv.k_scale[item.kv_head * p.kv.scale_stride]
                                : 1.0f;
      tile.template load_query<Query>(start, p.scale * k_scale * kLog2E, warp == 0, lane);
    };
    if constexpr (Tile::kWide) {
      load_query(Cache{});
    } else {
      p.dtype == DType::kFloat16 ? load_query(Half{}) : load_query(BFloat16{});
    }
    if constexpr (Tile::kSharedQuery) __syncthreads();
    tile.clear();

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
        // cap * tanh(score / cap); its absolute error, a few 2^-22 of cap, is what counts in a
        // logit.
        score =
            shape.cap - __fdividef(2.0f * shape.cap, 1.0f + exp2_approx(score * shape.cap_inverse));
      }
      if (p.alibi_slopes != nullptr) {
        score += p.alibi_slopes[place.head] * kLog2E * static_cast<float>(distance);
      }
      return score;
    };

    const int stages = item.stages, tiles_of_stage = stage_tokens / 16;
    first = (item.sequence.first_stage + item.stage + warp) << stage_shift;
    // Warp 0 asks for the next item before its last stage but one: late, so that no block holds
    // items back that others could start. The last of `count` calls brings the counter back to 0.
    const int asks_at = max(0, ((stages - 1) / warps - 1) * warps);
    uint32_t there = 0, following = count;
#pragma unroll 1
    for (int i = warp, t = 0; i < stages;) {
      if (t == 0) {
        if (i == asks_at && lane == 0 && count > gridDim.x) {
          following = gridDim.x + atomicInc(workspace.next, count - 1);
        }
        ring.wait();
        there = ring.present();
      }
      uint32_t tokens = there;
      const bool plain = first >= plain_begin && first + 16 <= plain_end;
      if (!plain) {
        if (first < begin) tokens &= begin - first < 16 ? 0xffffu << (begin - first) : 0u;
        if (end - first < 16) tokens &= end > first ? (1u << (end - first)) - 1 : 0u;
        tokens &= 0xffffu;
      }
      if (tokens != 0) {
        tile.step(ring.key() + t * Tile::kKeyTile, ring.value() + t * Tile::kValueTile, tokens,
                  plain, adjust, shape.tile, lane);
      }
      first += 16;
      if (++t == tiles_of_stage) {
        if (i == asks_at && lane == 0) {
          next_index = following;
          barrier_arrive(shared_address(&next_known));
        }
        t = 0;
        i += warps;
        first += (warps - 1) << stage_shift;
        ring.release();
        ring.fill(p.kv);
      }
    }
    barrier_wait(shared_address(&next_known), next_parity);
    next_parity ^= 1;
    index = next_index;
  }
}

// As (dimension, token of the page, KV head, block), in boxes of 128 bytes x up to 16 tokens. What
// lies behind the head is read as zero.
inline CUtensorMap row_map(const PagedKv& kv, void* base, int64_t token_stride, int64_t head_stride,
                           int64_t block_stride) {
  using Encode =
      CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                   const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                   CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  static const Encode encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                           cudaEnableDefault, &found),
          "cuTensorMapEncodeTiled");
    return reinterpret_cast<Encode>(function);
  }();
  const auto bytes = static_cast<cuuint64_t>(size_of(kv.dtype));
  const cuuint64_t sizes[] = {
      static_cast<cuuint64_t>(kv.head_size), static_cast<cuuint64_t>(kv.block_size),
      static_cast<cuuint64_t>(kv.num_kv_heads), static_cast<cuuint64_t>(kv.num_blocks)};
  const cuuint64_t strides[] = {token_stride * bytes, head_stride * bytes, block_stride * bytes};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(kColumnBytes / bytes),
                            static_cast<cuuint32_t>(std::min(kv.block_size, 16)), 1, 1};
  const cuuint32_t steps[] = {1, 1, 1, 1};
  CUtensorMap map;
  const CUresult result = encode(
      &map, bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8, 4, base,
      sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error("paged_attention: no tensor map for the cache, CUDA error " +
                             std::to_string(static_cast<int>(result)));
  }
  return map;
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
  const int stage_shift = kForm == PageForm::kPages && kv.block_size == 32 ? 5 : 4;
  ring.split_shift = std::max(0, stage_shift - ring.page_shift);
  shape.tile.page_tokens = kForm == PageForm::kPages ? kv.block_size : 16;
  ring.page_bytes = kv.head_size * shape.tile.page_tokens * kBytes;
  ring.page_stride = kMaxHeadSize * shape.tile.page_tokens * kBytes;
  shape.tile.page_stride = ring.page_stride;
  shape.tile.page_bytes = ring.page_bytes;
  ring.columns = row_columns(kv.head_size, kBytes);
  // V's products read past the head size, too: what comes then is the same stage's K.
  ring.key_offset = kByRow ? ring.columns * kColumnStride : (kv.head_size * kBytes) << stage_shift;
  const int key_bytes = kByRow ? row_columns(kMaxHeadSize, kBytes) * kColumnStride
                               : (kMaxHeadSize * kBytes) << stage_shift;
  ring.stage_bytes = (ring.key_offset + key_bytes + 127) / 128 * 128;

  constexpr auto kKernel = paged_attention_decode_kernel<Cache, kMaxHeadSize, kTiles, kForm>;
  const int memory = dynamic_shared_memory<kKernel>("paged_attention");
  const int row_bytes = ((kv.head_size + 15) / 16 * 16 + 4) * 4;
  const int group = p.num_heads / kv.num_kv_heads;
  const int most_rows =
      static_cast<int>(std::min<int64_t>({8, kRows, int64_t{p.max_query_len} * group}));
  // As many warps as can have 3 stages each and at least a few rows to merge.
  int warps = kDecodeThreads<Cache, kMaxHeadSize, kTiles> / 32;
  const auto stages_for = [&](int count) {
    return (memory / count - std::min(most_rows, 4) * row_bytes) / ring.stage_bytes;
  };
  while (warps > 2 && stages_for(warps) < 3) warps -= 2;
  ring.stages = std::clamp(stages_for(warps), 2, kMaxRingStages);
  const int rings = warps * ring.stages * ring.stage_bytes;
  shape.merge_rows =
      std::min({most_rows, (memory - rings) / (warps * row_bytes), warps * 32 * 4 / kv.head_size});
  const int bytes = rings + warps * shape.merge_rows * row_bytes;

  const auto units = [](int64_t stride) { return static_cast<uint32_t>(stride * kBytes / 16); };
  ring.key_block = units(kv.key_block_stride);
  ring.key_head = units(kv.key_head_stride);
  ring.value_block = units(kv.value_block_stride);
  ring.value_head = units(kv.value_head_stride);

  shape.work = {.group = group,
                .row_shift = std::bit_width(static_cast<unsigned>(kRows)) - 1,
                .stage_shift = stage_shift,
                .least_piece = warps,
                .group_divisor = FastDivisor(group)};
  RowMaps maps = {};
  if (kByRow && device.compute_capability >= 90) {
    maps.key = row_map(kv, kv.key, kv.key_token_stride, kv.key_head_stride, kv.key_block_stride);
    maps.value =
        row_map(kv, kv.value, kv.value_token_stride, kv.value_head_stride, kv.value_block_stride);
  }
  launch_kernel("paged_attention", kKernel, dim3(device.multiprocessors), dim3(warps * 32), bytes,
                stream, p, shape, maps, workspace);
}

// For one cache type: layouts, padded head sizes, and 1 to 4 tiles of 8 query rows.
template <typename Cache>
void launch_decode(const PagedAttentionParams& p, const DecodeWorkspace& workspace, void* stream) {
  const int64_t rows = int64_t{p.max_query_len} * (p.num_heads / p.kv.num_kv_heads);
  const auto with_head_size = [&](auto form, auto head_size) {
    constexpr PageForm kForm = decltype(form)::value;
    constexpr int kMaxHeadSize = decltype(head_size)::value;
    if (rows <= 8) return launch_decode<Cache, kMaxHeadSize, 1, kForm>(p, workspace, stream);
    if constexpr (kMaxHeadSize <= 128) {
      if (rows > 16) return launch_decode<Cache, kMaxHeadSize, 4, kForm>(p, workspace, stream);
    }
    launch_decode<Cache, kMaxHeadSize, 2, kForm>(p, workspace, stream);
  };
  const auto with_form = [&](auto form) {
    if (p.kv.head_size <= 64) return with_head_size(form, std::integral_constant<int, 64>{});
    if (p.kv.head_size <= 128) return with_head_size(form, std::integral_constant<int, 128>{});
    with_head_size(form, std::integral_constant<int, 256>{});
  };
  if (p.kv.layout != KvLayout::kVllm) {
    with_form(std::integral_constant<PageForm, PageForm::kRows>{});
  } else if (p.kv.block_size <= 32) {
    with_form(std::integral_constant<PageForm, PageForm::kPages>{});
  } else {
    with_form(std::integral_constant<PageForm, PageForm::kParts>{});
  }
}

}  // namespace vllm_kernels::cuda
