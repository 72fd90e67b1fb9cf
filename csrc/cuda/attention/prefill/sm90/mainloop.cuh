// The wgmma mainloop of one consumer warpgroup: 64 query rows against one KV tile at a time.
//   S [64 rows, tokens] = Q [64, D] K^T [D, tokens]       Q in registers where there is room
//   O [64 rows, D]     += P [64, tokens] V [tokens, D]    P in registers: S's fragments are A's
// As in FlashAttention-3, S of the next KV tile overlaps O of the current one. Both overlap the
// other warpgroup's softmax. prefill_kernel.cuh drives this loop.
//
// Pages are wgmma operands as they lie in memory. A box is 16 tokens of a page.
//
// kPackedPages and kPackedBoxes (layout vllm; pages of 16 tokens, and longer ones), K: a box is [16
// / 8 tokens][D / 8][8 tokens][16 bytes]. These are core matrices without swizzle. One stride leads
// from 8 tokens to the next 8, through all boxes.
//
// The same, V: a box is V^T, D rows of 16, or of 32 or 64 tokens (ValueBoxes). wgmma reads it with
// the swizzle of its row: 32, 64 or 128 bytes. TMA is faster with long lines. So where a box has
// whole pages, TMA writes lines of 128 bytes with the 128-byte swizzle. It permutes the chunks of a
// row like the shorter one, and also permutes rows: output column n is dimension n ^ (n / 8 % 4) of
// pages of 16 tokens, n ^ (n / 8 % 2) of 32. store() undoes that.
//
// Head sizes between the instantiations: TMA pads K, V and queries with zeros in shared memory.
//
// kSwizzledRows (NHD, HND): [D / 64][tokens][128 bytes], with the 128-byte swizzle.
//
// e4m3 queries (fp8.cuh): all operands have 8 bits. K is as above, with 128 dimensions in 128 bytes
// and 16 in a core matrix. V^T is [D][tokens], with the swizzle of its row. A register of P has
// four tokens.
#pragma once
#include "cuda/attention/common/heuristics.h"
#include "cuda/attention/common/kv_smem_layout.cuh"
#include "cuda/attention/common/online_softmax.cuh"
#include "cuda/attention/common/score_mod.cuh"
#include "cuda/attention/common/wgmma.cuh"
#include "cuda/attention/prefill/tile_scheduler.cuh"
#include "cuda/base/quad.cuh"
#include "cuda/base/upcast.cuh"
#include "cuda/base/vec.cuh"

namespace vllm_kernels::cuda {

constexpr int kPrefillBoxTokens = 16;  // tokens of a page that TMA copies at once

constexpr int kDequantWarps = 3;  // dequant producer warps of K, and as many of V

// Constants of a CTA that follow from its tuning. Operands in shared memory are
// [column][row][128 bytes].
template <PrefillTuning kTuned, int kProducers, int kRowColumns>
struct PrefillCta {
  static constexpr PrefillTuning kTuning = kTuned;
  static constexpr int kConsumers = kTuning.consumers;
  static constexpr int kRows = 64 * kConsumers;  // of a work tile
  static constexpr int kTokens = kTuning.tokens;
  static constexpr bool kQueryInRegisters = kTuning.query_in_registers;
  static constexpr int kKeyStages = kTuning.key_stages;
  static constexpr int kValueStages = kTuning.value_stages;
  static constexpr int kQueryStages = kTuning.query_stages;
  static constexpr int kThreads = 128 * (kConsumers + kProducers);
  // setmaxnreg only moves registers of the launch. A warpgroup that asks for more waits forever.
  static_assert(kConsumers * kTuning.consumer_registers + kProducers * kTuning.producer_registers <=
                kThreads / 128 * (65536 / kThreads / 8 * 8));
  static constexpr int kColumns = kRowColumns;
  static constexpr int kQueryBytes = kColumns * kRows * 128;
  static constexpr int kTileBytes = kColumns * kTokens * 128;
  static constexpr int kOperandBytes =
      kQueryStages * kQueryBytes + (kKeyStages + kValueStages) * kTileBytes;
};

// Whether bfloat16 queries over 8-bit caches without scales of tokens become fp16, as K and V do:
// fp16 represents all values of such caches, and takes fewer instructions to convert to.
// (prefill/dequantize.md, 1x128_on_8k: 50.5 to 45.5 us. Heads of 192 spill.)
template <typename T>
constexpr bool multiplies_in_fp16(int head_size) {
  return std::is_same_v<T, __nv_bfloat16> && head_size <= 128;
}

// 16-bit operands: a column has 64 dimensions. One producer warpgroup, or two for 8-bit caches: six
// of their warps dequantize.
// kSplits: several CTAs may share the keys of a work tile (combine_splits.cuh). Kernels of their
// own keep the main loop of others as it is.
// Product: the wgmma operands' type. fp16 represents all values of 8-bit caches.
template <typename Element, int kSize, KvForm kKvForm, bool kAdjustsScores, bool kIs8BitCache,
          bool kSplits = false, typename Product = Element>
struct PrefillConfig : PrefillCta<prefill_tuning(kSize, kAdjustsScores, kIs8BitCache),
                                  1 + kIs8BitCache, (kSize + 63) / 64> {
  using T = Element;        // of queries and result
  using Operand = Product;  // of the wgmma operands
  static constexpr int kHeadSize = kSize;
  static constexpr KvForm kForm = kKvForm;
  static constexpr bool kAdjusts = kAdjustsScores;
  static constexpr bool kCacheIs8Bit = kIs8BitCache;
  static constexpr bool kMaySplit = kSplits;
  static constexpr bool kConvertsQueries = !std::is_same_v<T, Operand>;  // bfloat16 to fp16
  // 8-bit caches: buffer of one dequant warp, its boxes of a KV tile as the cache stores them.
  static constexpr int kRawBytes =
      (PrefillConfig::kTokens / kPrefillBoxTokens + kDequantWarps - 1) / kDequantWarps *
      kPrefillBoxTokens * kHeadSize;
  static constexpr int kSharedBytes =
      PrefillConfig::kOperandBytes + (kCacheIs8Bit ? 2 * kDequantWarps * kRawBytes : 0);
};

// Whether TMA permutes the columns of V: ValueBoxes.
template <typename Config>
constexpr bool kPermutesValues =
    Config::kForm != KvForm::kSwizzledRows && !kIsFp8<typename Config::Operand>;

template <typename Config>
VLLM_KERNELS_HOST_DEVICE inline ValueBoxes value_boxes_of(const PrefillShape& shape) {
  return Config::kForm == KvForm::kPackedBoxes ? shape.value_boxes : ValueBoxes{};
}

#if defined(VLLM_KERNELS_HAS_WGMMA)

// What scores of row r of a lane are multiplied by, to log2 units.
template <bool kOfRows>
struct ScoreScales {
  float values[kOfRows ? 2 : 1];

  __device__ __forceinline__ float& operator[](int r) { return values[kOfRows ? r : 0]; }
  __device__ __forceinline__ float operator[](int r) const { return values[kOfRows ? r : 0]; }
};

template <typename Config>
struct PrefillMma {
  using T = typename Config::T;
  using Operand = typename Config::Operand;
  static constexpr bool kHas8Bit = kIsFp8<Operand>;
  static constexpr int kHeadSize = Config::kHeadSize, kTokens = Config::kTokens;
  // A wgmma has 32 bytes along k.
  static constexpr int kHeadSteps = kHeadSize * sizeof(Operand) / 32;
  static constexpr int kTokenSteps = kTokens * sizeof(Operand) / 32;
  static constexpr int kScoreTiles = kTokens / 8;
  static constexpr int kOutTiles = kHeadSize / 8;
  static constexpr int kBoxes = kTokens / kPrefillBoxTokens;
  static constexpr bool kRowForm = Config::kForm == KvForm::kSwizzledRows;
  static constexpr bool kPermutes = kPermutesValues<Config>;
  static constexpr uint32_t kBoxBytes = kPrefillBoxTokens * kHeadSize * sizeof(Operand);
  static constexpr uint32_t kColumnStep = kTokens * 128;  // bytes to the next 64 dimensions
  static constexpr uint32_t kQueryColumn = Config::kRows * 128;
  static constexpr bool kQueryInRegisters = Config::kQueryInRegisters;
  // log2 of P where row_max is raised, and of the largest P. 8 bits have few values below 1.
  // fp16 has none below 2^-24: with 2^7 it keeps more of many small P. Scores of 2^24 or more are
  // rounded so much that P may not fit.
  static constexpr float kLogP = kHas8Bit ? 8.0f : Config::kConvertsQueries ? 7.0f : 0.0f;
  static constexpr float kMaxLogP =
      kHas8Bit ? 8.75f : kLogP + kRescaleThreshold;  // e4m3: up to 448

  uint32_t query[kQueryInRegisters ? kHeadSteps : 1][4];
  float scores[kScoreTiles][4];
  float out[kOutTiles][4];
  float tile_out[kHas8Bit ? kOutTiles : 1][4];  // of a KV tile; see add_tile_out()
  uint32_t probs[kTokenSteps][4];
  float row_max[2];  // log2 units; see kMaxLogP
  float sum[2];      // partial: of this lane's columns

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

  // kQueryInRegisters: loads Q from `rows`, the shared address of this warpgroup's rows.
  __device__ __forceinline__ void load_query(uint32_t rows, int thread) {
    const int lane = thread % 32, row = thread / 32 * 16 + lane % 16;
#pragma unroll
    for (int k = 0; k < kHeadSteps; ++k) {
      const int chunk = 2 * k + lane / 16;
      load_matrices(query[k],
                    rows + chunk / 8 * kQueryColumn + row * 128 + ((chunk ^ row) % 8) * 16);
    }
  }
  // kConvertsQueries: makes this warpgroup's queries at `rows` fp16, in place. Each row is
  // multiplied by a power of two (query_scale()). `inverse` gets the inverses, of this lane's rows.
  __device__ __forceinline__ void convert_query(uint32_t rows, int thread, float (&inverse)[2]) {
    constexpr int kChunks = kHeadSize / 32;  // of a lane, in a row
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int lane = thread % 32, row = thread / 32 * 16 + lane / 4 + 8 * r;
      const auto address = [&](int i) {
        const int chunk = lane % 4 + 4 * i;
        return rows + chunk / 8 * kQueryColumn + row * 128 + ((chunk ^ row) % 8) * 16;
      };
      const auto each_pair = [](uint4& chunk, const auto& action) {
#pragma unroll
        for (uint32_t* pair : {&chunk.x, &chunk.y, &chunk.z, &chunk.w}) {
          action(*pair, __uint_as_float(*pair << 16), __uint_as_float(*pair & 0xffff0000u));
        }
      };
      float largest = 0.0f;
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        uint4 chunk = load_shared<uint4>(address(i));
        each_pair(chunk, [&](uint32_t, float first, float second) {
          largest = fmaxf(largest, fmaxf(fabsf(first), fabsf(second)));
        });
      }
      const QueryScale scale = query_scale(quad_max(largest));
      inverse[r] = scale.inverse;
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {  // read again: few registers are free
        uint4 chunk = load_shared<uint4>(address(i));
        each_pair(chunk, [&](uint32_t& pair, float first, float second) {
          pair = pack2<Operand>(first * scale.factor, second * scale.factor);
        });
        store_shared(address(i), chunk);
      }
    }
  }
  // Starts S = Q K^T, one wgmma group. `rows` and `key`: shared addresses.
  __device__ __forceinline__ void start_scores(uint32_t rows, uint32_t key) {
    warpgroup_fence_operand(scores);
    if (kQueryInRegisters) warpgroup_fence_operand(query);
    wgmma_fence();
    const DescriptorHalves query_rows(matrix_descriptor(rows >> 4, 16, 1024, Swizzle::k128));
    const DescriptorHalves columns(
        kRowForm ? matrix_descriptor(key >> 4, 16, 1024, Swizzle::k128)
                 : matrix_descriptor(key >> 4, 128, kBoxBytes / 2, Swizzle::kNone));
#pragma unroll
    for (int k = 0; k < kHeadSteps; ++k) {
      const uint64_t b = columns.at(kRowForm ? k / 4 * kColumnStep + k % 4 * 32 : k * 256);
      if constexpr (kQueryInRegisters) {
        wgmma<Operand, false>(scores, query[k], b, k > 0);
      } else {
        wgmma<Operand, false>(scores, query_rows.at(k / 4 * kQueryColumn + k % 4 * 32), b, k > 0);
      }
    }
    wgmma_commit();
  }
  // How start_out() finds 16 tokens of V. Only kPackedBoxes has values that the compiler does not
  // know; they cost 1 to 6%. (prefill/any_shape.md, e_d64_4x2k.)
  struct ValueLayout {
    uint64_t descriptor;  // of address 0
    uint32_t steps[2];    // bytes to the next 16, and to the next 32 tokens

    __device__ __forceinline__ explicit ValueLayout(const ValueBoxes& boxes) {
      if constexpr (kHas8Bit) {  // V^T, a row of 128 bytes per dimension
        static_assert(kTokens == 128);
        descriptor = matrix_descriptor(0, 16, 1024, Swizzle::k128);
      } else if constexpr (kRowForm) {
        descriptor = matrix_descriptor(0, kColumnStep, 1024, Swizzle::k128);
        steps[0] = 2048;
        steps[1] = 4096;
      } else {
        const Swizzle swizzle = boxes.shift == 0   ? Swizzle::k32
                                : boxes.shift == 1 ? Swizzle::k64
                                                   : Swizzle::k128;
        descriptor = matrix_descriptor(0, 16, 256 << boxes.shift, swizzle);
        steps[0] = boxes.shift > 0 ? 32 : kBoxBytes;
        steps[1] = boxes.shift > 1 ? 64 : 2 * kBoxBytes;
      }
    }
  };
  // Starts O += P V, one wgmma group. `value`: shared address.
  __device__ __forceinline__ void start_out(const ValueLayout& layout, uint32_t value) {
    warpgroup_fence_operand(probs);
    warpgroup_fence_operand(tensor_out());
    wgmma_fence();
    const DescriptorHalves columns(layout.descriptor | value >> 4);
#pragma unroll
    for (int step = 0; step < kTokenSteps; ++step) {
      if constexpr (kHas8Bit) {
        wgmma<Operand, false>(tile_out, probs[step], columns.at(step * 32), step > 0);
      } else {
        const uint32_t offset = (step & 1) * layout.steps[0] + (step >> 1 & 1) * layout.steps[1] +
                                (step >> 2) * (kRowForm ? 8192 : 4 * kBoxBytes);
        wgmma<Operand, kRowForm>(out, probs[step], columns.at(offset), true);
      }
    }
    wgmma_commit();
  }

  // What start_out() writes.
  __device__ __forceinline__ auto& tensor_out() {
    if constexpr (kHas8Bit) {
      return tile_out;
    } else {
      return out;
    }
  }
  // 8-bit operands: Hopper keeps 14 bits of their sums, and cuts the rest off. So a KV tile is
  // summed alone, and added to `out` in float32, as in vLLM's FlashAttention-3.
  __device__ __forceinline__ void add_tile_out() {
    if constexpr (kHas8Bit) {
#pragma unroll
      for (int i = 0; i < kOutTiles; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) out[i][j] += tile_out[i][j];
      }
    }
  }

  // A mask of this lane's columns. Bit 2i + j is column 8i + j, relative to its first column
  // 2 (lane % 4). Columns up to `last` are set.
  static __device__ __forceinline__ uint32_t columns_until(int last) {
    const int count = (last >> 3) * 2 + min(2, (last & 7) + 1);
    return last < 0 ? 0 : count >= 32 ? 0xffffffffu : (1u << count) - 1;
  }
  // Replaces each score by score(i, j, old): column 8i + j % 2 from this lane's first, row j / 2.
  template <typename Score>
  __device__ __forceinline__ void each_score(const Score& score) {
#pragma unroll
    for (int i = 0; i < kScoreTiles; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) scores[i][j] = score(i, j, scores[i][j]);
    }
  }

  // Scores become P, relative to row_max, which is raised if a score exceeds it by more than
  // kMaxLogP. `factor` rescales the earlier output; sum is rescaled here. Returns whether
  // any lane of the warp has a factor != 1.
  template <typename Scales>
  __device__ __forceinline__ bool online_softmax(const Scales& score_scale, float (&factor)[2]) {
    float local_max[2][2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      local_max[r][0] = fmaxf(scores[0][2 * r], scores[0][2 * r + 1]);
      local_max[r][1] = fmaxf(scores[1][2 * r], scores[1][2 * r + 1]);
    }
#pragma unroll
    for (int i = 2; i < kScoreTiles; ++i) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        local_max[r][i & 1] =
            fmaxf(local_max[r][i & 1], fmaxf(scores[i][2 * r], scores[i][2 * r + 1]));
      }
    }
    bool raised = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float tile_max = fmaxf(local_max[r][0], local_max[r][1]);
      tile_max = quad_max(tile_max) * score_scale[r];
      const bool raises = tile_max > row_max[r] + kMaxLogP;
      const float new_max = raises ? tile_max - kLogP : row_max[r];
      factor[r] = update_row_max(row_max[r], new_max);
      raised |= raises;
      float sums[2] = {sum[r] * factor[r], 0.0f};
#pragma unroll
      for (int i = 0; i < kScoreTiles; ++i) {
#pragma unroll
        for (int j = 2 * r; j < 2 * r + 2; ++j) {
          scores[i][j] = exp2_approx(fmaf(scores[i][j], score_scale[r], -new_max));
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
    for (int step = 0; step < kTokenSteps; ++step) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int row = j % 2 * 2;
        if constexpr (kHas8Bit) {
          // Its four tokens are this lane's of two groups of 8: gather_fp8_keys.cu has V in this
          // order.
          const float (&first)[4] = scores[4 * step + j / 2 * 2];
          const float (&second)[4] = scores[4 * step + j / 2 * 2 + 1];
          probs[step][j] = pack4_e4m3(first[row], first[row + 1], second[row], second[row + 1]);
        } else {
          const float (&from)[4] = scores[2 * step + j / 2];
          probs[step][j] = pack2<Operand>(from[row], from[row + 1]);
        }
      }
    }
  }

  // Writes row r of this lane, times `scale`. Each lane stores 16 bytes per 32 dimensions, of the
  // first `head_size`. `permutation`: see ValueBoxes.
  __device__ __forceinline__ void store(T* row, int head_size, int permutation, int r, float scale,
                                        int lane) const {
    const int quarter = lane % 4;
    const bool swaps_dims = kPermutes && (permutation & 1) != 0;
    const bool swaps_pairs = kPermutes && (permutation & 2) != 0 && quarter >= 2;
#pragma unroll
    for (int block = 0; block < kOutTiles / 4; ++block) {
      uint32_t pairs[4];  // this lane's 2 dimensions of 4 groups of 8
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float (&from)[4] = out[block * 4 + i];
        pairs[i] = pack2<T>(from[2 * r] * scale, from[2 * r + 1] * scale);
        if (i % 2 == 1 && swaps_dims) pairs[i] = __byte_perm(pairs[i], 0, 0x1032);
      }
      // A 4 x 4 transpose: a lane gets all four pairs of one group of 8 dimensions.
      quad_transpose(pairs, quarter);
      if (swaps_pairs) {
        pairs_swap(pairs[0], pairs[1]);
        pairs_swap(pairs[2], pairs[3]);
      }
      const int dim = block * 32 + quarter * 8;
      if (dim < head_size) {
        *reinterpret_cast<uint4*>(row + dim) = uint4{pairs[0], pairs[1], pairs[2], pairs[3]};
      }
    }
  }

 private:
  static __device__ __forceinline__ void pairs_swap(uint32_t& a, uint32_t& b) {
    const uint32_t old_a = a;
    a = b;
    b = old_a;
  }
};

#endif

}  // namespace vllm_kernels::cuda
