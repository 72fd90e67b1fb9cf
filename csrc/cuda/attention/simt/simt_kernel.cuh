// Paged attention without tensor cores: float32, and whatever the tensor-core kernels cannot
// address (8-bit caches with pages of 8 tokens, pages that are not 16-byte aligned). Any stride is
// right, and keys and values may be contiguous, without pages.
//
// A block serves one KV head (up to 8 of its query heads) of one query token or partition; its
// warps take tiles of 32 tokens in turn. For the scores a lane is a token, for the output a lane is
// a dimension, so K and V are read once for all the heads.
#pragma once
#include "cuda/attention/common/combine.cuh"
#include "cuda/base/launch.cuh"
#include "cuda/base/upcast.cuh"

namespace vllm_kernels::cuda {

constexpr int kSimtHeads = 8;
constexpr int kSimtWarps = 4;
constexpr int kSimtMaxHeadSize = 256;

__device__ __forceinline__ float to_float(__nv_fp8_e4m3 x) {
  return static_cast<float>(x);
}
__device__ __forceinline__ float to_float(__nv_fp8_e5m2 x) {
  return static_cast<float>(x);
}

__device__ __forceinline__ float to_float(int8_t x) {
  return static_cast<float>(x);
}

// Grid: (max_partitions * num_seqs, or num_tokens where kGeneral; num_kv_heads * head chunks).
// Block: kSimtWarps * 32.
template <typename Query, typename Cache, bool kGeneral>
__global__ void __launch_bounds__(kSimtWarps * 32)
    paged_attention_simt_kernel(PagedAttentionParams p) {
  // During the loop: the query rows [heads][head_size] and per warp the weights [heads][32].
  // After it: merge_and_write()'s arrays.
  extern __shared__ __align__(16) float simt_shared[];
  launch_dependents();
  wait_for_primary_kernel();

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const TokenRange tokens = kGeneral ? tokens_of_query(p, blockIdx.x) : token_range(p, blockIdx.x);
  if (tokens.query < 0 || (tokens.begin >= tokens.end && tokens.partition > 0)) return;
  const HeadRange heads = head_range(p, blockIdx.y, kSimtHeads);
  const int head_size = p.kv.head_size;
  const float k_scale = sizeof(Cache) == 1 && p.kv.k_scale != nullptr
                            ? p.kv.k_scale[heads.kv_head * p.kv.scale_stride]
                            : 1.0f;

  float* query = simt_shared;
  float* probs = simt_shared + kSimtHeads * head_size + warp * kSimtHeads * 32;
  const Query* rows = static_cast<const Query*>(p.query) + tokens.query * p.query_stride +
                      static_cast<int64_t>(heads.first) * head_size;
  for (int i = threadIdx.x; i < heads.count * head_size; i += blockDim.x) {
    query[i] = to_float(rows[i]) * p.scale * k_scale * kLog2E;
  }
  __syncthreads();

  // Contiguous keys: from the sequence's first on, all of them in block 0.
  const bool contiguous = kGeneral && p.key_start_loc != nullptr;
  const Cache* keys =
      static_cast<const Cache*>(p.kv.key) + tokens.first_key * p.kv.key_token_stride;
  const Cache* values =
      static_cast<const Cache*>(p.kv.value) + tokens.first_key * p.kv.value_token_stride;
  const int32_t* table = p.block_tables + tokens.seq * p.block_table_stride;

  float row_max[kSimtHeads], sum[kSimtHeads], out[kSimtHeads][kSimtMaxHeadSize / 32];
#pragma unroll
  for (int head = 0; head < kSimtHeads; ++head) {
    row_max[head] = kRowMaxInit;
    sum[head] = 0.0f;
#pragma unroll
    for (int i = 0; i < kSimtMaxHeadSize / 32; ++i) out[head][i] = 0.0f;
  }

  for (int first = tokens.begin + warp * 32; first < tokens.end; first += kSimtWarps * 32) {
    const int token = first + lane;
    int block = token >= tokens.end ? -1 : contiguous ? 0 : table[token / p.kv.block_size];
    const int slot = token % p.kv.block_size;
    if (static_cast<unsigned>(block) >= static_cast<unsigned>(p.kv.num_blocks)) block = -1;

    bool any_head_visible = false;
    float score[kSimtHeads];
#pragma unroll
    for (int head = 0; head < kSimtHeads; ++head) score[head] = 0.0f;
    if (block >= 0) {
      for (int d = 0; d < head_size; ++d) {
        const float key = to_float(keys[p.kv.key_offset(block, heads.kv_head, slot, d)]);
#pragma unroll
        for (int head = 0; head < kSimtHeads; ++head) {
          if (head < heads.count) score[head] += query[head * head_size + d] * key;
        }
      }
    }
#pragma unroll
    for (int head = 0; head < kSimtHeads; ++head) {
      if (head >= heads.count) break;
      const int global = heads.first + head;
      bool visible = block >= 0;
      if (kGeneral && p.softcap > 0.0f) {
        const float cap = p.softcap * kLog2E;
        score[head] = cap * tanhf(score[head] / cap);
      }
      if (p.alibi_slopes != nullptr) {
        score[head] -=
            p.alibi_slopes[global] * kLog2E * fabsf(static_cast<float>(token - tokens.position));
      }
      if (p.sparse.on()) {
        const int offset =
            p.sparse.head_offset(global, heads.kv_head, p.num_heads, p.kv.num_kv_heads);
        visible = visible && p.sparse.is_visible(token, tokens.seq_len, offset);
      }
      if (!visible) score[head] = -INFINITY;
      any_head_visible = any_head_visible || visible;
      float largest = score[head];
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
      }
      const float updated = fmaxf(row_max[head], largest);
      const float factor = exp2_approx(row_max[head] - updated);
      row_max[head] = updated;
      const float weight = exp2_approx(score[head] - updated);
      sum[head] = sum[head] * factor + weight;
#pragma unroll
      for (int i = 0; i < kSimtMaxHeadSize / 32; ++i) out[head][i] *= factor;
      probs[head * 32 + lane] = weight;
    }
    if (!any_head_visible) block = -1;
    __syncwarp();
    for (int t = 0; t < 32; ++t) {
      const int from = __shfl_sync(0xffffffffu, block, t);
      if (from < 0) continue;  // V of an absent token is not read
      const int at = (first + t) % p.kv.block_size;
#pragma unroll
      for (int i = 0; i < kSimtMaxHeadSize / 32; ++i) {
        const int d = i * 32 + lane;
        if (d >= head_size) break;
        const float value = to_float(values[p.kv.value_offset(from, heads.kv_head, at, d)]);
#pragma unroll
        for (int head = 0; head < kSimtHeads; ++head) {
          if (head < heads.count) out[head][i] += probs[head * 32 + t] * value;
        }
      }
    }
    __syncwarp();
  }

  __syncthreads();
  float* partial_out = simt_shared;
  float* partial_max = partial_out + kSimtWarps * heads.count * head_size;
  float* partial_sum = partial_max + kSimtWarps * heads.count;
#pragma unroll
  for (int head = 0; head < kSimtHeads; ++head) {
    if (head >= heads.count) break;
    float total = sum[head];
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      total += __shfl_xor_sync(0xffffffffu, total, distance);
    }
    const int row = warp * heads.count + head;
    if (lane == 0) {
      partial_max[row] = row_max[head];
      partial_sum[row] = total;
    }
#pragma unroll
    for (int i = 0; i < kSimtMaxHeadSize / 32; ++i) {
      const int d = i * 32 + lane;
      if (d < head_size) partial_out[row * head_size + d] = out[head][i];
    }
  }
  __syncthreads();
  merge_and_write<Query>(p, heads, tokens, kSimtWarps, partial_out, partial_max, partial_sum);
}

template <bool kGeneral, typename Query, typename Cache>
void launch_paged_attention_simt(const PagedAttentionParams& p, void* stream) {
  const auto kernel = paged_attention_simt_kernel<Query, Cache, kGeneral>;
  const int group = p.num_heads / p.kv.num_kv_heads;
  const int chunks = (group + kSimtHeads - 1) / kSimtHeads;
  const int64_t tokens = kGeneral ? int64_t{p.num_tokens} : int64_t{p.max_partitions} * p.num_seqs;
  const dim3 grid(grid_size("paged_attention", tokens), p.kv.num_kv_heads * chunks);
  const size_t loop = kSimtHeads * (p.kv.head_size + kSimtWarps * 32) * sizeof(float);
  const size_t merge = kSimtWarps * kSimtHeads * (p.kv.head_size + 2) * sizeof(float);
  launch_kernel("paged_attention", kernel, grid, dim3(kSimtWarps * 32), loop > merge ? loop : merge,
                stream, p);
}

// For any pair of types.
template <bool kGeneral>
void launch_paged_attention_simt(const PagedAttentionParams& p, void* stream) {
  dispatch_float(p.dtype, [&](auto tag) {
    using Query = decltype(tag);
    switch (p.kv.dtype) {
      case DType::kFp8E4M3:
        return launch_paged_attention_simt<kGeneral, Query, __nv_fp8_e4m3>(p, stream);
      case DType::kFp8E5M2:
        return launch_paged_attention_simt<kGeneral, Query, __nv_fp8_e5m2>(p, stream);
      case DType::kInt8:
        if constexpr (kGeneral) {
          return launch_paged_attention_simt<kGeneral, Query, int8_t>(p, stream);
        }
        return;
      default:
        return launch_paged_attention_simt<kGeneral, Query, Query>(p, stream);
    }
  });
}

}  // namespace vllm_kernels::cuda
