// clear_unowned_rows() as CUDA runs it: a warp is 32 threads, which vote together. Starts are in
// order, padded, too long for max_query_len, or any numbers.
#include <gtest/gtest.h>

#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <random>
#include <thread>
#include <vector>

#define __device__
#define __forceinline__ inline

namespace {

struct uint4 {
  alignas(16) uint32_t x;
  uint32_t y, z, w;
};
thread_local struct {
  unsigned x;
} threadIdx, blockIdx, gridDim;
std::barrier<> all_lanes(32);
bool votes[32];

int sum_of_votes(bool vote) {
  votes[threadIdx.x % 32] = vote;
  all_lanes.arrive_and_wait();
  int sum = 0;
  for (const bool one : votes) sum += one;
  all_lanes.arrive_and_wait();
  return sum;
}
bool __all_sync(uint32_t, bool vote) {
  return sum_of_votes(vote) == 32;
}
bool __any_sync(uint32_t, bool vote) {
  return sum_of_votes(vote) > 0;
}

}  // namespace

#include "cuda/attention/common/unowned_rows.cuh"

namespace vllm_kernels::cuda {
namespace {

constexpr int kHeads = 3, kHeadSize = 8, kStride = 40;  // 16 elements between rows

struct Batch {
  std::vector<int32_t> starts;
  PagedAttentionParams params{};
};

Batch draw_batch(std::mt19937& random) {
  const auto draw = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  Batch batch;
  PagedAttentionParams& p = batch.params;
  p.num_tokens = draw(1, 60);
  p.num_seqs = draw(1, 70);
  p.max_query_len = draw(1, 4) == 1 ? draw(0, 3) : p.num_tokens;
  p.num_heads = kHeads;
  p.kv.head_size = kHeadSize;
  p.out_stride = kStride;
  p.dtype = DType::kBFloat16;
  p.zero_unowned = draw(0, 3) > 0;
  p.concurrent = draw(0, 9) == 0;
  for (int seq = 0; seq <= p.num_seqs; ++seq) batch.starts.push_back(draw(0, p.num_tokens));
  std::sort(batch.starts.begin(), batch.starts.end());
  if (draw(0, 2) > 0) batch.starts.front() = 0;
  if (draw(0, 2) > 0) batch.starts.back() = p.num_tokens;
  for (int bad = draw(0, 5) - 3; bad > 0; --bad) {
    const int32_t values[] = {INT32_MIN, -1, 0, draw(0, 60), p.num_tokens + 5, INT32_MAX};
    batch.starts[draw(0, p.num_seqs)] = values[draw(0, 5)];
  }
  p.query_start_loc = batch.starts.data();
  return batch;
}

bool is_owned_by_any(const PagedAttentionParams& p, int row) {
  for (int seq = 0; seq < p.num_seqs; ++seq) {
    const RowRange range = query_range(p, seq);
    if (row >= range.first && row < range.first + range.count) return true;
  }
  return false;
}

void run_on_warps(const PagedAttentionParams& p, int blocks, int warps) {
  std::vector<std::thread> lanes;
  for (unsigned lane = 0; lane < 32; ++lane) {
    lanes.emplace_back([&p, lane, blocks, warps] {
      gridDim.x = blocks;
      for (int at = 0; at < blocks * warps; ++at) {
        blockIdx.x = at / warps;
        threadIdx.x = at % warps * 32 + lane;
        clear_unowned_rows(p, threadIdx.x, warps * 32);
      }
    });
  }
  for (std::thread& lane : lanes) lane.join();
}

TEST(UnownedRows, AreClearedAndNoOthers) {
  std::mt19937 random(0);
  int cleared = 0, kept = 0;
  for (int i = 0; i < 150; ++i) {
    Batch batch = draw_batch(random);
    PagedAttentionParams& p = batch.params;
    std::vector<uint4> memory(p.num_tokens * kStride / 8, uint4{7, 7, 7, 7});
    std::vector<float> lse(p.num_tokens * kHeads, 7.0f);
    p.out = memory.data();
    p.lse = i % 3 == 0 ? nullptr : lse.data();
    run_on_warps(p, 1 + i % 3, 1 + i % 2);
    const auto* words = reinterpret_cast<const uint32_t*>(memory.data());
    for (int row = 0; row < p.num_tokens; ++row) {
      const bool clears = !p.concurrent && !is_owned_by_any(p, row);
      clears ? ++cleared : ++kept;
      for (int word = 0; word < kStride / 2; ++word) {
        const bool is_out = word < kHeads * kHeadSize / 2;
        const uint32_t want = clears && p.zero_unowned && is_out ? 0 : 7;
        ASSERT_EQ(words[row * kStride / 2 + word], want) << "batch " << i << " row " << row;
      }
      for (int head = 0; p.lse != nullptr && head < kHeads; ++head) {
        ASSERT_EQ(lse[row * kHeads + head], clears ? -INFINITY : 7.0f) << i << " " << row;
      }
    }
  }
  EXPECT_GT(cleared, 500);
  EXPECT_GT(kept, 500);
}

}  // namespace
}  // namespace vllm_kernels::cuda
