// The mma.sync mainloop of one warp: 16 or 32 query rows against a KV tile of 64 tokens. It needs
// sm_80; prefill_kernel.cuh drives it.
//   S [16 rows, tokens] = Q [16, D] K^T [D, tokens]       Q in registers where there is room
//   O [16 rows, D]     += P [16, tokens] V [tokens, D]    P in registers: S's fragments are A's
// Two row tiles of 16 share each ldmatrix of K and V. With one, shared memory is the limit, not the
// tensor cores: 512 bytes feed 2 mma.m16n8k16 instead of 4.
//
// Layout of a KV tile in shared memory, 16-bit elements:
//   K                 rows of tokens, form kSwizzledRows of kv_smem_layout.cuh
//   V, kSwizzledRows  the same; ldmatrix transposes it
//   V, kPackedPages   (layout vllm) V^T: D rows of 64 tokens, 128 bytes. Chunks of 8 tokens are
//                     permuted by chunk ^ value_swizzle(d).
#pragma once
#include <algorithm>

#include "cuda/attention/common/kernel_choice.h"
#include "cuda/attention/common/kv_smem_layout.cuh"
#include "cuda/attention/common/online_softmax.cuh"
#include "cuda/attention/common/score_mod.cuh"
#include "cuda/attention/prefill/tile_scheduler.cuh"
#include "cuda/base/quad.cuh"
#include "cuda/base/upcast.cuh"
#include "cuda/base/vec.cuh"

namespace vllm_kernels::cuda {

// Sizes of the kernel. An 8-bit cache is upcast to fp16: then T is fp16.
template <typename Element, int kSize, KvForm kKvForm, bool kIs8BitCache>
struct Sm80Config {
  using T = Element;  // type of the mma operands
  static constexpr int kHeadSize = kSize;
  static constexpr KvForm kForm = kKvForm;
  static constexpr bool kCacheIs8Bit = kIs8BitCache;
  static constexpr PrefillSm80Sizes kSizes{kSize, kIs8BitCache};
  static constexpr int kRowTiles = kSizes.row_tiles;
  static constexpr int kWarpRows = kSizes.warp_rows();
  static constexpr int kWarps = PrefillSm80Sizes::kMaxWarps, kThreads = 32 * kWarps;  // at most
  static constexpr int kTokens = 64;  // of a KV tile
  static constexpr int kStages = kSizes.max_stages;
  static constexpr int kRegisterSteps = kSizes.held_steps;
  static constexpr int kTileBytes = kSizes.tile_bytes;
  static constexpr int kChunkElements = kCacheIs8Bit ? 16 : 8;  // elements of a 16-byte copy
  static constexpr int kLaneChunks = kSizes.chunks;
  static constexpr int kRawBytes = kSizes.raw_bytes;
  // Without a loop that ptxas cannot unroll it loads the operands of S so early that registers
  // spill on sm_100 and sm_120. 16-bit rows with heads of 128 spill, too, but the loop made them 1
  // to 10% slower (docs/lab/prefill/sm80.md). sm_90a needs no loop.
  static constexpr bool kSavesRegisters =
      sm90a_or(0, 1) && (kCacheIs8Bit ? kHeadSize == 96 || kHeadSize == 128
                                      : kForm == KvForm::kPackedPages && kHeadSize == 128);
  // Steps of 16 dimensions in a pass of that loop. All, if some are held: registers have no index.
  static constexpr int kPassSteps = kSavesRegisters && kRegisterSteps == 0 ? 4 : kHeadSize / 16;
};

// Swizzle of V^T: 8 consecutive rows have different values, 4 consecutive ones different pairs. So
// neither the writes of the copies nor the reads of ldmatrix have bank conflicts.
__device__ __forceinline__ uint32_t value_swizzle(uint32_t d) {
  return (d & 3) << 1 | (d >> 2 & 1);
}

template <typename Config>
struct Sm80Mma {
  using T = typename Config::T;
  using Addresses = KvFragments<T, Config::kHeadSize, Config::kTokens, KvForm::kSwizzledRows>;
  static constexpr int kRowTiles = Config::kRowTiles;
  static constexpr int kSteps = Config::kHeadSize / 16, kRegisterSteps = Config::kRegisterSteps;
  static constexpr int kOutTiles = Config::kHeadSize / 8;
  static constexpr int kScoreTiles = Config::kTokens / 8;
  static constexpr bool kRowForm = Config::kForm == KvForm::kSwizzledRows;
  using Scores = float[kRowTiles][kScoreTiles][4];

  uint32_t query[kRowTiles][std::max(1, kRegisterSteps)][4];
  uint32_t smem_query;  // shared address of this lane's other steps
  float out[kRowTiles][kOutTiles][4];
  float row_max[kRowTiles][2];  // log2 units; see kRescaleThreshold
  float sum[kRowTiles][2];      // partial: of this lane's columns

  // The warp's row that is row r (of 2) of this lane in row tile `tile`.
  static __device__ __forceinline__ int row_of(int lane, int tile, int r) {
    return tile * 16 + lane / 4 + 8 * r;
  }

  // This lane's byte offset in a tile of K, and of V. A B operand is two matrices, in consecutive
  // registers of one ldmatrix. Recomputed for each KV tile, to save registers.
  // K matrices: (tokens 0-7, chunk 0) (0-7, 1) (8-15, 0) (8-15, 1).
  static __device__ __forceinline__ uint32_t key_lane() {
    const int lane = opaque(threadIdx.x) % 32;
    const int row = lane & 7, second = lane >> 3 & 1, upper = lane >> 4;
    return (row + upper * 8) * kColumnBytes + (second ^ row) * 16;
  }
  // V matrices: (tokens 0-7, dims 0-7) (8-15, 0-7) (0-7, 8-15) (8-15, 8-15).
  static __device__ __forceinline__ uint32_t value_lane() {
    const int lane = opaque(threadIdx.x) % 32;
    const int row = lane & 7, second = lane >> 3 & 1, upper = lane >> 4;
    if constexpr (kRowForm) return (row + second * 8) * kColumnBytes + (upper ^ row) * 16;
    return (row + upper * 8) * kColumnBytes + (second ^ value_swizzle(row)) * 16;
  }

  // `start(row)` returns a pointer to a query row of type Query, or null. For an 8-bit cache each
  // row is scaled by a power of two to fp16; factors[row] undoes that.
  template <typename Query, typename Start>
  __device__ __forceinline__ void load_query(const Start& start, int head_size, float* factors,
                                             int lane) {
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
      uint32_t loaded[kSteps][4];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const Query* row = start(row_of(lane, tile, r));
        const auto* pairs = reinterpret_cast<const uint32_t*>(row) + lane % 4;
        const int limit = row == nullptr ? 0 : head_size;
#pragma unroll
        for (int i = 0; i < 2 * kSteps; ++i) {
          loaded[i / 2][i % 2 * 2 + r] = i * 8 < limit ? pairs[i * 4] : 0;
        }
        if constexpr (Config::kCacheIs8Bit) {
          const float factor = to_half<Query>(loaded, r);
          if (lane % 4 == 0) factors[row_of(lane, tile, r)] = factor;
        }
      }
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        if (k < kRegisterSteps) {
#pragma unroll
          for (int j = 0; j < 4; ++j) query[tile][k][j] = loaded[k][j];
        } else {
          store_shared(smem_query_at(smem_query, tile, k),
                       uint4{loaded[k][0], loaded[k][1], loaded[k][2], loaded[k][3]});
        }
      }
    }
    if constexpr (Config::kCacheIs8Bit) __syncwarp();
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        row_max[tile][r] = kRowMaxInit;
        sum[tile][r] = 0.0f;
      }
#pragma unroll
      for (int i = 0; i < kOutTiles; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) out[tile][i][j] = 0.0f;
      }
    }
  }

  // S = Q K^T of a KV tile. `key`: shared address of K.
  __device__ __forceinline__ void compute_scores(Scores& scores, uint32_t key) const {
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < kScoreTiles; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) scores[tile][i][j] = 0.0f;
      }
    }
    constexpr int kUnroll = Config::kPassSteps;
    const int last = Config::kSavesRegisters ? opaque(kSteps - kUnroll) : 0;
    uint32_t at = key + key_lane(), query_at = smem_query;
#pragma unroll 1
    for (int first = 0; first <= last; first += kUnroll) {
#pragma unroll
      for (int k = 0; k < kUnroll; ++k) {
        uint32_t a[kRowTiles][4];
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile) query_step(a[tile], query_at, tile, k);
#pragma unroll
        for (int step = 0; step < kScoreTiles / 2; ++step) {
          uint32_t b[4];
          load_matrices(b, (at ^ k % 4 * 32) + k / 4 * kColumnStride<Config::kTokens> +
                               step * 16 * kColumnBytes);
#pragma unroll
          for (int tile = 0; tile < kRowTiles; ++tile) {
            mma_m16n8k16<T>(scores[tile][2 * step], a[tile], b[0], b[1]);
            mma_m16n8k16<T>(scores[tile][2 * step + 1], a[tile], b[2], b[3]);
          }
        }
      }
      at += kColumnStride<Config::kTokens>;
      query_at += kUnroll * 32 * 16;
    }
  }

  // Scores become P, and out, sum and row_max are updated. score_scale(tile, r): the factor from a
  // row's scores to log2 units.
  template <typename ScoreScale>
  __device__ __forceinline__ void online_softmax(Scores& scores, const ScoreScale& score_scale) {
    float local_max[kRowTiles][2];
    bool exceeds = false;
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float lane_max = fmaxf(scores[tile][0][2 * r], scores[tile][0][2 * r + 1]);
#pragma unroll
        for (int i = 1; i < kScoreTiles; ++i) {
          lane_max = fmaxf(lane_max, fmaxf(scores[tile][i][2 * r], scores[tile][i][2 * r + 1]));
        }
        local_max[tile][r] = lane_max * score_scale(tile, r);
        exceeds |= local_max[tile][r] > row_max[tile][r] + kRescaleThreshold;
      }
    }
    // Most KV tiles raise no row_max and need only this vote.
    if (__any_sync(0xffffffffu, exceeds)) raise_row_max(local_max);
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float scale = score_scale(tile, r), negative_max = -row_max[tile][r];
#pragma unroll
        for (int i = 0; i < kScoreTiles; ++i) {
#pragma unroll
          for (int j = 2 * r; j < 2 * r + 2; ++j) {
            scores[tile][i][j] = exp2_approx(fmaf(scores[tile][i][j], scale, negative_max));
            sum[tile][r] += scores[tile][i][j];
          }
        }
      }
    }
  }

  // O += P V of a KV tile. `scores` holds P. `value`: shared address of V.
  __device__ __forceinline__ void accumulate_out(const Scores& scores, uint32_t value) {
    const uint32_t lane_at = value + value_lane();
#pragma unroll
    for (int step = 0; step < kScoreTiles / 2; ++step) {
      uint32_t probs[kRowTiles][4];
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float (&from)[4] = scores[tile][2 * step + j / 2];
          probs[tile][j] = pack2<T>(from[j % 2 * 2], from[j % 2 * 2 + 1]);
        }
      }
      uint32_t at = lane_at;
      if constexpr (!kRowForm) at ^= step * 32;
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        uint32_t b[4];
        if constexpr (kRowForm) {
          load_transposed(b, (at ^ k % 4 * 32) + k / 4 * kColumnStride<Config::kTokens> +
                                 step * 16 * kColumnBytes);
        } else {
          load_matrices(b, at + k * 16 * kColumnBytes);
        }
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile) {
          mma_m16n8k16<T>(out[tile][2 * k], probs[tile], b[0], b[1]);
          mma_m16n8k16<T>(out[tile][2 * k + 1], probs[tile], b[2], b[3]);
        }
      }
    }
  }

  // Writes row r of row tile `tile`, times `scale`, as elements of type Out. Each lane stores 16
  // bytes per 32 dimensions. All lanes call it; `present`: whether the row exists.
  template <typename Out>
  __device__ __forceinline__ void store(Out* row, bool present, int head_size, int tile, int r,
                                        float scale, int lane) const {
    const int quarter = lane % 4;
#pragma unroll
    for (int block = 0; block < kOutTiles / 4; ++block) {
      uint32_t pairs[4];  // this lane's 2 dimensions of 4 groups of 8
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float (&from)[4] = out[tile][block * 4 + i];
        pairs[i] = pack2<Out>(from[2 * r] * scale, from[2 * r + 1] * scale);
      }
      // A 4 x 4 transpose: a lane gets all four pairs of one group of 8 dimensions.
      quad_transpose(pairs, quarter);
      if (present && block * 32 + quarter * 8 < head_size) {
        *reinterpret_cast<uint4*>(row + block * 32 + quarter * 8) =
            uint4{pairs[0], pairs[1], pairs[2], pairs[3]};
      }
    }
  }

 private:
  // Address of step k of a row tile; `first` is that of the first step.
  static __device__ __forceinline__ uint32_t smem_query_at(uint32_t first, int tile, int k) {
    return first + (tile * (kSteps - kRegisterSteps) + k - kRegisterSteps) * 32 * 16;
  }
  __device__ __forceinline__ void query_step(uint32_t (&a)[4], uint32_t first, int tile,
                                             int k) const {
    if (k < kRegisterSteps) {
#pragma unroll
      for (int j = 0; j < 4; ++j) a[j] = query[tile][k][j];
    } else {
      const float4 from = load_shared<float4>(smem_query_at(first, tile, k));
      a[0] = __float_as_uint(from.x);
      a[1] = __float_as_uint(from.y);
      a[2] = __float_as_uint(from.z);
      a[3] = __float_as_uint(from.w);
    }
  }

  // Scales row r of this lane to fp16. Returns the factor that undoes the scaling.
  template <typename Query>
  static __device__ __forceinline__ float to_half(uint32_t (&loaded)[kSteps][4], int r) {
    if constexpr (std::is_same_v<Query, __half>) {
      return 1.0f;
    } else {
      const auto at = [&](int i, int j) {
        const uint32_t pair = loaded[i / 2][i % 2 * 2 + r];
        return to_float(bits_as<Query>(static_cast<uint16_t>(j == 0 ? pair : pair >> 16)));
      };
      float local_max = 0.0f;
#pragma unroll
      for (int i = 0; i < 2 * kSteps; ++i) {
        local_max = fmaxf(local_max, fmaxf(fabsf(at(i, 0)), fabsf(at(i, 1))));
      }
      local_max = quad_max(local_max);
      const auto [factor, inverse] = query_scale(local_max);
#pragma unroll
      for (int i = 0; i < 2 * kSteps; ++i) {
        loaded[i / 2][i % 2 * 2 + r] = pack2<__half>(at(i, 0) * factor, at(i, 1) * factor);
      }
      return inverse;
    }
  }

  // Raises row_max and rescales sum and out. `local_max`: the maximum of this lane's scores of each
  // row, log2 units.
  __device__ __forceinline__ void raise_row_max(const float (&local_max)[kRowTiles][2]) {
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
      float factor[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float new_max = quad_max(fmaxf(row_max[tile][r], local_max[tile][r]));
        factor[r] = update_row_max(row_max[tile][r], new_max);
        sum[tile][r] *= factor[r];
      }
#pragma unroll
      for (int i = 0; i < kOutTiles; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) out[tile][i][j] *= factor[j / 2];
      }
    }
  }
};

}  // namespace vllm_kernels::cuda
