// WarpgroupMma: attention of 16, 32 or 64 query rows over 64 tokens at a time, with wgmma. One
// consumer warpgroup (4 warps) computes it.
//
// As in warp_mma.cuh both products are swapped, and A comes from registers. So every cache type
// takes the same path: load fragments, upcast them if 8-bit, multiply.
//   S^T [64 tokens, rows] = K [64, D] Q^T [D, rows]      a warp has 16 tokens
//   O^T [64, rows]       += V^T [64, 64] P^T [64, rows]  a warp has 16 of each 64 dimensions
// Q and P^T are in shared memory. A step has one barrier of the warpgroup, after P is stored. This
// barrier also votes whether any score exceeds row_max by more than kRescaleThreshold. If so,
// row_max is raised and P computed again.
//
// For the order of rows, tokens and 8-bit elements see warp_mma.cuh.
#pragma once
#include "cuda/attention/common/wgmma.cuh"
#include "cuda/attention/decode/warp_mma.cuh"
#include "cuda/attention/decode/warpgroup_barrier.cuh"
#include "cuda/attention/decode/warpgroup_values.cuh"

namespace vllm_kernels::cuda {

constexpr int kStageTokens = kWgmmaStageTokens;

#if defined(VLLM_KERNELS_HAS_WGMMA)

// kMaxTiles: tiles of 8 query rows, 4 or 8.
template <typename Cache, int kMaxHeadSize, int kMaxTiles, KvForm kForm>
struct WarpgroupMma : WarpgroupValues<Cache, kMaxHeadSize, kStageTokens, kForm> {
  using Addresses = WarpgroupValues<Cache, kMaxHeadSize, kStageTokens, kForm>;
  using Addresses::key_at, Addresses::kHalves, Addresses::load_values, Addresses::mask_values,
      Addresses::order_probs, Addresses::token_of;
  template <int kCount>
  using Values = typename Addresses::template Values<kCount>;
  static constexpr int kTokens = kStageTokens;
  static constexpr bool kCacheIs16Bit = Addresses::kCacheIs16Bit, kRows = Addresses::kRows;
  static constexpr bool kScaled = kHasTokenScales<Cache>;
  using Element = std::conditional_t<kCacheIs16Bit, Cache, __half>;
  static constexpr int kSteps = kMaxHeadSize / 16;
  static constexpr int kTiles = kMaxTiles;
  static constexpr int kConsumers = wgmma_consumers(kMaxTiles);
  static constexpr int kGroups = kTokens / 16;
  // Enough registers to load V during the S^T product, and enough shared memory to double-buffer
  // P^T.
  static constexpr bool kEarly = kMaxTiles <= 4;
  // 8-bit: ldmatrix loads upcast at once, while the previous ones are multiplied; limited by
  // registers.
  static constexpr int kBatchLoads = kEarly ? 2 : 4;
  static_assert(kMaxHeadSize == 64 || kMaxHeadSize == 128);

  float out[kHalves][kMaxTiles][4];  // O^T accumulators: this warp's 16 of 64 dimensions x 8 rows
  float row_max[kMaxTiles][2];       // log2 units, this lane's two rows; the same in all warps
  float sum[kMaxTiles][2];           // row_sum, of this lane's tokens only until store_stats()
  float scale[kMaxTiles][2];         // from the product q . k to log2 units; not kReloads
  // 64 rows and scales of tokens: no registers are left for `scale`, which stays in shared memory.
  static constexpr bool kReloads = kScaled && !kEarly;
  uint32_t row_scales;       // kReloads
  float softmax_scale_log2;  // kReloads
  int head_size;
  int tiles;       // of 8 rows, in use: 2, 4 or 8
  uint32_t query;  // shared memory: [D / 8][rows][8] (query_rows.cuh)
  uint32_t probs;  // the consumer's shared memory: P^T [64 / 8][rows][8], one or two buffers
  uint32_t iteration = 0;  // which of two P^T buffers is next
  int consumer;
  int warp_in_consumer;  // 0 .. 3

  static __device__ __forceinline__ int row_of(int lane, int tile, int j) {
    return tile * 8 + (lane % 4) * 2 + j;
  }

  __device__ __forceinline__ void set_addresses(const KvStageLayout& layout, int lane) {
    Addresses::set_addresses(layout, lane);
    Addresses::set_value_base(layout, lane, warp_in_consumer);
    // From here on key_row includes the offset of this warp's 16 tokens.
    this->key_row = opaque(this->key_row + key_group(layout, warp_in_consumer));
  }

  // Byte offset of group i of 16 tokens.
  static __device__ __forceinline__ uint32_t key_group(const KvStageLayout& layout, int i) {
    return (i & 1) * layout.key_step + (i >> 1) * layout.key_half;
  }

  // After all threads have called store_query_rows().
  __device__ __forceinline__ void load_scales(uint32_t scales, float to_log2, int lane) {
    if constexpr (kReloads) {
      row_scales = scales;
      softmax_scale_log2 = to_log2;
      return;
    }
#pragma unroll
    for (int t = 0; t < kMaxTiles; ++t) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        scale[t][j] = to_log2;
        if (!kCacheIs16Bit && t < tiles) {
          scale[t][j] *= load_shared<float>(scales + row_of(lane, t, j) * 4);
        }
      }
    }
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int t = 0; t < kMaxTiles; ++t) {
      row_max[t][0] = row_max[t][1] = kRowMaxInit;
      sum[t][0] = sum[t][1] = 0.0f;
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
#pragma unroll
        for (int j = 0; j < 4; ++j) out[h][t][j] = 0.0f;
      }
    }
  }

  // Barrier of the consumer's 4 warps that returns whether any thread passes true.
  __device__ __forceinline__ bool consumer_any(bool mine) const {
    return warpgroup_any<kConsumers>(consumer, mine);
  }
  __device__ __forceinline__ void consumer_barrier() const { consumer_any(false); }

  // Raises row_max of all rows to the largest score of the 4 warps, and rescales. `scratch`: 16
  // bytes per row.
  template <int kUsed>
  __device__ __forceinline__ void raise_row_max(const float (&c)[kUsed][4],
                                                const PairScales& of_tokens, uint32_t scratch,
                                                int lane) {
#pragma unroll
    for (int t = 0; t < kUsed; ++t) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float mine = fmaxf(c[t][j], c[t][j + 2]);
        if constexpr (kScaled) {
          mine = fmaxf(c[t][j] + of_tokens.exponent(0), c[t][j + 2] + of_tokens.exponent(1));
        }
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2) {
          mine = fmaxf(mine, __shfl_xor_sync(0xffffffffu, mine, distance));
        }
        if (lane < 4) {
          store_shared(scratch + (row_of(lane, t, j) * 4 + warp_in_consumer) * 4, mine);
        }
      }
    }
    consumer_barrier();
#pragma unroll
    for (int t = 0; t < kUsed; ++t) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float4 warp_maxima = load_shared<float4>(scratch + row_of(lane, t, j) * 16);
        const float updated = fmaxf(row_max[t][j], fmaxf(fmaxf(warp_maxima.x, warp_maxima.y),
                                                         fmaxf(warp_maxima.z, warp_maxima.w)));
        const float factor = update_row_max(row_max[t][j], updated);
        sum[t][j] *= factor;
#pragma unroll
        for (int h = 0; h < kHalves; ++h) {
          out[h][t][j] *= factor;
          out[h][t][j + 2] *= factor;
        }
      }
    }
    consumer_barrier();  // all warps have read scratch
  }

  // O^T += V^T P^T for kCount groups of 16 tokens, from group `first` on.
  template <int kUsed, int kCount>
  __device__ __forceinline__ void accumulate(const Values<kCount>& values, uint32_t stored,
                                             int first) {
    constexpr uint32_t kChunk = kUsed * 128;
    uint32_t a[kCount][kHalves][4];
    const uint64_t columns = matrix_descriptor(stored >> 4 & 0x3fff, kChunk, 128, Swizzle::kNone) +
                             first * (2 * kChunk >> 4);
    warpgroup_fence_operand(out);
    constexpr int kLoads = Values<kCount>::kLoads,
                  kBatch = kCacheIs16Bit ? kLoads : std::min(kLoads, kBatchLoads);
#pragma unroll
    for (int begin = 0; begin < kLoads; begin += kBatch) {
#pragma unroll
      for (int i = begin; i < begin + kBatch; ++i) {
        const uint32_t (&from)[4] = values.data[i];
        if constexpr (kCacheIs16Bit) {
          uint32_t (&to)[4] = a[i / kHalves][i % kHalves];
#pragma unroll
          for (int w = 0; w < 4; ++w) to[w] = from[w];
          warpgroup_fence_operand(to);
        } else {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            uint32_t (&to)[4] = a[kHalves == 2 ? i : 2 * i + half][kHalves == 2 ? half : 0];
            upcast_values<Cache, kRows>(from, 2 * half, to);
            warpgroup_fence_operand(to);
          }
        }
      }
      wgmma_fence();
#pragma unroll
      for (int i = kCount * begin / kLoads; i < kCount * (begin + kBatch) / kLoads; ++i) {
#pragma unroll
        for (int h = 0; h < kHalves; ++h) {
          wgmma<Element, false, kUsed>(out[h], a[i][h], descriptor_at(columns, i * 2 * kChunk),
                                       true);
        }
      }
    }
    wgmma_commit();
    wgmma_wait<0>();
    warpgroup_fence_operand(out);
  }

  // Elementwise maximum of two pairs of p.
  static __device__ __forceinline__ uint32_t larger(uint32_t x, uint32_t y) {
    uint32_t result;
    if constexpr (std::is_same_v<Element, __half>) {
      asm("max.f16x2 %0, %1, %2;" : "=r"(result) : "r"(x), "r"(y));
    } else {
      asm("max.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(x), "r"(y));
    }
    return result;
  }

  // Stores p of this warp's scores to shared memory and returns its sums over this lane's tokens in
  // `sums`. kProducts: c is not yet in log2 units. kMasked: some may be -inf. Returns whether a
  // score exceeds row_max by more than kRescaleThreshold.
  template <int kUsed, bool kProducts, bool kMasked>
  __device__ __forceinline__ bool store_probs(const float (&c)[kUsed][4],
                                              const PairScales& of_tokens, float (&sums)[kUsed][2],
                                              uint32_t to_probs, int lane) const {
    constexpr uint32_t kChunk = kUsed * 128;
    uint32_t max_bits = 0;
    float max_weight = 0.0f;
#pragma unroll
    for (int t = 0; t < kUsed; t += 2) {
      uint32_t packed[2][2];
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        float weight[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float score_scale = kProducts ? scale[t + u][j & 1] : 1.0f;
          weight[j] = exp2_approx(fmaf(c[t + u][j], score_scale, -row_max[t + u][j & 1]));
        }
        sums[t + u][0] = weight[0] + weight[2];
        sums[t + u][1] = weight[1] + weight[3];
        if constexpr (kScaled) {
          max_weight = fmaxf(max_weight, fmaxf(sums[t + u][0], sums[t + u][1]));
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            weight[j] *= of_tokens.value[j >> 1];
            // A scale that the row does not see may be NaN.
            if (kMasked && c[t + u][j] == -INFINITY) weight[j] = 0.0f;
          }
        }
        packed[u][0] = pack2<Element>(weight[0], weight[1]);
        packed[u][1] = pack2<Element>(weight[2], weight[3]);
        order_probs(packed[u][0], packed[u][1], lane);
        // Only scales may be negative.
        constexpr uint32_t kMagnitude = kScaled ? 0x7fff7fff : 0xffffffff;
        max_bits = larger(max_bits, larger(packed[u][0] & kMagnitude, packed[u][1] & kMagnitude));
      }
      // stmatrix: (rows 8t .., slots 0-7) (8t + 8 .., 0-7) (8t .., 8-15) (8t + 8 .., 8-15).
      const uint32_t to = to_probs + (2 * warp_in_consumer + (lane >> 4)) * kChunk +
                          (t + (lane >> 3 & 1)) * 128 + lane % 8 * 16;
      store_transposed(to, packed[0][0], packed[1][0], packed[0][1], packed[1][1]);
    }
    fence_async_proxy();
    // p >= 0, so bits compare like values.
    constexpr uint32_t kLimit = std::is_same_v<Element, __half> ? 0x5c00 : 0x4380;
    static_assert(kRescaleThreshold == 8.0f);  // kLimit is 2^8 in Element
    const bool exceeds = max(max_bits & 0xffff, max_bits >> 16) > kLimit;
    // Where a value scale is tiny or 0, its product does not show how large the weight is.
    return kScaled ? exceeds || max_weight > kMaxScaledWeight : exceeds;
  }

  // This lane's fragments of a stage's K; zeros past the head size.
  struct Keys {
    static constexpr int kLoads = kCacheIs16Bit ? kSteps : kSteps / 2;
    uint32_t data[kLoads][4];
  };
  __device__ __forceinline__ void load_keys(Keys& keys, uint32_t key) const {
#pragma unroll
    for (int i = 0; i < Keys::kLoads; ++i) {
      load_matrices(keys.data[i], key + key_at(kCacheIs16Bit ? i : 2 * i));
    }
  }

  // One stage of 64 tokens; see WarpMma::step. kUsed: tiles of 8 rows. kPlain: all tokens are
  // visible to all rows and no score is modified. Calls release() once K and V have been read. All
  // warps of the consumer call it.
  template <int kUsed, bool kPlain, typename Scales, typename Adjust, typename Release>
  __device__ __forceinline__ void step(const Keys& keys, uint32_t value, const Scales& scales,
                                       uint64_t tokens, const Adjust& adjust,
                                       const Release& release, const KvStageLayout& layout,
                                       int lane) {
    constexpr uint32_t kChunk = kUsed * 128;  // bytes of 8 dimensions, or 8 tokens, of all rows
    uint32_t stored = probs;                  // this step's P^T buffer
    if constexpr (kEarly) {
      stored = probs + iteration * (kUsed * 8 * kStageTokens * 2);
      iteration ^= 1;
    }
    float c[kUsed][4];
    uint32_t a[kSteps][4];
    const uint64_t queries = matrix_descriptor(query >> 4 & 0x3fff, kChunk, 128, Swizzle::kNone);
    constexpr int kBatch = kCacheIs16Bit ? Keys::kLoads : std::min(Keys::kLoads, kBatchLoads);
#pragma unroll
    for (int first = 0; first < Keys::kLoads; first += kBatch) {
#pragma unroll
      for (int i = first; i < first + kBatch; ++i) {
        const uint32_t (&from)[4] = keys.data[i];
        if constexpr (kCacheIs16Bit) {
#pragma unroll
          for (int w = 0; w < 4; ++w) a[i][w] = from[w];
          warpgroup_fence_operand(a[i]);
        } else {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            uint32_t (&to)[4] = a[2 * i + half];
            upcast4<Cache>(from[2 * half], to[0], to[2]);
            upcast4<Cache>(from[2 * half + 1], to[1], to[3]);
            warpgroup_fence_operand(to);
          }
        }
      }
      wgmma_fence();
      constexpr int kEach = kSteps / Keys::kLoads;
#pragma unroll
      for (int k = first * kEach; k < (first + kBatch) * kEach; ++k) {
        wgmma<Element, false, kUsed>(c, a[k], descriptor_at(queries, k * 2 * kChunk), k > 0);
      }
    }
    wgmma_commit();
    PairScales of_tokens;
    const auto token_scales = [&](int j) {
      return scales() + (16 * warp_in_consumer + token_of(lane, j)) * 4;
    };
    const auto load_key_scales = [&] {
      if constexpr (kScaled) of_tokens.load_keys(token_scales(0), token_scales(2));
    };
    const auto load_value_scales = [&] {
      constexpr int kFromKeys = kTokens * 4;
      if constexpr (kScaled)
        of_tokens.load_values(token_scales(0) + kFromKeys, token_scales(2) + kFromKeys);
    };
    Values<kEarly ? kGroups : kGroups / 2> values;
    if constexpr (kEarly) {
      load_values(values, 0, value, layout);
      load_key_scales();
      load_value_scales();
      release();
    }
    wgmma_wait<0>();
    warpgroup_fence_operand(c);
    if (!kEarly) load_key_scales();
    const auto scale_scores = [&] {
#pragma unroll
      for (int t = 0; t < kUsed; ++t) {
        float of_rows[2] = {scale[t][0], scale[t][1]};
        if constexpr (kReloads) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            of_rows[j] =
                load_shared<float>(row_scales + row_of(lane, t, j) * 4) * softmax_scale_log2;
          }
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          c[t][j] *= of_rows[j & 1];
          if constexpr (kScaled) c[t][j] *= of_tokens.key[j >> 1];
        }
      }
    };
    constexpr bool kProducts = kPlain && !kScaled;
    if (!kProducts) scale_scores();
    if (!kPlain) {
      const uint32_t mine = static_cast<uint32_t>(tokens >> 16 * warp_in_consumer);
#pragma unroll
      for (int t = 0; t < kUsed; ++t) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int token = token_of(lane, j);
          c[t][j] = mine >> token & 1 ? adjust(c[t][j], t, j & 1, 16 * warp_in_consumer + token)
                                      : -INFINITY;
        }
      }
    }
    // Most steps do not raise row_max, so p is computed first and checked afterwards. Other warps
    // may still read the previous step's P^T. It is in the other buffer (kEarly), or this barrier
    // waits for them.
    if (!kEarly) {
      load_value_scales();
      consumer_barrier();
    }
    float sums[kUsed][2];
    if (consumer_any(store_probs<kUsed, kProducts, !kPlain>(c, of_tokens, sums, stored, lane))) {
      if (kProducts) scale_scores();
      raise_row_max<kUsed>(c, of_tokens, stored, lane);
      store_probs<kUsed, false, !kPlain>(c, of_tokens, sums, stored, lane);
      consumer_barrier();
    }
#pragma unroll
    for (int t = 0; t < kUsed; ++t) {
#pragma unroll
      for (int j = 0; j < 2; ++j) sum[t][j] += sums[t][j];
    }
    if constexpr (kEarly) {
      if (!kPlain) mask_values(values, 0, tokens, lane);
      accumulate<kUsed>(values, stored, 0);
    } else {
#pragma unroll
      for (int group = 0; group < kGroups; group += kGroups / 2) {
        load_values(values, group, value, layout);
        if (!kPlain) mask_values(values, group, tokens, lane);
        accumulate<kUsed>(values, stored, group);
      }
      release();
    }
  }

  // After all stages. store_stats(): row_max and row_sum of all rows, over the consumer's tokens.
  // store_half(): this warp's fragments of half a head (64 dimensions).
  __device__ __forceinline__ void store_stats(float (&row_maxima)[kMaxTiles * 8],
                                              float (&sums)[kMaxTiles * 8], int thread, int lane) {
#pragma unroll
    for (int t = 0; t < kMaxTiles; ++t) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2) {
          sum[t][j] += __shfl_xor_sync(0xffffffffu, sum[t][j], distance);
        }
      }
    }
    // [rows][4 warps], in a P^T buffer that no warp reads any more.
    uint32_t of_warps = probs;
    if constexpr (kEarly) {
      of_warps += iteration * (tiles * 8 * kStageTokens * 2);
    } else {
      consumer_barrier();
    }
    if (lane < 4) {
#pragma unroll
      for (int t = 0; t < kMaxTiles; ++t) {
        const int row = row_of(lane, t, 0);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          store_shared(of_warps + ((row + j) * 4 + warp_in_consumer) * 4, sum[t][j]);
        }
        if (warp_in_consumer == 0) {
          *reinterpret_cast<float2*>(&row_maxima[row]) = {row_max[t][0], row_max[t][1]};
        }
      }
    }
    consumer_barrier();
    if (thread < kMaxTiles * 8) {
      const float4 four = load_shared<float4>(of_warps + thread * 16);
      sums[thread] = four.x + four.y + four.z + four.w;
    }
  }
  // `to`: shared memory, [tiles][128 threads] of 16 bytes.
  template <int kHalf>
  __device__ __forceinline__ void store_half(uint32_t to, int thread) const {
    const int used = opaque(tiles);  // keeps no comparisons in registers during the stages
#pragma unroll
    for (int t = 0; t < kMaxTiles; ++t) {
      const float (&values)[4] = out[kHalf][t];
      if (t < used) {
        store_shared(to + (t * 128 + thread) * 16,
                     float4{values[0], values[1], values[2], values[3]});
      }
    }
  }
};

#endif

}  // namespace vllm_kernels::cuda