// Paged attention on tensor cores, layout vllm, one query token a sequence.
//
// A block serves one KV head (up to 8 * kHeadTiles of its query heads) of one sequence or
// partition. Its warps take the pages in turn, each through a ring of its own (page_ring.cuh), so
// every page is read once for all query heads of its KV head. Both products are swapped, so that
// tokens and head dimensions fill the 16 rows of an m16n8k16 and the query heads its 8 columns:
//   S^T [16 tokens, 8 heads] = K [16, D] Q^T [D, 8]
//   O^T [D, 8 heads]        += V^T [D, 16] P^T [16, 8]
// A page of K, [D/x][tokens][x], is a row of 8x8 core matrices as ldmatrix wants them, and a page
// of V, [D][tokens], is V^T already. Maxima and sums are per column, so rescaling O needs no
// shuffle.
//
// 8-bit caches: the index along k of an mma is free as long as both operands agree. A 16-byte row
// of 16 elements falls to the lanes as 4 consecutive ones each, so slots {2j, 2j+1, 2j+8, 2j+9} of
// k stand for elements 4j .. 4j+3; the token rows of K are permuted the same way, so that P comes
// out in V's order. Elements are widened to fp16 exactly; each query row is scaled by a power of
// two so that bfloat16's range fits, which loses nothing.
#pragma once
#include <type_traits>

#include "cuda/attention/common/combine.cuh"
#include "cuda/attention/mma/page_ring.cuh"
#include "cuda/base/launch.cuh"
#include "cuda/base/upcast.cuh"

namespace vllm_kernels::cuda {

constexpr int kMaxWarps = 8;

// The part of the score that is not a product: what a token's position does to it.
struct Mask {
  int seq_len;
  int end;     // tokens from here on do not count
  bool plain;  // neither ALiBi nor block-sparse
};

template <typename Query, typename Cache, int kMaxHeadSize, int kHeadTiles>
struct MmaTile {
  static constexpr bool kWide = sizeof(Cache) == 2;  // 16-bit cache, multiplied as it is
  using Element = std::conditional_t<kWide, Query, __half>;
  static constexpr int kSteps = kMaxHeadSize / 16;

  // The B operand, dimensions x heads, stays in registers where they suffice; otherwise the warps
  // share one copy, [kHeadTiles * kSteps][32 lanes] pairs.
  static constexpr bool kSharedQuery = kHeadTiles * kSteps > 16;
  static constexpr int kSharedQuerySize = kSharedQuery ? kHeadTiles * kSteps * 32 : 1;
  uint2 query[kSharedQuery ? 1 : kHeadTiles][kSharedQuery ? 1 : kSteps];
  uint2* shared_query;
  float out[kHeadTiles][kSteps][4];  // O^T accumulators: 16 dimensions x 8 heads a step
  float maximum[kHeadTiles][2];      // log2 units, of this lane's two heads
  float sum[kHeadTiles][2];          // this lane's tokens only, until reduce_sums()
  float scale[kHeadTiles][2];        // from product to log2 units
  int head_size;

  // Rows of a page that this lane addresses for ldmatrix.
  uint32_t key_row, value_row;    // byte offsets inside a stage
  uint32_t key_step, value_step;  // bytes from one step to the next
  uint32_t key_tile, value_tile;  // bytes from one 16-token tile of a page to the next
  uint32_t zeros;                 // shared address of 16 zero bytes

  __device__ __forceinline__ void set_query(int tile, int k, int lane, uint2 pair) {
    if constexpr (kSharedQuery) {
      shared_query[(tile * kSteps + k) * 32 + lane] = pair;  // every warp writes the same
    } else {
      query[tile][k] = pair;
    }
  }
  __device__ __forceinline__ uint2 get_query(int tile, int k, int lane) const {
    if constexpr (kSharedQuery) {
      return shared_query[(tile * kSteps + k) * 32 + lane];
    } else {
      return query[tile][k];
    }
  }

  // The token (0 .. 15) of this lane's score element j.
  static __device__ __forceinline__ int token_of(int lane, int j) {
    const int row = lane / 4, high = j >> 1;
    return kWide ? row + 8 * high : (row >> 1) * 4 + (row & 1) + 2 * high;
  }

  __device__ void load_query(const PagedAttentionParams& p, const HeadRange& heads, int seq,
                             int lane) {
    head_size = p.kv.head_size;
    const float k_scale = !kWide && p.kv.k_scale != nullptr ? *p.kv.k_scale : 1.0f;
    const Query* rows = static_cast<const Query*>(p.query) + seq * p.query_stride;
#pragma unroll
    for (int tile = 0; tile < kHeadTiles; ++tile) {
      const int head = tile * 8 + lane / 4;
      const bool real = head < heads.count;
      const Query* row = rows + static_cast<int64_t>(heads.first + (real ? head : 0)) * head_size;
      if constexpr (kWide) {
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
          const int d = k * 16 + (lane % 4) * 2;
          const auto pair = [&](int at) {
            return real && at < head_size ? *reinterpret_cast<const uint32_t*>(row + at) : 0u;
          };
          set_query(tile, k, lane, {pair(d), pair(d + 8)});
        }
        scale[tile][0] = scale[tile][1] = p.scale * kLog2E;
      } else {
        const auto at = [&](int k, int j) {
          const int d = k * 16 + (lane % 4) * 4 + j;
          return real && d < head_size ? to_float(row[d]) : 0.0f;
        };
        float largest = 0.0f;
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
#pragma unroll
          for (int j = 0; j < 4; ++j) largest = fmaxf(largest, fabsf(at(k, j)));
        }
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
        // Brings the largest element to [2^14, 2^15), in reach of fp16 whatever the dtype's range.
        const int exponent = largest > 0.0f && largest < INFINITY ? 14 - ilogbf(largest) : 0;
        const int clamped = min(max(exponent, -100), 100);
        const float factor = exp2f(static_cast<float>(clamped));
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
          set_query(tile, k, lane,
                    {pack2<__half>(at(k, 0) * factor, at(k, 1) * factor),
                     pack2<__half>(at(k, 2) * factor, at(k, 3) * factor)});
        }
        const float inverse = exp2f(static_cast<float>(-clamped)) * p.scale * k_scale * kLog2E;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          scale[tile][j] = __shfl_sync(0xffffffffu, inverse, ((lane % 4) * 2 + j) * 4);
        }
      }
    }
  }

  __device__ void clear() {
#pragma unroll
    for (int tile = 0; tile < kHeadTiles; ++tile) {
      maximum[tile][0] = maximum[tile][1] = kRowMaxInit;
      sum[tile][0] = sum[tile][1] = 0.0f;
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
#pragma unroll
        for (int j = 0; j < 4; ++j) out[tile][k][j] = 0.0f;
      }
    }
  }

  __device__ void set_addresses(int block_size, int page_bytes, int lane, uint32_t zero_bytes) {
    zeros = zero_bytes;
    const int row = lane & 7, second = lane >> 3 & 1, upper = lane >> 4;
    if constexpr (kWide) {
      // K matrices: (tokens 0-7, chunk 0) (8-15, 0) (0-7, 1) (8-15, 1); a chunk is 8 dimensions.
      const int chunk_bytes = block_size * 16;
      key_row = upper * chunk_bytes + row * 16 + second * (block_size == 8 ? page_bytes : 8 * 16);
      key_step = 2 * chunk_bytes;
      key_tile = 16 * 16;
      // V matrices: (dims 0-7, tokens 0-7) (8-15, 0-7) (0-7, 8-15) (8-15, 8-15).
      value_row = (second * 8 + row) * block_size * 2 + upper * (block_size == 8 ? page_bytes : 16);
      value_step = 16 * block_size * 2;
      value_tile = 16 * 2;
    } else {
      // K matrices: (slots 0-7, chunk 0) (8-15, 0) (0-7, 1) (8-15, 1); a chunk is 16 dimensions.
      const int token = (row >> 1) * 4 + (row & 1) + second * 2;
      key_row = upper * block_size * 16 + token * 16;
      key_step = block_size * 16;
      key_tile = 16 * 16;
      // V matrices: 32 rows of 16 tokens, two steps at once.
      value_row = lane * block_size;
      value_step = 16 * block_size;
      value_tile = 16;
    }
  }

  __device__ __forceinline__ void scores(float (&c)[kHeadTiles][4], uint32_t key, int lane) const {
#pragma unroll
    for (int tile = 0; tile < kHeadTiles; ++tile) {
#pragma unroll
      for (int j = 0; j < 4; ++j) c[tile][j] = 0.0f;
    }
    if constexpr (kWide) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        if (k * 16 >= head_size) break;
        uint32_t a[4];
        // A head size of 8 mod 16 has no second chunk in its last step: take zeros, not NaN.
        const bool absent = lane >= 16 && k * 16 + 8 >= head_size;
        load_matrices(a, absent ? zeros : key + key_row + k * key_step);
#pragma unroll
        for (int tile = 0; tile < kHeadTiles; ++tile) {
          const uint2 b = get_query(tile, k, lane);
          mma_m16n8k16<Element>(c[tile], a, b.x, b.y);
        }
      }
    } else {
#pragma unroll
      for (int k = 0; k < kSteps; k += 2) {
        if (k * 16 >= head_size) break;
        uint32_t bytes[4];
        const bool absent = lane >= 16 && (k + 1) * 16 >= head_size;
        load_matrices(bytes, absent ? zeros : key + key_row + k * key_step);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint32_t a[4];
          upcast4<Cache>(bytes[2 * half], a[0], a[2]);
          upcast4<Cache>(bytes[2 * half + 1], a[1], a[3]);
#pragma unroll
          for (int tile = 0; tile < kHeadTiles; ++tile) {
            const uint2 b = get_query(tile, k + half, lane);
            mma_m16n8k16<Element>(c[tile], a, b.x, b.y);
          }
        }
      }
    }
  }

  // `valid`: how many of the tile's 16 tokens count (the rest are read as zero).
  __device__ __forceinline__ void accumulate(const uint32_t (&weights)[kHeadTiles][2],
                                             uint32_t value, int valid, int lane) {
    if constexpr (kWide) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        if (k * 16 >= head_size) break;
        uint32_t a[4];
        // Rows past the head size belong to another stage, which may be filling.
        const bool absent = (lane >> 3 & 1) && k * 16 + 8 >= head_size;
        load_matrices(a, absent ? zeros : value + value_row + k * value_step);
        if (valid < 16) {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const int left = valid - ((lane % 4) * 2 + (j >> 1) * 8);
            a[j] = left >= 2 ? a[j] : left == 1 ? a[j] & 0xffffu : 0u;
          }
        }
#pragma unroll
        for (int tile = 0; tile < kHeadTiles; ++tile) {
          mma_m16n8k16<Element>(out[tile][k], a, weights[tile][0], weights[tile][1]);
        }
      }
    } else {
#pragma unroll
      for (int k = 0; k < kSteps; k += 2) {
        if (k * 16 >= head_size) break;
        uint32_t bytes[4];
        const bool absent = lane >= 16 && (k + 1) * 16 >= head_size;
        load_matrices(bytes, absent ? zeros : value + value_row + k * value_step);
        if (valid < 16) {
          const int left = valid - (lane % 4) * 4;
          const uint32_t keep = left >= 4 ? 0xffffffffu : left <= 0 ? 0u : (1u << 8 * left) - 1;
#pragma unroll
          for (int j = 0; j < 4; ++j) bytes[j] &= keep;
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint32_t a[4];
          upcast4<Cache>(bytes[2 * half], a[0], a[2]);
          upcast4<Cache>(bytes[2 * half + 1], a[1], a[3]);
#pragma unroll
          for (int tile = 0; tile < kHeadTiles; ++tile) {
            mma_m16n8k16<Element>(out[tile][k + half], a, weights[tile][0], weights[tile][1]);
          }
        }
      }
    }
  }

  // 16 tokens from `first_token` on. `pages`: which 8-token halves hold a readable page.
  __device__ __forceinline__ void step(const PagedAttentionParams& p, const HeadRange& heads,
                                       const Mask& mask, uint32_t key, uint32_t value,
                                       int first_token, uint32_t pages, int lane) {
    float c[kHeadTiles][4];
    scores(c, key, lane);
    const int valid = min(16, mask.end - first_token);
    const bool all = valid == 16 && pages == 3 && mask.plain;
    uint32_t weights[kHeadTiles][2];
#pragma unroll
    for (int tile = 0; tile < kHeadTiles; ++tile) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        c[tile][j] *= scale[tile][j & 1];
        if (!all) {
          const int token = token_of(lane, j);
          bool seen = token < valid && (pages >> (token >> 3) & 1);
          if (!mask.plain) {
            const int head =
                heads.first + min(tile * 8 + (lane % 4) * 2 + (j & 1), heads.count - 1);
            if (p.alibi_slopes != nullptr) {
              c[tile][j] += p.alibi_slopes[head] * kLog2E *
                            static_cast<float>(first_token + token - mask.seq_len + 1);
            }
            if (p.sparse.on()) {
              const int offset =
                  p.sparse.head_offset(head, heads.kv_head, p.num_heads, p.kv.num_kv_heads);
              seen = seen && p.sparse.is_visible(first_token + token, mask.seq_len, offset);
            }
          }
          if (!seen) c[tile][j] = -INFINITY;
        }
      }
      float largest[2] = {fmaxf(c[tile][0], c[tile][2]), fmaxf(c[tile][1], c[tile][3])};
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) {
        largest[0] = fmaxf(largest[0], __shfl_xor_sync(0xffffffffu, largest[0], distance));
        largest[1] = fmaxf(largest[1], __shfl_xor_sync(0xffffffffu, largest[1], distance));
      }
      // Most tiles move no maximum: skip the rescaling of O by a vote.
      if (__any_sync(0xffffffffu, largest[0] > maximum[tile][0] || largest[1] > maximum[tile][1])) {
        float factor[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float updated = fmaxf(maximum[tile][j], largest[j]);
          factor[j] = exp2_approx(maximum[tile][j] - updated);
          maximum[tile][j] = updated;
          sum[tile][j] *= factor[j];
        }
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
#pragma unroll
          for (int j = 0; j < 4; ++j) out[tile][k][j] *= factor[j & 1];
        }
      }
      float weight[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) weight[j] = exp2_approx(c[tile][j] - maximum[tile][j & 1]);
      sum[tile][0] += weight[0] + weight[2];
      sum[tile][1] += weight[1] + weight[3];
      weights[tile][0] = transpose_matrix(pack2<Element>(weight[0], weight[1]));
      weights[tile][1] = transpose_matrix(pack2<Element>(weight[2], weight[3]));
    }
    accumulate(weights, value, valid, lane);
  }

  // Lanes l, l + 4, ... hold the same heads and different tokens.
  __device__ void reduce_sums() {
#pragma unroll
    for (int tile = 0; tile < kHeadTiles; ++tile) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2) {
          sum[tile][j] += __shfl_xor_sync(0xffffffffu, sum[tile][j], distance);
        }
      }
    }
  }

  // To this warp's part of merge_and_write()'s arrays.
  __device__ void store(const HeadRange& heads, float* part_out, float* part_max, float* part_sum,
                        int lane) const {
#pragma unroll
    for (int tile = 0; tile < kHeadTiles; ++tile) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int head = tile * 8 + (lane % 4) * 2 + j;
        if (head >= heads.count) continue;
        if (lane < 4) {
          part_max[head] = maximum[tile][j];
          part_sum[head] = sum[tile][j];
        }
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
          const int d = k * 16 + lane / 4;
          if (d < head_size) part_out[head * head_size + d] = out[tile][k][j];
          if (d + 8 < head_size) part_out[head * head_size + d + 8] = out[tile][k][2 + j];
        }
      }
    }
  }
};

// Grid: (max_partitions * num_seqs, num_kv_heads * head chunks). Block: warps * 32.
template <typename Query, typename Cache, int kMaxHeadSize, int kHeadTiles>
__global__ void __launch_bounds__(kMaxWarps * 32, 1)
    paged_attention_mma_kernel(PagedAttentionParams p, RingShape shape) {
  extern __shared__ __align__(128) char shared[];
  __shared__ uint64_t barriers[kMaxWarps * kMaxStages];
  __shared__ __align__(16) uint4 zeros;
  launch_dependents();
  wait_for_primary_kernel();

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  const TokenRange tokens = token_range(p, blockIdx.x);
  if (tokens.begin >= tokens.end && tokens.partition > 0) return;
  const HeadRange heads = head_range(p, blockIdx.y, kHeadTiles * 8);
  if (threadIdx.x == 0) zeros = uint4{0, 0, 0, 0};

  // This warp's stages: number warp, warp + warps, ... of the range.
  const int block_size = p.kv.block_size;
  const int stage_tokens = block_size * shape.pages_per_stage;
  const int stages_in_range = (tokens.end - tokens.begin + stage_tokens - 1) / stage_tokens;
  const int my_stages = max(0, (stages_in_range - warp + warps - 1) / warps);
  const int first_page = tokens.begin / block_size;
  const int used_pages = (tokens.end + block_size - 1) / block_size;

  PageRing ring(shape, shared_address(shared) + warp * shape.stages * shape.stage_bytes(),
                barriers + warp * kMaxStages, lane);

  const bool sparse = p.sparse.on();
  const int my_head = heads.first + min(lane, heads.count - 1);
  const int my_offset =
      sparse ? p.sparse.head_offset(my_head, heads.kv_head, p.num_heads, p.kv.num_kv_heads) : 0;

  // Block ids are read 32 at a time, one batch ahead of their use.
  const int pages_per_stage = shape.pages_per_stage;
  const int batch = 32 / pages_per_stage;  // stages
  const int32_t* table = p.block_tables + tokens.seq * p.block_table_stride;
  const auto page_of = [&](int stage, int page) {
    return first_page + (warp + stage * warps) * pages_per_stage + page;
  };
  const auto read_ids = [&](int first_stage) {
    const int page = page_of(first_stage + lane / pages_per_stage, lane % pages_per_stage);
    return page < used_pages ? table[page] : -1;
  };
  int ids = read_ids(0), next_ids = read_ids(batch), batch_start = 0;

  const int64_t key_base = heads.kv_head * p.kv.key_head_stride;
  const int64_t value_base = heads.kv_head * p.kv.value_head_stride;
  const auto fill = [&](int stage) {
    if (stage - batch_start == batch) {
      batch_start = stage;
      ids = next_ids;
      next_ids = read_ids(stage + batch);
    }
    const char* key[2] = {};
    const char* value[2] = {};
    uint32_t mask = 0;
#pragma unroll
    for (int page = 0; page < 2; ++page) {
      if (page == 1 && pages_per_stage == 1) break;
      const int id = __shfl_sync(0xffffffffu, ids, (stage - batch_start) * pages_per_stage + page);
      bool wanted = static_cast<unsigned>(id) < static_cast<unsigned>(p.kv.num_blocks);
      if (sparse && wanted) {
        const int token = page_of(stage, page) * block_size;
        wanted = __any_sync(0xffffffffu, p.sparse.is_visible(token, tokens.seq_len, my_offset));
      }
      mask |= static_cast<uint32_t>(wanted) << page;
      key[page] = static_cast<const char*>(p.kv.key) +
                  (id * p.kv.key_block_stride + key_base) * static_cast<int64_t>(sizeof(Cache));
      value[page] =
          static_cast<const char*>(p.kv.value) +
          (id * p.kv.value_block_stride + value_base) * static_cast<int64_t>(sizeof(Cache));
    }
    ring.fill(key, value, mask);
  };

  for (int stage = 0; stage < shape.stages; ++stage) {
    if (stage < my_stages) {
      fill(stage);
    } else {
      ring.fill_nothing();
    }
  }

  using Tile = MmaTile<Query, Cache, kMaxHeadSize, kHeadTiles>;
  __shared__ uint2 shared_query[Tile::kSharedQuerySize];
  Tile tile;
  tile.shared_query = shared_query;
  tile.load_query(p, heads, tokens.seq, lane);
  tile.clear();
  tile.set_addresses(block_size, shape.page_bytes, lane, shared_address(&zeros));
  const Mask mask{tokens.seq_len, tokens.end, p.alibi_slopes == nullptr && !sparse};
  __syncthreads();  // zeros, shared_query

  for (int stage = 0; stage < my_stages; ++stage) {
    ring.wait();
    const uint32_t present = ring.mask();
    if (present != 0) {
      const int first_token = page_of(stage, 0) * block_size;
      if (pages_per_stage == 2 && present == 1) {
        // The second half of the tile has no page: its V must be zero, whatever lies there.
        char* missing = shared + (ring.value() + shape.page_bytes - shared_address(shared));
        for (int byte = lane * 16; byte < shape.page_bytes; byte += 32 * 16) {
          *reinterpret_cast<uint4*>(missing + byte) = uint4{0, 0, 0, 0};
        }
      } else if (pages_per_stage == 2 && present == 2) {
        char* missing = shared + (ring.value() - shared_address(shared));
        for (int byte = lane * 16; byte < shape.page_bytes; byte += 32 * 16) {
          *reinterpret_cast<uint4*>(missing + byte) = uint4{0, 0, 0, 0};
        }
      }
      __syncwarp();
      const uint32_t halves = pages_per_stage == 2 ? present : 3u;
      for (int t = 0; t * 16 < stage_tokens && first_token + t * 16 < tokens.end; ++t) {
        tile.step(p, heads, mask, ring.key() + t * tile.key_tile,
                  ring.value() + t * tile.value_tile, first_token + t * 16, halves, lane);
      }
#if defined(VLLM_KERNELS_HAS_SM90)
      if (pages_per_stage == 2 && present != 3) fence_async_proxy();
#endif
    }
    ring.release();
    if (stage + shape.stages < my_stages) {
      fill(stage + shape.stages);
    } else {
      ring.fill_nothing();
    }
  }
  tile.reduce_sums();

  // The rings are drained; their memory takes the partial results.
  __syncthreads();
  float* partial_out = reinterpret_cast<float*>(shared);
  float* partial_max = partial_out + warps * heads.count * p.kv.head_size;
  float* partial_sum = partial_max + warps * heads.count;
  tile.store(heads, partial_out + warp * heads.count * p.kv.head_size,
             partial_max + warp * heads.count, partial_sum + warp * heads.count, lane);
  __syncthreads();
  merge_and_write<Query>(p, heads, tokens, warps, partial_out, partial_max, partial_sum);
}

// Warps, stages and shared memory of a launch.
struct LaunchShape {
  int warps;
  RingShape ring;
  size_t shared_bytes;
};

inline LaunchShape launch_shape(const PagedAttentionParams& p, int heads_per_block,
                                int64_t blocks) {
  const DeviceInfo& device = current_device_info();
  const int element = size_of(p.kv.dtype);
  LaunchShape shape;
  shape.ring.pages_per_stage = p.kv.block_size >= 16 ? 1 : 16 / p.kv.block_size;
  shape.ring.page_bytes = p.kv.head_size * p.kv.block_size * element;
  const int stage_bytes = shape.ring.stage_bytes();
  // A grid that does not fill the device gets all of a multiprocessor's memory per block; otherwise
  // two blocks share it, so that one computes while the other starts or ends.
  const int fixed = 1024 + (heads_per_block > 8 ? 8192 : 0);  // with static arrays
  const int all = device.shared_memory_per_block - fixed;
  const int half = (device.shared_memory_per_block - 2048) / 2 - fixed;
  const int budget = blocks <= device.num_sms || 4 * 2 * stage_bytes > half ? all : half;
  shape.warps = kMaxWarps;
  while (shape.warps > 1 && shape.warps * 3 * stage_bytes > budget) shape.warps /= 2;
  shape.ring.stages = budget / (shape.warps * stage_bytes);
  if (shape.ring.stages > kMaxStages) shape.ring.stages = kMaxStages;
  if (shape.ring.stages < 2) shape.ring.stages = 2;
  const size_t rings = static_cast<size_t>(shape.warps) * shape.ring.stages * stage_bytes;
  const size_t merge =
      static_cast<size_t>(shape.warps) * heads_per_block * (p.kv.head_size + 2) * sizeof(float);
  shape.shared_bytes = rings > merge ? rings : merge;
  return shape;
}

template <typename Query, typename Cache, int kMaxHeadSize, int kHeadTiles>
void launch_paged_attention_mma(const PagedAttentionParams& p, void* stream) {
  constexpr auto kKernel = paged_attention_mma_kernel<Query, Cache, kMaxHeadSize, kHeadTiles>;
  const int group = p.num_heads / p.kv.num_kv_heads;
  const int chunks = (group + kHeadTiles * 8 - 1) / (kHeadTiles * 8);
  const dim3 grid(grid_size("paged_attention", int64_t{p.max_partitions} * p.num_seqs),
                  p.kv.num_kv_heads * chunks);
  const LaunchShape shape = launch_shape(p, kHeadTiles * 8, static_cast<int64_t>(grid.x) * grid.y);
  dynamic_shared_memory<kKernel>("paged_attention");
  launch_kernel("paged_attention", kKernel, grid, dim3(shape.warps * 32), shape.shared_bytes,
                stream, p, shape.ring);
}

// For one pair of types: the padded head sizes and the tiles of 8 query heads.
template <typename Query, typename Cache>
void launch_paged_attention_mma(const PagedAttentionParams& p, void* stream) {
  const bool one_tile = p.num_heads / p.kv.num_kv_heads <= 8;
  if (p.kv.head_size <= 64) {
    return one_tile ? launch_paged_attention_mma<Query, Cache, 64, 1>(p, stream)
                    : launch_paged_attention_mma<Query, Cache, 64, 2>(p, stream);
  }
  if (p.kv.head_size <= 128) {
    return one_tile ? launch_paged_attention_mma<Query, Cache, 128, 1>(p, stream)
                    : launch_paged_attention_mma<Query, Cache, 128, 2>(p, stream);
  }
  return one_tile ? launch_paged_attention_mma<Query, Cache, 256, 1>(p, stream)
                  : launch_paged_attention_mma<Query, Cache, 256, 2>(p, stream);
}

}  // namespace vllm_kernels::cuda
