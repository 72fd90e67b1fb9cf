// Attention over tiles of 32 tokens in shared memory, by a block of 128 threads that has the 4
// query heads of one KV head. Introduced by step 3; steps 4 and 5 change only where tiles lie.
//
//   load     all threads copy K and V of the tile, 16 bytes each time
//   scores   thread = (head, token): a warp has a head, a lane has a token
//   output   thread = dimension, of all 4 heads: each v is read once and used 4 times
#pragma once
#include "common.cuh"

constexpr int kTile = 32;
constexpr int kThreads = kGroup * 32;
static_assert(kThreads == kHeadSize, "a thread per dimension");

struct Tile {
  alignas(16) bf16 key[kTile][kRow];
  alignas(16) bf16 value[kTile][kRow];
  alignas(16) float query[kGroup][kHeadSize];
  alignas(16) float probs[kTile][kGroup];
  float factor[kGroup];
};

struct TileAttention {
  Tile& tile;
  float max = -INFINITY, sum = 0;  // of this warp's head; equal in all lanes
  float out[kGroup] = {};          // this thread's dimension of each head

  __device__ void load_query(const Attention<bf16>& a, int seq, int kv_head) {
    for (int head = 0; head < kGroup; ++head) {
      const int64_t row = query_row(a, seq, kv_head * kGroup + head);
      tile.query[head][threadIdx.x] = __bfloat162float(a.query[row + threadIdx.x]);
    }  // visible to all after the next __syncthreads()
  }

  // Tokens first to first + kTile. row_of(t) is the offset of token t; tokens from len on are 0.
  template <typename RowOf>
  __device__ void load(const Attention<bf16>& a, int first, int len, const RowOf& row_of) {
    constexpr int kVecs = kHeadSize / kVec;  // of a row
    for (int i = threadIdx.x; i < kTile * kVecs; i += kThreads) {
      const int t = i / kVecs, d = i % kVecs * kVec;
      uint4 key = {0, 0, 0, 0}, value = {0, 0, 0, 0};
      if (first + t < len) {
        const int64_t at = row_of(first + t) + d;
        key = *reinterpret_cast<const uint4*>(a.key + at);
        value = *reinterpret_cast<const uint4*>(a.value + at);
      }
      *reinterpret_cast<uint4*>(&tile.key[t][d]) = key;
      *reinterpret_cast<uint4*>(&tile.value[t][d]) = value;
    }
  }

  // One step of the online softmax for each head, 32 tokens at once.
  __device__ void scores(float scale, int first, int len) {
    const int head = threadIdx.x / 32, token = threadIdx.x % 32;
    float score = 0;
    for (int d = 0; d < kHeadSize; d += kVec) {  // kRow: 8 lanes' 16 bytes are in all 32 banks
      const uint4 key = *reinterpret_cast<const uint4*>(&tile.key[token][d]);
      const float4* query = reinterpret_cast<const float4*>(&tile.query[head][d]);
      score += dot4(query[0], unpack(key.x, key.y)) + dot4(query[1], unpack(key.z, key.w));
    }
    score = first + token < len ? scale * score : -INFINITY;
    const float new_max = fmaxf(max, warp_max(score));
    const float factor = __expf(max - new_max), p = __expf(score - new_max);
    sum = sum * factor + warp_sum(p);
    max = new_max;
    tile.probs[token][head] = p;
    if (token == 0) tile.factor[head] = factor;
  }

  __device__ void output() {
    for (int head = 0; head < kGroup; ++head) out[head] *= tile.factor[head];
    for (int t = 0; t < kTile; ++t) {
      const float4 p = *reinterpret_cast<const float4*>(tile.probs[t]);
      const float value = __bfloat162float(tile.value[t][threadIdx.x]);
      out[0] += p.x * value;
      out[1] += p.y * value;
      out[2] += p.z * value;
      out[3] += p.w * value;
    }
  }

  template <typename RowOf>
  __device__ void attend(const Attention<bf16>& a, int begin, int end, const RowOf& row_of) {
    for (int first = begin; first < end; first += kTile) {
      load(a, first, end, row_of);
      __syncthreads();  // the tile is complete
      scores(a.scale, first, end);
      __syncthreads();  // probs and factor are complete
      output();
      __syncthreads();  // nobody reads the tile any more
    }
  }

  // Divides by the sums, which are in the warps of the heads, and returns each head's log-sum-exp.
  __device__ void finish(float (&lse)[kGroup]) {
    if (threadIdx.x % 32 == 0) {
      tile.probs[0][threadIdx.x / 32] = sum;
      tile.factor[threadIdx.x / 32] = max;
    }
    __syncthreads();
    for (int head = 0; head < kGroup; ++head) {
      const float total = tile.probs[0][head];
      out[head] = total > 0 ? out[head] / total : 0;
      lse[head] = tile.factor[head] + __logf(total);  // empty: -inf
    }
  }
};
