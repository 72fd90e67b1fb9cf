// Many threads on one manager, each with ids of its own; under TSan this shows a missing lock.
#include <gtest/gtest.h>

#include <atomic>
#include <random>
#include <thread>
#include <vector>

#include "kv_cache/errors.h"
#include "kv_cache/kv_cache_manager.h"
#include "kv_cache/test_access.h"

namespace vllm_kernels::kv_cache {
namespace {

using Ids = std::vector<int64_t>;

void work(KVCacheManager& manager, int64_t thread, std::atomic<int64_t>& refusals) {
  std::mt19937_64 random(static_cast<uint64_t>(thread));
  const Ids ids = {thread * 10, thread * 10 + 1};
  TestBuffers buffers(2, 64, 64);
  std::vector<BlockCopy> copies(2);
  for (int round = 0; round < 300; ++round) {
    try {
      manager.allocate(ids[0], 1 + static_cast<int64_t>(random() % 40));
    } catch (const OutOfBlocks&) {
      ++refusals;
      continue;
    }
    manager.fork(ids[0], ids[1]);
    try {
      for (int i = 0; i < 6; ++i) manager.step(ids, Ids{1, 2}, buffers.view, copies);
      manager.reorder(ids, Ids{ids[1], ids[1]});
      manager.append(ids[0], 3);
    } catch (const OutOfBlocks&) {
      ++refusals;
    }
    manager.build(ids, Ids{1, 1}, buffers.view);
    ASSERT_EQ(manager.num_tokens(ids[1]), buffers.seq_lens[1]);
    ASSERT_EQ(static_cast<int64_t>(manager.block_table(ids[0]).size()),
              (manager.num_tokens(ids[0]) + 3) / 4);
    manager.truncate(ids[0], 1);
    if (round % 16 == 0) {
      manager.check_integrity();
      const Statistics statistics = manager.statistics();
      ASSERT_EQ(statistics.used_blocks + statistics.free_blocks, statistics.total_blocks);
    }
    manager.free(ids);
  }
}

TEST(Threads, ShareOneManager) {
  constexpr int64_t kThreads = 8;
  KVCacheManager manager(90, 4);
  std::atomic<int64_t> refusals{0};
  std::vector<std::thread> threads;
  for (int64_t i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] { work(manager, i, refusals); });
  }
  for (std::thread& thread : threads) thread.join();
  manager.check_integrity();
  EXPECT_EQ(manager.num_free_blocks(), 90);
  EXPECT_EQ(manager.num_sequences(), 0);
}

}  // namespace
}  // namespace vllm_kernels::kv_cache
