// Attention of one warp over pages of 16 tokens, by tensor cores. Introduced by step 6; step 7
// changes only how pages reach shared memory.
//
// Both products are swapped. Tokens and dimensions are the 16 rows of an mma, and query heads are
// its 8 columns; the 4 heads of a KV head fill half of them.
//   S^T [16 tokens, 8 heads]     = K [16, 128] Q^T [128, 8]       8 mma of 16 dimensions
//   O^T [128 dimensions, 8 heads] += V^T [128, 16] P^T [16, 8]    8 mma, one per 16 rows of O^T
// A lane has the same two heads in both results, so it rescales O^T without a shuffle.
#pragma once
#include "merge.cuh"
#include "ptx.cuh"

constexpr int kWarps = 4;               // of a block; each has pages of its own
constexpr int kThreads = kWarps * 32;   // also the dimensions
constexpr int kSteps = kHeadSize / 16;  // mma per product
constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

struct Page {
  alignas(16) bf16 key[kPageSize][kRow];
  alignas(16) bf16 value[kPageSize][kRow];
};

// Results of the warps of a block, in shared memory.
struct WarpResults {
  float out[kWarps][kGroup][kHeadSize];
  float max[kWarps][kGroup], sum[kWarps][kGroup];
};

struct WarpAttention {
  int lane;
  float scale_log2;                       // scores are in log2 units: the hardware computes 2^x
  uint32_t query[kSteps][2];              // Q^T, fragments b
  float out[kSteps][4] = {};              // O^T, fragments c
  float max[2] = {-INFINITY, -INFINITY};  // of heads 2 * (lane % 4) and that + 1
  float sum[2] = {0, 0};                  // of this lane's tokens only, until store()

  __device__ void load_query(const Attention<bf16>& a, int seq, int kv_head) {
    const int head = lane / 4;  // column g of Q^T; columns 4 to 7 are no heads: zeros
    for (int k = 0; k < kSteps; ++k) query[k][0] = query[k][1] = 0;
    if (head >= kGroup) return;
    const int64_t row = query_row(a, seq, kv_head * kGroup + head);
    const uint32_t* pairs = reinterpret_cast<const uint32_t*>(a.query + row) + lane % 4;
    for (int k = 0; k < kSteps; ++k) {
      query[k][0] = pairs[k * 8];
      query[k][1] = pairs[k * 8 + 4];
    }
  }

  // One page. Tokens from `present` on are not there; their values must be 0, their keys anything.
  __device__ void attend(const Page& page, int present) {
    // Lane l gives row l % 16 of the page, columns 0-7 or 8-15: the fragment a of 16 x 16.
    const int row = lane % 16, column = lane / 16 * 8;
    uint32_t a[4];
    float s[4] = {};
    for (int k = 0; k < kSteps; ++k) {
      load_matrices(a, &page.key[row][k * 16 + column]);
      mma(s, a, query[k]);
    }
    for (int j = 0; j < 4; ++j) {  // s[j]: token lane / 4 + 8 * (j / 2), head j % 2
      const bool is_present = lane / 4 + j / 2 * 8 < present;
      s[j] = is_present ? s[j] * scale_log2 : -INFINITY;
    }
    float factor[2];
    for (int j = 0; j < 2; ++j) {  // the lanes of a column are 4, 8 and 16 apart
      float new_max = fmaxf(max[j], fmaxf(s[j], s[j + 2]));
      for (int distance = 4; distance < 32; distance *= 2) {
        new_max = fmaxf(new_max, __shfl_xor_sync(kAllLanes, new_max, distance));
      }
      factor[j] = exp2f(max[j] - new_max);
      max[j] = new_max;
      s[j] = exp2f(s[j] - new_max);  // from here on s is P^T
      s[j + 2] = exp2f(s[j + 2] - new_max);
      sum[j] = sum[j] * factor[j] + s[j] + s[j + 2];
    }
    // A fragment c has [token][head], a fragment b wants [head][token] in a register: transposed.
    const uint32_t p[2] = {transpose(pack(s[0], s[1])), transpose(pack(s[2], s[3]))};
    for (int k = 0; k < kSteps; ++k) {
      for (int j = 0; j < 4; ++j) out[k][j] *= factor[j % 2];
      // V^T: matrices of [token][dimension] are transposed. a[1] has dimensions 8-15 of tokens 0-7,
      // a[2] dimensions 0-7 of tokens 8-15, so lanes 8-15 and 16-23 change places.
      const int token = lane % 8 + lane / 16 * 8, dimension = k * 16 + lane / 8 % 2 * 8;
      load_transposed(a, &page.value[token][dimension]);
      mma(out[k], a, p);
    }
  }

  // Combines the warps of the block and stores the split. All threads call it.
  __device__ void store(const Attention<bf16>& a, int seq, int kv_head, int split,
                        WarpResults& results) {
    const int warp = threadIdx.x / 32;
    for (int j = 0; j < 2; ++j) {
      for (int distance = 4; distance < 32; distance *= 2) {
        sum[j] += __shfl_xor_sync(kAllLanes, sum[j], distance);
      }
    }
    for (int j = 0; j < 4; ++j) {
      const int head = lane % 4 * 2 + j % 2;
      if (head >= kGroup) continue;
      for (int k = 0; k < kSteps; ++k) {
        results.out[warp][head][k * 16 + lane / 4 + j / 2 * 8] = out[k][j];
      }
      results.max[warp][head] = max[j % 2];  // several lanes store the same number
      results.sum[warp][head] = sum[j % 2];
    }
    __syncthreads();
    for (int head = 0; head < kGroup; ++head) {
      float all_max = -INFINITY, all_sum = 0, all_out = 0;
      for (int w = 0; w < kWarps; ++w) all_max = fmaxf(all_max, results.max[w][head]);
      for (int w = 0; w < kWarps; ++w) {
        if (results.sum[w][head] == 0) continue;  // a warp without pages
        const float weight = exp2f(results.max[w][head] - all_max);
        all_sum += weight * results.sum[w][head];
        all_out += weight * results.out[w][head][threadIdx.x];
      }
      store_split(a, seq, kv_head * kGroup + head, split, threadIdx.x,
                  all_sum > 0 ? all_out / all_sum : 0, all_max * kLn2 + __logf(all_sum));
    }
  }
};
