// paged_attention of more than 8 query rows a KV head on Hopper's warpgroup products: one launch of
// one block a multiprocessor for any batch.
//
// A block's first two or three warpgroups are teams (attention_team.cuh) that take an item's stages
// in turn, each through a ring of its own (kv_ring.cuh). Of a last warpgroup, one warp fills each
// ring (a warp issues a bulk copy in about 100 cycles) and runs ahead: while an item ends the next
// one's pages are under way. Another asks for items (attention_work.cuh), and puts them down in a
// queue of two and their queries beside it.
//
// For an item's end see paged_attention_team_end.cuh.
#pragma once
#include "cuda/attention_team.cuh"
#include "cuda/attention_team_rows.cuh"
#include "cuda/cache_maps.cuh"
#include "cuda/kv_ring.cuh"
#include "cuda/launch.cuh"
#include "cuda/paged_attention_team_end.cuh"

namespace vllm_kernels::cuda {

constexpr int kItemQueue = 2;

// Threads: the teams and the warpgroup that serves them.
__host__ __device__ constexpr int team_threads(int max_tiles) {
  return 128 * (team_count(max_tiles) + 1);
}
// Registers of a thread, of 65536 in all: the teams need more than their even share.
__host__ __device__ constexpr int servant_registers(int max_tiles) {
  return max_tiles <= 4 ? 80 : 64;
}
constexpr float kTeamPieceShare = 0.5f;  // WorkShape::piece_share
__host__ __device__ constexpr int team_registers(int max_tiles) {
  return max_tiles <= 4 ? 144 : 224;
}

// Query rows there is room for: products of whole rows have 64, used or not.
__host__ __device__ constexpr int stored_rows(bool whole, int rows) {
  return whole ? 64 : rows;
}

// Whether rows are the rows of the products, not their columns.
template <typename Cache>
constexpr bool kWholeRows = sizeof(Cache) == 2;

struct TeamShape {
  WorkShape work;
  RingLayout ring;
  TileLayout tile;
  ScoreCap cap;
  int scratch;  // bytes of all rings: the queries and weights lie behind them
};

// Operands of the products.
template <typename Cache>
__host__ __device__ constexpr int team_scratch_bytes(int max_tiles, int rows, int max_head_size) {
  const int stored = stored_rows(kWholeRows<Cache>, rows);
  return kTeamQueries<Cache> * query_bytes(stored, max_head_size) +
         team_count(max_tiles) * weight_bytes(stored);
}

#if defined(VLLM_KERNELS_HAS_WGMMA)

using TeamPlan = WorkPlan<1>;

struct ItemQueue {
  WorkItem items[kItemQueue];
  ItemRows rows[kItemQueue];
  bool ends[kItemQueue];  // there is no such item, nor any other
  uint64_t full[kItemQueue], empty[kItemQueue];
  uint64_t wanted;  // the first filler is at its item's last stage
};

// The queries of items, in turn.
template <typename Cache, int kMaxRows>
struct TeamQueries {
  static constexpr int kCount = kTeamQueries<Cache>;
  uint64_t full[kCount], empty[kCount];
  float scales[kCount][sizeof(Cache) == 1 ? kMaxRows : 1];  // see TeamTile::store_query
};

// Tiles of 8 rows that products have.
__device__ __forceinline__ int used_tiles(const ItemRows& rows) {
  return rows.count <= 16 ? 2 : rows.count <= 32 ? 4 : 8;
}

// Asks the second-level cache for the pages that an item's rings will have first, where it is long.
// They are not read, so this may be done before the predecessor has ended.
template <typename Cache, PageForm kForm>
__device__ __forceinline__ void prefetch_pages(const PagedAttentionParams& p,
                                               const RingLayout& ring, const WorkItem& item,
                                               int teams, int lane) {
  if (!may_prefetch<kForm, kTeamTokens>(ring)) return;
  if (item.stages < kPrefetchLength * teams * ring.stages) return;
  const int page = ((item.sequence.first_stage + item.stage) << ring.split_shift) + lane;
  uint32_t block = ~0u;
  if (lane < teams * ring.stages << ring.split_shift &&
      page << ring.page_shift < item.sequence.seq_len) {
    block = __ldcg(&p.block_tables[item.seq * p.block_table_stride + page]);
  }
#pragma unroll 1
  for (uint32_t left = __ballot_sync(0xffffffffu, block < p.kv.num_blocks); left != 0;
       left &= left - 1) {
    const uint64_t of = __shfl_sync(0xffffffffu, block, __ffs(left) - 1);
    const uint64_t head = item.kv_head;
    prefetch_page<Cache, kForm>(
        p.kv, ring,
        static_cast<const char*>(p.kv.key) + (of * ring.key_block + head * ring.key_head) * 16,
        static_cast<const char*>(p.kv.value) +
            (of * ring.value_block + head * ring.value_head) * 16,
        lane);
  }
}

// One warp: the queries of a block's item `number`, to `storage`.
template <typename Tile, typename Queries>
__device__ __forceinline__ void store_queries(const PagedAttentionParams& p, const TeamShape& shape,
                                              const WorkItem& item, const ItemRows& rows,
                                              Queries& queries, uint32_t storage, uint32_t number,
                                              int lane) {
  const uint32_t slot = number % Queries::kCount;
  const auto store = [&](auto tag) {
    using Query = decltype(tag);
    const auto start = [&](int row) -> const Query* {
      if (row >= rows.count) return nullptr;
      const RowPlace place = place_of_row(shape.work, item, rows, row);
      return static_cast<const Query*>(p.query) +
             (item.sequence.first_query + place.token) * p.query_stride +
             static_cast<int64_t>(place.head) * p.kv.head_size;
    };
    store_query<Tile, Query>(
        start,
        storage +
            slot * query_bytes(stored_rows(Tile::kWholeRows, shape.work.rows()), Tile::kMaxHead),
        shared_address(queries.scales[slot]), used_tiles(rows), p.kv.head_size, lane);
  };
  barrier_wait(shared_address(&queries.empty[slot]), number / Queries::kCount & 1 ^ 1);
  if constexpr (Tile::kWide) {
    store(typename Tile::Element{});
  } else {
    p.dtype == DType::kFloat16 ? store(Half{}) : store(BFloat16{});
  }
  fence_async_proxy();
  barrier_arrive_warp(shared_address(&queries.full[slot]), lane);
}

// One warp: which items this block takes, and their queries.
template <typename Tile, typename Cache, PageForm kForm, typename Queries>
__device__ __forceinline__ void queue_items(const PagedAttentionParams& p, const TeamShape& shape,
                                            ItemQueue& queue, Queries& queries, uint32_t storage,
                                            uint32_t* next, int lane) {
  // The first item of a small batch is guessed before the predecessor has ended, and once more
  // where memory then holds other lengths.
  enum { kGuess, kPlan, kGoOn } now = TeamPlan::may_guess(p) ? kGuess : kPlan;
  if (now == kPlan && !p.early_pages) wait_before(p);
  TeamPlan plan;
  uint32_t index = blockIdx.x;
#pragma unroll 1
  for (uint32_t number = 0;;) {
    if (now != kGoOn) plan.make(p, shape.work, lane);
    const uint32_t slot = number % kItemQueue;
    WorkItem item;
    if (index < plan.items()) item = plan.find(p, shape.work, index, lane);
    barrier_wait(shared_address(&queue.empty[slot]), number / kItemQueue & 1 ^ 1);
    if (lane == 0) {
      if (index < plan.items()) {
        queue.items[slot] = item;
        queue.rows[slot] = item_rows(shape.work, item);
      }
      queue.ends[slot] = index >= plan.items();
    }
    if (now == kGuess) {
      if (index < plan.items()) {
        __syncwarp();
        prefetch_pages<Cache, kForm>(p, shape.ring, queue.items[slot], Tile::kTeams, lane);
      }
      now = kPlan;
      wait_for_predecessor();
      TeamPlan::Indices indices;
      indices.load(p, lane);
      __syncwarp();  // nobody reads the item any more
      if (!plan.holds(p, shape.work, indices, lane)) continue;
    }
    now = kGoOn;
    if (lane == 0) barrier_arrive(shared_address(&queue.full[slot]));
    __syncwarp();
    if (index >= plan.items()) return;
    wait_before(p);
    store_queries<Tile>(p, shape, queue.items[slot], queue.rows[slot], queries, storage, number,
                        lane);
    // Late, so that no block holds items back that others could start. The last of all calls
    // brings the counter back to 0.
    barrier_wait(shared_address(&queue.wanted), number & 1);
    const uint32_t count = plan.items();
    index = count;
    if (lane == 0 && count > gridDim.x) index = gridDim.x + atomicInc(next, count - 1);
    index = __shfl_sync(0xffffffffu, index, 0);
    ++number;
  }
}

// One warp a team: the pages of those items.
template <typename Cache, PageForm kForm>
__device__ __forceinline__ void fill_ring(const PagedAttentionParams& p, ItemQueue& queue,
                                          KvRing<Cache, kTeamTokens, kForm, true>& ring, int team,
                                          int teams, int lane) {
  if (!p.early_pages) wait_before(p);
#pragma unroll 1
  for (uint32_t number = 0;; ++number) {
    const uint32_t slot = number % kItemQueue;
    barrier_wait(shared_address(&queue.full[slot]), number / kItemQueue & 1);
    if (queue.ends[slot]) return;
    const WorkItem& item = queue.items[slot];
    const int stages = max(0, item.stages - team + teams - 1) / teams;
    ring.start(p, kStageShift<kTeamTokens>, item, item.sequence.first_stage + item.stage + team,
               teams, stages);
    ring.look_up();
    barrier_arrive_warp(shared_address(&queue.empty[slot]), lane);
#pragma unroll 1
    for (int i = 0; i < stages; ++i) {
      if (team == 0 && i == stages - 1 && lane == 0) barrier_arrive(shared_address(&queue.wanted));
      ring.fill(p.kv);
    }
  }
}

template <typename Tile, typename Ring, typename Queries>
__device__ __forceinline__ void attend(const PagedAttentionParams& p, const TeamShape& shape,
                                       const DecodeWorkspace& workspace, Ring& ring,
                                       ItemQueue& queue, Queries& queries,
                                       TeamRows<Tile::kMaxRows>& of_rows,
                                       TeamBarriers<Tile::kTeams>& barriers, bool& is_last,
                                       uint32_t scratch, int team, int thread) {
  constexpr int kTeams = Tile::kTeams;
  constexpr int kShift = kStageShift<kTeamTokens>;
  const int lane = thread % 32;
  Tile tile;
  tile.head_size = p.kv.head_size;
  tile.team = team;
  tile.member = same_in_warp(thread / 32);
  const int rows_there = stored_rows(Tile::kWholeRows, shape.work.rows());
  tile.team_weights = weight_bytes(rows_there);
  tile.weights = scratch + Queries::kCount * query_bytes(rows_there, Tile::kMaxHead) +
                 team * tile.team_weights;
  tile.set_addresses(shape.tile, lane);
  uint32_t splits = 0;
  wait_before(p);
#pragma unroll 1
  for (uint32_t number = 0;; ++number) {
    const uint32_t slot = number % kItemQueue;
    barrier_wait(shared_address(&queue.full[slot]), number / kItemQueue & 1);
    if (queue.ends[slot]) {
      wait_after(p);
      return;
    }
    const WorkItem& item = queue.items[slot];
    const ItemRows rows = queue.rows[slot];
    const uint32_t of_queries = number % Queries::kCount;
    const float k_scale = !Tile::kWide && p.kv.k_scale != nullptr
                              ? p.kv.k_scale[item.kv_head * p.kv.scale_stride]
                              : 1.0f;
    barrier_wait(shared_address(&queries.full[of_queries]), number / Queries::kCount & 1);
    tile.start(used_tiles(rows), scratch + of_queries * query_bytes(rows_there, Tile::kMaxHead),
               shared_address(queries.scales[of_queries]), p.scale * k_scale * kLog2E, thread);
    if (Tile::kQueryInRegisters) {
      barrier_arrive_warp(shared_address(&queries.empty[of_queries]), lane);
    }

    const bool plain_scores = p.alibi_slopes == nullptr && p.softcap == 0.0f && p.scale > 0.0f;
    const int window = p.sliding_window;
    const int begin = window > 0 ? max(0, rows.low - window + 1) : 0;  // tokens that any row sees
    const int end = rows.high + 1;
    // Steps that begin in [plain_begin, plain_begin + plain_extent] need no mask, no adjustment.
    int plain_begin = window > 0 ? rows.high - window + 1 : 0;
    int plain_extent = rows.low + 1 - kTeamTokens - plain_begin;
    if (!plain_scores || plain_extent < 0) {
      plain_begin = INT32_MAX;
      plain_extent = 0;
    }
    const int stages = item.stages;
    int first = (item.sequence.first_stage + item.stage + team) << kShift;
    const auto adjust = [&](float score, int t, int j, int token) {
      const int row = min(Tile::row_of(lane, t, j), rows.count - 1);
      const RowPlace place = place_of_row(shape.work, item, rows, row);
      return adjusted_score(p, shape.cap, place.head, first + token - rows.position - place.token,
                            score);
    };
#pragma unroll 1
    for (int i = team; i < stages; i += kTeams) {
      ring.wait();
      uint64_t tokens = ring.present();
      const bool plain = tokens == ~uint64_t{0} && static_cast<uint32_t>(first - plain_begin) <=
                                                       static_cast<uint32_t>(plain_extent);
      if (!plain) {
        if (first < begin) tokens &= begin - first < 64 ? ~uint64_t{0} << (begin - first) : 0;
        if (end - first < 64) tokens &= end > first ? (uint64_t{1} << (end - first)) - 1 : 0;
      }
      const auto release = [&] { ring.release(); };
      if (tokens != 0) {
        tile.step(ring.key(), ring.value(), tokens, plain, adjust, release, shape.tile, lane);
      } else {
        release();
      }
      first += kTeams << kShift;
    }
    if (!Tile::kQueryInRegisters) {
      barrier_arrive_warp(shared_address(&queries.empty[of_queries]), lane);
    }
    const TeamEnd<Tile> end_of_item = {.p = p,
                                       .shape = shape.work,
                                       .workspace = workspace,
                                       .item = item,
                                       .rows = rows,
                                       .of_rows = of_rows,
                                       .is_last = is_last,
                                       .warp = team * 4 + tile.member,
                                       .lane = lane};
    finish_item(end_of_item, tile, barriers, number, splits, thread);
    barrier_arrive_warp(shared_address(&queue.empty[slot]), lane);
  }
}

#endif

template <typename Cache, int kMaxHeadSize, int kMaxTiles, PageForm kForm>
__global__ void __launch_bounds__(team_threads(kMaxTiles), 1)
    paged_attention_team_kernel(const __grid_constant__ PagedAttentionParams p,
                                const __grid_constant__ TeamShape shape,
                                const __grid_constant__ RowMaps maps,
                                const __grid_constant__ DecodeWorkspace workspace) {
#if defined(VLLM_KERNELS_HAS_WGMMA)
  using Tile = std::conditional_t<kWholeRows<Cache>, TeamRowsTile<Cache, kMaxHeadSize, kForm>,
                                  TeamTile<Cache, kMaxHeadSize, kMaxTiles, kForm>>;
  using Ring = KvRing<Cache, kTeamTokens, kForm, true>;
  constexpr int kTeams = Tile::kTeams;
  extern __shared__ __align__(1024) char shared[];  // the rings, then the scratch
  __shared__ uint64_t barriers[kTeams][Ring::kBarriers + kMaxRingStages];
  __shared__ TeamBarriers<kTeams> teams;
  __shared__ __align__(16) TeamRows<Tile::kMaxRows> of_rows;
  __shared__ TeamQueries<Cache, kMaxTiles * 8> queries;
  __shared__ ItemQueue queue;
  __shared__ bool is_last;
  // Beyond 3 KiB the rings of 64 rows lose a stage: the third of three in 16 bits.
  static_assert(sizeof(barriers) + sizeof(teams) + sizeof(of_rows) + sizeof(queries) +
                    sizeof(queue) + 16 <=
                3072);
  launch_dependents();
  const int lane = threadIdx.x % 32;
  const int ring_bytes = shape.ring.stages * shape.ring.stage_bytes;
  if (threadIdx.x < kTeams) {
    Ring::init(shape.ring, maps, shared_address(barriers[threadIdx.x]), 4);
  }
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < kItemQueue; ++slot) {
      barrier_init(shared_address(&queue.full[slot]), 1);
      barrier_init(shared_address(&queue.empty[slot]), (4 * kTeams + kTeams) * kWarpArrivals);
    }
    barrier_init(shared_address(&queue.wanted), 1);
    for (int slot = 0; slot < queries.kCount; ++slot) {
      barrier_init(shared_address(&queries.full[slot]), kWarpArrivals);
      barrier_init(shared_address(&queries.empty[slot]), 4 * kTeams * kWarpArrivals);
    }
    teams.init();
    fence_barrier_init();
  }
  if (p.kv.head_size < kMaxHeadSize) {  // K past the head size is read as well, and never copied
    for (int i = threadIdx.x * 16; i < shape.scratch; i += team_threads(kMaxTiles) * 16) {
      *reinterpret_cast<uint4*>(shared + i) = uint4{0, 0, 0, 0};
    }
    fence_async_proxy();
  }
  __syncthreads();  // the barriers, the zeros
  const int warpgroup = same_in_warp(threadIdx.x / 128);
  if (warpgroup == kTeams) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(servant_registers(kMaxTiles)));
    const int team = same_in_warp(threadIdx.x / 32) - 4 * kTeams;
    if (team == kTeams) {
      queue_items<Tile, Cache, kForm>(p, shape, queue, queries,
                                      shared_address(shared) + shape.scratch, workspace.next, lane);
    } else if (team < kTeams) {
      Ring ring(shape.ring, maps, shared_address(shared) + team * ring_bytes,
                shared_address(barriers[team]), shared_address(&barriers[team][Ring::kBarriers]),
                true, lane);
      fill_ring<Cache, kForm>(p, queue, ring, team, kTeams, lane);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(team_registers(kMaxTiles)));
    const int team = warpgroup;
    Ring ring(shape.ring, maps, shared_address(shared) + team * ring_bytes,
              shared_address(barriers[team]), shared_address(&barriers[team][Ring::kBarriers]),
              false, lane);
    attend<Tile>(p, shape, workspace, ring, queue, queries, of_rows, teams, is_last,
                 shared_address(shared) + shape.scratch, team, threadIdx.x % 128);
  }
#endif
}

template <typename Cache, int kMaxHeadSize, int kMaxTiles, PageForm kForm>
void launch_team(const PagedAttentionParams& p, int row_shift, const DecodeWorkspace& workspace,
                 void* stream) {
  constexpr auto kKernel = paged_attention_team_kernel<Cache, kMaxHeadSize, kMaxTiles, kForm>;
  constexpr int kTeams = team_count(kMaxTiles);
  const int group = p.num_heads / p.kv.num_kv_heads;
  TeamShape shape;
  shape.cap = score_cap(p.softcap);
  set_stage_layout<Cache, kMaxHeadSize, kTeamTokens, kForm>(p.kv, shape.ring, shape.tile);
  shape.work = {.group = group,
                .row_shift = row_shift,
                .stage_shift = kStageShift<kTeamTokens>,
                .least_piece = kTeams,
                .slots = workspace_slots(row_shift, kMaxHeadSize),
                .piece_share = kTeamPieceShare,
                .group_divisor = FastDivisor(group)};
  check_split(p, shape.work);
  const int operands = team_scratch_bytes<Cache>(kMaxTiles, 1 << row_shift, kMaxHeadSize);
  const int memory = dynamic_shared_memory<kKernel>("paged_attention") - operands;
  shape.ring.stages = ring_stages(memory, kTeams, shape.ring.stage_bytes);
  shape.scratch = kTeams * shape.ring.stages * shape.ring.stage_bytes;
  launch_kernel("paged_attention", kKernel, dim3(current_device_info().multiprocessors),
                dim3(team_threads(kMaxTiles)), shape.scratch + operands, stream, p, shape,
                cache_maps<Cache, kMaxHeadSize, kTeamTokens, kForm>(p.kv), workspace);
}

template <typename Cache, int kMaxHeadSize, PageForm kForm>
void launch_team(const PagedAttentionParams& p, const DecodeWorkspace& workspace, void* stream) {
  const int64_t rows = int64_t{p.max_query_len} * (p.num_heads / p.kv.num_kv_heads);
  const int row_shift = rows <= 16 ? 4 : rows <= 32 ? 5 : 6;
  if constexpr (kWholeRows<Cache>) {
    if constexpr (kForm == PageForm::kPages) {
      if (p.kv.block_size < 16) {
        return launch_team<Cache, kMaxHeadSize, 8, kForm>(p, row_shift, workspace, stream);
      }
    }
    constexpr PageForm kLies = kForm == PageForm::kRows ? kForm : PageForm::kOperands;
    launch_team<Cache, kMaxHeadSize, 8, kLies>(p, row_shift, workspace, stream);
  } else if (rows <= 32) {
    launch_team<Cache, kMaxHeadSize, 4, kForm>(p, row_shift, workspace, stream);
  } else {
    launch_team<Cache, kMaxHeadSize, 8, kForm>(p, row_shift, workspace, stream);
  }
}

}  // namespace vllm_kernels::cuda
