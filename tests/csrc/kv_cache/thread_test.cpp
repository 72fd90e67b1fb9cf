// Many threads on one manager, each with ids of its own; under TSan this shows a missing lock.
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "kv_cache/errors.h"
#include "kv_cache/kv_cache_manager.h"
#include "kv_cache/ledger.h"
#include "kv_cache/test_access.h"

namespace vllm_kernels::kv_cache {
namespace {

using Ids = std::vector<int64_t>;

// A prompt that all threads share, decoded a little, swapped out and in, and freed.
void share(KVCacheManager& manager, int64_t id, std::mt19937_64& random,
           std::atomic<int64_t>& refusals) {
  const std::vector<int32_t> prompt(1 + random() % 20, 5);
  std::vector<BlockCopy> copies(32);
  bool there = false;
  try {
    const int64_t cached = manager.allocate(id, prompt, kMaxTokens, {});
    there = true;
    ASSERT_LT(cached, static_cast<int64_t>(prompt.size()));
    for (int32_t token = 0; token < 6; ++token) {
      manager.append(id, 1, {.tokens = std::span(&token, 1)});
    }
    manager.swap_out(Ids{id}, copies);
    manager.swap_in(Ids{id}, copies);
    manager.take_events();
  } catch (const OutOfBlocks&) {
    ++refusals;
  }
  if (there) manager.free(id);
}

void work(KVCacheManager& manager, int64_t thread, std::atomic<int64_t>& refusals) {
  std::mt19937_64 random(static_cast<uint64_t>(thread));
  const Ids ids = {thread * 10, thread * 10 + 1};
  TestBuffers buffers(2, 64, 64);
  std::vector<BlockCopy> copies(2);
  for (int round = 0; round < 300; ++round) {
    share(manager, thread * 10 + 2, random, refusals);
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
      ASSERT_EQ(statistics.used_blocks + statistics.cached_blocks + statistics.free_blocks,
                statistics.total_blocks);
    }
    manager.free(ids);
  }
}

TEST(Threads, ShareOneManager) {
  constexpr int64_t kThreads = 8;
  KVCacheManager manager(
      Options{.num_blocks = 90, .block_size = 4, .num_host_blocks = 40, .events = true});
  std::atomic<int64_t> refusals{0};
  std::vector<std::thread> threads;
  for (int64_t i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] { work(manager, i, refusals); });
  }
  for (std::thread& thread : threads) thread.join();
  manager.check_integrity();
  EXPECT_EQ(manager.num_free_blocks(), 90);
  EXPECT_EQ(manager.num_free_host_blocks(), 40);
  EXPECT_GT(manager.statistics().hit_tokens, 0);
  EXPECT_EQ(manager.num_sequences(), 0);
}

// Loans of one sequence a thread, while other threads use the same managers.
void borrow(Ledger& ledger, std::vector<std::unique_ptr<KVCacheManager>>& managers, int64_t thread,
            std::atomic<int64_t>& loans) {
  std::mt19937_64 random(static_cast<uint64_t>(thread));
  const int64_t home = thread % ledger.num_instances();
  std::vector<InstanceBlock> blocks(3);
  std::vector<BlockMove> moves(1);
  for (int round = 0; round < 300; ++round) {
    try {
      managers[home]->allocate(100 + thread, 1 + static_cast<int64_t>(random() % 30));
      managers[home]->free(100 + thread);
      ledger.lend(Ledger::kAnyInstance, home, thread, blocks);
      ++loans;
      if (round % 4 == 0) ledger.recall((home + 1) % ledger.num_instances(), moves);
    } catch (const Error&) {  // out of blocks, or nothing to recall
    }
    if (random() % 3 == 0 && ledger.contains(thread)) ledger.free(thread);
    if (round % 16 == 0) ledger.counts(home);
  }
  if (ledger.contains(thread)) ledger.free(thread);
}

TEST(Threads, ShareOneLedger) {
  std::vector<std::unique_ptr<KVCacheManager>> managers;
  std::vector<KVCacheManager*> pointers;
  for (int i = 0; i < 3; ++i) {
    managers.push_back(std::make_unique<KVCacheManager>(20, 4));
    pointers.push_back(managers.back().get());
  }
  Ledger ledger(pointers);
  std::atomic<int64_t> loans{0};
  std::vector<std::thread> threads;
  for (int64_t i = 0; i < 6; ++i) {
    threads.emplace_back([&, i] { borrow(ledger, managers, i, loans); });
  }
  for (std::thread& thread : threads) thread.join();
  ledger.check_integrity();
  EXPECT_GT(loans, 0);
  for (const auto& manager : managers) EXPECT_EQ(manager->num_free_blocks(), 20);
}

}  // namespace
}  // namespace vllm_kernels::kv_cache
