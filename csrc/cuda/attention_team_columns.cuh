// Attention of 16 or 32 query rows over 64 tokens of an 8-bit cache at a time, by a team of 4 warps
// and Hopper's warpgroup products.
//
// As in attention_tile.cuh both products are swapped and A comes from registers, where it is
// widened:
//   S^T [64 tokens, rows] = K [64, D] Q^T [D, rows]      a warp has 16 tokens
//   O^T [64, rows]       += V^T [64, 64] P^T [64, rows]  a warp has 16 of each 64 dimensions
// Queries and P^T lie in shared memory. A step has one barrier of the team, behind the weights: it
// also tells whether any warp saw a maximum exceeded, and if so they are computed again.
//
// For rows, tokens and 8-bit elements see attention_tile.cuh.
#pragma once
#include "cuda/attention_team.cuh"
#include "cuda/attention_tile.cuh"
#include "cuda/wgmma.cuh"

namespace vllm_kernels::cuda {

constexpr int kColumnRows = 32, kColumnTeams = 3;  // of a block

// Bytes of shared memory: a team's P^T, two of them in turn.
__host__ __device__ constexpr int weight_bytes(int rows) {
  return 2 * rows * kTeamTokens * 2;
}

#if defined(VLLM_KERNELS_HAS_WGMMA)

template <typename Cache, int kMaxHeadSize, PageForm kForm>
struct TeamColumnsTile : TileAddresses<Cache, kTeamTokens, kForm>, TeamMember<kColumnTeams> {
  using Addresses = TileAddresses<Cache, kTeamTokens, kForm>;
  using Addresses::key_at, Addresses::token_of, Addresses::value_masks;
  using Member = TeamMember<kColumnTeams>;
  using Member::kTeams, Member::member, Member::team_any, Member::team_barrier, Member::storage;
  static constexpr int kTokens = kTeamTokens;
  static constexpr bool kWide = false, kRows = Addresses::kRows;
  using Element = __half;
  static constexpr int kMaxHead = kMaxHeadSize, kMaxRows = kColumnRows;
  static constexpr int kMaxTiles = kMaxRows / 8;  // of 8 query rows
  static constexpr int kSteps = kMaxHeadSize / 16;
  static constexpr int kHalves = kMaxHeadSize / 64;  // of 64 dimensions
  static constexpr int kGroups = kTokens / 16;
  static_assert(kMaxHeadSize == 64 || kMaxHeadSize == 128);

  float out[kHalves][kMaxTiles][4];  // O^T accumulators: this warp's 16 of 64 dimensions x 8 rows
  float maximum[kMaxTiles][2];       // log2 units, of this lane's two rows; the same in all warps
  float sum[kMaxTiles][2];           // this lane's tokens only, until row_stats()
  float scale[kMaxTiles][2];         // from product to log2 units
  float theirs_factor[4][2];         // see add_unit()
  int head_size;
  int tiles;       // of 8 rows, in use: 2 or 4
  uint32_t query;  // shared memory: [D / 8] [rows] [8], scaled
  // `storage`: P^T [64 / 8] [rows] [8], twice
  uint32_t turn = 0;    // which of two P^T comes next
  uint32_t value_base;  // this lane's V

  static __device__ __forceinline__ int row_of(int lane, int tile, int j) {
    return tile * 8 + (lane % 4) * 2 + j;
  }

  __device__ __forceinline__ void set_addresses(const TileLayout& layout, int lane) {
    Addresses::set_addresses(layout, lane);
    // The upper 16 lanes load the next 64 dimensions, or the next 16 tokens.
    const int upper = lane >> 4;
    if constexpr (kRows) {
      const int row = lane & 7;
      const int chunk = kHalves == 2 ? member + 4 * upper : member;
      value_base = this->value_row + ((chunk ^ row) * 16);
    } else {
      const int dimension = member * 16 + (kHalves == 2 ? 64 * upper : 0) + lane % 16;
      value_base = dimension * layout.page_tokens;
    }
    if (kHalves == 1) value_base += upper * layout.value_step;
  }

  // Of group i of 16 tokens.
  static __device__ __forceinline__ uint32_t key_group(const TileLayout& layout, int i) {
    return (i & 1) * layout.key_step + (i >> 1) * layout.key_half;
  }
  static __device__ __forceinline__ uint32_t value_group(const TileLayout& layout, int i) {
    return (i & 1) * layout.value_step + (i >> 1) * layout.value_half;
  }

  // Where 16 bytes of a query row lie, of `rows`.
  static __device__ __forceinline__ uint32_t query_place(uint32_t query, int row, int chunk,
                                                         int rows) {
    return query + (chunk * rows + row) * 16;
  }
  template <typename Query>
  static __device__ __forceinline__ void narrow_row(uint32_t query, uint32_t scales, int row,
                                                    int rows) {
    // Slots {2j, 2j+1, 2j+8, 2j+9} of k are elements 4j .. 4j+3.
    const auto permute = [](uint4& a, uint4& b) {
      const uint4 low = {a.x, a.z, b.x, b.z}, high = {a.y, a.w, b.y, b.w};
      a = low;
      b = high;
    };
    narrow_query_row<Query, 2 * kSteps>(
        [&](int chunk) { return query_place(query, row, chunk, rows); }, scales + row * 4, permute);
  }
  // Before an item's first step, when its queries are there.
  __device__ __forceinline__ void start(int tiles_in_use, uint32_t queries, uint32_t scales,
                                        float to_log2, int thread) {
    tiles = tiles_in_use;
    query = queries;
    load_scales(scales, to_log2, thread % 32);
    clear();
  }
  __device__ __forceinline__ void load_scales(uint32_t scales, float to_log2, int lane) {
#pragma unroll
    for (int t = 0; t < kMaxTiles; ++t) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        scale[t][j] = to_log2;
        if (t < tiles) {
          scale[t][j] *= load_shared<float>(scales + row_of(lane, t, j) * 4);
        }
      }
    }
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int t = 0; t < kMaxTiles; ++t) {
      maximum[t][0] = maximum[t][1] = kNoMaximum;
      sum[t][0] = sum[t][1] = 0.0f;
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
#pragma unroll
        for (int j = 0; j < 4; ++j) out[h][t][j] = 0.0f;
      }
    }
  }

  // A row's maximum to `updated`.
  __device__ __forceinline__ void rescale(int t, int j, float updated) {
    const float factor = exp2_approx(maximum[t][j] - updated);
    maximum[t][j] = updated;
    sum[t][j] *= factor;
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      out[h][t][j] *= factor;
      out[h][t][j + 2] *= factor;
    }
  }
  // All maxima to what the team saw. `scratch`: 16 bytes a row.
  template <int kUsed>
  __device__ __forceinline__ void raise_maxima(const float (&largest)[kUsed][2], uint32_t scratch,
                                               int lane) {
#pragma unroll
    for (int t = 0; t < kUsed; ++t) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float mine = largest[t][j];
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2) {
          mine = fmaxf(mine, __shfl_xor_sync(0xffffffffu, mine, distance));
        }
        if (lane < 4) {
          store_shared(scratch + (row_of(lane, t, j) * 4 + member) * 4, mine);
        }
      }
    }
    team_barrier();
#pragma unroll
    for (int t = 0; t < kUsed; ++t) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float4 seen = load_shared<float4>(scratch + row_of(lane, t, j) * 16);
        rescale(t, j, fmaxf(maximum[t][j], fmaxf(fmaxf(seen.x, seen.y), fmaxf(seen.z, seen.w))));
      }
    }
    team_barrier();  // all have read
  }

  // V of kCount groups of 16 tokens, as this lane loads it.
  template <int kCount>
  struct Values {
    static constexpr int kLoads = kCount * kHalves / 2;
    uint32_t data[kLoads][4];
  };
  template <int kCount>
  __device__ __forceinline__ void load_values(Values<kCount>& values, int first, uint32_t value,
                                              const TileLayout& layout) const {
#pragma unroll
    for (int i = 0; i < Values<kCount>::kLoads; ++i) {
      // Past the head size: anything, for it gives outputs that nobody asks for.
      const uint32_t at =
          value + value_base + value_group(layout, first + (kHalves == 2 ? i : 2 * i));
      if constexpr (kRows) {
        load_transposed(values.data[i], at);
      } else {
        load_matrices(values.data[i], at);
      }
    }
  }
  template <int kCount>
  static __device__ __forceinline__ void mask_values(Values<kCount>& values, int first,
                                                     uint64_t tokens, int lane) {
#pragma unroll
    for (int i = 0; i < Values<kCount>::kLoads; ++i) {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        // 8-bit, 64 dimensions: the upper two registers are the next 16 tokens.
        const int group = first + (kHalves == 2 ? i : 2 * i + w / 2);
        uint32_t masks[2];
        value_masks(masks, static_cast<uint32_t>(tokens >> 16 * group), lane);
        values.data[i][w] &= masks[w % 2];
      }
    }
  }

  // O^T += V^T P^T, of kCount groups from `first` on.
  template <int kUsed, int kCount>
  __device__ __forceinline__ void accumulate(const Values<kCount>& values, uint32_t stored,
                                             int first) {
    constexpr uint32_t kChunk = kUsed * 128;
    uint32_t a[kCount][kHalves][4];
#pragma unroll
    for (int i = 0; i < Values<kCount>::kLoads; ++i) {
      const uint32_t (&from)[4] = values.data[i];
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        uint32_t (&to)[4] = a[kHalves == 2 ? i : 2 * i + part][kHalves == 2 ? part : 0];
        if constexpr (kRows) {
          // Two tokens of two dimensions -> both tokens of the even one, then of the odd one.
          const uint32_t low = __byte_perm(from[2 * part], 0, 0x3120);
          const uint32_t high = __byte_perm(from[2 * part + 1], 0, 0x3120);
          widen4<Cache>(low, to[0], to[1]);
          widen4<Cache>(high, to[2], to[3]);
        } else {
          widen4<Cache>(from[2 * part], to[0], to[2]);
          widen4<Cache>(from[2 * part + 1], to[1], to[3]);
        }
      }
    }
    const uint64_t columns = core_matrices(stored, kChunk, 128) + first * (2 * kChunk >> 4);
    settle(a);
    settle(out);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        wgmma<Element, kUsed>(out[h], a[i][h], columns + i * (2 * kChunk >> 4), true);
      }
    }
    wgmma_commit();
    wgmma_wait<0>();
    settle(out);
  }

  // Weights of the scores, to shared memory, and their sums, of this lane's tokens.
  template <int kUsed>
  __device__ __forceinline__ void store_weights(const float (&c)[kUsed][4], float (&sums)[kUsed][2],
                                                uint32_t to_weights, int lane) const {
    constexpr uint32_t kChunk = kUsed * 128;
#pragma unroll
    for (int t = 0; t < kUsed; t += 2) {
      uint32_t packed[2][2];
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        float weight[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          weight[j] = exp2_approx(c[t + u][j] - maximum[t + u][j & 1]);
        }
        sums[t + u][0] = weight[0] + weight[2];
        sums[t + u][1] = weight[1] + weight[3];
        packed[u][0] = pack2<Element>(weight[0], weight[1]);
        packed[u][1] = pack2<Element>(weight[2], weight[3]);
      }
      // Matrices: (rows 8t on, tokens 0-7) (8t + 8 on, 0-7) (8t on, 8-15) (8t + 8 on, 8-15).
      const uint32_t to = to_weights + (2 * member + (lane >> 4)) * kChunk +
                          (t + (lane >> 3 & 1)) * 128 + lane % 8 * 16;
      store_transposed(to, packed[0][0], packed[1][0], packed[0][1], packed[1][1]);
    }
    fence_async_proxy();
  }

  template <int kUsed, typename Adjust, typename Release>
  __device__ __forceinline__ void step_rows(uint32_t key, uint32_t value, uint64_t tokens,
                                            bool plain, const Adjust& adjust,
                                            const Release& release, const TileLayout& layout,
                                            int lane) {
    constexpr uint32_t kChunk = kUsed * 128;  // bytes of 8 dimensions, or tokens, of all rows
    float c[kUsed][4];
    uint32_t a[kSteps][4];
    const uint32_t from = key + key_group(layout, member);
#pragma unroll
    for (int k = 0; k < kSteps; k += 2) {
      uint32_t loaded[4];
      load_matrices(loaded, from + key_at(k));  // past the head size: zeros
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        widen4<Cache>(loaded[2 * half], a[k + half][0], a[k + half][2]);
        widen4<Cache>(loaded[2 * half + 1], a[k + half][1], a[k + half][3]);
      }
    }
    const uint64_t queries = core_matrices(query, kChunk, 128);
    settle(a);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      wgmma<Element, kUsed>(c, a[k], queries + k * (2 * kChunk >> 4), k > 0);
    }
    wgmma_commit();
    Values<kGroups> values;
    load_values(values, 0, value, layout);
    release();
    wgmma_wait<0>();
    settle(c);
#pragma unroll
    for (int t = 0; t < kUsed; ++t) {
#pragma unroll
      for (int j = 0; j < 4; ++j) c[t][j] *= scale[t][j & 1];
    }
    if (!plain) {
      const uint32_t mine = static_cast<uint32_t>(tokens >> 16 * member);
#pragma unroll
      for (int t = 0; t < kUsed; ++t) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int token = token_of(lane, j);
          c[t][j] = mine >> token & 1 ? adjust(c[t][j], t, j & 1, 16 * member + token) : -INFINITY;
        }
      }
    }
    float largest[kUsed][2];
    bool higher = false;
#pragma unroll
    for (int t = 0; t < kUsed; ++t) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        largest[t][j] = fmaxf(c[t][j], c[t][j + 2]);
        higher = higher || largest[t][j] > maximum[t][j] + kMaximumSlack;
      }
    }
    // Most steps move no maximum: weights first, then the question whether they count. Other warps
    // may still read those of the step before: they are elsewhere, or waited for.
    const uint32_t stored = storage + turn * (kUsed * 8 * kTeamTokens * 2);
    turn ^= 1;
    float sums[kUsed][2];
    store_weights<kUsed>(c, sums, stored, lane);
    if (team_any(higher)) {
      raise_maxima<kUsed>(largest, stored, lane);
      store_weights<kUsed>(c, sums, stored, lane);
      team_barrier();
    }
#pragma unroll
    for (int t = 0; t < kUsed; ++t) {
#pragma unroll
      for (int j = 0; j < 2; ++j) sum[t][j] += sums[t][j];
    }
    if (!plain) mask_values(values, 0, tokens, lane);
    accumulate<kUsed>(values, stored, 0);
  }

  // 64 tokens, of which those of `tokens` count; see AttentionTile::step. Calls release() when K
  // and V have been read. All warps of the team.
  template <typename Adjust, typename Release>
  __device__ __forceinline__ void step(uint32_t key, uint32_t value, uint64_t tokens, bool plain,
                                       const Adjust& adjust, const Release& release,
                                       const TileLayout& layout, int lane) {
    if (tiles == 4) return step_rows<4>(key, value, tokens, plain, adjust, release, layout, lane);
    step_rows<2>(key, value, tokens, plain, adjust, release, layout, lane);
  }

  // What this thread knows, in units of 16 bytes: of 4 tiles at a time maxima and sums, then
  // results.
  static constexpr int kUnits = kMaxTiles * (1 + kHalves);
  static __device__ __forceinline__ int tile_of_unit(int unit) {
    return unit / (4 * (1 + kHalves)) * 4 + unit % 4;
  }
  static __device__ __forceinline__ int plane_of_unit(int unit) { return unit / 4 % (1 + kHalves); }
  __device__ __forceinline__ bool has_unit(int unit) const { return tile_of_unit(unit) < tiles; }
  __device__ __forceinline__ float4 unit(int unit) const {
    const int t = tile_of_unit(unit), plane = plane_of_unit(unit);
    if (plane == 0) return {maximum[t][0], maximum[t][1], sum[t][0], sum[t][1]};
    const float (&values)[4] = out[plane - 1][t];
    return {values[0], values[1], values[2], values[3]};
  }
  // Adds the same of other tokens, unit by unit.
  __device__ __forceinline__ void add_unit(int unit, const float4& theirs) {
    const int t = tile_of_unit(unit), plane = plane_of_unit(unit);
    float (&factor)[2] = theirs_factor[unit % 4];
    if (plane == 0) {
      const float maxima[2] = {theirs.x, theirs.y}, sums[2] = {theirs.z, theirs.w};
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float updated = fmaxf(maximum[t][j], maxima[j]);
        factor[j] = exp2_approx(maxima[j] - updated);
        rescale(t, j, updated);
        sum[t][j] += factor[j] * sums[j];
      }
      return;
    }
    float (&values)[4] = out[plane - 1][t];
    values[0] += factor[0] * theirs.x;
    values[1] += factor[1] * theirs.y;
    values[2] += factor[0] * theirs.z;
    values[3] += factor[1] * theirs.w;
  }

  __device__ __forceinline__ int rows_in_use() const { return tiles * 8; }
  // Fragments of 16 dimensions x 8 rows, of all 4 warps. A lane's values j are of the two rows
  // fragment_row(lane, f, pair_of(j)), whose stats lie side by side from place_of_stats() on.
  __device__ __forceinline__ int fragments() const { return kHalves * tiles * 4; }
  __device__ __forceinline__ int fragment_row(int lane, int f, int j) const {
    return row_of(lane, f % (tiles * 4) / 4, j);
  }
  static __device__ __forceinline__ constexpr int pair_of(int j) { return j & 1; }
  static __device__ __forceinline__ int place_of_stats(int row) { return row; }
  template <typename Action>
  __device__ __forceinline__ void each_fragment(const Action& action) const {
#pragma unroll
    for (int t = 0; t < kMaxTiles; ++t) {
      if (t >= tiles) continue;
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        action((half * tiles + t) * 4 + member, out[half][t]);
      }
    }
  }
  // Whether, of the lanes that have a row, this one is to write what there is one of.
  __device__ __forceinline__ bool first_of_rows(int lane, int f) const {
    return f % 4 == 0 && lane < 4;
  }
  // A fragment's values, to `out`, where rows begin at starts[row], if that is not negative.
  template <typename T>
  __device__ __forceinline__ void write_fragment(T* out, const int64_t* starts, int f,
                                                 const float (&values)[4], int lane) const {
    // Dimensions x rows -> rows x dimensions.
    const uint32_t low = transpose_matrix(pack2<T>(values[0], values[1]));
    const uint32_t high = transpose_matrix(pack2<T>(values[2], values[3]));
    const int half = f / (tiles * 4), i = f % (tiles * 4);
    const int64_t start = starts[i / 4 * 8 + lane / 4];
    const int d = (half * 4 + i % 4) * 16;
    if (start < 0 || d >= head_size) return;
    T* to = out + start + d;
    if constexpr (kRows) {  // even dimensions, odd dimensions
      const uint2 four = {__byte_perm(low, high, 0x5410), __byte_perm(low, high, 0x7632)};
      *reinterpret_cast<uint2*>(to + lane % 4 * 4) = four;
    } else {
      *reinterpret_cast<uint32_t*>(to + lane % 4 * 2) = low;
      if (d + 8 < head_size) *reinterpret_cast<uint32_t*>(to + 8 + lane % 4 * 2) = high;
    }
  }

  // A row's maximum and sum of all tokens, for thread `row` of the team.
  __device__ __forceinline__ float2 row_stats(int thread, int lane) {
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
    // Sums [rows][4 warps], then maxima, in the place of weights that no warp reads any more.
    const uint32_t maxima = storage + tiles * 8 * 16;
    team_barrier();
    if (lane < 4) {
#pragma unroll
      for (int t = 0; t < kMaxTiles; ++t) {
        if (t >= tiles) continue;
        const int row = row_of(lane, t, 0);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          store_shared(storage + ((row + j) * 4 + member) * 4, sum[t][j]);
          if (member == 0) store_shared(maxima + (row + j) * 4, maximum[t][j]);
        }
      }
    }
    team_barrier();
    if (thread >= tiles * 8) return {kNoMaximum, 0.0f};
    const float4 four = load_shared<float4>(storage + thread * 16);
    return {load_shared<float>(maxima + thread * 4), four.x + four.y + four.z + four.w};
  }
};

#endif

}  // namespace vllm_kernels::cuda
