// paged_attention on tensor cores: one launch of one block a multiprocessor, or two, for any batch.
//
// A block takes items (attention/decode/tile_scheduler.cuh) one after the other. Its teams take an
// item's stages in turn, each through a ring of its own (kv_pipeline.cuh). At the end each team
// starts to fill its ring for the next item; then the teams' results are merged in shared memory
// and written: as output where the item is a whole segment, else to the workspace, where the
// segment's last block to finish, or that of its last piece (split_exchange.cuh), merges all pieces
// in order.
//
// A team is one warp where an item has up to 8 query rows; else each of its 1, 2 or 4 warps has
// 8 or 16 of them, so that a warp keeps its queries and results in registers. (Where there are
// warpgroup products, decode_wgmma_kernel.cuh has the items of more than 8 rows.)
#pragma once
#include <algorithm>

#include "cuda/attention/common/kv_pipeline.cuh"
#include "cuda/attention/common/score_mod.cuh"
#include "cuda/attention/common/split_exchange.cuh"
#include "cuda/attention/common/tensor_maps.cuh"
#include "cuda/attention/decode/decode_wgmma_kernel.cuh"
#include "cuda/attention/decode/tile_scheduler.cuh"
#include "cuda/attention/decode/warp_mma.cuh"
#include "cuda/base/launch.cuh"

namespace vllm_kernels::cuda {

// What paged_attention has in the place of fused_decode_attention's FreshToken: query rows and
// tokens are where the parameters say.
struct NothingFresh {
  static constexpr bool kAny = false;
};

struct DecodeShape {
  WorkShape work;
  RingLayout ring;
  TileLayout tile;
  int team_shift;     // log2 of the warps of a team
  int warp_shift;     // log2 of the query rows of a warp, at most
  int merge_rows;     // rows of a warp that are merged at a time: a thread has 4 dimensions of one
  FastDivisor fours;  // groups of 4 dimensions of a head
  ScoreCap cap;
};

// What is known of a row after some of its tokens: logits in log2 units, relative to `maximum`.
struct RowState {
  float maximum = kNoMaximum;
  float sum = 0.0f;
  float4 out = {0.0f, 0.0f, 0.0f, 0.0f};  // of 4 dimensions

  // Roundings are spelt out: which product of a sum is fused would be the compiler's choice, and
  // another one where pieces are posted than where they are counted.
  __device__ __forceinline__ void add(float weight, float other_sum, float4 other) {
    sum = __fmaf_rn(weight, other_sum, sum);
    out.x = __fmaf_rn(weight, other.x, out.x);
    out.y = __fmaf_rn(weight, other.y, out.y);
    out.z = __fmaf_rn(weight, other.z, out.z);
    out.w = __fmaf_rn(weight, other.w, out.w);
  }
  // From here on relative to `updated`.
  __device__ __forceinline__ void raise(float updated) {
    const float factor = exp2_approx(maximum - updated);
    maximum = updated;
    sum = __fmul_rn(sum, factor);
    out = {__fmul_rn(out.x, factor), __fmul_rn(out.y, factor), __fmul_rn(out.z, factor),
           __fmul_rn(out.w, factor)};
  }
  // One more token.
  __device__ __forceinline__ void add_token(float score, float4 value) {
    raise(fmaxf(maximum, score));
    add(exp2_approx(score - maximum), 1.0f, value);
  }
  // Part i of `parts` has stats[i * stats_step] and outs[i * out_step]. kGroups of 8 are loaded at
  // a time, and merged one after the other: the result does not depend on kGroups.
  template <int kGroups, typename Source>
  __device__ __forceinline__ void merge(int parts, float2* stats, uint32_t stats_step, float4* outs,
                                        uint32_t out_step, const Source& source) {
    constexpr int kBatch = 8 * kGroups;
#pragma unroll 1
    for (int first = 0; first < parts; first += kBatch) {
      float2 s[kBatch];
      float4 o[kBatch];
      bool all_there;
      // Lanes may part here: behind a merge of posted pieces there is nothing of a warp and no
      // mbarrier, only a barrier of the block (TeamEnd::merge_pieces keeps its warps together).
#pragma unroll 1
      do {
        all_there = true;
        const int begin = in_register(first);  // keeps no addresses
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const uint32_t part = min(begin + i, parts - 1);
          s[i] = source.load(stats + part * stats_step);
          o[i] = source.load(outs + part * out_step);
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          all_there &= source.there(s[i].x) & source.there(o[i].x);
        }
      } while (!all_there);
#pragma unroll
      for (int group = 0; group < kBatch; group += 8) {
        float updated = maximum;
#pragma unroll
        for (int i = group; i < group + 8; ++i) updated = fmaxf(updated, s[i].x);
        raise(updated);
#pragma unroll
        for (int i = group; i < group + 8; ++i) {
          // No branches: they would part what may go on at the same time.
          const bool there = first + i < parts;
          const float4 zero = {0.0f, 0.0f, 0.0f, 0.0f};
          add(there ? exp2_approx(s[i].x - maximum) : 0.0f, s[i].y, there ? o[i] : zero);
        }
      }
      const int begin = in_register(first);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        source.take(outs + static_cast<uint32_t>(min(begin + i, parts - 1)) * out_step);
      }
    }
  }
};

// Where RowState::merge() finds its parts: in shared memory,
struct SharedParts {
  template <typename T>
  __device__ __forceinline__ T load(const T* from) const {
    return *from;
  }
  __device__ __forceinline__ bool there(float) const { return true; }
  __device__ __forceinline__ void take(float4*) const {}
};
// or in the workspace, where they are, or will be.
struct CountedParts : SharedParts {
  template <typename T>
  __device__ __forceinline__ T load(const T* from) const {
    return __ldcg(from);
  }
};
struct PostedParts {
  template <typename T>
  __device__ __forceinline__ T load(const T* from) const {
    return load_relaxed(from);
  }
  __device__ __forceinline__ bool there(float x) const { return is_posted(x); }
  __device__ __forceinline__ void take(float4* from) const { take_back(from); }
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
  const RowResult result = row_result(p, item.kv_head, place.head, state.maximum, state.sum);
  const float scale = result.scale;
  const float values[4] = {state.out.x * scale, state.out.y * scale, state.out.z * scale,
                           state.out.w * scale};
  const int64_t token = item.sequence.first_query + place.token;
  const int64_t at = token * p.out_stride + static_cast<int64_t>(place.head) * p.kv.head_size + d;
  if (p.dtype == DType::kFloat16) {
    store4<Half>(p.out, at, values);
  } else {
    store4<BFloat16>(p.out, at, values);
  }
  if (p.lse != nullptr && d == 0) p.lse[token * p.num_heads + place.head] = result.lse;
}

// Query rows of a warp, in tiles of 8: alone, one; in a team, as many as its registers hold.
template <int kMaxHeadSize, bool kTeam>
constexpr int kRowTiles = kTeam && kMaxHeadSize <= 128 ? 2 : 1;

// Tiles of 16 tokens that a warp takes at a time: two where that is not more than 8 KiB of K and V,
// or a team's.
template <typename Cache, int kMaxHeadSize, bool kTeam>
constexpr int kTokenTiles =
    kMaxHeadSize <= 128 && (kTeam || sizeof(Cache) * kMaxHeadSize <= 128) ? 2 : 1;

// 16-bit pages: 8 warps with a ring of 3 pages each; 8-bit pages are half as long and take more
// work.
template <typename Cache, int kMaxHeadSize, bool kTeam>
constexpr int kDecodeThreads = sizeof(Cache) == 1 && !kTeam && kMaxHeadSize <= 128 ? 384 : 256;

// `fresh`: NothingFresh, or fused_decode_attention's FreshToken.
template <typename Cache, int kMaxHeadSize, bool kTeam, PageForm kForm, typename Fresh>
__device__ __forceinline__ void decode(const PagedAttentionParams& p, const DecodeShape& shape,
                                       const RowMaps& maps, const DecodeWorkspace& workspace,
                                       Fresh fresh) {
  constexpr int kTiles = kRowTiles<kMaxHeadSize, kTeam>, kBytes = sizeof(Cache);
  using Tile =
      AttentionTile<Cache, kMaxHeadSize, kTiles, kTokenTiles<Cache, kMaxHeadSize, kTeam>, kForm>;
  constexpr int kTokens = Tile::kTokens, kShift = kStageShift<kTokens>;
  using Ring = KvRing<Cache, kMaxHeadSize, kTokens, kForm, kTeam>;
  extern __shared__ __align__(1024) char shared[];  // the teams' rings, then the warps' results
  constexpr int kWarps = kDecodeThreads<Cache, kMaxHeadSize, kTeam> / 32;
  __shared__ uint64_t ring_words[kWarps][Ring::kWords];
  __shared__ float2 warp_stats[kWarps * 8];
  // Three items: some threads may still write out the last one when the next but one is put down.
  __shared__ WorkItem items[3];
  __shared__ ItemRows items_rows[3];
  __shared__ uint32_t next_index;  // thread 0 knows it first
  __shared__ uint64_t next_known;
  __shared__ bool is_last;
  launch_dependents();

  const int warps = blockDim.x / 32;
  const int warp = in_register(threadIdx.x / 32), lane = in_register(threadIdx.x % 32);
  const int team_shift = kTeam ? shape.team_shift : 0, members = 1 << team_shift;
  const int team = warp >> team_shift, member = warp & members - 1, teams = warps >> team_shift;
  const int warp_rows = kTiles > 1 ? 1 << shape.warp_shift : 8;
  const int head_size = p.kv.head_size, fours = head_size / 4;
  const int ring_bytes = shape.ring.stages * shape.ring.stage_bytes;
  Ring ring(shape.ring, maps, shared_address(shared) + team * ring_bytes,
            shared_address(ring_words[team]), member == 0, lane);
  if (member == 0 && lane == 0) {
    Ring::init(shape.ring, maps, shared_address(ring_words[team]), members);
  }
  __syncwarp();
  float* results = reinterpret_cast<float*>(shared + teams * ring_bytes);
  const int pitch = (head_size + 15) / 16 * 16 + 4;  // floats; no two lanes of a store in a bank
  if (threadIdx.x == 0) barrier_init(shared_address(&next_known), 1);
  Tile tile;
  tile.head_size = head_size;
  tile.set_addresses(shape.tile, lane);
  tile.keep_addresses();
  if (head_size < kMaxHeadSize) {  // K past the head size is read as well, and never copied
    for (int i = threadIdx.x * 16; i < teams * ring_bytes; i += blockDim.x * 16) {
      *reinterpret_cast<uint4*>(shared + i) = uint4{0, 0, 0, 0};
    }
    fence_async_proxy();
  }
  if (kTeam || head_size < kMaxHeadSize) __syncthreads();  // the barriers, the zeros
  if (threadIdx.x == 0) {                                  // written anew before it is read
    store_shared(shared_address(&next_index), touch(p) ^ touch(shape) ^ touch(workspace));
  }
  // As registers allow.
  using Plan = WorkPlan<kTeam || (Fresh::kAny && kBytes == 1) ? 1 : kBytes == 1 ? 4 : 8>;
  Plan plan;
  uint32_t index = blockIdx.x;               // of the item at hand
  const int first_row = member * warp_rows;  // this warp's
  const void* query_rows[kTiles];            // this lane's of the item that the ring has next
  // Puts down item `index`, which this warp's ring has next.
  const auto take_item = [&](int now, bool guesses) {
    const WorkItem item = plan.find(p, shape.work, index, lane);
    const ItemRows rows = item_rows(shape.work, item);
    if constexpr (Fresh::kAny) {
      fresh.aim(item, shape.work.group, guesses);
    } else {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const int row = t * 8 + lane / 4;
        query_rows[t] = nullptr;
        if (first_row + row >= rows.count || row >= warp_rows) continue;
        const RowPlace place = place_of_row(shape.work, item, rows, first_row + row);
        query_rows[t] = static_cast<const char*>(p.query) +
                        2 * ((item.sequence.first_query + place.token) * p.query_stride +
                             static_cast<int64_t>(place.head) * head_size);
      }
    }
    if (threadIdx.x == 0) {
      items[now] = item;
      items_rows[now] = rows;
    }
    ring.start(p, kShift, item.seq, item.sequence.seq_len, item.kv_head,
               item.sequence.first_stage + item.stage + team, teams,
               max(0, item.stages - team + teams - 1) / teams);
  };
  const auto load_query = [&] {
    if constexpr (!Fresh::kAny) tile.load_query(query_rows, lane);
  };
  const auto load_fresh = [&] {
    if constexpr (Fresh::kAny) fresh.load(p);
  };
  const auto fill_ring = [&](int stages) {
    int filled = 0;
#pragma unroll 1
    for (int i = 0; i < stages; ++i) filled += ring.fill(p.kv);
    return filled;
  };

  // The first item of a small batch, and its blocks, are guessed before the predecessor has ended,
  // from lengths and tables that it may be writing; then both are read again, with the first pages
  // under way. Where they differ all is done once more. (One place of the code takes first items
  // and others: a block that has one waits for every line that it runs.)
  bool guesses = !kTeam && Plan::may_guess(p);
  if (!guesses && !p.early_pages) wait_before(p);
  uint32_t count = UINT32_MAX;  // of all items, once there is a plan
  bool merges = false;          // the item before this
#pragma unroll 1
  for (int turn = 0;; turn = turn == 5 ? 0 : turn + 1) {
    const int now = turn < 3 ? turn : turn - 3, last = now == 0 ? 2 : now - 1;  // of `items`
    if (index < count) {
      int filled = 0;  // stages
#pragma unroll 1
      for (;;) {
        if (!merges) {
          plan.make(p, shape.work, lane);
          count = plan.items();
        }
        const bool some = index < count;
        if (some) take_item(now, guesses);
        if (!guesses) {
          if (some) {
            load_fresh();
            ring.look_up();
          }
          break;
        }
        const int32_t* looked_up = nullptr;
        typename Ring::Copies copies = {};
        if (some) {
          looked_up = ring.guess();
          // Blocks of few items begin while the predecessor runs, and have time. With many, all
          // stages at once would hold up the indices, which are asked for after them.
          const bool few = count <= gridDim.x / 2;
          ring.prefetch(p.kv, shape.ring.stages, few);
          copies = ring.prepare_copies(p.kv, few ? shape.ring.stages : 1);
        }
        wait_for_predecessor();
        if (some) load_fresh();
        typename Plan::Indices indices;
        indices.load(p, lane);
        const int32_t block = looked_up != nullptr ? __ldcg(looked_up) : -1;
        ring.start_copies(copies);
        filled = copies.stages;
        if (some && filled == 0) filled = fill_ring(shape.ring.stages);
        guesses = false;
        if (plan.holds(p, shape.work, indices, lane) && (!some || ring.holds(block))) break;
        ring.drain(filled);
        filled = 0;
      }
      if (index < count) fill_ring(shape.ring.stages - filled);
      // The query and the workspace are touched from here on only: the query is there before the
      // first pages all the same.
      if (!merges && p.early_pages) wait_before(p);
      if (index < count) load_query();
    }
    if (merges) {
      const WorkItem& item = items[last];
      const ItemRows& rows = items_rows[last];
      const bool whole = item.pieces == 1, posts = item.posts;
      const int own = shape.fours.divide(threadIdx.x), d = (threadIdx.x - own * fours) * 4;
      const PieceResults& pieces = posts ? workspace.posted : workspace.counted;
      const auto place = [&](int piece, int row) {
        return (static_cast<int64_t>(item.slot + piece) << shape.work.row_shift) + row;
      };
      const auto out_at = [&](int64_t at) {
        return reinterpret_cast<float4*>(&pieces.out[at * head_size + d]);
      };
      // Calls merge(member, row) for this thread's rows of those from `first` on that are merged
      // at a time of each member.
      const int merge_rows = shape.merge_rows;
      const auto each_row = [&](int first, const auto& merge) {
        if (own >= merge_rows || first + own >= warp_rows) return;
#pragma unroll 1
        for (int of = 0; of < members; ++of) {
          const int row = of * warp_rows + first + own;
          if (row < rows.count) merge(of, row);
        }
      };
      const int most = min(warp_rows, rows.count);
      tile.reduce_sums();
#pragma unroll 1
      for (int first = 0; first < most; first += merge_rows) {
        __syncthreads();  // nobody reads results any more
        const int own_rows = max(0, rows.count - member * warp_rows - first);
        tile.store(first, min(merge_rows, own_rows), results + warp * merge_rows * pitch, pitch,
                   warp_stats + warp * merge_rows, lane);
        __syncthreads();
        each_row(first, [&](int of, int row) {
          RowState state;
          const int at = of * merge_rows + own;
          const uint32_t part_rows = merge_rows << team_shift;
          state.merge<1>(teams, &warp_stats[at], part_rows,
                         reinterpret_cast<float4*>(results + at * pitch + d), part_rows * pitch / 4,
                         SharedParts{});
          if constexpr (Fresh::kAny) {
            if (fresh.counts(last)) state.add_token(fresh.score(last, row), fresh.value(last, d));
          }
          if (whole) {
            write_row(p, shape.work, item, rows, row, d, state);
            return;
          }
          const int64_t to = place(item.piece, row);
          const float2 stats = {state.maximum, state.sum};
          if (posts) {
            post(out_at(to), state.out);
            if (d == 0) post(&pieces.stats[to], stats);
          } else {
            *out_at(to) = state.out;
            if (d == 0) pieces.stats[to] = stats;
          }
        });
      }
      const auto merge_pieces = [&](auto groups, const auto& source) {
#pragma unroll 1
        for (int first = 0; first < most; first += merge_rows) {
          each_row(first, [&](int, int row) {
            RowState state;
            const int64_t at = place(0, row);
            state.merge<decltype(groups)::value>(item.pieces, &pieces.stats[at],
                                                 1u << shape.work.row_shift, out_at(at),
                                                 fours << shape.work.row_shift, source);
            write_row(p, shape.work, item, rows, row, d, state);
          });
        }
      };
      if (!whole && !posts) {
        __syncthreads();
        if (threadIdx.x == 0) {
          is_last = atomic_inc_acquire_release(&workspace.finished[item.slot], item.pieces - 1) ==
                    static_cast<uint32_t>(item.pieces - 1);
        }
        __syncthreads();
        if (is_last) merge_pieces(std::integral_constant<int, 1>{}, CountedParts{});
      }
      if (index >= count) {
        // Blocks that post have no other item: here nothing else is in registers.
        if (!whole && posts && item.piece + 1 == item.pieces) {
          if (item.pieces <= 8) {
            merge_pieces(std::integral_constant<int, 1>{}, PostedParts{});
          } else {
            merge_pieces(std::integral_constant<int, 2>{}, PostedParts{});
          }
          __syncthreads();  // all have read the maxima
          for (int i = threadIdx.x; i < item.pieces << shape.work.row_shift; i += blockDim.x) {
            take_back(&pieces.stats[place(0, i)]);
          }
        }
        break;
      }
    } else {
      __syncthreads();  // items[now] is there
      if (index >= count) break;
    }
    merges = true;

    const WorkItem& item = items[now];
    const ItemRows rows = items_rows[now];
    if constexpr (Fresh::kAny) fresh.prepare(p, shape.cap, item, rows.count, now);
    tile.tiles = min(warp_rows / 8, max(0, rows.count - first_row + 7) / 8);
    if constexpr (Fresh::kAny) {
      query_rows[0] = lane / 4 < rows.count ? fresh.query_row(lane / 4) : nullptr;
      tile.load_query(query_rows, lane);
    }
    const float k_scale = !Tile::kWide && p.kv.k_scale != nullptr
                              ? p.kv.k_scale[item.kv_head * p.kv.scale_stride]
                              : 1.0f;
    const float to_log2 = p.scale * k_scale * kLog2E;
    if constexpr (Tile::kWide) {
      tile.template prepare_query<Cache>(to_log2, lane);
    } else {
      p.dtype == DType::kFloat16 ? tile.template prepare_query<Half>(to_log2, lane)
                                 : tile.template prepare_query<BFloat16>(to_log2, lane);
    }
    tile.clear();

    const bool plain_scores = p.alibi_slopes == nullptr && p.softcap == 0.0f;
    const int window = p.sliding_window;
    const int begin = window > 0 ? max(0, rows.low - window + 1) : 0;  // tokens that any row sees
    int fresh_tokens = 0;  // that are not looked for in pages
    if constexpr (Fresh::kAny) fresh_tokens = fresh.counts(now) ? 1 : 0;
    const int end = rows.high + 1 - fresh_tokens;
    // Steps that begin in [plain_begin, plain_begin + plain_extent] need no mask, no adjustment.
    int plain_begin = window > 0 ? rows.high - window + 1 : 0;
    int plain_extent = rows.low + 1 - fresh_tokens - kTokens - plain_begin;
    if (!plain_scores || plain_extent < 0) {
      plain_begin = INT32_MAX;
      plain_extent = 0;
    }
    plain_begin = in_register(plain_begin);
    plain_extent = in_register(plain_extent);
    int first = 0;  // token of the step at hand
    const auto adjust = [&](float score, int t, int j, int token) {
      const int row = min(first_row + Tile::row_of(lane, t, j), rows.count - 1);
      const RowPlace place = place_of_row(shape.work, item, rows, row);
      return adjusted_score(p, shape.cap, place.head, first + token - rows.position - place.token,
                            score);
    };

    const int stages = in_register(item.stages);
    first = (item.sequence.first_stage + item.stage + team) << kShift;
    // Warp 0 asks for the next item before its last stage but one: late, so that no block holds
    // items back that others could start. The last of `count` calls brings the counter back to 0.
    const int asks_at =
        in_register(warp == 0 ? max(0, ((stages - 1) / teams - 1) * teams) : INT32_MAX);
    uint32_t following = count;
#pragma unroll 1
    for (int i = team; i < stages; i += teams) {
      if (i == asks_at && lane == 0 && count > gridDim.x) {
        following = gridDim.x + atomicInc(workspace.next, count - 1);
      }
      ring.wait();
      uint32_t tokens = ring.present();
      // A team's stage before this one: by now all its warps have it behind them, almost surely.
      if (kTeam && i != team) ring.fill(p.kv);
      const bool plain =
          tokens == kAllTokens<kTokens> &&
          static_cast<uint32_t>(first - plain_begin) <= static_cast<uint32_t>(plain_extent);
      if (!plain) {
        if (first < begin) tokens &= begin - first < kTokens ? ~0u << (begin - first) : 0u;
        if (end - first < kTokens) tokens &= end > first ? (1u << (end - first)) - 1 : 0u;
      }
      if (tokens != 0 && (!kTeam || tile.tiles > 0)) {
        tile.step(ring.key(), ring.value(), tokens, plain, adjust, shape.tile, lane);
      }
      first += teams << kShift;
      ring.release();
      if (!kTeam) ring.fill(p.kv);
      if (i == asks_at && lane == 0) {
        next_index = following;
        barrier_arrive(shared_address(&next_known));
      }
    }
    barrier_wait(shared_address(&next_known), turn & 1);
    index = next_index;
  }
  wait_after(p);
}

template <typename Cache, int kMaxHeadSize, bool kTeam, PageForm kForm>
__global__ void __launch_bounds__(kDecodeThreads<Cache, kMaxHeadSize, kTeam>, 1)
    paged_attention_decode_kernel(const __grid_constant__ PagedAttentionParams p,
                                  const __grid_constant__ DecodeShape shape,
                                  const __grid_constant__ RowMaps maps,
                                  const __grid_constant__ DecodeWorkspace workspace) {
#if defined(VLLM_KERNELS_HAS_WGMMA)
  constexpr bool kUsed = !kTeam || kMaxHeadSize > kTeamMaxHeadSize;
#else
  constexpr bool kUsed = true;
#endif
  if constexpr (kUsed)
    decode<Cache, kMaxHeadSize, kTeam, kForm>(p, shape, maps, workspace, NothingFresh{});
}

// kKernel takes p, DecodeShape, RowMaps, workspace and `more`. False, and no launch, where shared
// memory has no room for `least_threads` with their rings.
template <typename Cache, int kMaxHeadSize, bool kTeam, PageForm kForm, auto kKernel,
          typename... More>
bool launch_decode_kernel(const PagedAttentionParams& p, const DecodeWorkspace& workspace,
                          void* stream, int least_threads, const More&... more) {
  const DeviceInfo& device = current_device_info();
  const PagedKv& kv = p.kv;
  constexpr int kBytes = sizeof(Cache);
  constexpr int kTokens = 16 * kTokenTiles<Cache, kMaxHeadSize, kTeam>;
  constexpr int kShift = kStageShift<kTokens>;
  DecodeShape shape;
  shape.fours = FastDivisor(kv.head_size / 4);
  shape.cap = score_cap(p.softcap);

  set_stage_layout<Cache, kMaxHeadSize, kTokens, kForm>(kv, shape.ring, shape.tile);
  RingLayout& ring = shape.ring;
  int memory = dynamic_shared_memory<kKernel>("paged_attention");
  const int row_bytes = ((kv.head_size + 15) / 16 * 16 + 4) * 4;
  const int group = p.num_heads / kv.num_kv_heads;
  const int64_t rows = int64_t{p.max_query_len} * group;
  // A team's stage in 16 bits is twice as large: half as many teams.
  shape.team_shift = kTeam && (kBytes == 2 || kMaxHeadSize > 128) ? 1 : 0;
  shape.warp_shift = 3;
  if (kRowTiles<kMaxHeadSize, kTeam> > 1 && rows > 8 << shape.team_shift) shape.warp_shift = 4;
  while (kTeam && shape.team_shift < 2 && rows > 1 << (shape.warp_shift + shape.team_shift)) {
    ++shape.team_shift;
  }
  const int row_shift = shape.warp_shift + shape.team_shift;
  const int most_rows = static_cast<int>(std::min<int64_t>(rows, 8));  // merged at a time
  int warps = kDecodeThreads<Cache, kMaxHeadSize, kTeam> / 32;
  const auto memory_for = [&](int count) {  // their rings'
    return memory - count * (kTeam ? most_rows : std::min(most_rows, 4)) * row_bytes;
  };
  const auto stages_for = [&](int count) {
    return memory_for(count) / (count >> shape.team_shift) / ring.stage_bytes;
  };
  // Two blocks of half the warps, of 2 stages each, where many segments end for their bytes: one's
  // copies go on while the other merges. (Batches may not differ so with split_tokens.)
  int blocks = 1, least_stages = 3;
  if (kBytes == 1 && !kTeam && least_threads == 0 && p.split_tokens == 0 &&
      int64_t{p.num_seqs} * kv.num_kv_heads > device.multiprocessors) {
    const int all = memory, fixed = device.shared_memory_per_block - all + 1024;
    memory = (all - fixed) / 2;
    if (stages_for(warps / 2) >= 2) {
      blocks = 2;
      least_stages = 2;
      warps /= 2;
    } else {
      memory = all;
    }
  }
  // As many teams as can have their stages and a few rows a warp to merge.
  const int step = std::max(2, 1 << shape.team_shift);
  while (warps > step && stages_for(warps) < least_stages) warps -= step;
  if (warps * 32 < least_threads) return false;
  ring.stages = ring_stages(memory_for(warps), warps >> shape.team_shift, ring.stage_bytes);
  const int rings = (warps >> shape.team_shift) * ring.stages * ring.stage_bytes;
  shape.merge_rows =
      std::min({most_rows, (memory - rings) / (warps * row_bytes), warps * 32 * 4 / kv.head_size});
  const int bytes = rings + warps * shape.merge_rows * row_bytes;

  shape.work = {
      .group = group,
      .row_shift = row_shift,
      .stage_shift = kShift,
      .least_piece = std::max(1, (warps >> shape.team_shift) >> (kShift - 4)),
      .merge_share = warps >> shape.team_shift,
      .slots = workspace_slots(row_shift, kv.head_size),
      .may_post = may_post_pieces(device.multiprocessors * blocks, row_shift, kv.head_size),
      .piece_share = 0.25f * blocks,
      .group_divisor = FastDivisor(group)};
  check_split(p, shape.work);
  const RowMaps maps = cache_maps<Cache, kTokens, kForm>(kv, ring.line_shift);
  launch_kernel("paged_attention", kKernel, dim3(device.multiprocessors * blocks), dim3(warps * 32),
                bytes, stream, p, shape, maps, workspace, more...);
  return true;
}

template <typename Cache, int kMaxHeadSize, bool kTeam, PageForm kForm>
void launch_decode(const PagedAttentionParams& p, const DecodeWorkspace& workspace, void* stream) {
  launch_decode_kernel<Cache, kMaxHeadSize, kTeam, kForm,
                       paged_attention_decode_kernel<Cache, kMaxHeadSize, kTeam, kForm>>(
      p, workspace, stream, 0);
}

// Layouts NHD and HND: whether form kDense has a kernel for such rows, and is faster with it than
// form kRows (benchmarks/RESULTS.md, "Along the axes").
template <typename Cache>
bool takes_dense(const PagedKv& kv) {
  if (kv.layout == KvLayout::kVllm || kv.block_size < 8) return false;
  constexpr bool kWide = sizeof(Cache) == 2;
  const bool dense = is_dense(kv);
  if (!dense && current_device_info().architecture < 90) return false;
  switch (kv.head_size) {
    case 80:
    case 112:
      return kWide || dense;
    case 96:
      return kWide != dense;
    case 192:
      return !kWide;
    default:
      return false;
  }
}

// For one cache type: layouts, padded head sizes, one warp or several for a stage.
template <typename Cache>
void launch_decode(const PagedAttentionParams& p, const DecodeWorkspace& workspace, void* stream) {
  const int64_t rows = int64_t{p.max_query_len} * (p.num_heads / p.kv.num_kv_heads);
  const auto with_head_size = [&](auto form, auto head_size) {
    constexpr PageForm kForm = decltype(form)::value;
    constexpr int kMaxHeadSize = decltype(head_size)::value;
    if (rows <= 8) return launch_decode<Cache, kMaxHeadSize, false, kForm>(p, workspace, stream);
    if constexpr (kMaxHeadSize <= kTeamMaxHeadSize) {
      if (current_device_info().has_wgmma) {
        return launch_team<Cache, kMaxHeadSize, kForm>(p, workspace, stream);
      }
    }
    launch_decode<Cache, kMaxHeadSize, true, kForm>(p, workspace, stream);
  };
  const auto with_form = [&](auto form) {
    if (p.kv.head_size <= 64) return with_head_size(form, std::integral_constant<int, 64>{});
    if (p.kv.head_size <= 128) return with_head_size(form, std::integral_constant<int, 128>{});
    with_head_size(form, std::integral_constant<int, 256>{});
  };
  if (rows <= 8 && takes_dense<Cache>(p.kv)) {
    const auto of = [&](auto head_size) {
      launch_decode<Cache, decltype(head_size)::value, false, PageForm::kDense>(p, workspace,
                                                                                stream);
    };
    if (p.kv.head_size == 80) return of(std::integral_constant<int, 80>{});
    if (p.kv.head_size == 96) return of(std::integral_constant<int, 96>{});
    if (p.kv.head_size == 112) return of(std::integral_constant<int, 112>{});
    if constexpr (sizeof(Cache) == 1) return of(std::integral_constant<int, 192>{});
  }
  if (p.kv.layout != KvLayout::kVllm) {
    with_form(std::integral_constant<PageForm, PageForm::kRows>{});
  } else if (p.kv.block_size <= 16) {
    with_form(std::integral_constant<PageForm, PageForm::kPages>{});
  } else {
    with_form(std::integral_constant<PageForm, PageForm::kParts>{});
  }
}

}  // namespace vllm_kernels::cuda
