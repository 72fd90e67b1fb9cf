// Moving sequences to host blocks and back.
#include <gtest/gtest.h>

#include <numeric>
#include <utility>
#include <vector>

#include "kv_cache/errors.h"
#include "kv_cache/kv_cache_manager.h"
#include "kv_cache/test_access.h"

namespace vllm_kernels::kv_cache {
namespace {

using Blocks = std::vector<int32_t>;
using Ids = std::vector<int64_t>;
using Pairs = std::vector<std::pair<int64_t, int64_t>>;
using Tokens = std::vector<int32_t>;

Tokens range(int32_t size) {
  Tokens tokens(size);
  std::iota(tokens.begin(), tokens.end(), 0);
  return tokens;
}

class Swapping : public ::testing::Test {
 protected:
  Pairs out(const Ids& ids) { return pairs(manager.swap_out(ids, copies)); }
  Pairs in(const Ids& ids) { return pairs(manager.swap_in(ids, copies)); }
  Pairs pairs(int64_t count) const {
    Pairs result;
    for (int64_t i = 0; i < count; ++i)
      result.emplace_back(copies[i].source, copies[i].destination);
    return result;
  }
  template <typename Expected, typename Call>
  void refused(Call call) {
    const Snapshot before = TestAccess::snapshot(manager);
    EXPECT_THROW(call(), Expected);
    EXPECT_EQ(TestAccess::snapshot(manager), before);
    manager.check_integrity();
  }

  KVCacheManager manager{Options{.num_blocks = 8, .block_size = 4, .num_host_blocks = 4}};
  std::vector<BlockCopy> copies{16};
};

TEST_F(Swapping, ASequenceGoesOutAndComesBack) {
  manager.allocate(Ids{1, 2}, Ids{4, 6});
  EXPECT_EQ(out({2}), (Pairs{{1, 0}, {2, 1}}));
  EXPECT_TRUE(manager.is_swapped(2));
  EXPECT_EQ(manager.block_table(2), (Blocks{0, 1}));
  EXPECT_EQ(manager.num_free_blocks(), 7);
  EXPECT_EQ(manager.num_free_host_blocks(), 2);
  EXPECT_EQ(manager.statistics().num_swapped_sequences, 1);
  EXPECT_EQ(manager.statistics().used_host_blocks, 2);
  EXPECT_EQ(manager.statistics().num_tokens, 4);
  manager.check_integrity();
  EXPECT_EQ(in({2}), (Pairs{{0, 3}, {1, 4}}));
  EXPECT_EQ(manager.block_table(2), (Blocks{3, 4}));
  EXPECT_EQ(manager.num_tokens(2), 6);
  EXPECT_EQ(manager.num_free_host_blocks(), 4);
  manager.check_integrity();
}

TEST_F(Swapping, SharedBlocksAreCopiedOnceAndStayShared) {
  manager.allocate(1, 6);
  manager.fork(1, 2);
  EXPECT_EQ(out({2, 1}), (Pairs{{0, 0}, {1, 1}}));
  EXPECT_EQ(manager.block_table(1), manager.block_table(2));
  manager.check_integrity();
  EXPECT_EQ(in({1, 2}).size(), 2u);
  EXPECT_EQ(manager.block_table(1), manager.block_table(2));
  EXPECT_EQ(manager.append(1, 1).size(), 1u);
  manager.check_integrity();
}

TEST_F(Swapping, BlocksThatAreStillCachedAreNotCopiedBack) {
  manager.allocate(1, range(10), kMaxTokens, {});
  out({1});
  EXPECT_EQ(manager.statistics().cached_blocks, 2);
  EXPECT_EQ(in({1}), (Pairs{{2, 3}}));
  EXPECT_EQ(manager.block_table(1), (Blocks{0, 1, 3}));
  manager.check_integrity();
  // And what is copied back can be found again.
  out({1});
  manager.allocate(2, 32);
  EXPECT_EQ(manager.match(range(10), {}), 0);
  manager.free(2);
  EXPECT_EQ(in({1}).size(), 3u);
  EXPECT_EQ(manager.match(range(10), {}), 8);
  manager.append(1, 2, {.tokens = Tokens{10, 11}});
  EXPECT_EQ(manager.match(range(13), {}), 12);
  manager.check_integrity();
}

TEST_F(Swapping, TooFewBlocksOnEitherSideChangeNothing) {
  manager.allocate(Ids{1, 2}, Ids{16, 4});
  refused<OutOfBlocks>([&] { out({1, 2}); });
  EXPECT_FALSE(manager.can_swap_out(Ids{1, 2}));
  EXPECT_TRUE(manager.can_swap_out(Ids{1}));
  out({1});
  manager.allocate(3, 16);
  EXPECT_FALSE(manager.can_swap_in(Ids{1}));
  refused<OutOfBlocks>([&] { in({1}); });
  manager.free(3);
  EXPECT_TRUE(manager.can_swap_in(Ids{1}));
  refused<InvalidArgument>([&] { manager.swap_in(Ids{1}, std::span(copies).first(3)); });
  EXPECT_EQ(in({1}).size(), 4u);
  refused<InvalidArgument>([&] { manager.swap_out(Ids{1}, std::span(copies).first(3)); });
}

TEST_F(Swapping, ASwappedSequenceCanOnlyBeFreedOrSwappedIn) {
  manager.allocate(Ids{1, 2}, Ids{6, 4});
  out({1});
  TestBuffers buffers(2, 4, 8);
  refused<InvalidArgument>([&] { out({1}); });
  refused<InvalidArgument>([&] { in({2}); });
  refused<InvalidArgument>([&] { manager.append(1, 1); });
  refused<InvalidArgument>([&] { manager.truncate(1, 1); });
  refused<InvalidArgument>([&] { manager.fork(1, 3); });
  refused<InvalidArgument>([&] { manager.reorder(Ids{1}, Ids{2}); });
  refused<InvalidArgument>([&] { manager.reorder(Ids{2}, Ids{1}); });
  refused<InvalidArgument>([&] { manager.build(Ids{1}, Ids{1}, buffers.view); });
  refused<InvalidArgument>([&] { manager.record_tokens(Ids{1}, Ids{1}, range(1)); });
  refused<InvalidArgument>([&] { manager.num_common_prefix_blocks(Ids{1, 2}); });
  refused<InvalidArgument>([&] {
    Ids slots(1);
    manager.slot_mapping(1, 0, slots);
  });
  refused<UnknownSequence>([&] { out({2, 9}); });
  refused<DuplicateSequence>([&] { out({2, 2}); });
  manager.free(1);
  EXPECT_EQ(manager.num_free_host_blocks(), 4);
  manager.check_integrity();
}

TEST_F(Swapping, LookaheadIsDroppedAndWindowsStayPassed) {
  KVCacheManager windowed(
      Options{.num_blocks = 8, .block_size = 4, .num_host_blocks = 4, .windows = {4}});
  windowed.allocate(1, 8);
  windowed.append(1, 1, {.tokens = {}, .lookahead = 6});
  EXPECT_EQ(windowed.swap_out(Ids{1}, copies), 2);
  EXPECT_EQ(windowed.block_table(1), (Blocks{-1, 0, 1}));
  EXPECT_EQ(windowed.num_free_blocks(), 7);
  windowed.check_integrity();
  EXPECT_EQ(windowed.swap_in(Ids{1}, copies), 2);
  EXPECT_EQ(windowed.block_table(1)[0], kNullBlock);
  windowed.check_integrity();
}

TEST_F(Swapping, TheMostSharersThereMayBeFitOnBothSides) {
  KVCacheManager manager(
      Options{.num_blocks = 8, .block_size = 4, .max_references = 2, .num_host_blocks = 4});
  manager.allocate(1, range(6), kMaxTokens, {});
  manager.fork(1, 2);
  EXPECT_EQ(manager.swap_out(Ids{1, 2}, copies), 2);
  manager.check_integrity();
  EXPECT_EQ(manager.swap_in(Ids{1, 2}, copies), 1);
  manager.check_integrity();
}

TEST(NoHostBlocks, NothingCanBeSwappedOut) {
  KVCacheManager manager(8, 4);
  manager.allocate(1, 4);
  std::vector<BlockCopy> copies(4);
  EXPECT_FALSE(manager.can_swap_out(Ids{1}));
  EXPECT_THROW(manager.swap_out(Ids{1}, copies), OutOfBlocks);
  EXPECT_EQ(manager.num_free_host_blocks(), 0);
}

}  // namespace
}  // namespace vllm_kernels::kv_cache
