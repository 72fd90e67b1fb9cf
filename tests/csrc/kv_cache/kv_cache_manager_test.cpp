// One sequence at a time: what each call does, and that a refused call does nothing.
#include "kv_cache/kv_cache_manager.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <limits>
#include <string>
#include <vector>

#include "kv_cache/errors.h"
#include "kv_cache/test_access.h"

namespace vllm_kernels::kv_cache {
namespace {

using Blocks = std::vector<int32_t>;
using Ids = std::vector<int64_t>;
constexpr int64_t kLargest = std::numeric_limits<int64_t>::max();

// Runs a call that must throw `Expected`, and sees that nothing changed.
template <typename Expected, typename Call>
std::string refused(KVCacheManager& manager, Call call) {
  const Snapshot before = TestAccess::snapshot(manager);
  std::string message;
  try {
    call();
    ADD_FAILURE() << "expected an error";
  } catch (const Expected& error) {
    message = error.what();
  }
  EXPECT_EQ(TestAccess::snapshot(manager), before);
  manager.check_integrity();
  return message;
}

TEST(KVCacheManager, ConstructorRefusesImpossibleSizes) {
  EXPECT_THROW(KVCacheManager(0, 16), InvalidArgument);
  EXPECT_THROW(KVCacheManager(-1, 16), InvalidArgument);
  EXPECT_THROW(KVCacheManager(4, 0), InvalidArgument);
  EXPECT_THROW(KVCacheManager(4, -16), InvalidArgument);
  EXPECT_THROW(KVCacheManager(kLargest, kLargest), InvalidArgument);
  EXPECT_THROW(KVCacheManager(kMaxBlocks, kLargest), InvalidArgument);
  EXPECT_THROW(KVCacheManager(4, kLargest), InvalidArgument);
  EXPECT_THROW(KVCacheManager(4, 16, 0), InvalidArgument);
  EXPECT_THROW(KVCacheManager(1, kMaxTokens + 1), InvalidArgument);
  EXPECT_THROW(KVCacheManager(1, 65537), InvalidArgument);  // with prefix caching
  const Options wide{.num_blocks = 1, .block_size = kMaxTokens, .prefix_caching = false};
  EXPECT_EQ(KVCacheManager(wide).num_free_blocks(), 1);

  const auto refuses = [](auto change) {
    Options options{.num_blocks = 8, .block_size = 4};
    change(options);
    EXPECT_THROW(KVCacheManager manager(options), InvalidArgument);
  };
  refuses([](Options& o) { o.num_host_blocks = -1; });
  refuses([](Options& o) { o.num_host_blocks = kMaxBlocks + 1; });
  refuses([](Options& o) { o.watermark_blocks = -1; });
  refuses([](Options& o) { o.windows = {}; });
  refuses([](Options& o) { o.windows = {0, -1}; });
  refuses([](Options& o) { o.hash_bits = 0; });
  refuses([](Options& o) { o.hash_bits = 129; });
  refuses([](Options& o) {  // nothing beside the null block
    o.num_blocks = 1;
    o.windows = {4};
  });
}

TEST(KVCacheManager, AllocateTakesAsManyBlocksAsTheTokensFill) {
  KVCacheManager manager(8, 4);
  const int64_t tokens[] = {0, 1, 3, 4, 5};
  const size_t blocks[] = {0, 1, 1, 1, 2};
  for (int64_t id = 0; id < 5; ++id) {
    manager.allocate(id, tokens[id]);
    EXPECT_EQ(manager.block_table(id).size(), blocks[id]);
    EXPECT_EQ(manager.num_tokens(id), tokens[id]);
  }
  EXPECT_EQ(manager.num_free_blocks(), 3);
  EXPECT_TRUE(manager.can_allocate(12));
  EXPECT_FALSE(manager.can_allocate(13));
  manager.check_integrity();
}

TEST(KVCacheManager, OutOfBlocksSaysHowManyAndARetryAfterFreeSucceeds) {
  KVCacheManager manager(4, 4);
  manager.allocate(1, 8);
  const std::string message = refused<OutOfBlocks>(manager, [&] { manager.allocate(2, 12); });
  EXPECT_EQ(message, "allocate: out of blocks: needed 3, free 2");
  refused<OutOfBlocks>(manager, [&] { manager.append(1, 9); });
  refused<OutOfBlocks>(manager, [&] { manager.append(1, kMaxTokens - 8); });
  manager.free(1);
  manager.allocate(2, 12);
  EXPECT_EQ(manager.num_free_blocks(), 1);
}

TEST(KVCacheManager, UnknownAndDuplicateIdsAreErrors) {
  KVCacheManager manager(8, 4);
  manager.allocate(1, 4);
  refused<DuplicateSequence>(manager, [&] { manager.allocate(1, 1); });
  refused<DuplicateSequence>(manager, [&] { manager.fork(1, 1); });
  refused<UnknownSequence>(manager, [&] { manager.fork(2, 3); });
  refused<UnknownSequence>(manager, [&] { manager.append(2, 1); });
  refused<UnknownSequence>(manager, [&] { manager.truncate(2, 0); });
  refused<UnknownSequence>(manager, [&] { manager.block_table(2); });
  refused<UnknownSequence>(manager, [&] { manager.num_tokens(2); });
  const std::string message = refused<UnknownSequence>(manager, [&] { manager.free(2); });
  EXPECT_EQ(message, "free: sequence: expected one that is allocated, got unknown id 2");
  manager.free(1);
  refused<UnknownSequence>(manager, [&] { manager.free(1); });  // a double free
  EXPECT_FALSE(manager.contains(1));
}

TEST(KVCacheManager, CountsOutOfRangeAreErrors) {
  KVCacheManager manager(8, 4);
  manager.allocate(1, 5);
  for (const int64_t bad : {int64_t{-1}, kMaxTokens + 1, kLargest}) {
    refused<InvalidArgument>(manager, [&] { manager.allocate(2, bad); });
    refused<InvalidArgument>(manager, [&] { manager.append(1, bad); });
    refused<InvalidArgument>(manager, [&] { manager.truncate(1, bad); });
    refused<InvalidArgument>(manager, [&] { manager.can_allocate(bad); });
  }
  refused<InvalidArgument>(manager, [&] { manager.append(1, kMaxTokens - 4); });
  refused<InvalidArgument>(manager, [&] { manager.truncate(1, 6); });
}

TEST(KVCacheManager, AppendFillsTheLastBlockBeforeItTakesAnother) {
  KVCacheManager manager(8, 4);
  manager.allocate(1, 3);
  EXPECT_TRUE(manager.append(1, 0).empty());
  EXPECT_TRUE(manager.append(1, 1).empty());
  EXPECT_EQ(manager.block_table(1), (Blocks{0}));
  EXPECT_TRUE(manager.append(1, 5).empty());
  EXPECT_EQ(manager.block_table(1), (Blocks{0, 1, 2}));
  EXPECT_EQ(manager.num_tokens(1), 9);
}

TEST(KVCacheManager, AppendToASharedPartlyFilledBlockCopiesItOnce) {
  KVCacheManager manager(8, 4);
  manager.allocate(1, 6);  // blocks 0, 1
  manager.fork(1, 2);
  EXPECT_EQ(manager.statistics().shared_blocks, 2);

  const std::vector<BlockCopy> copies = manager.append(2, 1);
  ASSERT_EQ(copies.size(), 1u);
  EXPECT_EQ(copies[0].source, 1);
  EXPECT_EQ(copies[0].destination, 2);
  EXPECT_EQ(manager.block_table(1), (Blocks{0, 1}));
  EXPECT_EQ(manager.block_table(2), (Blocks{0, 2}));
  EXPECT_TRUE(manager.append(2, 1).empty());
  EXPECT_TRUE(manager.append(1, 1).empty());  // alone with its block now
  EXPECT_EQ(manager.statistics().num_copies, 1);
  EXPECT_EQ(manager.statistics().shared_blocks, 1);
  manager.check_integrity();
}

TEST(KVCacheManager, AppendBehindASharedFullBlockCopiesNothing) {
  KVCacheManager manager(8, 4);
  manager.allocate(1, 8);
  manager.fork(1, 2);
  EXPECT_TRUE(manager.append(2, 1).empty());
  EXPECT_TRUE(manager.append(1, 0).empty());
  EXPECT_EQ(manager.block_table(2), (Blocks{0, 1, 2}));
  EXPECT_EQ(manager.statistics().num_copies, 0);
}

TEST(KVCacheManager, NoCopyWithoutAFreeBlock) {
  KVCacheManager manager(2, 4);
  manager.allocate(1, 6);
  manager.fork(1, 2);
  try {
    manager.append(2, 1);
    FAIL() << "expected OutOfBlocks";
  } catch (const OutOfBlocks& error) {
    EXPECT_EQ(error.needed(), 1);
    EXPECT_EQ(error.free(), 0);
  }
  refused<OutOfBlocks>(manager, [&] { manager.append(1, 1); });
  manager.free(1);
  EXPECT_TRUE(manager.append(2, 1).empty());
}

TEST(KVCacheManager, TruncateIntoASharedBlockThenAppendCopies) {
  KVCacheManager manager(8, 4);
  manager.allocate(1, 12);  // blocks 0, 1, 2
  manager.fork(1, 2);
  manager.truncate(2, 6);
  EXPECT_EQ(manager.block_table(2), (Blocks{0, 1}));
  EXPECT_EQ(manager.block_table(1), (Blocks{0, 1, 2}));
  EXPECT_EQ(manager.num_free_blocks(), 5);
  const std::vector<BlockCopy> copies = manager.append(2, 1);
  ASSERT_EQ(copies.size(), 1u);
  EXPECT_EQ(copies[0].source, 1);
  manager.truncate(1, 0);
  EXPECT_EQ(manager.block_table(1), Blocks{});
  manager.truncate(1, 0);
  EXPECT_TRUE(manager.append(1, 1).empty());
  manager.check_integrity();
}

TEST(KVCacheManager, FreeReturnsTheTailFirst) {
  KVCacheManager manager(4, 4);
  manager.allocate(1, 12);
  manager.free(1);
  EXPECT_EQ(TestAccess::snapshot(manager).free_list, (Blocks{3, 2, 1, 0}));
}

TEST(KVCacheManager, ReferenceCountsDoNotWrap) {
  KVCacheManager manager(8, 4, 3);
  manager.allocate(1, 6);
  manager.fork(1, 2);
  manager.fork(1, 3);
  const std::string message = refused<ReferenceOverflow>(manager, [&] { manager.fork(1, 4); });
  EXPECT_EQ(message,
            "fork: parent: expected fewer than 3 sequences to share block 0 of sequence 1");
  manager.append(3, 1);  // its second block is its own now, the first is still shared by all
  refused<ReferenceOverflow>(manager, [&] { manager.fork(3, 4); });
  const Ids ids = {1, 2, 3};
  const Ids parents = {3, 3, 3};
  refused<ReferenceOverflow>(manager, [&] { manager.reorder(ids, parents); });
  manager.free(2);
  manager.fork(1, 4);
  manager.check_integrity();
}

TEST(KVCacheManager, ReorderThatOverflowsHalfwayIsUndone) {
  KVCacheManager manager(8, 4, 2);
  manager.allocate(1, 8);
  manager.allocate(2, 4);
  manager.allocate(3, 4);
  const Ids ids = {2, 3};
  const Ids parents = {1, 1};
  refused<ReferenceOverflow>(manager, [&] { manager.reorder(ids, parents); });
  manager.reorder(std::span(ids).first(1), std::span(parents).first(1));
  manager.check_integrity();
}

TEST(KVCacheManager, SlotMappingOfARange) {
  KVCacheManager manager(8, 4);
  manager.allocate(1, 4);
  manager.allocate(2, 4);
  manager.append(1, 3);  // blocks 0, 2
  std::vector<int64_t> slots(4);
  manager.slot_mapping(1, 2, slots);
  EXPECT_EQ(slots, (Ids{2, 3, 8, 9}));
  manager.slot_mapping(1, 7, std::span<int64_t>());
  refused<InvalidArgument>(manager, [&] { manager.slot_mapping(1, 4, slots); });
  refused<InvalidArgument>(manager, [&] { manager.slot_mapping(1, -1, slots); });
  refused<InvalidArgument>(manager, [&] { manager.slot_mapping(1, kLargest, slots); });
  EXPECT_EQ(slots, (Ids{2, 3, 8, 9}));
}

TEST(KVCacheManager, StatisticsCountSharedWasteOnce) {
  KVCacheManager manager(16, 4);
  manager.allocate(1, 6);  // 2 empty slots
  manager.fork(1, 2);
  manager.fork(1, 3);
  EXPECT_EQ(manager.statistics().waste_slots, 2);
  manager.truncate(2, 5);  // its last block is still read further by the others
  EXPECT_EQ(manager.statistics().waste_slots, 2);
  manager.append(3, 6);  // a copy, and two blocks more: 12 tokens
  manager.fork(3, 4);
  manager.truncate(4, 9);  // a shared block that is full for sequence 3
  const Statistics statistics = manager.statistics();
  EXPECT_EQ(statistics.waste_slots, 2);
  EXPECT_EQ(statistics.num_tokens, 6 + 5 + 12 + 9);
  EXPECT_EQ(statistics.table_entries, 2 + 2 + 3 + 3);
  EXPECT_EQ(statistics.used_blocks, 4);
  EXPECT_EQ(statistics.shared_blocks, 4);
  EXPECT_EQ(statistics.free_blocks, 12);
  EXPECT_EQ(statistics.total_blocks, 16);
  EXPECT_EQ(statistics.peak_used_blocks, 4);
  EXPECT_EQ(statistics.num_sequences, 4);
  EXPECT_EQ(statistics.num_copies, 1);
  manager.free(3);
  EXPECT_EQ(manager.statistics().waste_slots, 2 + 3);
}

TEST(KVCacheManager, ResetIsAsNew) {
  KVCacheManager manager(8, 4);
  const Snapshot initial = TestAccess::snapshot(manager);
  manager.allocate(1, 6);
  manager.fork(1, 2);
  manager.append(2, 1);
  manager.free(1);
  manager.reset();
  EXPECT_EQ(TestAccess::snapshot(manager), initial);
  manager.allocate(1, 6);
  manager.check_integrity();
}

TEST(KVCacheManager, CheckIntegrityNoticesEveryKindOfDamage) {
  const auto damaged = [](auto damage) {
    KVCacheManager manager(8, 4);
    manager.allocate(1, 6);
    manager.allocate(2, 4);
    manager.check_integrity();
    damage(manager);
    EXPECT_THROW(manager.check_integrity(), IntegrityError);
  };
  damaged([](KVCacheManager& m) { TestAccess::table(m, 1)[0] = 7; });
  damaged([](KVCacheManager& m) { TestAccess::table(m, 1)[0] = 2; });
  damaged([](KVCacheManager& m) { TestAccess::table(m, 1)[0] = -1; });
  damaged([](KVCacheManager& m) { TestAccess::table(m, 1)[0] = 8; });
  damaged([](KVCacheManager& m) { TestAccess::table(m, 1).pop_back(); });
  damaged([](KVCacheManager& m) { TestAccess::tokens(m, 1) = 9; });
  damaged([](KVCacheManager& m) { TestAccess::tokens(m, 1) = -1; });
  damaged([](KVCacheManager& m) { TestAccess::index(m).insert(1, 1); });
  damaged([](KVCacheManager& m) { TestAccess::index(m).erase(2); });
  damaged([](KVCacheManager& m) { TestAccess::pool(m).add_reference(0); });
  damaged([](KVCacheManager& m) { TestAccess::pool(m).release(2); });
  damaged([](KVCacheManager& m) { TestAccess::pool(m).take(); });
}

TEST(KVCacheManager, RefusesToWorkInAForkOfTheProcess) {
  KVCacheManager manager(8, 4);
  manager.allocate(1, 4);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    int refused_calls = 0;
    try {
      manager.free(1);
    } catch (const Error&) {
      ++refused_calls;
    }
    try {
      manager.statistics();
    } catch (const Error&) {
      ++refused_calls;
    }
    KVCacheManager(8, 4).allocate(1, 4);  // one made in the child works
    ::_exit(refused_calls == 2 ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  manager.free(1);
}

}  // namespace
}  // namespace vllm_kernels::kv_cache
