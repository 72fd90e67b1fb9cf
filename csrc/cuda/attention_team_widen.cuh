// The warps of paged_attention_team.cuh that widen a team's stages of 8 bits, exactly: from the
// ring to operands of fp16 as attention_team_rows.cuh wants them, which lie in slots of their own.
#pragma once
#include "cuda/attention_team.cuh"
#include "cuda/kv_ring.cuh"
#include "cuda/widen.cuh"

namespace vllm_kernels::cuda {

constexpr int kTeamWideners = 2;  // warps of a team
constexpr int kWideSlots = 2;     // of a team

// Bytes of K, or V, of a stage.
__host__ __device__ constexpr int wide_bytes(int max_head_size) {
  return kTeamTokens * max_head_size * 2;
}

#if defined(VLLM_KERNELS_HAS_WGMMA)

struct WideBarriers {
  uint64_t full[kWideSlots], empty[kWideSlots];
  uint64_t present[kWideSlots];  // see KvRing::present()

  // One thread.
  __device__ __forceinline__ void init() {
    for (int slot = 0; slot < kWideSlots; ++slot) {
      barrier_init(shared_address(&full[slot]), kTeamWideners * kWarpArrivals);
      barrier_init(shared_address(&empty[slot]), 4 * kWarpArrivals);
    }
  }
};

// A team's slots as a ring: V, then K.
template <int kMaxHeadSize>
struct WideRing {
  static constexpr uint32_t kBytes = wide_bytes(kMaxHeadSize);
  uint32_t storage;
  WideBarriers& barriers;
  int lane;
  uint32_t slot = 0, parity = 0;

  __device__ __forceinline__ void wait() const {
    barrier_wait(shared_address(&barriers.full[slot]), parity);
  }
  __device__ __forceinline__ void wait_empty() const {
    barrier_wait(shared_address(&barriers.empty[slot]), parity ^ 1);
  }
  __device__ __forceinline__ uint32_t value() const { return storage + slot * (2 * kBytes); }
  __device__ __forceinline__ uint32_t key() const { return value() + kBytes; }
  __device__ __forceinline__ uint64_t present() const { return barriers.present[slot]; }
  // The slot is full, or empty.
  __device__ __forceinline__ void fill() {
    barrier_arrive_warp(shared_address(&barriers.full[slot]), lane);
    next();
  }
  __device__ __forceinline__ void release() {
    barrier_arrive_warp(shared_address(&barriers.empty[slot]), lane);
    next();
  }

 private:
  __device__ __forceinline__ void next() {
    slot ^= 1;
    parity ^= slot == 0;
  }
};

// One of a team's wideners: K and V of a stage. A lane takes pieces of 16 elements: of 16
// dimensions of a token, or of 16 tokens of a dimension of V in layout vllm.
template <typename Cache, int kMaxHeadSize, PageForm kForm>
__device__ __forceinline__ void widen_stage(uint32_t key, uint32_t value, uint32_t wide_key,
                                            uint32_t wide_value, const TileLayout& layout,
                                            int widener, int lane) {
  constexpr uint32_t kPartBytes = 16 * kMaxHeadSize * 2;
  constexpr int kBatch = 4;  // pieces under way
  // from(i): where piece i lies; to(i, half): where 8 of its elements belong.
  const auto widen = [&](int pieces, const auto& from, const auto& to) {
#pragma unroll 1
    for (int i = 0; i < pieces; i += kBatch) {
      uint4 bytes[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) bytes[b] = load_shared<uint4>(from(i + b));
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        uint4 low, high;
        widen4<Cache>(bytes[b].x, low.x, low.y);
        widen4<Cache>(bytes[b].y, low.z, low.w);
        widen4<Cache>(bytes[b].z, high.x, high.y);
        widen4<Cache>(bytes[b].w, high.z, high.w);
        store_shared(to(i + b, 0), low);
        store_shared(to(i + b, 1), high);
      }
    }
  };
  const int first = widener * 32 + lane;
  constexpr int kKeyPieces = kMaxHeadSize / 16;  // of a lane, as many as of V
  if constexpr (kForm == PageForm::kRows) {
    // Of both: tokens are first's, steps of 16 dimensions.
    const auto from = [&](int i) { return first * 128 + (i ^ first) % 8 * 16; };
    const auto to = [&](int i, int half) {
      return i / 4 * (kTeamTokens * 128) + first * 128 + ((2 * (i % 4) + half) ^ first % 8) * 16;
    };
    widen(
        kKeyPieces, [&](int i) { return key + from(i); },
        [&](int i, int half) { return wide_key + to(i, half); });
    widen(
        kKeyPieces, [&](int i) { return value + from(i); },
        [&](int i, int half) { return wide_value + to(i, half); });
  } else {
    // K: tokens are first's, steps of 16 dimensions.
    const uint32_t key_from =
        key + (first >> 5) * layout.key_half + (first >> 4 & 1) * layout.key_step + first % 16 * 16;
    const uint32_t key_to = wide_key + first / 8 * (kPartBytes / 2) + first % 8 * 16;
    widen(
        kKeyPieces, [&](int i) { return key_from + i * layout.page_tokens * 16; },
        [&](int i, int half) { return key_to + (2 * i + half) * 128; });
    // V: dimensions are first's, or 64 behind them; parts of 16 tokens.
    const int swapped = first >> 2 & 1;
    const uint32_t value_from = value + first * layout.page_tokens;
    const uint32_t value_to = wide_value + first * 32;
    widen(
        kKeyPieces,
        [&](int i) {
          return value_from + (i >> 1 & 1) * layout.value_half + (i & 1) * layout.value_step +
                 (i >> 2) * 64 * layout.page_tokens;
        },
        [&](int i, int half) {
          return value_to + i % 4 * kPartBytes + (i >> 2) * 64 * 32 + (swapped ^ half) * 16;
        });
  }
}

#endif

}  // namespace vllm_kernels::cuda
