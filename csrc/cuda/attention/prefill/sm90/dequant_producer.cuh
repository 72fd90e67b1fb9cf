// The warps of attention/prefill/sm90/prefill_kernel.cuh that read K and V of 8 bits and write them
// to shared memory as the 16 bits of the queries, exactly: scales are applied to scores and
// results.
#pragma once
#include "cuda/attention/prefill/sm90/producer.cuh"
#include "cuda/base/kv_element.cuh"

namespace vllm_kernels::cuda {

#if defined(VLLM_KERNELS_HAS_WGMMA)

// Two fp16 that T can represent, as T.
template <typename T>
__device__ __forceinline__ uint32_t from_half_pair(uint32_t pair) {
  if constexpr (std::is_same_v<T, __half>) {
    return pair;
  } else {
    __half2 halves;
    memcpy(&halves, &pair, sizeof(halves));
    const float2 values = __half22float2(halves);
    return pack2<T>(values.x, values.y);
  }
}
// Eight elements of the cache as T.
template <typename T, typename Cache>
__device__ __forceinline__ uint4 upcast8(uint32_t first, uint32_t second) {
  uint32_t pairs[4];
  upcast4<Cache>(first, pairs[0], pairs[1]);
  upcast4<Cache>(second, pairs[2], pairs[3]);
  return {from_half_pair<T>(pairs[0]), from_half_pair<T>(pairs[1]), from_half_pair<T>(pairs[2]),
          from_half_pair<T>(pairs[3])};
}

// Those of 16 bytes with an index in [low, high), and zeros.
__device__ __forceinline__ uint4 bytes_between(uint4 pack, int low, int high) {
  const auto kept = [&](uint32_t word, int first) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (first + i < low || first + i >= high) word &= ~(0xffu << 8 * i);
    }
    return word;
  };
  return {kept(pack.x, 0), kept(pack.y, 4), kept(pack.z, 8), kept(pack.w, 12)};
}

// One of kDequantWarps warps, number `warp`: K, or V, of the block's items. It takes every other
// part; a lane's piece of 16 bytes is 16 dimensions of a token, or 16 tokens of a dimension of V in
// layout vllm. attention/prefill/sm90/mainloop.cuh says where they belong. While a tile's pieces
// are widened, the next one's are on their way to `raw`, where nobody but their lane sees them.
template <typename Config, bool kValue, typename Cache>
__device__ __forceinline__ void dequantize_tiles(const PagedAttentionParams& p,
                                                 const PrefillShape& shape,
                                                 PrefillShared<Config>& shared, uint32_t storage,
                                                 uint32_t raw, int warp, int lane) {
  using T = typename Config::T;
  using Blocks = TileBlocks<Config>;
  constexpr bool kRows = Config::kForm == KvForm::kSwizzledRows;
  constexpr bool kOfTokens = kValue && !kRows;  // pieces
  constexpr int kBoxes = Blocks::kBoxes;
  constexpr uint32_t kBoxBytes = PrefillMma<Config>::kBoxBytes;
  constexpr int kPieces = Config::kHeadSize / 32;  // of a lane and part
  const PagedKv& kv = p.kv;
  const int token_of_lane = kOfTokens ? 0 : lane % 16;
  const int dim_of_lane = kOfTokens ? lane : lane / 16 * 16;
  const int64_t block_stride = kValue ? kv.value_block_stride : kv.key_block_stride;
  const int64_t token_stride = kValue ? kv.value_token_stride : kv.key_token_stride;
  // From one dimension to the next, where pieces begin.
  const int64_t dim_stride = kOfTokens ? kv.value_dim_stride : kRows ? 1 : kv.key_chunk_stride / 16;
  const char* of_lane =
      static_cast<const char*>(kValue ? kv.value : kv.key) + dim_of_lane * dim_stride;
  const int64_t head_stride = kValue ? kv.value_head_stride : kv.key_head_stride;
  raw += warp * Config::kRawBytes + lane * 16;
  wait_for_primary_kernel();
  PipelineState<kValue ? Config::kValueStages : Config::kKeyStages> state;
  for_each_tile(shared, lane, [&](const PrefillTile& work_tile) {
    Blocks blocks(p, shape, work_tile, lane);
    const char* of_head = of_lane + work_tile.kv_head * head_stride;
    const auto token_of = [&](int number) {  // the first of the item's tile
      return (work_tile.first_tile + work_tile.tiles - 1 - number) * Config::kTokens;
    };
    uint32_t parts;  // of the tile whose pieces are on their way, that are there
    const auto reach = [&](int number) {
      const int first = token_of(number), part = lane % kBoxes;
      blocks.reach(number, first);
      const bool present =
          blocks.block(part) >= 0 || !blocks.visible(first + part * kPrefillBoxTokens);
      parts = __ballot_sync(0xffffffffu, present) & ((1u << kBoxes) - 1);
    };
    const auto fetch = [&](int number, int part) {
      const int token = token_of(number) + part * kPrefillBoxTokens + token_of_lane;
      const int block = blocks.block(part);
      const bool present =
          block >= 0 && (kOfTokens || (token >= work_tile.begin && token < work_tile.end));
      const char* from =
          of_head +
          (present ? block * block_stride + blocks.row_in_block(token) * token_stride : int64_t{0});
#pragma unroll
      for (int j = 0; j < kPieces; ++j) {
        copy16_async(raw + (part / kDequantWarps * kPieces + j) * 512, from + j * 32 * dim_stride,
                     present ? 16 : 0);
      }
    };
    reach(0);
#pragma unroll 1
    for (int part = warp; part < kBoxes; part += kDequantWarps) fetch(0, part);
#pragma unroll 1
    for (int i = 0; i < work_tile.tiles; ++i, state.advance()) {
      const uint32_t stage = storage + state.index * Config::kTileBytes;
      const uint32_t boxes_now = parts;
      const bool more = i + 1 < work_tile.tiles;
      if (more) reach(i + 1);
      wait_all_copies();
      barrier_wait(shared_address(kValue ? &shared.value_empty[state.index]
                                         : &shared.key_empty[state.index]),
                   state.phase ^ 1);
      if (!kValue && warp == 0 && lane == 0) shared.parts[state.index] = boxes_now;
#pragma unroll 1
      for (int part = warp; part < kBoxes; part += kDequantWarps) {
        const int token = token_of(i) + part * kPrefillBoxTokens;
        const bool whole = token >= work_tile.begin && token + kPrefillBoxTokens <= work_tile.end;
#pragma unroll
        for (int j = 0; j < kPieces; ++j) {
          uint4 pack = load_shared<uint4>(raw + (part / kDequantWarps * kPieces + j) * 512);
          if (kOfTokens && !whole) {
            pack = bytes_between(pack, work_tile.begin - token, work_tile.end - token);
          }
          const int dim = j * 32 + dim_of_lane;
          const auto smem_offset = [&](int half) -> uint32_t {
            if constexpr (kRows) {
              const int chunk = dim / 8 + half, row = part * kPrefillBoxTokens + token_of_lane;
              return chunk / 8 * (Config::kTokens * 128) + row * 128 + ((chunk ^ row) % 8) * 16;
            } else if constexpr (kValue) {
              const int chunk = dim * 2 + half;
              return part * kBoxBytes + (chunk ^ (chunk >> 3 & 7)) * 16;
            } else {
              return part * kBoxBytes + token_of_lane / 8 * (kBoxBytes / 2) +
                     (dim / 8 + half) * 128 + token_of_lane % 8 * 16;
            }
          };
          store_shared(stage + smem_offset(0), upcast8<T, Cache>(pack.x, pack.y));
          store_shared(stage + smem_offset(1), upcast8<T, Cache>(pack.z, pack.w));
        }
        if (more) fetch(i + 1, part);  // behind what its stores were made of
      }
      fence_async_proxy();
      barrier_arrive_warp(
          shared_address(kValue ? &shared.value_full[state.index] : &shared.key_full[state.index]),
          lane);
      if (!kValue && warp == 0) signal_wanted(shared, work_tile, i, lane);
    }
  });
}

#endif

}  // namespace vllm_kernels::cuda
