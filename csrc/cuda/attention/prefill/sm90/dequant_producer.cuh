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
__device__ __forceinline__ uint4 widen8(uint32_t first, uint32_t second) {
  uint32_t pairs[4];
  widen4<Cache>(first, pairs[0], pairs[1]);
  widen4<Cache>(second, pairs[2], pairs[3]);
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

// One of kWideners warps, number `warp`: K, or V, of the block's items. It takes every other part;
// a lane's piece of 16 bytes is 16 dimensions of a token, or 16 tokens of a dimension of V in
// layout vllm. attention/prefill/sm90/mainloop.cuh says where they belong. While a tile's pieces
// are widened, the next one's are on their way to `raw`, where nobody but their lane sees them.
template <typename Config, bool kValue, typename Cache>
__device__ __forceinline__ void widen_tiles(const PagedAttentionParams& p,
                                            const PrefillShape& shape,
                                            PrefillShared<Config>& shared, uint32_t storage,
                                            uint32_t raw, int warp, int lane) {
  using T = typename Config::T;
  using Blocks = TileBlocks<Config>;
  constexpr bool kRows = Config::kForm == PageForm::kRows;
  constexpr bool kOfTokens = kValue && !kRows;  // pieces
  constexpr int kParts = Blocks::kParts;
  constexpr uint32_t kPartBytes = PrefillTile<Config>::kPartBytes;
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
  wait_for_predecessor();
  Turn<kValue ? Config::kValueStages : Config::kKeyStages> turn;
  each_item(shared, lane, [&](const PrefillItem& item) {
    Blocks blocks(p, shape, item, lane);
    const char* of_head = of_lane + item.kv_head * head_stride;
    const auto token_of = [&](int number) {  // the first of the item's tile
      return (item.first_tile + item.tiles - 1 - number) * Config::kTokens;
    };
    uint32_t parts;  // of the tile whose pieces are on their way, that are there
    const auto reach = [&](int number) {
      const int first = token_of(number), part = lane % kParts;
      blocks.reach(number, first);
      const bool there = blocks.block(part) >= 0 || !blocks.seen(first + part * kPrefillPart);
      parts = __ballot_sync(0xffffffffu, there) & ((1u << kParts) - 1);
    };
    const auto fetch = [&](int number, int part) {
      const int token = token_of(number) + part * kPrefillPart + token_of_lane;
      const int block = blocks.block(part);
      const bool there = block >= 0 && (kOfTokens || (token >= item.begin && token < item.end));
      const char* from =
          of_head +
          (there ? block * block_stride + blocks.place(token) * token_stride : int64_t{0});
#pragma unroll
      for (int j = 0; j < kPieces; ++j) {
        copy16_async(raw + (part / kWideners * kPieces + j) * 512, from + j * 32 * dim_stride,
                     there ? 16 : 0);
      }
    };
    reach(0);
#pragma unroll 1
    for (int part = warp; part < kParts; part += kWideners) fetch(0, part);
#pragma unroll 1
    for (int i = 0; i < item.tiles; ++i, turn.next()) {
      const uint32_t stage = storage + turn.at * Config::kTileBytes;
      const uint32_t parts_now = parts;
      const bool more = i + 1 < item.tiles;
      if (more) reach(i + 1);
      wait_all_copies();
      barrier_wait(
          shared_address(kValue ? &shared.value_empty[turn.at] : &shared.key_empty[turn.at]),
          turn.parity ^ 1);
      if (!kValue && warp == 0 && lane == 0) shared.parts[turn.at] = parts_now;
#pragma unroll 1
      for (int part = warp; part < kParts; part += kWideners) {
        const int token = token_of(i) + part * kPrefillPart;
        const bool whole = token >= item.begin && token + kPrefillPart <= item.end;
#pragma unroll
        for (int j = 0; j < kPieces; ++j) {
          uint4 pack = load_shared<uint4>(raw + (part / kWideners * kPieces + j) * 512);
          if (kOfTokens && !whole) {
            pack = bytes_between(pack, item.begin - token, item.end - token);
          }
          const int dim = j * 32 + dim_of_lane;
          const auto place = [&](int half) -> uint32_t {
            if constexpr (kRows) {
              const int chunk = dim / 8 + half, row = part * kPrefillPart + token_of_lane;
              return chunk / 8 * (Config::kTokens * 128) + row * 128 + ((chunk ^ row) % 8) * 16;
            } else if constexpr (kValue) {
              const int chunk = dim * 2 + half;
              return part * kPartBytes + (chunk ^ (chunk >> 3 & 7)) * 16;
            } else {
              return part * kPartBytes + token_of_lane / 8 * (kPartBytes / 2) +
                     (dim / 8 + half) * 128 + token_of_lane % 8 * 16;
            }
          };
          store_shared(stage + place(0), widen8<T, Cache>(pack.x, pack.y));
          store_shared(stage + place(1), widen8<T, Cache>(pack.z, pack.w));
        }
        if (more) fetch(i + 1, part);  // behind what its stores were made of
      }
      fence_async_proxy();
      barrier_arrive_warp(
          shared_address(kValue ? &shared.value_full[turn.at] : &shared.key_full[turn.at]), lane);
      if (!kValue && warp == 0) tell_wanted(shared, item, i, lane);
    }
  });
}

#endif

}  // namespace vllm_kernels::cuda
