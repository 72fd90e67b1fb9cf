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
  constexpr int kPieces = kTeamTokens * kMaxHeadSize / 16;
  constexpr uint32_t kPartBytes = 16 * kMaxHeadSize * 2;
  // to(half): where 8 of the elements belong.
  const auto widen = [&](uint32_t from, const auto& to) {
    const uint4 bytes = load_shared<uint4>(from);
    uint4 low, high;
    widen4<Cache>(bytes.x, low.x, low.y);
    widen4<Cache>(bytes.y, low.z, low.w);
    widen4<Cache>(bytes.z, high.x, high.y);
    widen4<Cache>(bytes.w, high.z, high.w);
    store_shared(to(0), low);
    store_shared(to(1), high);
  };
  const int first = widener * 32 + lane;
  if constexpr (kForm == PageForm::kRows) {
    const int row = first % 64;
#pragma unroll 4
    for (int i = 0; i < kPieces / (32 * kTeamWideners); ++i) {  // tokens are first's
      const uint32_t at = row * 128 + (i ^ row) % 8 * 16;
      const auto to = [&](int half) {
        return i / 4 * (kTeamTokens * 128) + row * 128 + ((2 * (i % 4) + half) ^ row % 8) * 16;
      };
      widen(key + at, [&](int half) { return wide_key + to(half); });
      widen(value + at, [&](int half) { return wide_value + to(half); });
    }
  } else {
    // K: tokens are first's, steps of 16 dimensions.
    const uint32_t key_from =
        key + (first >> 5) * layout.key_half + (first >> 4 & 1) * layout.key_step + first % 16 * 16;
    const uint32_t key_to = wide_key + first / 8 * (kPartBytes / 2) + first % 8 * 16;
#pragma unroll 4
    for (int i = 0; i < kMaxHeadSize / 16; ++i) {
      widen(key_from + i * layout.page_tokens * 16,
            [&](int half) { return key_to + (2 * i + half) * 128; });
    }
    // V: dimensions are first's, 16 tokens.
    constexpr int kRounds = kMaxHeadSize / 64;
#pragma unroll 4
    for (int i = 0; i < 4 * kRounds; ++i) {
      const int part = i / kRounds, d = i % kRounds * 64 + first;
      const uint32_t from = value + part / 2 * layout.value_half + (part & 1) * layout.value_step +
                            d * layout.page_tokens;
      const uint32_t to = wide_value + part * kPartBytes + d * 32;
      widen(from, [&](int half) { return to + ((d >> 2 & 1) ^ half) * 16; });
    }
  }
}

#endif

}  // namespace vllm_kernels::cuda
