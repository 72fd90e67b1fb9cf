// WarpMma: attention of 8 or 16 query rows over 16 or 32 tokens at a time, by one warp's mma.sync.
//
// Both matrix products are swapped (operands exchanged). Tokens and head dimensions fill the 16
// rows of an m16n8k16, and the query rows fill its 8 columns:
//   S^T [16 tokens, 8 rows] = K [16, D] Q^T [D, 8]
//   O^T [D, 8 rows]        += V^T [D, 16] P^T [16, 8]
// row_max and row_sum are per column, so rescaling O needs no shuffle.
//
// 8-bit caches are upcast to fp16, which is exact. The query is converted to fp16 too. Each query
// row is scaled by a power of two, so that bfloat16's range fits; this loses nothing.
//
// The order of the k index of an mma is free, as long as both operands agree. ldmatrix gives each
// lane 4 consecutive elements of a 16-byte row of 16 elements. So k slots {2j, 2j+1, 2j+8, 2j+9}
// stand for elements 4j .. 4j+3. Packed pages use the same order for V's tokens, with 16 bits too.
// Their K rows are permuted so that P comes out in V's order (page_token() in kv_smem_layout.cuh).
// With 8-bit rows, the transposing ldmatrix moves pairs of dimensions. So the rows of an output
// tile are the 8 even dimensions, then the 8 odd ones.
//
// int4: a row of `head_size` bytes has twice as many dimensions. Every step of 16 bytes gives two
// steps of mmas: 16 dimensions of the first half of the row, then those of the second half. The
// upcast pairs bytes 0 and 2, and bytes 1 and 3. So k slots {2j, 2j+1, 2j+8, 2j+9} stand for bytes
// 4j, 4j+2, 4j+1, 4j+3. The upcast's factor of the second half is undone in the query, and in the
// output at the end. No masks are needed for V: any bytes are finite numbers.
#pragma once
#include <algorithm>
#include <type_traits>

#include "cuda/attention/common/kv_smem_layout.cuh"
#include "cuda/attention/common/online_softmax.cuh"
#include "cuda/attention/common/token_scales.cuh"
#include "cuda/base/upcast.cuh"
#include "cuda/base/vec.cuh"

namespace vllm_kernels::cuda {

// kMaxHeadSize: in elements of the cache. kTiles: tiles of 8 query rows. kDepth: tiles of 16 tokens
// that a warp multiplies at once. kStageTokens: of a stage; as many, or twice as many.
template <typename Cache, int kMaxHeadSize, int kTiles, int kDepth, KvForm kForm,
          int kStageTokens = 16 * kDepth>
struct WarpMma : KvFragments<Cache, kMaxHeadSize, kStageTokens, kForm> {
  using Addresses = KvFragments<Cache, kMaxHeadSize, kStageTokens, kForm>;
  using Addresses::dimension_of, Addresses::key_at, Addresses::load_value, Addresses::order_probs,
      Addresses::token_of, Addresses::value_at, Addresses::value_masks, Addresses::kIsInt4;
  static constexpr int kTokens = 16 * kDepth;
  static constexpr bool kCacheIs16Bit = Addresses::kCacheIs16Bit, kRows = Addresses::kRows;
  static constexpr bool kScaled = kHasTokenScales<Cache>, kZeros = kHasZeros<Cache>;
  using Element = std::conditional_t<kCacheIs16Bit, Cache, __half>;
  static constexpr int kLoadSteps = kMaxHeadSize / 16;  // of 16 elements of the cache
  static constexpr int kHalves = kValuesOf<Cache>, kSteps = kLoadSteps * kHalves;

  uint2 query[kTiles][kSteps];   // B operand of S^T: 16 dimensions x 8 rows per step
  float out[kTiles][kSteps][4];  // O^T accumulators: 16 dimensions x 8 rows per step
  float row_max[kTiles][2];  // log2 units, this lane's two rows; at most kRescaleThreshold too low
  float sum[kTiles][2];      // row_sum, of this lane's tokens only until reduce_sums()
  float scale[kTiles][2];    // from the product q . k to log2 units
  // kZeros: the sum of q in log2 units, and row_sum with the tokens' zeros as factors, of this
  // lane's tokens only.
  float query_sum[kZeros ? kTiles : 1][2], zero_sum[kZeros ? kTiles : 1][2];
  int head_size;  // elements of the cache
  int tiles;      // of 8 rows, in use

  // The row (0 .. 8 * kTiles - 1) of this lane's column j (0 or 1).
  static __device__ __forceinline__ int row_of(int lane, int tile, int j) {
    return tile * 8 + (lane % 4) * 2 + j;
  }

  // The factor of step k's numbers after the upcast, a power of two.
  static __device__ __forceinline__ constexpr float stored_factor(int k) {
    return k % kHalves == 0 ? 1.0f : kHighNibbleFactor;
  }

  // Loads this lane's elements of query rows 8 * tile + lane / 4, unconverted. A row may be null.
  __device__ __forceinline__ void load_query(const void* const (&rows)[kTiles], int lane) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) query[tile][k] = {0, 0};
      if (rows[tile] == nullptr) continue;
      // 16-bit: two pairs per step. 8-bit: four consecutive elements; the head size is a multiple
      // of 16.
      const auto* pairs = static_cast<const uint32_t*>(rows[tile]) + lane % 4;
      const auto* fours = static_cast<const uint2*>(rows[tile]) + lane % 4;
      const int limit = head_size - (lane % 4) * (kCacheIs16Bit ? 2 : 4);
      const auto load = [&](auto all) {  // no bounds tests for the full head size
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
          if constexpr (kCacheIs16Bit) {
            if (all() || k * 16 < limit) query[tile][k].x = pairs[k * 8];
            if (all() || k * 16 + 8 < limit) query[tile][k].y = pairs[k * 8 + 4];
          } else {
            const int step = k / kHalves, half = k % kHalves;
            if (all() || step * 16 < limit) {
              query[tile][k] = fours[step * 4 + half * (head_size / 4)];
            }
          }
        }
      };
      head_size == kMaxHeadSize ? load(std::true_type{}) : load(std::false_type{});
    }
  }

  // Converts the query to mma operands. Query: its type. softmax_scale_log2: the factor from the
  // product of query and stored key to log2 units.
  template <typename Query>
  __device__ __forceinline__ void prepare_query(float softmax_scale_log2, int lane) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      if constexpr (kCacheIs16Bit) {
        scale[tile][0] = scale[tile][1] = softmax_scale_log2;
      } else {
        float largest = 0.0f;
        const auto at = [&](int k, int j) {
          const uint32_t pair = j < 2 ? query[tile][k].x : query[tile][k].y;
          return to_float(bits_as<Query>(static_cast<uint16_t>(j & 1 ? pair >> 16 : pair)));
        };
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
#pragma unroll
          for (int j = 0; j < 4; ++j) largest = fmaxf(largest, fabsf(at(k, j)));
        }
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
        const auto [factor, inverse] = query_scale(largest);
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
          constexpr int kSecond = kIsInt4 ? 2 : 1, kThird = 3 - kSecond;
          const float by = factor / stored_factor(k);
          query[tile][k] = {pack2<__half>(at(k, 0) * by, at(k, kSecond) * by),
                            pack2<__half>(at(k, kThird) * by, at(k, 3) * by)};
        }
        const float to_log2 = inverse * softmax_scale_log2;
        if constexpr (kZeros) {
          float total = 0.0f;
#pragma unroll
          for (int k = 0; k < kSteps; ++k) {
            const float2 first = __half22float2(bits_as<__half2>(query[tile][k].x)),
                         second = __half22float2(bits_as<__half2>(query[tile][k].y));
            total += ((first.x + first.y) + (second.x + second.y)) * stored_factor(k);
          }
          total += __shfl_xor_sync(0xffffffffu, total, 1);
          total += __shfl_xor_sync(0xffffffffu, total, 2);
          total *= to_log2;
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            query_sum[tile][j] = __shfl_sync(0xffffffffu, total, ((lane % 4) * 2 + j) * 4);
          }
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          scale[tile][j] = __shfl_sync(0xffffffffu, to_log2, ((lane % 4) * 2 + j) * 4);
        }
      }
    }
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      row_max[tile][0] = row_max[tile][1] = kRowMaxInit;
      sum[tile][0] = sum[tile][1] = 0.0f;
      if constexpr (kZeros) zero_sum[tile][0] = zero_sum[tile][1] = 0.0f;
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
#pragma unroll
        for (int j = 0; j < 4; ++j) out[tile][k][j] = 0.0f;
      }
    }
  }

  // c = S^T of 16 tokens, not yet scaled.
  template <int kUsed>
  __device__ __forceinline__ void scores(float (&c)[kUsed][4], uint32_t key) const {
    // Dependent mmas wait for each other, so there are at least four independent chains.
    constexpr int kChains = std::max(1, 4 / (kDepth * kUsed));
    float chain[kChains][kUsed][4];
#pragma unroll
    for (int i = 0; i < kChains; ++i) {
#pragma unroll
      for (int tile = 0; tile < kUsed; ++tile) {
#pragma unroll
        for (int j = 0; j < 4; ++j) chain[i][tile][j] = 0.0f;
      }
    }
    const auto multiply = [&](int k, const uint32_t (&a)[4]) {
#pragma unroll
      for (int tile = 0; tile < kUsed; ++tile) {
        const uint2 b = query[tile][k];
        mma_m16n8k16<Element>(chain[k % kChains][tile], a, b.x, b.y);
      }
    };
#pragma unroll
    for (int k = 0; k < kLoadSteps; k += kCacheIs16Bit ? 1 : 2) {
      uint32_t loaded[4];
      load_matrices(loaded, key + key_at(k));  // the query has zeros past the head size
      if constexpr (kCacheIs16Bit) {
        multiply(k, loaded);
      } else {
#pragma unroll
        for (int half = 0; half < 2 && k + half < kLoadSteps; ++half) {
          uint32_t a[4];
          if constexpr (kIsInt4) {
            uint32_t b[4];
            upcast_nibbles(loaded[2 * half], a[0], a[2], b[0], b[2]);
            upcast_nibbles(loaded[2 * half + 1], a[1], a[3], b[1], b[3]);
            multiply(2 * (k + half) + 1, b);
          } else {
            upcast4<Cache>(loaded[2 * half], a[0], a[2]);
            upcast4<Cache>(loaded[2 * half + 1], a[1], a[3]);
          }
          multiply(kHalves * (k + half), a);
        }
      }
    }
#pragma unroll
    for (int tile = 0; tile < kUsed; ++tile) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        c[tile][j] = chain[0][tile][j];
        if constexpr (kChains == 2) c[tile][j] += chain[1][tile][j];
        if constexpr (kChains == 4) {
          c[tile][j] += chain[1][tile][j];
          c[tile][j] += chain[2][tile][j] + chain[3][tile][j];
        }
      }
    }
  }

  // O^T += V^T P^T for 16 tokens.
  template <int kUsed, bool kMasked>
  __device__ __forceinline__ void accumulate(const uint32_t (&probs)[kUsed][2], uint32_t value,
                                             const uint32_t (&masks)[2]) {
    const auto multiply = [&](int k, const uint32_t (&a)[4]) {
#pragma unroll
      for (int tile = 0; tile < kUsed; ++tile) {
        mma_m16n8k16<Element>(out[tile][k], a, probs[tile][0], probs[tile][1]);
      }
    };
#pragma unroll
    for (int k = 0; k < kLoadSteps; k += kCacheIs16Bit ? 1 : 2) {
      uint32_t loaded[4];
      // Past the head size this reads arbitrary data; the outputs there are not used.
      load_value(loaded, value + value_at(k));
      if constexpr (kMasked) {
#pragma unroll
        for (int i = 0; i < 4; ++i) loaded[i] &= masks[kCacheIs16Bit ? i / 2 : i % 2];
      }
      if constexpr (kCacheIs16Bit) {
        multiply(k, loaded);
      } else {
#pragma unroll
        for (int half = 0; half < 2 && k + half < kLoadSteps; ++half) {
          uint32_t a[4];
          if constexpr (kIsInt4) {
            // Rows: a register has both tokens of one dimension, the even one first.
            constexpr int kSecond = kRows ? 1 : 2, kThird = 3 - kSecond;
            uint32_t b[4];
            upcast_nibbles(loaded[2 * half], a[0], a[kSecond], b[0], b[kSecond]);
            upcast_nibbles(loaded[2 * half + 1], a[kThird], a[3], b[kThird], b[3]);
            multiply(2 * (k + half) + 1, b);
          } else {
            upcast_values<Cache, kRows>(loaded, 2 * half, a);
          }
          multiply(kHalves * (k + half), a);
        }
      }
    }
  }

  // Raises row_max and rescales. `largest`: this lane's largest score of each row.
  template <int kUsed>
  __device__ __forceinline__ void raise_row_max(const float (&largest)[kUsed][2]) {
#pragma unroll
    for (int tile = 0; tile < kUsed; ++tile) {
      float factor[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float updated = fmaxf(row_max[tile][j], largest[tile][j]);
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2) {
          updated = fmaxf(updated, __shfl_xor_sync(0xffffffffu, updated, distance));
        }
        factor[j] = update_row_max(row_max[tile][j], updated);
        sum[tile][j] *= factor[j];
        if constexpr (kZeros) zero_sum[tile][j] *= factor[j];
      }
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
#pragma unroll
        for (int j = 0; j < 4; ++j) out[tile][k][j] *= factor[j & 1];
      }
    }
  }

  template <int kUsed, typename Adjusts, typename Adjust>
  __device__ __forceinline__ void step_used(uint32_t key, uint32_t value, uint32_t scales,
                                            uint32_t tokens, bool plain, const Adjusts& adjusts,
                                            const Adjust& adjust, const KvStageLayout& layout,
                                            int lane) {
    float c[kDepth][kUsed][4];
    PairScales of_tokens[kDepth], zeros[kZeros ? kDepth : 1];
    float exponents[kDepth][2];  // of the value scales
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      scores<kUsed>(c[i], key + i * layout.key_step);
#pragma unroll
      for (int tile = 0; tile < kUsed; ++tile) {
#pragma unroll
        for (int j = 0; j < 4; ++j) c[i][tile][j] *= scale[tile][j & 1];
      }
      if constexpr (kScaled) {
        const uint32_t first = scales + (16 * i + token_of(lane, 0)) * 4,
                       second = scales + (16 * i + token_of(lane, 2)) * 4;
        of_tokens[i].load_keys(first, second);
        of_tokens[i].load_values(first + kTokens * 4, second + kTokens * 4);
#pragma unroll
        for (int tile = 0; tile < kUsed; ++tile) {
#pragma unroll
          for (int j = 0; j < 4; ++j) c[i][tile][j] *= of_tokens[i].key[j >> 1];
        }
        if constexpr (kZeros) {
          zeros[i].load_keys(first + 2 * kTokens * 4, second + 2 * kTokens * 4);
          zeros[i].load_values(first + 3 * kTokens * 4, second + 3 * kTokens * 4);
#pragma unroll
          for (int tile = 0; tile < kUsed; ++tile) {
#pragma unroll
            for (int j = 0; j < 4; ++j)
              c[i][tile][j] += zeros[i].key[j >> 1] * query_sum[tile][j & 1];
          }
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          if constexpr (kZeros) {
            exponents[i][j] = of_tokens[i].exponent(j, zeros[i]);
          } else {
            exponents[i][j] = of_tokens[i].exponent(j);
          }
        }
      }
    }
    const auto mask = [&](const auto& score_of) {
#pragma unroll
      for (int i = 0; i < kDepth; ++i) {
#pragma unroll
        for (int tile = 0; tile < kUsed; ++tile) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const int token = 16 * i + token_of(lane, j);
            c[i][tile][j] =
                tokens >> token & 1 ? score_of(c[i][tile][j], tile, j & 1, token) : -INFINITY;
          }
        }
      }
    };
    if (!plain) {
      // If possible, skip adjust(): its code is not in the instruction cache, which costs 1 us.
      adjusts() ? mask(adjust) : mask([](float score, int, int, int) { return score; });
    }
    float largest[kUsed][2];
    bool higher = false;
#pragma unroll
    for (int tile = 0; tile < kUsed; ++tile) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const auto bound = [&](int i) {
          if constexpr (!kScaled) return fmaxf(c[i][tile][j], c[i][tile][j + 2]);
          return fmaxf(c[i][tile][j] + exponents[i][0], c[i][tile][j + 2] + exponents[i][1]);
        };
        largest[tile][j] = bound(0);
        if constexpr (kDepth == 2) largest[tile][j] = fmaxf(largest[tile][j], bound(1));
        higher = higher || largest[tile][j] > row_max[tile][j] + kRescaleThreshold;
      }
    }
    // Most steps do not raise row_max and need only this vote.
    if (__any_sync(0xffffffffu, higher)) raise_row_max<kUsed>(largest);
    uint32_t probs[kDepth][kUsed][2];
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      if constexpr (kScaled && sm90a_or(0, 1)) {  // loaded again: kept, they would spill on sm_80
        const uint32_t first = opaque(scales) + (16 * i + kTokens) * 4;
        of_tokens[i].load_values(first + token_of(lane, 0) * 4, first + token_of(lane, 2) * 4);
        if constexpr (kZeros) {
          const uint32_t from = first + 2 * kTokens * 4;
          zeros[i].load_values(from + token_of(lane, 0) * 4, from + token_of(lane, 2) * 4);
        }
      }
#pragma unroll
      for (int tile = 0; tile < kUsed; ++tile) {
        float weight[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) weight[j] = exp2_approx(c[i][tile][j] - row_max[tile][j & 1]);
        sum[tile][0] += weight[0] + weight[2];
        sum[tile][1] += weight[1] + weight[3];
        if constexpr (kZeros) {
          float zero[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) zero[j] = zeros[i].value[j >> 1];
          if (!plain) {  // as the scales below
#pragma unroll
            for (int j = 0; j < 4; ++j) zero[j] = c[i][tile][j] == -INFINITY ? 0.0f : zero[j];
          }
#pragma unroll
          for (int j = 0; j < 4; ++j) zero_sum[tile][j & 1] += weight[j] * zero[j];
        }
        if constexpr (kScaled) {
#pragma unroll
          for (int j = 0; j < 4; ++j) weight[j] *= of_tokens[i].value[j >> 1];
          if (!plain) {  // a scale that the row does not see may be NaN
#pragma unroll
            for (int j = 0; j < 4; ++j) weight[j] = c[i][tile][j] == -INFINITY ? 0.0f : weight[j];
          }
        }
        uint32_t (&packed)[2] = probs[i][tile];
        packed[0] = pack2<Element>(weight[0], weight[1]);
        packed[1] = pack2<Element>(weight[2], weight[3]);
        order_probs(packed[0], packed[1], lane);
        packed[0] = transpose_matrix(packed[0]);
        packed[1] = transpose_matrix(packed[1]);
      }
    }
    uint32_t masks[2] = {};
    if (kIsInt4 || plain) {
#pragma unroll
      for (int i = 0; i < kDepth; ++i) {
        accumulate<kUsed, false>(probs[i], value + i * layout.value_step, masks);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kDepth; ++i) {
        value_masks(masks, tokens >> 16 * i, lane);
        accumulate<kUsed, true>(probs[i], value + i * layout.value_step, masks);
      }
    }
  }
  // kTokens tokens of a stage. `scales`: its scales (KvPipeline::scales()), used if kScaled.
  // `tokens`: mask of the tokens to attend to. `plain`: all rows see all of them, and no score is
  // modified. If not, adjusts() says whether rows see different tokens or scores are modified. Then
  // adjust(score, tile, j, token) returns the score in log2 units.
  template <typename Adjusts, typename Adjust>
  __device__ __forceinline__ void step(uint32_t key, uint32_t value, uint32_t scales,
                                       uint32_t tokens, bool plain, const Adjusts& adjusts,
                                       const Adjust& adjust, const KvStageLayout& layout,
                                       int lane) {
    if constexpr (kTiles > 1) {
      if (tiles == 1)
        return step_used<1>(key, value, scales, tokens, plain, adjusts, adjust, layout, lane);
    }
    step_used<kTiles>(key, value, scales, tokens, plain, adjusts, adjust, layout, lane);
  }

  // Lanes l, l + 4, ... hold the same rows for different tokens. Completes the output, too.
  __device__ __forceinline__ void reduce_sums() {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2) {
          sum[tile][j] += __shfl_xor_sync(0xffffffffu, sum[tile][j], distance);
          if constexpr (kZeros) {
            zero_sum[tile][j] += __shfl_xor_sync(0xffffffffu, zero_sum[tile][j], distance);
          }
        }
      }
      if constexpr (kZeros) {
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            out[tile][k][j] = out[tile][k][j] / stored_factor(k) + zero_sum[tile][j & 1];
          }
        }
      }
    }
  }

  // Stores rows [first, first + rows): the unnormalized output to partial_out [rows][pitch],
  // row_max and row_sum to partial_stats [rows].
  __device__ __forceinline__ void store(int first, int rows, float* partial_out, int pitch,
                                        float2* partial_stats, int lane) const {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int row = row_of(lane, tile, j) - first;
        if (static_cast<unsigned>(row) >= static_cast<unsigned>(rows)) continue;
        if (lane < 4) partial_stats[row] = {row_max[tile][j], sum[tile][j]};
        float* to = partial_out + row * pitch;
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
          const int step = k / kHalves, half = k % kHalves;
          if (step * 16 >= head_size) break;
          to[half * head_size + dimension_of(lane, step, 0)] = out[tile][k][j];
          to[half * head_size + dimension_of(lane, step, 1)] = out[tile][k][2 + j];
        }
      }
    }
  }
};

}  // namespace vllm_kernels::cuda
