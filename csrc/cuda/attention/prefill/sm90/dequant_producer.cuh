// The dequant producer warps of the sm90 prefill kernel (prefill_kernel.cuh), for 8-bit caches.
// They read K and V with cp.async, upcast them to 16 bits and store them as wgmma
// operands. The upcast is exact: k_scale is applied to scores, v_scale to the output.
//
// A scale a token is applied here, in float32, and the product is rounded once to 16 bits, as an
// unquantized cache is. That error is small beside int8's, and the consumers' softmax, which is the
// bottleneck, has no more to do. (Scaled scores would be a multiplication and half a load each.)
#pragma once
#include "cuda/attention/common/token_scales.cuh"
#include "cuda/attention/prefill/sm90/producer.cuh"
#include "cuda/base/kv_element.cuh"

namespace vllm_kernels::cuda {

#if defined(VLLM_KERNELS_HAS_WGMMA)

// Two fp16 as two T. T represents both exactly.
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
// Eight elements of the cache as eight T.
template <typename T, typename Cache>
__device__ __forceinline__ uint4 upcast8(uint32_t first, uint32_t second) {
  uint32_t pairs[4];
  upcast4<Cache>(first, pairs[0], pairs[1]);
  upcast4<Cache>(second, pairs[2], pairs[3]);
  return {from_half_pair<T>(pairs[0]), from_half_pair<T>(pairs[1]), from_half_pair<T>(pairs[2]),
          from_half_pair<T>(pairs[3])};
}

// Eight int8 elements as eight T, element i times scale(i).
template <typename T, typename Scale>
__device__ __forceinline__ uint4 dequantize8(uint32_t first, uint32_t second, const Scale& scale) {
  uint32_t pairs[4];
  upcast4<int8_t>(first, pairs[0], pairs[1]);
  upcast4<int8_t>(second, pairs[2], pairs[3]);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    __half2 halves;
    memcpy(&halves, &pairs[i], sizeof(halves));
    const float2 values = __half22float2(halves);
    pairs[i] = pack2<T>(values.x * scale(2 * i), values.y * scale(2 * i + 1));
  }
  return {pairs[0], pairs[1], pairs[2], pairs[3]};
}

// The scales of a KV tile's tokens, of the boxes that one dequant warp takes. Lane l has token l %
// 16 of its boxes l / 16 and, where a warp has more than two, l / 16 + 2.
template <int kBoxesOfWarp>
struct TileScales {
  static_assert(kBoxesOfWarp <= 4);
  float boxes[kBoxesOfWarp > 2 ? 2 : 1] = {};

  // of_box(i, t): the scale of token t of the warp's i-th box. All lanes.
  template <typename OfBox>
  __device__ __forceinline__ void read(int lane, const OfBox& of_box) {
    boxes[0] = of_box(lane / 16, lane % 16);
    if constexpr (kBoxesOfWarp > 2) boxes[1] = of_box(lane / 16 + 2, lane % 16);
  }
  // All lanes, with the same i.
  __device__ __forceinline__ float get(int i, int token) const {
    float held = boxes[0];
    if constexpr (kBoxesOfWarp > 2) held = i < 2 ? held : boxes[1];
    return __shfl_sync(0xffffffffu, held, i % 2 * 16 + token);
  }
  // Of all 16 tokens of the box, or of `token`.
  template <int kCount>
  __device__ __forceinline__ void get(int i, int token, float (&scales)[kCount]) const {
    static_assert(kCount == 16 || kCount == 1);
#pragma unroll
    for (int t = 0; t < kCount; ++t) scales[t] = get(i, kCount == 16 ? t : token);
  }
};

template <bool kValue>
__device__ __forceinline__ float token_scale(const TokenScales& all, int block, int kv_head,
                                             int row) {
  const int64_t page = kValue ? all.value_offset(block, kv_head) : all.key_offset(block, kv_head);
  return (kValue ? all.value : all.key)[page + row];
}

// Keeps the bytes with an index in [low, high); the others become 0.
__device__ __forceinline__ uint4 mask_bytes(uint4 elements, int low, int high) {
  const auto bytes_from = [](int index) {  // of a word. The shift clamps to 32
    return __funnelshift_lc(0, ~0u, min(max(index, 0), 4) * 8);
  };
  const auto masked = [&](uint32_t word, int first) {
    return word & bytes_from(low - first) & ~bytes_from(high - first);
  };
  return {masked(elements.x, 0), masked(elements.y, 4), masked(elements.z, 8),
          masked(elements.w, 12)};
}

// The chunks of 16 bytes that a lane takes of a box: 16 dimensions of a token. For V of layout
// vllm: 16 tokens of a dimension. A warp takes 32 chunks at once: 64 bytes of 8 tokens, or 32 bytes
// of 16 tokens where these are contiguous (layout vllm) and for heads below 128.
// (prefill/dequantize.md, 16x16_on_4k: 72 to 57 us; heads of 64, 4x128_on_8k: 104 to 106.)
//
// at(): where they end in a KV tile; mainloop.cuh has the layout. A box begins at a multiple of 128
// bytes, so a constant can flip bits of an address: one instruction, and no register of the loop.
template <typename Config, bool kValue>
struct LaneChunks {
  static constexpr bool kRowForm = Config::kForm == KvForm::kSwizzledRows;
  static constexpr bool kAreTokens = kValue && !kRowForm;
  static constexpr int kCount = Config::kHeadSize / 32;
  static constexpr bool kHas8Tokens = kRowForm && Config::kHeadSize >= 128;
  static constexpr uint32_t kBoxBytes = PrefillMma<Config>::kBoxBytes;
  static constexpr uint32_t kBoxStep = kRowForm ? kPrefillBoxTokens * 128 : kBoxBytes;

  int first_token, first_dim;  // of chunk 0
  uint32_t first_offset;       // bytes from a box to its half 0

  __device__ __forceinline__ explicit LaneChunks(uint32_t lane) {
    const uint32_t token = kHas8Tokens ? lane / 4 : lane % 16;  // K, and V in rows
    const uint32_t chunk = kHas8Tokens ? lane % 4 : lane / 16;  // 16 dimensions
    first_token = kAreTokens ? 0 : token;
    first_dim = kAreTokens ? lane : chunk * 16;
    if constexpr (kRowForm) {
      first_offset = token * 128 + (2 * chunk ^ token % 8) * 16;
    } else if constexpr (kValue) {
      first_offset = (2 * lane ^ lane / 4) * 16;
    } else {
      first_offset = token / 8 * (kBoxBytes / 2) + chunk * 256 + token % 8 * 16;
    }
  }
  __device__ __forceinline__ int token(int j) const {
    return first_token + (kHas8Tokens ? j % 2 * 8 : 0);
  }
  // Elements (= bytes) from one dimension to the next, at the starts of chunks.
  static __device__ __forceinline__ int64_t dim_stride(const PagedKv& kv) {
    return kAreTokens ? kv.value_dim_stride : kRowForm ? 1 : kv.key_chunk_stride / 16;
  }
  // From dimension first_dim to that of chunk j.
  static __device__ __forceinline__ int dim_step(int j) {
    return kHas8Tokens ? j / 2 * 64 : j * 32;
  }
  // Half `half` of chunk j: 8 elements. `first`: half 0 of chunk 0.
  static __device__ __forceinline__ uint32_t at(uint32_t first, int j, int half) {
    constexpr int kColumnBytes = Config::kTokens * 128;
    if constexpr (kHas8Tokens) return (first ^ half * 16) + j % 2 * 1024 + j / 2 * kColumnBytes;
    if constexpr (kRowForm) return (first ^ (j % 2 * 64 + half * 16)) + j / 2 * kColumnBytes;
    if constexpr (kValue) return (first ^ half * 16) + j * 1024;
    return first + (j * 4 + half) * 128;
  }
};

// Stores a chunk as 16 elements of T: half i at address(i). of_tokens: ScaledInt8's scale of the
// chunk's token, or of its tokens.
template <typename T, typename Cache, typename Address, int kScales>
__device__ __forceinline__ void store_chunk(uint4 elements, const Address& address,
                                            const float (&of_tokens)[kScales]) {
  const auto upcast = [&](uint32_t low, uint32_t high, int first) {
    if constexpr (!kHasTokenScales<Cache>) return upcast8<T, Cache>(low, high);
    return dequantize8<T>(low, high, [&](int e) { return of_tokens[kScales > 1 ? first + e : 0]; });
  };
  store_shared(address(0), upcast(elements.x, elements.y, 0));
  store_shared(address(1), upcast(elements.z, elements.w, 8));
}

// Dequant producer warp `warp` of kDequantWarps, for K or V. It takes boxes warp, warp +
// kDequantWarps, ... of each KV tile.
//
// While one KV tile is upcast, the next one is copied to `raw`. Each lane reads back only its own
// chunks, so these copies need no barrier.
template <typename Config, bool kValue, typename Cache>
__device__ __forceinline__ void dequantize_tiles(const PagedAttentionParams& p,
                                                 const PrefillShape& shape,
                                                 PrefillShared<Config>& shared, uint32_t stages,
                                                 uint32_t raw, int warp, int lane) {
  using T = typename Config::Operand;
  using Pages = TilePages<Config>;
  using Chunks = LaneChunks<Config, kValue>;
  constexpr bool kChunkIsTokens = Chunks::kAreTokens;
  constexpr bool kScaled = kHasTokenScales<Cache>;
  constexpr int kBoxes = Pages::kBoxes;
  constexpr int kWarpBoxes = (kBoxes + kDequantWarps - 1) / kDequantWarps;
  using Scales = TileScales<kWarpBoxes>;
  constexpr int kChunks = Chunks::kCount;  // of a lane, in a box
  constexpr bool kHasRoom = kChunks <= 4;  // registers can hold all chunks of a box
  // Chunks loaded before one is stored. Scales need the registers.
  constexpr int kLoads = kScaled ? 1 : kHasRoom ? kChunks : 2;
  constexpr bool kEarlyAddress = kHasRoom && !(kScaled && kChunkIsTokens);
  const PagedKv& kv = p.kv;
  const Chunks of_lane(lane);
  const int64_t block_stride = kValue ? kv.value_block_stride : kv.key_block_stride;
  const int64_t token_stride = kValue ? kv.value_token_stride : kv.key_token_stride;
  const int64_t dim_stride = Chunks::dim_stride(kv);
  const auto base = reinterpret_cast<uint64_t>(kValue ? kv.value : kv.key);
  const int64_t head_stride = kValue ? kv.value_head_stride : kv.key_head_stride;
  raw += warp * Config::kRawBytes + lane * 16;
  const int lane_dims = shape.head_size - of_lane.first_dim;  // chunks past them stay zero
  for (int i = 0; i < Config::kRawBytes; i += 512) store_shared(raw + i, uint4{0, 0, 0, 0});
  wait_for_primary_kernel();
  PipelineState<kValue ? Config::kValueStages : Config::kKeyStages> state;
  for_each_tile(shared, lane, [&](const SplitTile& work_tile) {
    Pages pages(p, shape, work_tile, lane);
    // opaque(): the product would take two registers of the loop over work tiles.
    const uint64_t head_base =
        base + work_tile.kv_head * head_stride + opaque(of_lane.first_dim) * dim_stride;
    const auto token_of = [&](int number) {  // first token of KV tile `number`
      return (work_tile.first_tile + work_tile.tiles - 1 - number) * Config::kTokens;
    };
    uint32_t present_boxes;  // of the KV tile that is being copied
    const auto look_up = [&](int number) {
      const int first = token_of(number), box = lane % kBoxes;
      pages.look_up(number, first);
      const bool present = pages.block(box) >= 0 || !pages.visible(first + box * kPrefillBoxTokens);
      present_boxes = __ballot_sync(0xffffffffu, present) & ((1u << kBoxes) - 1);
    };
    // Where this lane's first chunk of a box lies, or 0: no token of it is visible, or it has no
    // valid page. A copy of size 0 reads nothing, whatever its address is.
    const auto source_of = [&](int number, int box) -> uint64_t {
      const int token = token_of(number) + box * kPrefillBoxTokens + of_lane.first_token;
      const int block = pages.block(box);
      if (block < 0) return 0;
      return head_base + block * block_stride + pages.row_in_block(token) * token_stride;
    };
    const auto fetch = [&](int number, int k, uint64_t source) {
      const int first = token_of(number) + (warp + k * kDequantWarps) * kPrefillBoxTokens;
#pragma unroll
      for (int j = 0; j < kChunks; ++j) {
        const int token = first + of_lane.token(j);
        const bool present =
            source != 0 && (kChunkIsTokens || (token >= work_tile.begin && token < work_tile.end));
        if (Chunks::dim_step(j) < lane_dims) {
          const int64_t step = (of_lane.token(j) - of_lane.first_token) * token_stride +
                               Chunks::dim_step(j) * dim_stride;
          copy16_async(raw + (k * kChunks + j) * 512, reinterpret_cast<const char*>(source + step),
                       present ? 16 : 0);
        }
      }
    };
    Scales scales, next_scales;
    const auto read_scales = [&](int number, Scales& of_tile) {
      if constexpr (!kScaled) return;
      of_tile.read(lane, [&](int i, int t) {
        const int box = warp + i * kDequantWarps;
        const int token = token_of(number) + box * kPrefillBoxTokens + t;
        const int block = pages.block(box % kBoxes);
        if (box >= kBoxes || block < 0 || token < work_tile.begin || token >= work_tile.end) {
          return 0.0f;
        }
        return token_scale<kValue>(p.token_scales, block, work_tile.kv_head,
                                   pages.row_in_block(token));
      });
    };
    look_up(0);
    read_scales(0, scales);
#pragma unroll 1
    for (int k = 0; k < kWarpBoxes; ++k) {
      const int box = warp + k * kDequantWarps;
      if (box < kBoxes) fetch(0, k, source_of(0, box));
      commit_copies();
    }
#pragma unroll 1
    for (int i = 0; i < work_tile.tiles; ++i, state.advance()) {
      const uint32_t stage = stages + state.index * Config::kTileBytes;
      const uint32_t stage_present_boxes = present_boxes;
      const bool has_next = i + 1 < work_tile.tiles;
      if (has_next) {
        look_up(i + 1);
        read_scales(i + 1, next_scales);
      }
      barrier_wait(shared_address(kValue ? &shared.value_empty[state.index]
                                         : &shared.key_empty[state.index]),
                   state.phase ^ 1);
      if (!kValue && warp == 0 && lane == 0)
        shared.present_boxes[state.index] = stage_present_boxes;
#pragma unroll 1
      for (int k = 0; k < kWarpBoxes; ++k) {
        const int box = warp + k * kDequantWarps;
        wait_copies<kWarpBoxes - 1>();  // this box's copies
        if (box >= kBoxes) {
          commit_copies();
          break;
        }
        const int token = token_of(i) + box * kPrefillBoxTokens;
        const bool is_whole_box =
            token >= work_tile.begin && token + kPrefillBoxTokens <= work_tile.end;
        float of_tokens[kChunkIsTokens ? 16 : 1];  // kScaled: the scales of this lane's tokens
        if constexpr (kScaled && !Chunks::kHas8Tokens) scales.get(k, of_lane.token(0), of_tokens);
        const auto next_source = [&] { return has_next ? source_of(i + 1, box) : 0; };
        const uint64_t next = kEarlyAddress ? next_source() : 0;
        const uint32_t first = stage + box * Chunks::kBoxStep + of_lane.first_offset;
        uint4 chunks[kLoads];
#pragma unroll
        for (int j = 0; j < kChunks; ++j) {
          if (j % kLoads == 0) {
#pragma unroll
            for (int l = 0; l < kLoads; ++l) {
              chunks[l] = load_shared<uint4>(raw + (k * kChunks + j + l) * 512);
            }
          }
          uint4 elements = chunks[j % kLoads];
          if (kChunkIsTokens && !is_whole_box) {
            elements = mask_bytes(elements, work_tile.begin - token, work_tile.end - token);
          }
          if constexpr (kScaled && Chunks::kHas8Tokens) scales.get(k, of_lane.token(j), of_tokens);
          const auto address = [&](int half) { return Chunks::at(first, j, half); };
          store_chunk<T, Cache>(elements, address, of_tokens);
        }
        if (has_next)
          fetch(i + 1, k, kEarlyAddress ? next : next_source());  // its buffer has been read
        commit_copies();
      }
      scales = next_scales;
      fence_async_proxy();
      barrier_arrive_warp(
          shared_address(kValue ? &shared.value_full[state.index] : &shared.key_full[state.index]),
          lane);
      if (!kValue && warp == 0) request_next_tile(shared, work_tile, i, lane);
    }
  });
}

// Calls with_cache(Cache{}) with the cache's type. Keys times the scale of their token may not fit
// fp16. So kernels that convert queries take no such cache. Kernels of bfloat16 and the same heads
// that do not convert take nothing else.
template <typename Config, typename Action>
__device__ __forceinline__ void dispatch_dequantized(const PagedAttentionParams& p,
                                                     const Action& with_cache) {
  constexpr bool kMayScale =
      takes_token_scales(Config::kForm, Config::kHeadSize) && !Config::kConvertsQueries;
  if constexpr (kMayScale && multiplies_in_fp16<typename Config::T>(Config::kHeadSize)) {
    with_cache(ScaledInt8{});
  } else {
    if constexpr (kMayScale) {
      if (p.token_scales.any()) return with_cache(ScaledInt8{});
    }
    dispatch_8_bit(p.kv.dtype, with_cache);
  }
}

#endif

}  // namespace vllm_kernels::cuda
