// paged_attention of more than 8 query rows a KV head on Hopper's warpgroup products: one launch of
// one block a multiprocessor for any batch.
//
// A block's first two or three warpgroups are teams (warpgroup_mma.cuh) that take an item's stages
// in turn, each through a ring of its own (kv_pipeline.cuh). Of a last warpgroup, one warp fills
// each ring (a warp issues a bulk copy in about 100 cycles) and runs ahead: while an item ends the
// next one's pages are under way. Another asks for items (attention/decode/tile_scheduler.cuh) and
// puts them down in a queue of two.
//
// For an item's end see decode_wgmma_epilogue.cuh.
#pragma once
#include "cuda/attention/common/kv_pipeline.cuh"
#include "cuda/attention/common/tensor_maps.cuh"
#include "cuda/attention/decode/decode_wgmma_epilogue.cuh"
#include "cuda/attention/decode/tile_scheduler.cuh"
#include "cuda/attention/decode/warpgroup_mma.cuh"
#include "cuda/base/launch.cuh"

namespace vllm_kernels::cuda {

constexpr int kItemQueue = 2;

// Threads: the teams and the warpgroup that serves them.
__host__ __device__ constexpr int team_threads(int max_tiles) {
  return 128 * (team_count(max_tiles) + 1);
}
constexpr float kTeamPieceShare = 0.5f;  // WorkShape::piece_share
// Registers of a thread. All of a block share what its launch has of 65536; the teams need more
// than the even share.
__host__ __device__ constexpr int launch_registers(int max_tiles) {
  return 65536 / team_threads(max_tiles) / 8 * 8;
}
__host__ __device__ constexpr int team_registers(int max_tiles) {
  return max_tiles <= 4 ? 152 : 216;
}
__host__ __device__ constexpr int servant_registers(int max_tiles) {
  const int teams = team_count(max_tiles);
  return launch_registers(max_tiles) * (teams + 1) - team_registers(max_tiles) * teams;
}

struct TeamShape {
  WorkShape work;
  RingLayout ring;
  TileLayout tile;
  ScoreCap cap;
};

// Operands of the products, and results at an item's end, in turn.
__host__ __device__ constexpr int team_scratch_bytes(int max_tiles, int rows, int max_head_size) {
  const int teams = team_count(max_tiles);
  const int operands = query_bytes(rows, max_head_size) + teams * weight_bytes(rows);
  const int results = teams * rows * 64 * 4;  // of half a head
  return operands > results ? operands : results;
}

#if defined(VLLM_KERNELS_HAS_WGMMA)

using TeamPlan = WorkPlan<1>;
template <typename Cache, int kMaxHeadSize, PageForm kForm>
using TeamRing = KvRing<Cache, kMaxHeadSize, kTeamTokens, kForm, true>;

struct ItemQueue {
  WorkItem items[kItemQueue];
  ItemRows rows[kItemQueue];
  bool ends[kItemQueue];  // there is no such item, nor any other
  uint64_t full[kItemQueue], empty[kItemQueue];
  uint64_t wanted;  // the first filler is at its item's last stage
};

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

// One warp: which items this block takes.
template <typename Cache, PageForm kForm, int kTeams>
__device__ __forceinline__ void queue_items(const PagedAttentionParams& p, const TeamShape& shape,
                                            ItemQueue& queue, uint32_t* next, int lane) {
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
        prefetch_pages<Cache, kForm>(p, shape.ring, queue.items[slot], kTeams, lane);
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
    // Late, so that no block holds items back that others could start. The last of all calls
    // brings the counter back to 0.
    barrier_wait(shared_address(&queue.wanted), number & 1);
    wait_before(p);
    const uint32_t count = plan.items();
    index = count;
    if (lane == 0 && count > gridDim.x) index = gridDim.x + atomicInc(next, count - 1);
    index = __shfl_sync(0xffffffffu, index, 0);
    ++number;
  }
}

// One warp a team: the pages of those items.
template <typename Ring>
__device__ __forceinline__ void fill_ring(const PagedAttentionParams& p, ItemQueue& queue,
                                          Ring& ring, int team, int teams, int lane) {
  if (!p.early_pages) wait_before(p);
#pragma unroll 1
  for (uint32_t number = 0;; ++number) {
    const uint32_t slot = number % kItemQueue;
    barrier_wait(shared_address(&queue.full[slot]), number / kItemQueue & 1);
    if (queue.ends[slot]) return;
    const WorkItem& item = queue.items[slot];
    const int stages = max(0, item.stages - team + teams - 1) / teams;
    ring.start(p, kStageShift<kTeamTokens>, item.seq, item.sequence.seq_len, item.kv_head,
               item.sequence.first_stage + item.stage + team, teams, stages);
    ring.look_up();
    barrier_arrive_warp(shared_address(&queue.empty[slot]), lane);
#pragma unroll 1
    for (int i = 0; i < stages; ++i) {
      if (team == 0 && i == stages - 1 && lane == 0) barrier_arrive(shared_address(&queue.wanted));
      ring.fill(p.kv);
    }
  }
}

template <typename Cache, int kMaxHeadSize, int kMaxTiles, PageForm kForm>
__device__ __forceinline__ void attend(const PagedAttentionParams& p, const TeamShape& shape,
                                       const DecodeWorkspace& workspace,
                                       TeamRing<Cache, kMaxHeadSize, kForm>& ring, ItemQueue& queue,
                                       TeamStats<team_count(kMaxTiles), kMaxTiles * 8>& stats,
                                       uint32_t row_scales, bool& is_last,
                                       const TeamsBarrier& barrier, uint32_t scratch, int team,
                                       int thread) {
  using Tile = TeamTile<Cache, kMaxHeadSize, kMaxTiles, kForm>;
  constexpr int kTeams = Tile::kTeams;
  constexpr int kShift = kStageShift<kTeamTokens>;
  const int lane = thread % 32;
  Tile tile;
  tile.head_size = p.kv.head_size;
  tile.team = team;
  tile.member = same_in_warp(thread / 32);
  tile.query = scratch;
  tile.weights = in_register(scratch + query_bytes(shape.work.rows(), kMaxHeadSize) +
                             team * weight_bytes(shape.work.rows()));
  tile.set_addresses(shape.tile, lane);
  wait_before(p);
  barrier.arrive();
#pragma unroll 1
  for (int number = 0;; ++number) {
    const int slot = number % kItemQueue;
    barrier_wait(shared_address(&queue.full[slot]), number / kItemQueue & 1);
    if (queue.ends[slot]) {
      wait_after(p);
      return;
    }
    const WorkItem& item = queue.items[slot];
    const ItemRows& rows = queue.rows[slot];
    const int row_tiles = (rows.count + 7) / 8;
    tile.tiles = row_tiles <= 2 ? 2 : row_tiles <= 4 ? 4 : 8;
    const auto load_query = [&](auto tag) {
      using Query = decltype(tag);
      const auto start = [&](int row) -> const Query* {
        if (row >= rows.count) return nullptr;
        const RowPlace place = place_of_row(shape.work, item, rows, row);
        return static_cast<const Query*>(p.query) +
               (item.sequence.first_query + place.token) * p.query_stride +
               static_cast<int64_t>(place.head) * p.kv.head_size;
      };
      tile.template store_query<Query>(start, row_scales, team * 128 + thread, kTeams * 128);
    };
    barrier.wait<0>();  // the results of the item before, which lie in the same place, are read
    if constexpr (Tile::kWide) {
      load_query(Cache{});
    } else {
      p.dtype == DType::kFloat16 ? load_query(Half{}) : load_query(BFloat16{});
    }
    fence_async_proxy();
    barrier.sync<1>();
    const float k_scale = !Tile::kWide && p.kv.k_scale != nullptr
                              ? p.kv.k_scale[item.kv_head * p.kv.scale_stride]
                              : 1.0f;
    tile.load_scales(row_scales, p.scale * k_scale * kLog2E, lane);
    tile.clear();

    const bool plain_scores = p.alibi_slopes == nullptr && p.softcap == 0.0f;
    const int window = p.sliding_window;
    const auto release = [&] { ring.release(); };
    const auto attend_stages = [&](auto used) {
      constexpr int kUsed = decltype(used)::value;
      int stage = item.sequence.first_stage + item.stage + team;
      const int last = stage - team + item.stages;
#pragma unroll 1
      for (; stage < last; stage += kTeams) {
        const int first = stage << kShift;  // token
        // (No branches: registers and cycles of the way that nearly all steps take.)
        const bool sees_all = plain_scores & (first + kTeamTokens <= rows.low + 1) &
                              ((window <= 0) | (first > rows.high - window));
        ring.wait();
        typename Tile::Keys keys;
        tile.load_keys(keys, ring.key());
        uint64_t tokens = ring.present();
        if (sees_all & (tokens == ~uint64_t{0})) {
          const auto nothing = [](float score, int, int, int) { return score; };
          tile.template step<kUsed, true>(keys, ring.value(), tokens, nothing, release, shape.tile,
                                          lane);
          continue;
        }
        const ItemRows mine = rows;
        // Tokens that any row sees.
        const int begin = window > 0 ? max(0, mine.low - window + 1) : 0;
        const int end = mine.high + 1;
        if (first < begin) tokens &= begin - first < 64 ? ~uint64_t{0} << (begin - first) : 0;
        if (end - first < 64) tokens &= end > first ? (uint64_t{1} << (end - first)) - 1 : 0;
        if (tokens == 0) {
          release();
          continue;
        }
        const auto adjust = [&](float score, int t, int j, int token) {
          const int row = min(Tile::row_of(lane, t, j), mine.count - 1);
          const RowPlace place = place_of_row(shape.work, item, mine, row);
          return adjusted_score(p, shape.cap, place.head,
                                first + token - mine.position - place.token, score);
        };
        tile.template step<kUsed, false>(keys, ring.value(), tokens, adjust, release, shape.tile,
                                         lane);
      }
    };
    if (kMaxTiles == 8 && tile.tiles == 8) {
      attend_stages(std::integral_constant<int, kMaxTiles>());
    } else if (tile.tiles == 4) {
      attend_stages(std::integral_constant<int, 4>());
    } else {
      attend_stages(std::integral_constant<int, 2>());
    }
    const TeamEnd<Tile> finish = {.p = p,
                                  .shape = shape.work,
                                  .workspace = workspace,
                                  .item = item,
                                  .rows = rows,
                                  .stats = stats,
                                  .is_last = is_last,
                                  .scratch = scratch,
                                  .tiles = tile.tiles,
                                  .warp = team * 4 + tile.member,
                                  .lane = lane};
    finish_item(finish, tile, barrier, thread);
    barrier.arrive();
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
  constexpr int kTeams = team_count(kMaxTiles);
  using Ring = TeamRing<Cache, kMaxHeadSize, kForm>;
  extern __shared__ __align__(1024) char shared[];  // the rings, then the scratch
  __shared__ uint64_t ring_words[kTeams][Ring::kWords];
  __shared__ __align__(16) TeamStats<kTeams, kMaxTiles * 8> stats;
  __shared__ float row_scales[sizeof(Cache) == 1 ? kMaxTiles * 8 : 1];
  __shared__ ItemQueue queue;
  __shared__ uint64_t teams_barrier;
  __shared__ bool is_last;
  // Beyond 3 KiB the rings of 64 rows lose a stage: the third of three in 16 bits.
  static_assert(sizeof(ring_words) + sizeof(stats) + sizeof(row_scales) + sizeof(queue) + 16 <=
                3072);
  launch_dependents();
  const int lane = threadIdx.x % 32;
  const int ring_bytes = shape.ring.stages * shape.ring.stage_bytes;
  if (threadIdx.x < kTeams) {
    Ring::init(shape.ring, maps, shared_address(ring_words[threadIdx.x]), 4);
  }
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < kItemQueue; ++slot) {
      barrier_init(shared_address(&queue.full[slot]), 1);
      barrier_init(shared_address(&queue.empty[slot]), (4 * kTeams + kTeams) * kWarpArrivals);
    }
    barrier_init(shared_address(&queue.wanted), 1);
    barrier_init(shared_address(&teams_barrier), 4 * kTeams * kWarpArrivals);
    fence_barrier_init();
  }
  if (p.kv.head_size < kMaxHeadSize) {  // K past the head size is read as well, and never copied
    for (int i = threadIdx.x * 16; i < kTeams * ring_bytes; i += team_threads(kMaxTiles) * 16) {
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
      queue_items<Cache, kForm, kTeams>(p, shape, queue, workspace.next, lane);
    } else if (team < kTeams) {
      Ring ring(shape.ring, maps, shared_address(shared) + team * ring_bytes,
                shared_address(ring_words[team]), true, lane);
      fill_ring(p, queue, ring, team, kTeams, lane);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(team_registers(kMaxTiles)));
    const int team = warpgroup;
    Ring ring(shape.ring, maps, shared_address(shared) + team * ring_bytes,
              shared_address(ring_words[team]), false, lane);
    attend<Cache, kMaxHeadSize, kMaxTiles, kForm>(
        p, shape, workspace, ring, queue, stats, shared_address(row_scales), is_last,
        TeamsBarrier{shared_address(&teams_barrier), lane},
        shared_address(shared) + kTeams * ring_bytes, team, threadIdx.x % 128);
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
  shape.work = {
      .group = group,
      .row_shift = row_shift,
      .stage_shift = kStageShift<kTeamTokens>,
      .least_piece = kTeams,
      .merge_share = kTeams,
      .slots = workspace_slots(row_shift, kMaxHeadSize),
      .may_post = may_post_pieces(current_device_info().multiprocessors, row_shift, kMaxHeadSize),
      .piece_share = kTeamPieceShare,
      .group_divisor = FastDivisor(group)};
  check_split(p, shape.work);
  const int scratch = team_scratch_bytes(kMaxTiles, 1 << row_shift, kMaxHeadSize);
  const int memory = dynamic_shared_memory<kKernel>("paged_attention") - scratch;
  shape.ring.stages = ring_stages(memory, kTeams, shape.ring.stage_bytes);
  launch_kernel("paged_attention", kKernel, dim3(current_device_info().multiprocessors),
                dim3(team_threads(kMaxTiles)),
                kTeams * shape.ring.stages * shape.ring.stage_bytes + scratch, stream, p, shape,
                cache_maps<Cache, kTeamTokens, kForm>(p.kv, shape.ring.line_shift), workspace);
}

template <typename Cache, int kMaxHeadSize, PageForm kForm>
void launch_team(const PagedAttentionParams& p, const DecodeWorkspace& workspace, void* stream) {
  const int64_t rows = int64_t{p.max_query_len} * (p.num_heads / p.kv.num_kv_heads);
  if (rows <= 32) {
    launch_team<Cache, kMaxHeadSize, 4, kForm>(p, rows <= 16 ? 4 : 5, workspace, stream);
  } else {
    launch_team<Cache, kMaxHeadSize, 8, kForm>(p, 6, workspace, stream);
  }
}

}  // namespace vllm_kernels::cuda
