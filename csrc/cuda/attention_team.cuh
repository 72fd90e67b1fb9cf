// What the teams of paged_attention_team.cuh have in common: 4 warps each, which take 64 tokens of
// an item at a time, and its queries in shared memory.
#pragma once
#include "cuda/pack.cuh"
#include "cuda/ptx.cuh"
#include "cuda/types.cuh"
#include "cuda/widen.cuh"

namespace vllm_kernels::cuda {

constexpr int kTeamTokens = 64;  // of a step
constexpr int kTeamMaxHeadSize = 128;

#if defined(VLLM_KERNELS_HAS_WGMMA)

// A warp of a team, and where it meets the others.
template <int kTeamCount>
struct TeamMember {
  static constexpr int kTeams = kTeamCount;  // of the block
  int team;
  int member;        // this warp of the team
  uint32_t storage;  // shared memory of the team
  int team_bytes;    // from one team's to the next

  __device__ __forceinline__ uint32_t storage_of(int other) const {
    return storage + (other - team) * team_bytes;
  }
  // Barriers of a team; their numbers are constants, for tools that check.
  __device__ __forceinline__ void team_barrier() const {
    if (team == 0) {
      asm volatile("barrier.cta.sync.aligned 1, 128;" ::: "memory");
    } else if (kTeams == 2 || team == 1) {
      asm volatile("barrier.cta.sync.aligned 2, 128;" ::: "memory");
    } else {
      asm volatile("barrier.cta.sync.aligned 3, 128;" ::: "memory");
    }
  }
  template <int kBarrier>
  static __device__ __forceinline__ bool any_of_team(bool mine) {
    uint32_t any;
    asm volatile(
        "{\n.reg .pred mine, any;\nsetp.ne.b32 mine, %1, 0;\n"
        "barrier.cta.red.or.pred.aligned any, %2, 128, mine;\nselp.b32 %0, 1, 0, any;\n}"
        : "=r"(any)
        : "r"(static_cast<uint32_t>(mine)), "n"(kBarrier)
        : "memory");
    return any != 0;
  }
  // ... which tells whether any thread says so.
  __device__ __forceinline__ bool team_any(bool mine) const {
    if (team == 0) return any_of_team<1>(mine);
    if (kTeams == 2 || team == 1) return any_of_team<2>(mine);
    return any_of_team<3>(mine);
  }
};

template <typename Query>
__device__ __forceinline__ uint4 load8(const Query* from) {
  if (reinterpret_cast<uintptr_t>(from) % 16 == 0) return *reinterpret_cast<const uint4*>(from);
  const auto* pairs = reinterpret_cast<const uint32_t*>(from);
  return uint4{pairs[0], pairs[1], pairs[2], pairs[3]};
}

// A query row [kChunks][8] of type Query to fp16, in place, times a power of two whose inverse goes
// to `inverse`; place(chunk) is where its 16 bytes lie, of which permute() may change two in turn.
template <typename Query, int kChunks, typename Place, typename Permute>
__device__ __forceinline__ void narrow_query_row(const Place& place, uint32_t inverse,
                                                 const Permute& permute) {
  const auto element = [](uint32_t pair, int j) {
    return to_float(bits_as<Query>(static_cast<uint16_t>(j ? pair >> 16 : pair)));
  };
  float largest[2] = {0.0f, 0.0f};
#pragma unroll 2
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    const uint4 pack = load_shared<uint4>(place(chunk));
#pragma unroll
    for (const uint32_t pair : {pack.x, pack.y, pack.z, pack.w}) {
#pragma unroll
      for (int j = 0; j < 2; ++j) largest[j] = fmaxf(largest[j], fabsf(element(pair, j)));
    }
  }
  const int exponent = power_for_half(fmaxf(largest[0], largest[1]));
  const float factor = exp2f(static_cast<float>(exponent));
  store_shared(inverse, exp2f(static_cast<float>(-exponent)));
  const auto narrow = [&](uint32_t pair) {
    return pack2<__half>(element(pair, 0) * factor, element(pair, 1) * factor);
  };
  const auto narrow4 = [&](const uint4& pack) {
    return uint4{narrow(pack.x), narrow(pack.y), narrow(pack.z), narrow(pack.w)};
  };
#pragma unroll 2
  for (int chunk = 0; chunk < kChunks; chunk += 2) {
    uint4 a = narrow4(load_shared<uint4>(place(chunk)));
    uint4 b = narrow4(load_shared<uint4>(place(chunk + 1)));
    permute(a, b);
    store_shared(place(chunk), a);
    store_shared(place(chunk + 1), b);
  }
}

// One warp puts the queries of an item with `tiles` tiles of 8 rows down at `query`, a lane a row.
// start(row) points to a query row of type Query, null where there is none.
template <typename Tile, typename Query, typename Start>
__device__ __forceinline__ void store_query(const Start& start, uint32_t query, uint32_t scales,
                                            int tiles, int head_size, int lane) {
  const int rows = tiles * 8;
#pragma unroll 1
  for (int row = lane; row < rows; row += 32) {
    const Query* from = start(row);
    const bool aligned = reinterpret_cast<uintptr_t>(from) % 16 == 0;
#pragma unroll 4
    for (int chunk = 0; chunk < Tile::kMaxHead / 8; ++chunk) {
      const uint32_t to = Tile::query_place(query, row, chunk, rows);
      if (from == nullptr || chunk * 8 >= head_size) {
        store_shared(to, uint4{0, 0, 0, 0});
      } else if (aligned) {
        copy16_async(to, from + chunk * 8);
      } else {
        store_shared(to, load8(from + chunk * 8));
      }
    }
  }
  wait_all_copies();
  if constexpr (!Tile::kWide) {
#pragma unroll 1
    for (int row = lane; row < rows; row += 32) {
      Tile::template narrow_row<Query>(query, scales, row, rows);
    }
  }
}

#endif

}  // namespace vllm_kernels::cuda
