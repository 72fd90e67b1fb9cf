// Attention of up to 64 query rows over 64 tokens of a 16-bit cache at a time, by a team of 4
// warps, where K and V are operands of Hopper's warpgroup products as they lie in shared memory:
//   S [64 rows, 64 tokens] = Q [64, D] K^T [D, 64]     Q in registers
//   O [64 rows, D]        += P [64, 64] V [64, D]      P in registers: S's fragments are A's
// A warp has 16 rows, so that nothing of a step passes between warps. For the products, and for
// where K and V lie (forms kOperands and kRows), see attention_prefill.cuh; V of kOperands has
// dimensions of 16 tokens, rows of 32 bytes in the pattern of that many.
#pragma once
#include "cuda/attention_prefill.cuh"
#include "cuda/attention_team.cuh"

namespace vllm_kernels::cuda {

#if defined(VLLM_KERNELS_HAS_WGMMA)

template <typename Element, int kMaxHeadSize, PageForm kPageForm>
struct TeamRowsConfig {
  using T = Element;
  static constexpr int kHeadSize = kMaxHeadSize, kTokens = kTeamTokens, kRows = 64;
  static constexpr PageForm kForm = kPageForm;
  static constexpr bool kQueryInRegisters = true;
};

// kForm: of what products read.
template <typename Cache, int kMaxHeadSize, PageForm kForm>
struct TeamRowsTile : TeamMember<2> {
  static constexpr bool kWide = sizeof(Cache) == 2, kRows = kForm == PageForm::kRows;
  using Element = std::conditional_t<kWide, Cache, __half>;
  using Config = TeamRowsConfig<Element, kMaxHeadSize, kForm>;
  static constexpr int kMaxHead = kMaxHeadSize, kMaxRows = 64;
  static constexpr int kOutTiles = kMaxHeadSize / 8;

  PrefillTile<Config> products;
  float scale[2];  // from product to log2 units, of this lane's rows
  int head_size;
  int page_bytes;  // form kPages: from one page's V to the next
  int warps;       // that have rows: 1, 2 or 4

  // The row (0 .. 63) of this lane's values 2j and 2j + 1; `warp` of the team.
  static __device__ __forceinline__ int row_of(int lane, int warp, int j) {
    return warp * 16 + lane / 4 + 8 * j;
  }
  __device__ __forceinline__ void set_addresses(const TileLayout& layout, int) {
    page_bytes = layout.page_bytes;
  }

  // Where 16 bytes of a query row lie: 8 dimensions, in order.
  static __device__ __forceinline__ uint32_t query_place(uint32_t query, int row, int chunk, int) {
    return query + chunk / 8 * (64 * 128) + row * 128 + (chunk ^ row) % 8 * 16;
  }

  template <typename Query>
  static __device__ __forceinline__ void narrow_row(uint32_t query, uint32_t scales, int row, int) {
    narrow_query_row<Query, kMaxHeadSize / 8>(
        [&](int chunk) { return query_place(query, row, chunk, 0); }, scales + row * 4,
        [](uint4&, uint4&) {});
  }

  __device__ __forceinline__ void start(int tiles, uint32_t query, uint32_t scales, float to_log2,
                                        int thread) {
    warps = tiles / 2;
    products.load_query(query, thread);
    products.clear();
    products.start_sums();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      scale[r] = to_log2;
      if (!kWide) scale[r] *= load_shared<float>(scales + row_of(thread % 32, member, r) * 4);
    }
  }

  // See TeamColumnsTile::step.
  template <typename Adjust, typename Release>
  __device__ __forceinline__ void step(uint32_t key, uint32_t value, uint64_t tokens, bool plain,
                                       const Adjust& adjust, const Release& release,
                                       const TileLayout&, int lane) {
    products.start_scores(0, key);
    if (!plain) clear_values(value, tokens, member * 32 + lane);
    wgmma_wait<0>();
    settle(products.scores);
    float unit[2] = {scale[0], scale[1]};
    if (!plain) {
      products.each_score([&](int i, int j, float score) {
        const int token = 8 * i + lane % 4 * 2 + j % 2;
        return tokens >> token & 1 ? adjust(score * scale[j / 2], member, j / 2, token) : -INFINITY;
      });
      unit[0] = unit[1] = 1.0f;
    }
    float factor[2];
    if (products.weigh(unit, factor)) products.rescale(factor);
    products.pack_weights();
    if (!plain) team_barrier();  // V is clear
    start_out(value);
    wgmma_wait<0>();
    settle(products.out);
    settle(products.weights);
    release();
  }

  // Units and fragments: see TeamColumnsTile.
  static constexpr int kUnits = 1 + kOutTiles;
  __device__ __forceinline__ bool has_unit(int) const { return true; }
  __device__ __forceinline__ float4 unit(int unit) const {
    if (unit == 0) {
      return {products.maximum[0], products.maximum[1], products.sum[0], products.sum[1]};
    }
    const float (&values)[4] = products.out[unit - 1];
    return {values[0], values[1], values[2], values[3]};
  }
  __device__ __forceinline__ void add_unit(int unit, const float4& theirs) {
    if (unit == 0) {
      const float maxima[2] = {theirs.x, theirs.y}, sums[2] = {theirs.z, theirs.w};
      float factor[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float updated = fmaxf(products.maximum[r], maxima[r]);
        factor[r] = exp2_approx(products.maximum[r] - updated);
        theirs_factor[r] = exp2_approx(maxima[r] - updated);
        products.maximum[r] = updated;
        products.sum[r] = products.sum[r] * factor[r] + sums[r] * theirs_factor[r];
      }
      products.rescale(factor);
      return;
    }
    float (&values)[4] = products.out[unit - 1];
    values[0] += theirs_factor[0] * theirs.x;
    values[1] += theirs_factor[0] * theirs.y;
    values[2] += theirs_factor[1] * theirs.z;
    values[3] += theirs_factor[1] * theirs.w;
  }

  __device__ __forceinline__ int rows_in_use() const { return warps * 16; }
  __device__ __forceinline__ int fragments() const { return kOutTiles * warps; }
  __device__ __forceinline__ int fragment_row(int lane, int f, int j) const {
    return row_of(lane, f & warps - 1, j);
  }
  static __device__ __forceinline__ constexpr int pair_of(int j) { return j >> 1; }
  static __device__ __forceinline__ int place_of_stats(int row) {
    return row / 16 * 16 + row % 8 * 2 + row / 8 % 2;
  }
  template <typename Action>
  __device__ __forceinline__ void each_fragment(const Action& action) const {
    if (member >= warps) return;
#pragma unroll
    for (int i = 0; i < kOutTiles; ++i) action(warps * i + member, products.out[i]);
  }
  __device__ __forceinline__ bool first_of_rows(int lane, int f) const {
    return f < warps && lane % 4 == 0;
  }
  template <typename T>
  __device__ __forceinline__ void write_fragment(T* out, const int64_t* starts, int f,
                                                 const float (&values)[4], int lane) const {
    const int d = f / warps * 8 + lane % 4 * 2;
    if (d >= head_size) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int64_t start = starts[fragment_row(lane, f, r)];
      if (start < 0) continue;
      *reinterpret_cast<uint32_t*>(out + start + d) = pack2<T>(values[2 * r], values[2 * r + 1]);
    }
  }
  // A row's maximum and sum of all tokens, for thread `row` of the team.
  __device__ __forceinline__ float2 row_stats(int thread, int lane) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = quad_sum(products.sum[r]);
      if (lane % 4 == 0) {
        const uint32_t at = storage + row_of(lane, member, r) * 8;
        store_shared(at, products.maximum[r]);
        store_shared(at + 4, sum);
      }
    }
    team_barrier();
    if (thread >= rows_in_use()) return {kNoMaximum, 0.0f};
    return {load_shared<float>(storage + thread * 8), load_shared<float>(storage + thread * 8 + 4)};
  }

 private:
  float theirs_factor[2];  // see add_unit()

  __device__ __forceinline__ void start_out(uint32_t value) {
    if constexpr (kForm != PageForm::kPages) return products.start_out(value);
    settle(products.weights);
    settle(products.out);
    wgmma_fence();
    const MatrixDescriptor columns(value, page_bytes, 128, Swizzle::kNone);
#pragma unroll
    for (int part = 0; part < kTeamTokens / 16; ++part) {
      wgmma_registers<Element, false>(products.out, products.weights[part],
                                      columns.behind(part * 2 * page_bytes), true);
    }
    wgmma_commit();
  }
  // V of tokens that do not count must not reach a product, whatever lies there: 0 * NaN is NaN.
  __device__ __forceinline__ void clear_values(uint32_t value, uint64_t tokens, int thread) const {
    const int width = kForm == PageForm::kPages ? head_size : kMaxHeadSize;
#pragma unroll 1
    for (int i = thread; i < kTeamTokens / 8 * width; i += 128) {  // pieces of 16 bytes
      const uint32_t at = value + i * 16;
      if constexpr (kRows) {
        if (!(tokens >> i / 8 % kTeamTokens & 1)) store_shared(at, uint4{0, 0, 0, 0});
      } else {
        // Of 8 tokens.
        const int eight =
            kForm == PageForm::kPages ? i / width : i / (2 * width) * 2 + ((i ^ i >> 3) & 1);
        const uint32_t there = static_cast<uint32_t>(tokens >> eight * 8);
        if ((there & 0xff) == 0xff) continue;
        const auto mask = [&](int pair) {
          return (there >> 2 * pair & 1 ? 0xffffu : 0u) |
                 (there >> 2 * pair & 2 ? 0xffff0000u : 0u);
        };
        const uint4 pack = load_shared<uint4>(at);
        store_shared(at,
                     uint4{pack.x & mask(0), pack.y & mask(1), pack.z & mask(2), pack.w & mask(3)});
      }
    }
    fence_async_proxy();
  }
};

#endif

}  // namespace vllm_kernels::cuda
