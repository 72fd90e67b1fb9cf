// Attention of 64 query rows over a tile of tokens at a time, by one of the warpgroups of a
// block that attend (attention/prefill/sm90/prefill_kernel.cuh):
//   S [64 rows, tokens] = Q [64, D] K^T [D, tokens]       Q in registers where they suffice
//   O [64 rows, D]     += P [64, tokens] V [tokens, D]    P in registers: S's fragments are A's
// S of a tile is under way while the tile before it is multiplied by V, and both while the other
// warpgroup takes its exponentials. (The order is FlashAttention-3's.)
//
// How pages become operands as they lie. A part is 16 tokens.
//   kPages (layout vllm): K's part is [16 / 8 tokens] [D / 8] [8 tokens] [16 bytes], core matrices
//     of the plain pattern, so that 8 tokens follow the 8 before them at one stride through all
//     parts. V's part is V^T, D rows of 16 tokens, rows of 32 bytes in the pattern of 128 bytes. It
//     is read in the pattern of 32 bytes, which exchanges the same pieces of a row; what the other
//     pattern does beyond that exchanges rows: column n of the product is dimension
//     n ^ (n / 8 % 4). So the copy engine has rows of 128 bytes to write, not of 32.
//   kRows (NHD, HND): 64 dimensions of all tokens, rows of 128 bytes in that pattern, then the
//   next.
#pragma once
#include "cuda/attention/common/kv_smem_layout.cuh"
#include "cuda/attention/common/online_softmax.cuh"
#include "cuda/attention/common/score_mod.cuh"
#include "cuda/attention/common/wgmma_wide.cuh"
#include "cuda/attention/prefill/tile_scheduler.cuh"
#include "cuda/base/quad.cuh"
#include "cuda/base/upcast.cuh"
#include "cuda/base/vec.cuh"

namespace vllm_kernels::cuda {

constexpr int kPrefillBoxTokens = 16;  // tokens

// What one block works on: registers (65536 in all) and shared memory decide.
struct PrefillTuning {
  int groups;  // warpgroups that attend, each 64 rows of an item
  int tokens;  // of a tile
  // Tiles of K and of V, and items' queries, in shared memory.
  int key_stages, value_stages, queries;
  // Queries in registers spare shared memory a fifth of what it is read.
  bool query_in_registers;
  int registers, producer_registers;  // of a thread that attends, and of one that serves those
};

// adjusts: scores are capped or biased. widens: K and V are of 8 bits.
constexpr PrefillTuning prefill_tuning(int head_size, bool adjusts, bool cache_is_8bit) {
  if (cache_is_8bit) {
    return head_size <= 64    ? PrefillTuning{2, 128, 3, 3, 2, false, 200, 56}
           : head_size <= 128 ? PrefillTuning{2, 128, 2, 2, 1, false, 200, 56}
                              : PrefillTuning{2, 64, 2, 2, 1, false, 200, 56};
  }
  if (adjusts) {
    return head_size <= 64    ? PrefillTuning{3, 80, 3, 3, 2, false, 152, 56}
           : head_size <= 128 ? PrefillTuning{2, 128, 3, 2, 2, false, 224, 56}
           : head_size <= 192 ? PrefillTuning{2, 80, 2, 2, 1, false, 224, 56}
                              : PrefillTuning{2, 64, 2, 2, 1, false, 232, 40};
  }
  return head_size <= 64    ? PrefillTuning{3, 96, 3, 3, 2, true, 152, 56}
         : head_size <= 128 ? PrefillTuning{2, 128, 3, 2, 2, true, 224, 56}
         : head_size <= 192 ? PrefillTuning{2, 96, 2, 2, 1, false, 224, 56}
                            : PrefillTuning{2, 64, 2, 2, 1, false, 232, 40};
}

constexpr int kDequantWarps = 3;  // warps that widen K, and as many that widen V

template <typename Element, int kSize, KvForm kKvForm, bool kAdjustsScores, bool kIs8BitCache>
struct PrefillConfig {
  using T = Element;  // of the products
  static constexpr int kHeadSize = kSize;
  static constexpr KvForm kForm = kKvForm;
  static constexpr bool kAdjusts = kAdjustsScores;
  static constexpr bool kCacheIs8Bit = kIs8BitCache;
  static constexpr PrefillTuning kTuning = prefill_tuning(kSize, kAdjusts, kCacheIs8Bit);
  static constexpr int kGroups = kTuning.groups;
  static constexpr int kRows = 64 * kGroups;  // of an item
  static constexpr int kTokens = kTuning.tokens;
  static constexpr bool kQueryInRegisters = kTuning.query_in_registers;
  static constexpr int kKeyStages = kTuning.key_stages;
  static constexpr int kValueStages = kTuning.value_stages;
  static constexpr int kQueries = kTuning.queries;
  // A warpgroup serves those that attend, two where six of their warps widen.
  static constexpr int kThreads = 128 * (kGroups + 1 + kCacheIs8Bit);
  // 64 dimensions of all rows, or tokens, together.
  static constexpr int kColumns = (kHeadSize + 63) / 64;
  static constexpr int kQueryBytes = kColumns * kRows * 128;
  static constexpr int kTileBytes = kColumns * kTokens * 128;
  // Of one widener: its parts of a tile, as they are stored.
  static constexpr int kRawBytes = (kTokens / kPrefillBoxTokens + kDequantWarps - 1) /
                                   kDequantWarps * kPrefillBoxTokens * kHeadSize;
  static constexpr int kSharedBytes = kQueries * kQueryBytes +
                                      (kKeyStages + kValueStages) * kTileBytes +
                                      (kCacheIs8Bit ? 2 * kDequantWarps * kRawBytes : 0);
};

#if defined(VLLM_KERNELS_HAS_WGMMA)

template <typename Config>
struct PrefillMma {
  using T = typename Config::T;
  static constexpr int kHeadSize = Config::kHeadSize, kTokens = Config::kTokens;
  static constexpr int kScoreTiles = kTokens / 8;
  static constexpr int kOutTiles = kHeadSize / 8;
  static constexpr int kBoxes = kTokens / kPrefillBoxTokens;
  static constexpr bool kRows = Config::kForm == KvForm::kSwizzledRows;
  static constexpr uint32_t kBoxBytes = kPrefillBoxTokens * kHeadSize * 2;
  static constexpr uint32_t kColumnStep = kTokens * 128;  // to the next 64 dimensions
  static constexpr uint32_t kQueryColumn = Config::kRows * 128;
  static constexpr bool kQueryInRegisters = Config::kQueryInRegisters;

  uint32_t query[kQueryInRegisters ? kHeadSize / 16 : 1][4];
  float scores[kScoreTiles][4];
  float out[kOutTiles][4];
  uint32_t probs[kBoxes][4];
  float row_max[2];  // log2 units; see kRescaleThreshold
  float sum[2];      // this lane's columns only

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kOutTiles; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) out[i][j] = 0.0f;
    }
  }
  __device__ __forceinline__ void start_sums() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      row_max[r] = kRowMaxInit;
      sum[r] = 0.0f;
    }
  }

  // kQueryInRegisters: from `rows`, this warpgroup's in shared memory.
  __device__ __forceinline__ void load_query(uint32_t rows, int thread) {
    const int lane = thread % 32, row = thread / 32 * 16 + lane % 16;
#pragma unroll
    for (int k = 0; k < kHeadSize / 16; ++k) {
      const int chunk = 2 * k + lane / 16;
      load_matrices(query[k],
                    rows + chunk / 8 * kQueryColumn + row * 128 + ((chunk ^ row) % 8) * 16);
    }
  }
  __device__ __forceinline__ void start_scores(uint32_t rows, uint32_t key) {
    warpgroup_fence_operand(scores);
    if (kQueryInRegisters) warpgroup_fence_operand(query);
    wgmma_fence();
    const MatrixDescriptor query_rows(rows, 16, 1024, Swizzle::k128);
    const auto columns = kRows ? MatrixDescriptor(key, 16, 1024, Swizzle::k128)
                               : MatrixDescriptor(key, 128, kBoxBytes / 2, Swizzle::kNone);
#pragma unroll
    for (int k = 0; k < kHeadSize / 16; ++k) {
      const uint64_t b = columns.behind(kRows ? k / 4 * kColumnStep + k % 4 * 32 : k * 256);
      if constexpr (kQueryInRegisters) {
        wgmma_registers<T, false>(scores, query[k], b, k > 0);
      } else {
        wgmma_shared<T, false>(scores, query_rows.behind(k / 4 * kQueryColumn + k % 4 * 32), b,
                               k > 0);
      }
    }
    wgmma_commit();
  }
  __device__ __forceinline__ void start_out(uint32_t value) {
    warpgroup_fence_operand(probs);
    warpgroup_fence_operand(out);
    wgmma_fence();
    const auto columns = kRows ? MatrixDescriptor(value, kColumnStep, 1024, Swizzle::k128)
                               : MatrixDescriptor(value, 16, 256, Swizzle::k32);
#pragma unroll
    for (int part = 0; part < kBoxes; ++part) {
      wgmma_registers<T, kRows>(out, probs[part], columns.behind(part * (kRows ? 2048 : kBoxBytes)),
                                true);
    }
    wgmma_commit();
  }

  // Bit 2i + j of this lane's column 8i + j (+ 2 (lane % 4)), for those up to 2 (lane % 4) + last.
  static __device__ __forceinline__ uint32_t columns_until(int last) {
    const int count = (last >> 3) * 2 + min(2, (last & 7) + 1);
    return last < 0 ? 0 : count >= 32 ? 0xffffffffu : (1u << count) - 1;
  }
  // score(i, j): of column 8i + j % 2 (+ 2 (lane % 4)) and row j / 2.
  template <typename Score>
  __device__ __forceinline__ void each_score(const Score& score) {
#pragma unroll
    for (int i = 0; i < kScoreTiles; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) scores[i][j] = score(i, j, scores[i][j]);
    }
  }

  // Scores to weights, relative to maxima that are raised where need be; what scales the results
  // and sums before them goes to `factor`. Says whether any lane's is not 1.
  __device__ __forceinline__ bool online_softmax(float score_scale, float (&factor)[2]) {
    float largest[2][2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      largest[r][0] = fmaxf(scores[0][2 * r], scores[0][2 * r + 1]);
      largest[r][1] = fmaxf(scores[1][2 * r], scores[1][2 * r + 1]);
    }
#pragma unroll
    for (int i = 2; i < kScoreTiles; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        largest[r][i & 1] = fmaxf(largest[r][i & 1], fmaxf(scores[i][2 * r], scores[i][2 * r + 1]));
      }
    }
    bool raised = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float most = fmaxf(largest[r][0], largest[r][1]);
      most = quad_max(most) * score_scale;
      const bool raises = most > row_max[r] + kRescaleThreshold;
      const float updated = raises ? most : row_max[r];
      factor[r] = exp2_approx(row_max[r] - updated);
      row_max[r] = updated;
      raised |= raises;
      float sums[2] = {sum[r] * factor[r], 0.0f};
#pragma unroll
      for (int i = 0; i < kScoreTiles; ++i) {
#pragma unroll
        for (int j = 2 * r; j < 2 * r + 2; ++j) {
          scores[i][j] = exp2_approx(fmaf(scores[i][j], score_scale, -updated));
          sums[j & 1] += scores[i][j];
        }
      }
      sum[r] = sums[0] + sums[1];
    }
    return __any_sync(0xffffffffu, raised);
  }
  __device__ __forceinline__ void rescale(const float (&factor)[2]) {
#pragma unroll
    for (int i = 0; i < kOutTiles; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) out[i][j] *= factor[j / 2];
    }
  }
  __device__ __forceinline__ void pack_probs() {
#pragma unroll
    for (int part = 0; part < kBoxes; ++part) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float (&from)[4] = scores[2 * part + j / 2];
        probs[part][j] = pack2<T>(from[j % 2 * 2], from[j % 2 * 2 + 1]);
      }
    }
  }

  // Row r of this lane, times `scale`: 16 bytes a lane and 32 dimensions.
  __device__ __forceinline__ void store(T* row, bool present, int r, float scale, int lane) const {
    const int quarter = lane % 4;
#pragma unroll
    for (int block = 0; block < kOutTiles / 4; ++block) {
      uint32_t pairs[4];  // this lane's of 4 times 8 dimensions
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float (&from)[4] = out[block * 4 + i];
        const bool swapped = !kRows && i % 2 == 1;
        pairs[i] = pack2<T>(from[2 * r + swapped] * scale, from[2 * r + 1 - swapped] * scale);
      }
      // The quad's pairs of 8 dimensions go to one lane: a transposition of 4 x 4.
      quad_transpose(pairs, quarter);
      if (!kRows && quarter >= 2) {
        pairs_swap(pairs[0], pairs[1]);
        pairs_swap(pairs[2], pairs[3]);
      }
      if (present) {
        *reinterpret_cast<uint4*>(row + block * 32 + quarter * 8) =
            uint4{pairs[0], pairs[1], pairs[2], pairs[3]};
      }
    }
  }

 private:
  static __device__ __forceinline__ void pairs_swap(uint32_t& a, uint32_t& b) {
    const uint32_t kept = a;
    a = b;
    b = kept;
  }
};

#endif

}  // namespace vllm_kernels::cuda
