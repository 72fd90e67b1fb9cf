// The sm90 prefill kernel: paged_attention and varlen_attention of many query rows on Hopper, by
// wgmma and TMA. It serves prompts, and chunks of prompts after a cached prefix.
//
// Shapes: a work tile is 128 or 192 packed query rows of one KV head. Its KV tiles of 64 to 128
// tokens come from the last to the first. mainloop.cuh has the sizes (PrefillTuning).
//
// Grid: one persistent CTA an SM. It takes work tiles from ../tile_scheduler.cuh.
// - Two or three consumer warpgroups have 64 rows each (mainloop.cuh). Where no sequence has rows
//   for all of them, the last ones leave at once.
// - One producer warpgroup has a warp each for K, V and queries (producer.cuh), and the scheduler
//   warp. 8-bit caches have two: six warps copy and dequantize K and V (dequant_producer.cuh).
// - Producers run ahead: they load the next work tile while the current one ends.
// - Where CTAs share a work tile's keys, a second launch adds up what they leave
//   (combine_splits.cu).
//
// Early reads: none. Every role waits for the primary kernel first (PDL).
#pragma once
#include <bit>

#include "cuda/attention/common/kernel_choice.h"
#include "cuda/attention/common/unowned_rows.cuh"
#include "cuda/attention/prefill/prefill.h"
#include "cuda/attention/prefill/sm90/combine_splits.cuh"
#include "cuda/attention/prefill/sm90/dequant_producer.cuh"
#include "cuda/attention/prefill/sm90/maps.cuh"
#include "cuda/attention/prefill/sm90/producer.cuh"

namespace vllm_kernels::cuda {

#if defined(VLLM_KERNELS_HAS_WGMMA)

// The scheduler warp: writes the CTA's work tiles to shared.work_tiles.
template <typename Config>
__device__ __forceinline__ void schedule_tiles(const PagedAttentionParams& p,
                                               const PrefillShape& shape,
                                               PrefillShared<Config>& shared, uint32_t* next,
                                               int lane) {
  wait_for_primary_kernel();
  // After the PDL wait: the concurrent launch reads the primary kernel's results without a wait of
  // its own.
  if (shape.has_concurrent_launch) launch_dependents();
  PrefillTileScheduler<Config::kHeadSize, Config::kRows, Config::kTokens, Config::kMaySplit,
                       Config::kForm != KvForm::kSwizzledRows>
      scheduler;
  const uint32_t split_tiles = scheduler.build(p, shape, lane);
  if (Config::kMaySplit && blockIdx.x == 0 && lane == 0) *shape.splits.num_tiles = split_tiles;
  const uint32_t blocks = scheduler.num_ctas();
  const uint32_t count = blockIdx.x < blocks ? scheduler.num_items() : 0;
  uint32_t index = blockIdx.x;
  // The last atomicInc of the launch wraps the counter to 0.
  const auto next_index = [&] {
    uint32_t taken = count;
    if (lane == 0 && count > blocks) taken = blocks + atomicInc(next, count - 1);
    return __shfl_sync(0xffffffffu, taken, 0);
  };
  PipelineState<kPrefillQueue> state;
#pragma unroll 1
  for (uint32_t iteration = 0;; ++iteration, state.advance()) {
    SplitTile& work_tile = shared.work_tiles[state.index];
    barrier_wait(shared_address(&shared.tile_empty[state.index]), state.phase ^ 1);
#pragma unroll 1
    while (index < count && !scheduler.get_tile(p, shape, index, lane, work_tile)) {
      index = next_index();
    }
    if (lane == 0) {
      if (index >= count) work_tile.seq = -1;
      barrier_arrive(shared_address(&shared.tile_full[state.index]));
      if constexpr (Config::kMaySplit) {  // consumers need not wait for this store
        const int entry = scheduler.entry();
        if (index < count && entry >= 0 && work_tile.split == 0) {
          shape.splits.tiles[entry] = work_tile;
        }
      }
    }
    __syncwarp();
    if (index >= count) return;
    // The request is late, so that a CTA does not hold a work tile that another could start.
    barrier_wait(shared_address(&shared.next_tile_requested), iteration & 1);
    index = next_index();
  }
}

// A consumer warpgroup: 64 rows of every work tile, as one sequence of KV tiles. The first scores
// of a work tile overlap the last output of the one before. The warpgroups are not synchronised:
// they drift apart, so one multiplies while another takes exponentials.
template <typename Config>
__device__ __forceinline__ void consume_tiles(const PagedAttentionParams& p,
                                              const PrefillShape& shape, const ScoreCap& cap,
                                              PrefillShared<Config>& shared, uint32_t query,
                                              uint32_t key, uint32_t value, int warpgroup,
                                              int thread) {
  constexpr int kTokens = Config::kTokens;
  constexpr uint32_t kTileBytes = Config::kTileBytes;
  using Mma = PrefillMma<Config>;
  const int lane = thread % 32;
  const int row =
      warpgroup * 64 + thread / 32 * 16 + lane / 4;  // of the work tile; this lane also has row + 8
  query += warpgroup * 64 * 128;
  Mma tile;
  const ValueBoxes value_boxes = value_boxes_of<Config>(shape);
  const typename Mma::ValueLayout value_layout(value_boxes);
  PipelineState<Config::kKeyStages> keys;
  PipelineState<Config::kValueStages> values;
  PipelineState<Config::kQueryStages> queries;
  PipelineState<kPrefillQueue> work_tiles;

  // The current work tile.
  uint32_t slot_now;  // its index in shared.work_tiles
  int tiles_left;     // KV tiles whose softmax is still to come
  int first_token;    // token of the next KV tile
  ScoreScales<Config::kConvertsQueries> score_scale;
  // The query token of row r in its sequence, and its head.
  const auto token_of_row = [&](const SplitTile& work_tile, int r, int& head) {
    return cuda::token_of_row(shape, work_tile, row + 8 * r, head);
  };
  const auto release_query = [&] {
    barrier_arrive_warp(shared_address(&shared.query_empty[queries.index]), lane);
    queries.advance();
  };
  const auto take_tile = [&] {  // false: no more
    barrier_wait(shared_address(&shared.tile_full[work_tiles.index]), work_tiles.phase);
    const SplitTile& work_tile = shared.work_tiles[work_tiles.index];
    if (work_tile.seq < 0) return false;
    slot_now = work_tiles.index;
    tiles_left = work_tile.tiles;
    first_token = (work_tile.first_tile + work_tile.tiles - 1) * kTokens;
    float scale = shape.softmax_scale_log2;
    // Gathered keys of 16 bits have the scales of their 8-bit cache, too.
    constexpr bool kMayHaveScale =
        Config::kCacheIs8Bit || Mma::kHas8Bit || Config::kForm == KvForm::kSwizzledRows;
    if (kMayHaveScale && p.kv.k_scale != nullptr) {
      scale *= usable_scale(p.kv.k_scale[work_tile.kv_head * p.kv.scale_stride]);
    }
    barrier_wait(shared_address(&shared.query_full[queries.index]), queries.phase);
    if constexpr (Config::kConvertsQueries) {
      float inverse[2];
      tile.convert_query(query + queries.index * Config::kQueryBytes, thread, inverse);
#pragma unroll
      for (int r = 0; r < 2; ++r) score_scale[r] = usable_scale(scale * inverse[r]);
      static_assert(Config::kQueryInRegisters);
      fence_async_proxy();  // of these stores and the next work tile's queries
      __syncwarp();         // load_query() reads this warp's rows
    } else {
      score_scale[0] = scale;
    }
    if constexpr (Config::kQueryInRegisters) {
      tile.load_query(query + queries.index * Config::kQueryBytes, thread);
      release_query();
    }
    return true;
  };
  const auto start_scores = [&] {
    tile.start_scores(query + queries.index * Config::kQueryBytes, key + keys.index * kTileBytes);
  };
  float factor[2];
  bool raised;
  // Of the KV tile whose scores are in flight:
  uint32_t present_boxes;  // bit i: box i has a valid page
  bool unmasked;           // every token is visible to every row
  const auto load_mask_inputs = [&] {
    const SplitTile& work_tile = shared.work_tiles[slot_now];
    present_boxes = shared.present_boxes[keys.index];
    unmasked = first_token >= work_tile.whole_begin && first_token + kTokens <= work_tile.whole_end;
  };
  // After the wgmma of those scores: score modifications, mask, softmax.
  const auto online_softmax = [&] {
    warpgroup_fence_operand(tile.scores);
    barrier_arrive_warp(shared_address(&shared.key_empty[keys.index]), lane);
    keys.advance();
    if (--tiles_left == 0 && !Config::kQueryInRegisters) release_query();
    const SplitTile& work_tile = shared.work_tiles[slot_now];
    const int column = first_token + lane % 4 * 2;
    // Column of row r's own token, relative to this lane's first column.
    const auto own_column = [&](int r, int& head) {
      return work_tile.position + token_of_row(work_tile, r, head) - column;
    };
    if constexpr (Config::kAdjusts) {
      tile.each_score([&](int, int, float score) { return score * score_scale[0]; });
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        modify_scores(
            p, cap,
            [&] {
              int head;
              const int at = own_column(r, head);
              return ScoreRow{head, -at};
            },
            [&](const auto& modified) {
              tile.each_score([&](int i, int j, float score) {
                return j / 2 == r ? modified(score, i * 8 + j % 2) : score;
              });
            });
      }
    }
    if (!unmasked) {
      uint32_t visible[2];  // bit 2i + j % 2: column 8i + j % 2 of the row
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        int head;
        const int at = own_column(r, head);
        visible[r] = Mma::columns_until(min(at + shape.window_right, work_tile.end - 1 - column));
        if (p.sliding_window > 0) visible[r] &= ~Mma::columns_until(at - p.sliding_window);
      }
      tile.each_score([&](int i, int j, float score) {
        return visible[j / 2] >> (2 * i + j % 2) & 1 ? score : -INFINITY;
      });
    }
    if (present_boxes != (1u << Mma::kBoxes) - 1) {
      tile.each_score(
          [&](int i, int, float score) { return present_boxes >> i / 2 & 1 ? score : -INFINITY; });
    }
    if constexpr (Config::kAdjusts) {
      raised = tile.online_softmax(ScoreScales<false>{1.0f}, factor);
    } else {
      raised = tile.online_softmax(score_scale, factor);
    }
    first_token -= kTokens;
  };
  const auto start_out = [&] {
    barrier_wait(shared_address(&shared.value_full[values.index]), values.phase);
    tile.start_out(value_layout, value + values.index * kTileBytes);
  };
  const auto end_out = [&] {
    wgmma_wait<0>();
    warpgroup_fence_operand(tile.tensor_out());
    warpgroup_fence_operand(tile.probs);
    barrier_arrive_warp(shared_address(&shared.value_empty[values.index]), lane);
    values.advance();
    tile.add_tile_out();
  };
  // Epilogue of the work tile in `slot`.
  const auto write_tile = [&](uint32_t slot, const float (&row_max)[2], const float (&sum)[2]) {
    using T = typename Config::T;
    const SplitTile& work_tile = shared.work_tiles[slot];
    if (Config::kMaySplit && work_tile.splits > 1) {
      const float sums[2] = {quad_sum(sum[0]), quad_sum(sum[1])};
      store_split(shape, work_tile, tile.out, row_max, sums);
    } else {
      // The main loop has no registers left for it.
      constexpr bool kHidesLane = Config::kMaySplit && Config::kCacheIs8Bit;
      const int out_lane = (kHidesLane ? opaque(thread) : thread) % 32;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        int head;
        const int64_t token = work_tile.first_query + token_of_row(work_tile, r, head);
        const RowResult result =
            row_result(p, work_tile.kv_head, head, row_max[r], quad_sum(sum[r]));
        const bool present = row + 8 * r < work_tile.rows;
        tile.store(static_cast<T*>(p.out) + token * p.out_stride + head * int64_t{shape.head_size},
                   present ? shape.head_size : 0, value_boxes.permutation, r, result.scale,
                   out_lane);
        if (p.lse != nullptr && present && out_lane % 4 == 0) {
          p.lse[token * p.num_heads + head] = result.lse;
        }
      }
    }
    barrier_arrive_warp(shared_address(&shared.tile_empty[slot]), lane);
  };

  wait_for_primary_kernel();
  if (take_tile()) {
    tile.clear();
    tile.start_sums();
    barrier_wait(shared_address(&shared.key_full[keys.index]), keys.phase);
    start_scores();
    load_mask_inputs();
    wgmma_wait<0>();
    online_softmax();
    tile.pack_probs();
    uint32_t slot = work_tiles.index;
    work_tiles.advance();
    float row_max[2], sum[2];  // of the work tile that ends
#pragma unroll 1
    for (;;) {
      const bool ends = tiles_left == 0;
      if (ends) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          row_max[r] = tile.row_max[r];
          sum[r] = tile.sum[r];
        }
        if (!take_tile()) break;
        tile.start_sums();
      }
      barrier_wait(shared_address(&shared.key_full[keys.index]), keys.phase);
      start_scores();
      start_out();
      load_mask_inputs();
      wgmma_wait<1>();
      online_softmax();
      // ptxas hoists the next wgmma wait over all but memory accesses. This dummy store keeps the
      // softmax before the wait, so that it overlaps the wgmma of O.
      if (lane == 0) {
        store_shared(shared_address(&shared.ordering_dummy[warpgroup * 4 + thread / 32]),
                     tile.sum[0] + tile.sum[1]);
      }
      end_out();
      if (ends) {
        write_tile(slot, row_max, sum);
        tile.clear();
        slot = work_tiles.index;
        work_tiles.advance();
      } else if (raised) {
        tile.rescale(factor);
      }
      tile.pack_probs();
    }
    start_out();
    end_out();
    write_tile(slot, row_max, sum);
  }
}

#endif

template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    paged_attention_prefill_kernel(const __grid_constant__ PagedAttentionParams p,
                                   const __grid_constant__ PrefillShape shape,
                                   const __grid_constant__ ScoreCap cap,
                                   const __grid_constant__ PrefillMaps maps, uint32_t* next) {
#if defined(VLLM_KERNELS_HAS_WGMMA)
  using Shared = PrefillShared<Config>;
  constexpr int kWarps = 4 * Config::kConsumers;  // of the consumers
  const int active_warps = shape.rows / 16;       // of these, warps that have rows
  constexpr int kProducers =
      Config::kCacheIs8Bit ? kDequantWarps : 1;     // warps of K, and as many of V
  extern __shared__ __align__(1024) char memory[];  // queries, K, V, raw 8-bit K and V
  __shared__ Shared shared;
  if (!shape.has_concurrent_launch) launch_dependents();
  const int warp = warp_uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
  const uint32_t query = shared_address(memory);
  const uint32_t key = query + Shared::kQueryStages * Config::kQueryBytes;
  const uint32_t value = key + Shared::kKeyStages * Config::kTileBytes;
  if (threadIdx.x == 0) {
    const auto init = [](auto& barriers, int arrivals) {
      for (uint64_t& barrier : barriers) barrier_init(shared_address(&barrier), arrivals);
    };
    init(shared.key_full, kProducers * (Config::kCacheIs8Bit ? kWarpArrivals : 1));
    init(shared.value_full, kProducers * (Config::kCacheIs8Bit ? kWarpArrivals : 1));
    init(shared.key_empty, active_warps * kWarpArrivals);
    init(shared.value_empty, active_warps * kWarpArrivals);
    init(shared.query_full, shape.query_by_tma ? 1 : kWarpArrivals);
    init(shared.query_empty, active_warps * kWarpArrivals);
    init(shared.tile_full, 1);
    init(shared.tile_empty, (active_warps + 2 * kProducers + 1) * kWarpArrivals);
    barrier_init(shared_address(&shared.next_tile_requested), 1);
    fence_barrier_init();
    if (!Config::kCacheIs8Bit) {
      prefetch_tensor_map(&maps.key);
      prefetch_tensor_map(&maps.value);
    }
    if (!Config::kCacheIs8Bit && !kIsFp8<typename Config::Operand> && p.key_start_loc != nullptr) {
      prefetch_tensor_map(&maps.value_box);
    }
    if (shape.query_by_tma) prefetch_tensor_map(&maps.query);
  }
  __syncthreads();
  // Warps 0 .. kDequantWarps - 1 have K, the next kDequantWarps V.
  [[maybe_unused]] const auto dequantize = [&](int dequant_warp) {
    const uint32_t raw = value + Shared::kValueStages * Config::kTileBytes;
    const auto with_cache = [&](auto cache) {
      using Cache = decltype(cache);
      if (dequant_warp < kDequantWarps) {
        dequantize_tiles<Config, false, Cache>(p, shape, shared, key, raw, dequant_warp, lane);
      } else {
        dequantize_tiles<Config, true, Cache>(p, shape, shared, value,
                                              raw + kDequantWarps * Config::kRawBytes,
                                              dequant_warp - kDequantWarps, lane);
      }
    };
    dispatch_dequantized<Config>(p, with_cache);
  };
  if (warp < kWarps) {
    if (warp >= active_warps) return;
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Config::kTuning.consumer_registers));
    consume_tiles<Config>(p, shape, cap, shared, query, key, value, warp / 4, threadIdx.x % 128);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Config::kTuning.producer_registers));
    if (warp == kWarps) {
      schedule_tiles(p, shape, shared, next, lane);
    } else if (warp == kWarps + 1) {
      copy_queries<Config>(p, shape, maps.query, shared, query, lane);
      clear_unowned_rows(p, lane, 32);
    } else if constexpr (Config::kCacheIs8Bit) {
      dequantize(warp - kWarps - 2);
    } else if (warp == kWarps + 2) {
      copy_tiles<Config, false>(p, shape, maps, shared, key, lane);
    } else if constexpr (kIsFp8<typename Config::Operand>) {
      copy_transposed_values(shape, maps, shared, value, lane);
    } else {
      copy_tiles<Config, true>(p, shape, maps, shared, value, lane);
    }
  }
#endif
}

// The fields of the shape that all launches set alike.
template <typename Config>
PrefillShape launch_shape(const PagedAttentionParams& p, const PrefillLaunch& launch) {
  PrefillShape shape = prefill_shape(p, launch.min_query_len);
  shape.page_shift = static_cast<int>(std::bit_width(static_cast<uint32_t>(p.kv.block_size))) - 1;
  const int64_t rows = std::max<int64_t>(1, int64_t{p.max_query_len} * shape.group);
  shape.rows = static_cast<int>(std::min<int64_t>(Config::kConsumers, (rows + 63) / 64)) * 64;
  shape.query_by_tma = Config::kRows % shape.group == 0;
  shape.has_concurrent_launch = launch.has_concurrent_launch;
  shape.gathered_starts = launch.gathered_starts;
  shape.takes_gathered = launch.takes_gathered;
  shape.value_starts = launch.value_starts;
  if constexpr (Config::kMaySplit) {
    shape.splits = prefill_splits<Config::kHeadSize>(*launch.workspace, shape.rows);
  }
  shape.concurrent_ratio =
      concurrent_ratio(p, current_device_model(), Config::kRows, Config::kHeadSize);
  return shape;
}

template <typename Config>
void launch_with(const PagedAttentionParams& p, const PrefillShape& shape, const PrefillMaps& maps,
                 const PrefillLaunch& launch, void* stream) {
  constexpr auto kKernel = paged_attention_prefill_kernel<Config>;
  static_cast<void>(dynamic_shared_memory<kKernel>("paged_attention"));  // raises the limit
  std::unique_lock<std::mutex> lock;
  if constexpr (Config::kMaySplit) lock = lock_split_launches();
  launch_kernel("paged_attention", kKernel, dim3(current_device_model().num_sms),
                dim3(Config::kThreads), Config::kSharedBytes, stream, p, shape,
                score_cap(p.softcap), maps, launch.next);
  if constexpr (Config::kMaySplit) {
    const int permutation = kPermutesValues<Config> ? value_boxes_of<Config>(shape).permutation : 0;
    launch_combine_splits(p, shape, {Config::kHeadSize / 8, permutation}, stream);
  }
}

template <typename Config>
void launch_prefill_kernel(const PagedAttentionParams& p, const PrefillLaunch& launch,
                           void* stream) {
  PrefillShape shape = launch_shape<Config>(p, launch);
  if (Config::kForm == KvForm::kPackedBoxes) shape.value_boxes = value_boxes<Config>(p.kv);
  launch_with<Config>(p, shape, prefill_maps<Config>(p, shape), launch, stream);
}

// The kernel that may split, or the one that does not.
template <typename Config>
void launch_split_or_whole(const PagedAttentionParams& p, const PrefillLaunch& launch,
                           void* stream) {
  constexpr int kHeadSize = Config::kHeadSize;
  if constexpr (kHeadSize == 64 || kHeadSize == 128) {
    using SplitConfig = PrefillConfig<typename Config::T, kHeadSize, Config::kForm, false,
                                      Config::kCacheIs8Bit, true, typename Config::Operand>;
    if (launch.workspace != nullptr) return launch_prefill_kernel<SplitConfig>(p, launch, stream);
  }
  launch_prefill_kernel<Config>(p, launch, stream);
}

template <int kHeadSize>
void PrefillSm90Kernels<kHeadSize>::launch(const PagedAttentionParams& p, KvForm form,
                                           const PrefillLaunch& launch, void* stream) {
  const auto with_type = [&](auto tag) {
    using T = decltype(tag);
    const auto with_form = [&](auto constant) {
      constexpr KvForm kForm = decltype(constant)::value;
      // An 8-bit page is dequantized to boxes of 16 tokens, however long it is.
      if constexpr (kHeadSize <= kMaxHeadSize8Bit && kForm != KvForm::kPackedBoxes) {
        if (size_of(p.kv.dtype) == 1) {
          const auto with_operand = [&](auto operand) {
            using Config =
                PrefillConfig<T, kHeadSize, kForm, false, true, false, decltype(operand)>;
            launch_split_or_whole<Config>(p, launch, stream);
          };
          if constexpr (multiplies_in_fp16<T>(kHeadSize)) {
            if (!p.token_scales.any()) return with_operand(__half{});
          }
          return with_operand(T{});
        }
      }
      if (p.modifies_scores()) {
        using Config = PrefillConfig<T, kHeadSize, kForm, true, false>;
        return launch_prefill_kernel<Config>(p, launch, stream);
      }
      using Config = PrefillConfig<T, kHeadSize, kForm, false, false>;
      launch_split_or_whole<Config>(p, launch, stream);
    };
    if (form == KvForm::kPackedPages) {
      with_form(std::integral_constant<KvForm, KvForm::kPackedPages>{});
    } else if (form == KvForm::kPackedBoxes) {
      with_form(std::integral_constant<KvForm, KvForm::kPackedBoxes>{});
    } else {
      with_form(std::integral_constant<KvForm, KvForm::kSwizzledRows>{});
    }
  };
  dispatch_16_bit(p.dtype, with_type);
}

}  // namespace vllm_kernels::cuda
