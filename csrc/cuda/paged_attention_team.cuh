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
#include "cuda/attention_team_columns.cuh"
#include "cuda/attention_team_rows.cuh"
#include "cuda/attention_team_widen.cuh"
#include "cuda/cache_maps.cuh"
#include "cuda/kv_ring.cuh"
#include "cuda/launch.cuh"
#include "cuda/paged_attention_team_end.cuh"

namespace vllm_kernels::cuda {

constexpr int kItemQueue = 2;
constexpr float kTeamPieceShare = 0.5f;  // WorkShape::piece_share

// What a block works on. kWholeRows: rows are rows of the products (attention_team_rows.cuh), not
// their columns (attention_team_columns.cuh).
template <typename CacheElement, int kHeadSize, bool kWholeRows, PageForm kPageForm>
struct TeamConfig {
  using Cache = CacheElement;
  static constexpr int kMaxHeadSize = kHeadSize;
  static constexpr bool kWhole = kWholeRows;
  static constexpr PageForm kForm = kPageForm;
  static constexpr bool kWidens = kWhole && sizeof(Cache) == 1;
  static constexpr int kTeams = kWhole ? 2 : kColumnTeams;
  static constexpr int kMaxRows = kWhole ? 64 : kColumnRows;
  // Items whose queries lie in shared memory; whole rows go on to registers.
  static constexpr int kQueries = kWhole ? 1 : 2;
  // Threads, and their registers: teams need more than their even share of those that a block is
  // launched with, and get no others.
  static constexpr int kServants = kWidens ? 2 : 1;  // warpgroups that serve the teams
  static constexpr int kThreads = 128 * (kTeams + kServants);
  static constexpr int kRegisters = kWidens ? 192 : kWhole ? 216 : 144;
  static constexpr int kServantRegisters = kWidens ? 64 : kWhole ? 72 : 80;
  static_assert(kTeams * kRegisters + kServants * kServantRegisters <=
                (kTeams + kServants) * (65536 / kThreads / 8 * 8));
  // Shared memory: a team's slots of what was widened; queries; what a team writes.
  static constexpr int kWideBytes = kWidens ? kWideSlots * 2 * wide_bytes(kMaxHeadSize) : 0;
  static __host__ __device__ constexpr int query_bytes(int rows) {
    return (kWhole ? kMaxRows : rows) * kMaxHeadSize * 2;
  }
  static __host__ __device__ constexpr int team_bytes(int rows) {
    return kWhole ? 8192 : weight_bytes(rows);
  }
};

struct TeamShape {
  WorkShape work;
  RingLayout ring;
  TileLayout tile;
  ScoreCap cap;
  // Bytes of shared memory before what was widened, the queries, and what teams write.
  int wide, queries, teams;
};

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
template <typename Config>
struct TeamQueries {
  static constexpr int kCount = Config::kQueries;
  static constexpr int kScales = sizeof(typename Config::Cache) == 1 ? Config::kMaxRows : 1;
  uint64_t full[kCount], empty[kCount];
  float scales[kCount][kScales];  // see narrow_query_row()
};

template <typename Config>
struct TeamTileOf {
  using Cache = typename Config::Cache;
  static constexpr PageForm kOperands =
      Config::kForm == PageForm::kRows || !Config::kWidens ? Config::kForm : PageForm::kOperands;
  using type =
      std::conditional_t<Config::kWhole, TeamRowsTile<Cache, Config::kMaxHeadSize, kOperands>,
                         TeamColumnsTile<Cache, Config::kMaxHeadSize, Config::kForm>>;
};
template <typename Config>
using TeamRing = KvRing<typename Config::Cache, kTeamTokens, Config::kForm, true>;

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
template <typename Config>
__device__ __forceinline__ void store_queries(const PagedAttentionParams& p, const TeamShape& shape,
                                              const WorkItem& item, const ItemRows& rows,
                                              TeamQueries<Config>& queries, uint32_t storage,
                                              uint32_t number, int lane) {
  using Tile = typename TeamTileOf<Config>::type;
  const uint32_t slot = number % Config::kQueries;
  const auto store = [&](auto tag) {
    using Query = decltype(tag);
    const auto start = [&](int row) -> const Query* {
      if (row >= rows.count) return nullptr;
      const RowPlace place = place_of_row(shape.work, item, rows, row);
      return static_cast<const Query*>(p.query) +
             (item.sequence.first_query + place.token) * p.query_stride +
             static_cast<int64_t>(place.head) * p.kv.head_size;
    };
    store_query<Tile, Query>(start, storage + slot * Config::query_bytes(shape.work.rows()),
                             shared_address(queries.scales[slot]), used_tiles(rows), p.kv.head_size,
                             lane);
  };
  barrier_wait(shared_address(&queries.empty[slot]), number / Config::kQueries & 1 ^ 1);
  if constexpr (Tile::kWide) {
    store(typename Tile::Element{});
  } else {
    p.dtype == DType::kFloat16 ? store(Half{}) : store(BFloat16{});
  }
  fence_async_proxy();
  barrier_arrive_warp(shared_address(&queries.full[slot]), lane);
}

// One warp: which items this block takes, and their queries.
template <typename Config>
__device__ __forceinline__ void queue_items(const PagedAttentionParams& p, const TeamShape& shape,
                                            ItemQueue& queue, TeamQueries<Config>& queries,
                                            uint32_t storage, uint32_t* next, int lane) {
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
        prefetch_pages<typename Config::Cache, Config::kForm>(p, shape.ring, queue.items[slot],
                                                              Config::kTeams, lane);
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
    store_queries(p, shape, queue.items[slot], queue.rows[slot], queries, storage, number, lane);
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

// Calls action(item, stages) for every item of the block, in order, with the team's number of
// stages.
template <typename Config, typename Action>
__device__ __forceinline__ void each_item(ItemQueue& queue, int team, const Action& action) {
#pragma unroll 1
  for (uint32_t number = 0;; ++number) {
    const uint32_t slot = number % kItemQueue;
    barrier_wait(shared_address(&queue.full[slot]), number / kItemQueue & 1);
    if (queue.ends[slot]) return;
    const int stages =
        max(0, queue.items[slot].stages - team + Config::kTeams - 1) / Config::kTeams;
    action(queue.items[slot], stages, shared_address(&queue.empty[slot]));
  }
}

// One warp a team: the pages of those items.
template <typename Config>
__device__ __forceinline__ void fill_ring(const PagedAttentionParams& p, ItemQueue& queue,
                                          TeamRing<Config>& ring, int team, int lane) {
  if (!p.early_pages) wait_before(p);
  each_item<Config>(queue, team, [&](const WorkItem& item, int stages, uint32_t empty) {
    ring.start(p, kStageShift<kTeamTokens>, item, item.sequence.first_stage + item.stage + team,
               Config::kTeams, stages);
    ring.look_up();
    barrier_arrive_warp(empty, lane);
#pragma unroll 1
    for (int i = 0; i < stages; ++i) {
      if (team == 0 && i == stages - 1 && lane == 0) barrier_arrive(shared_address(&queue.wanted));
      ring.fill(p.kv);
    }
  });
}

// One of a team's wideners: their stages.
template <typename Config>
__device__ __forceinline__ void widen_ring(const TeamShape& shape, ItemQueue& queue,
                                           TeamRing<Config>& ring,
                                           WideRing<Config::kMaxHeadSize>& wide, int team,
                                           int widener, int lane) {
  each_item<Config>(queue, team, [&](const WorkItem&, int stages, uint32_t empty) {
    barrier_arrive_warp(empty, lane);
#pragma unroll 1
    for (int i = 0; i < stages; ++i) {
      ring.wait();
      wide.wait_empty();
      widen_stage<typename Config::Cache, Config::kMaxHeadSize, Config::kForm>(
          ring.key(), ring.value(), wide.key(), wide.value(), shape.tile, widener, lane);
      if (widener == 0 && lane == 0) wide.barriers.present[wide.slot] = ring.present();
      ring.release();
      fence_async_proxy();
      wide.fill();
    }
  });
}

// One warp of a team. Ring: of stages in 16 bits, or of 8 where products widen them.
template <typename Config, typename Ring>
__device__ __forceinline__ void attend(const PagedAttentionParams& p, const TeamShape& shape,
                                       const DecodeWorkspace& workspace, Ring& ring,
                                       ItemQueue& queue, TeamQueries<Config>& queries,
                                       TeamRows<Config::kMaxRows>& of_rows,
                                       TeamBarriers<Config::kTeams>& barriers, bool& is_last,
                                       uint32_t memory, int team, int thread) {
  using Tile = typename TeamTileOf<Config>::type;
  constexpr int kTeams = Config::kTeams;
  constexpr int kShift = kStageShift<kTeamTokens>;
  const int lane = thread % 32;
  Tile tile;
  tile.head_size = p.kv.head_size;
  tile.team = team;
  tile.member = same_in_warp(thread / 32);
  tile.team_bytes = Config::team_bytes(shape.work.rows());
  tile.storage = memory + shape.teams + team * tile.team_bytes;
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
    const uint32_t of_queries = number % Config::kQueries;
    const float k_scale = sizeof(typename Config::Cache) == 1 && p.kv.k_scale != nullptr
                              ? p.kv.k_scale[item.kv_head * p.kv.scale_stride]
                              : 1.0f;
    const float to_log2 = p.scale * k_scale * kLog2E;
    barrier_wait(shared_address(&queries.full[of_queries]), number / Config::kQueries & 1);
    tile.start(used_tiles(rows),
               memory + shape.queries + of_queries * Config::query_bytes(shape.work.rows()),
               shared_address(queries.scales[of_queries]), to_log2, thread);
    if (Config::kWhole) {
      barrier_arrive_warp(shared_address(&queries.empty[of_queries]), lane);
    }

    // (Whole rows take their maxima of plain scores before they scale them.)
    const bool plain_scores = p.alibi_slopes == nullptr && p.softcap == 0.0f && to_log2 > 0.0f;
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
    if (!Config::kWhole) {
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

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    paged_attention_team_kernel(const __grid_constant__ PagedAttentionParams p,
                                const __grid_constant__ TeamShape shape,
                                const __grid_constant__ RowMaps maps,
                                const __grid_constant__ DecodeWorkspace workspace) {
#if defined(VLLM_KERNELS_HAS_WGMMA)
  using Ring = TeamRing<Config>;
  constexpr int kTeams = Config::kTeams;
  extern __shared__ __align__(1024) char shared[];  // the rings, then what TeamShape says
  __shared__ uint64_t barriers[kTeams][Ring::kBarriers + kMaxRingStages];
  __shared__ WideBarriers wide_barriers[Config::kWidens ? kTeams : 1];
  __shared__ TeamBarriers<kTeams> teams;
  __shared__ __align__(16) TeamRows<Config::kMaxRows> of_rows;
  __shared__ TeamQueries<Config> queries;
  __shared__ ItemQueue queue;
  __shared__ bool is_last;
  // Beyond 3 KiB a ring loses a stage: the third of three in 16 bits, the second of two in 8.
  static_assert(sizeof(barriers) + sizeof(wide_barriers) + sizeof(teams) + sizeof(of_rows) +
                    sizeof(queries) + sizeof(queue) + 16 <=
                3072);
  launch_dependents();
  const int lane = threadIdx.x % 32;
  const int ring_bytes = shape.ring.stages * shape.ring.stage_bytes;
  if (threadIdx.x < kTeams) {
    Ring::init(shape.ring, maps, shared_address(barriers[threadIdx.x]),
               Config::kWidens ? kTeamWideners : 4);
    if (Config::kWidens) wide_barriers[threadIdx.x].init();
  }
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < kItemQueue; ++slot) {
      barrier_init(shared_address(&queue.full[slot]), 1);
      barrier_init(shared_address(&queue.empty[slot]),
                   (4 + 1 + (Config::kWidens ? kTeamWideners : 0)) * kTeams * kWarpArrivals);
    }
    barrier_init(shared_address(&queue.wanted), 1);
    for (int slot = 0; slot < queries.kCount; ++slot) {
      barrier_init(shared_address(&queries.full[slot]), kWarpArrivals);
      barrier_init(shared_address(&queries.empty[slot]), 4 * kTeams * kWarpArrivals);
    }
    teams.init();
    fence_barrier_init();
  }
  if (p.kv.head_size <
      Config::kMaxHeadSize) {  // K past the head size is read as well, and never copied
    for (int i = threadIdx.x * 16; i < shape.wide; i += Config::kThreads * 16) {
      *reinterpret_cast<uint4*>(shared + i) = uint4{0, 0, 0, 0};
    }
    fence_async_proxy();
  }
  __syncthreads();  // the barriers, the zeros
  const uint32_t memory = shared_address(shared);
  const int warp = same_in_warp(threadIdx.x / 32);
  const auto ring_of = [&](int team, bool fills) {
    return Ring(shape.ring, maps, memory + team * ring_bytes, shared_address(barriers[team]),
                shared_address(&barriers[team][Ring::kBarriers]), fills, lane);
  };
  const auto wide_ring_of = [&](int team) {
    return WideRing<Config::kMaxHeadSize>{
        .storage = memory + shape.wide + team * Config::kWideBytes,
        .barriers = wide_barriers[Config::kWidens ? team : 0],
        .lane = lane};
  };
  if (warp >= 4 * kTeams) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Config::kServantRegisters));
    const int servant = warp - 4 * kTeams;
    if (servant == kTeams) {
      queue_items<Config>(p, shape, queue, queries, memory + shape.queries, workspace.next, lane);
    } else if (servant < kTeams) {
      Ring ring = ring_of(servant, true);
      fill_ring<Config>(p, queue, ring, servant, lane);
    } else if (Config::kWidens && servant >= 4) {
      const int team = (servant - 4) % kTeams;
      Ring ring = ring_of(team, false);
      auto wide = wide_ring_of(team);
      widen_ring<Config>(shape, queue, ring, wide, team, (servant - 4) / kTeams, lane);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Config::kRegisters));
    const int team = warp / 4;
    const auto run = [&](auto ring) {
      attend<Config>(p, shape, workspace, ring, queue, queries, of_rows, teams, is_last, memory,
                     team, threadIdx.x % 128);
    };
    if constexpr (Config::kWidens) {
      run(wide_ring_of(team));
    } else {
      run(ring_of(team, false));
    }
  }
#endif
}

template <typename Config>
void launch_team_kernel(const PagedAttentionParams& p, int row_shift,
                        const DecodeWorkspace& workspace, void* stream) {
  using Cache = typename Config::Cache;
  constexpr auto kKernel = paged_attention_team_kernel<Config>;
  constexpr int kTeams = Config::kTeams, kMaxHeadSize = Config::kMaxHeadSize;
  constexpr PageForm kForm = Config::kForm;
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
  const int queries = Config::kQueries * Config::query_bytes(1 << row_shift);
  const int others =
      kTeams * Config::kWideBytes + queries + kTeams * Config::team_bytes(1 << row_shift);
  const int memory = (dynamic_shared_memory<kKernel>("paged_attention") - others) / 1024 * 1024;
  shape.ring.stages = ring_stages(memory, kTeams, shape.ring.stage_bytes);
  shape.wide = (kTeams * shape.ring.stages * shape.ring.stage_bytes + 1023) / 1024 * 1024;
  shape.queries = shape.wide + kTeams * Config::kWideBytes;
  shape.teams = shape.queries + queries;
  launch_kernel("paged_attention", kKernel, dim3(current_device_info().multiprocessors),
                dim3(Config::kThreads), shape.wide + others, stream, p, shape,
                cache_maps<Cache, kMaxHeadSize, kTeamTokens, kForm>(p.kv), workspace);
}

template <typename Cache, int kMaxHeadSize, PageForm kForm>
void launch_team(const PagedAttentionParams& p, const DecodeWorkspace& workspace, void* stream) {
  const int64_t rows = int64_t{p.max_query_len} * (p.num_heads / p.kv.num_kv_heads);
  const int row_shift = rows <= 16 ? 4 : rows <= 32 ? 5 : 6;
  const auto launch = [&](auto whole, auto form) {
    launch_team_kernel<
        TeamConfig<Cache, kMaxHeadSize, decltype(whole)::value, decltype(form)::value>>(
        p, row_shift, workspace, stream);
  };
  constexpr std::integral_constant<PageForm, kForm> kAsPages;
  constexpr std::integral_constant<PageForm, PageForm::kOperands> kAsOperands;
  if constexpr (sizeof(Cache) == 1) {
    rows <= kColumnRows ? launch(std::false_type{}, kAsPages) : launch(std::true_type{}, kAsPages);
  } else if constexpr (kForm == PageForm::kPages) {
    // Pages of 8 tokens make no boxes of 16, and no blocks no tensor map.
    p.kv.block_size < 16 || p.kv.num_blocks == 0 ? launch(std::true_type{}, kAsPages)
                                                 : launch(std::true_type{}, kAsOperands);
  } else if constexpr (kForm == PageForm::kParts) {
    launch(std::true_type{}, kAsOperands);
  } else {
    launch(std::true_type{}, kAsPages);
  }
}

}  // namespace vllm_kernels::cuda
