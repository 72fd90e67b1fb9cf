// Many sequences in one call: tables, lengths and slots for the ops, and all-or-nothing batches.
#include <gtest/gtest.h>

#include <vector>

#include "kv_cache/errors.h"
#include "kv_cache/kv_cache_manager.h"
#include "kv_cache/test_access.h"

namespace vllm_kernels::kv_cache {
namespace {

using Ids = std::vector<int64_t>;
using Lengths = std::vector<int32_t>;
constexpr int32_t kMark = TestBuffers::kMark;

class Batch : public ::testing::Test {
 protected:
  // Three sequences of 6, 4 and 1 tokens in blocks {0, 1}, {2}, {3} of 12.
  void SetUp() override { manager.allocate(ids, Ids{6, 4, 1}); }

  template <typename Expected, typename Call>
  void refused(Call call) {
    const Snapshot before = TestAccess::snapshot(manager);
    EXPECT_THROW(call(), Expected);
    EXPECT_EQ(TestAccess::snapshot(manager), before);
    EXPECT_TRUE(buffers.untouched());
    manager.check_integrity();
  }

  KVCacheManager manager{12, 4};
  const Ids ids{10, 20, 30};
  std::vector<BlockCopy> copies{8};
  TestBuffers buffers{4, 3, 10};
};

TEST_F(Batch, BuildWritesRowsAndPadsTheRest) {
  manager.build(ids, Ids{3, 4, 0}, buffers.view);
  EXPECT_EQ(buffers.block_tables, (Lengths{0, 1, kMark,      //
                                           2, kMark, kMark,  //
                                           3, kMark, kMark,  //
                                           kMark, kMark, kMark}));
  EXPECT_EQ(buffers.seq_lens, (Lengths{6, 4, 1, 0}));
  EXPECT_EQ(buffers.query_start_loc, (Lengths{0, 3, 7, 7, 7}));
  EXPECT_EQ(buffers.slot_mapping, (Ids{3, 4, 5, 8, 9, 10, 11, -1, -1, -1}));
  EXPECT_EQ(buffers.positions, (Ids{3, 4, 5, 0, 1, 2, 3, 0, 0, 0}));
}

TEST_F(Batch, BuildOfAnEmptyBatchPadsEverything) {
  manager.build(Ids{}, Ids{}, buffers.view);
  EXPECT_EQ(buffers.seq_lens, (Lengths{0, 0, 0, 0}));
  EXPECT_EQ(buffers.query_start_loc, (Lengths{0, 0, 0, 0, 0}));
  EXPECT_EQ(buffers.slot_mapping, Ids(10, -1));
}

TEST_F(Batch, StepAppendsAndWritesTheNewTokens) {
  EXPECT_EQ(manager.step(ids, Ids{1, 1, 4}, buffers.view, copies), 0);
  EXPECT_EQ(buffers.seq_lens, (Lengths{7, 5, 5, 0}));
  EXPECT_EQ(buffers.query_start_loc, (Lengths{0, 1, 2, 6, 6}));
  EXPECT_EQ(buffers.slot_mapping, (Ids{6, 16, 13, 14, 15, 20, -1, -1, -1, -1}));
  EXPECT_EQ(buffers.positions, (Ids{6, 4, 1, 2, 3, 4, 0, 0, 0, 0}));
  manager.check_integrity();
}

TEST_F(Batch, PositionsAreOptionalAndRowsMayBeStrided) {
  std::vector<int32_t> wide(4 * 5, kMark);
  buffers.view.block_tables = wide.data();
  buffers.view.row_stride = 5;
  buffers.view.positions = {};
  manager.step(ids, Ids{1, 1, 1}, buffers.view, copies);
  EXPECT_EQ(wide, (Lengths{0,     1,     kMark, kMark, kMark,  //
                           2,     4,     kMark, kMark, kMark,  //
                           3,     kMark, kMark, kMark, kMark,  //
                           kMark, kMark, kMark, kMark, kMark}));
  EXPECT_EQ(buffers.positions, Ids(10, kMark));
}

TEST_F(Batch, SharersOfABlockCopyItButForTheLastOne) {
  manager.fork(10, 11);
  manager.fork(10, 12);
  const Ids sharers = {12, 10, 11};
  ASSERT_EQ(manager.append(sharers, Ids{1, 1, 1}, copies), 2);
  EXPECT_EQ(copies[0].source, 1);
  EXPECT_EQ(copies[1].source, 1);
  EXPECT_NE(copies[0].destination, copies[1].destination);
  EXPECT_EQ(manager.block_table(11), (Lengths{0, 1}));
  EXPECT_EQ(manager.statistics().num_copies, 2);
  EXPECT_EQ(manager.append(sharers, Ids{1, 1, 1}, copies), 0);
  manager.check_integrity();
}

TEST_F(Batch, TheNumberOfCopiesIsExactWhenBlocksAreFew) {
  manager.fork(10, 11);
  manager.allocate(40, 4 * 7);  // one block is left
  EXPECT_EQ(manager.num_free_blocks(), 1);
  EXPECT_EQ(manager.append(Ids{10, 11}, Ids{1, 1}, copies), 1);
  EXPECT_EQ(manager.num_free_blocks(), 0);
  manager.check_integrity();
}

TEST_F(Batch, ASharerThatStaysKeepsTheBlock) {
  manager.fork(10, 11);
  manager.fork(10, 12);
  EXPECT_EQ(manager.append(Ids{10, 12}, Ids{1, 1}, copies), 2);
  EXPECT_EQ(manager.append(Ids{11}, Ids{1}, copies), 0);
  manager.check_integrity();
}

TEST_F(Batch, AppendRefusesTooLittleRoomForPairsBeforeAnythingChanges) {
  manager.fork(10, 11);
  refused<InvalidArgument>([&] { manager.append(Ids{10, 11}, Ids{1, 1}, {}); });
  EXPECT_EQ(manager.append(Ids{10, 11}, Ids{1, 1}, std::span(copies).first(1)), 1);
}

TEST_F(Batch, AppendIsAllOrNothing) {
  refused<OutOfBlocks>([&] { manager.append(ids, Ids{2, 16, 20}, copies); });
  refused<OutOfBlocks>([&] { manager.append(ids, Ids{kMaxTokens - 6, 0, 0}, copies); });
  refused<UnknownSequence>([&] { manager.append(Ids{10, 20, 31}, Ids{1, 1, 1}, copies); });
  refused<DuplicateSequence>([&] { manager.append(Ids{10, 20, 10}, Ids{1, 1, 1}, copies); });
  refused<InvalidArgument>([&] { manager.append(ids, Ids{1, 1, -1}, copies); });
  refused<InvalidArgument>([&] { manager.append(ids, Ids{1, 1}, copies); });
  refused<InvalidArgument>([&] { manager.append(ids, Ids{1, 1, kMaxTokens}, copies); });
}

TEST_F(Batch, FreeAndTruncateAreAllOrNothing) {
  refused<UnknownSequence>([&] { manager.free(Ids{10, 20, 31}); });
  refused<DuplicateSequence>([&] { manager.free(Ids{10, 20, 20}); });
  refused<InvalidArgument>([&] { manager.truncate(ids, Ids{1, 1, 2}); });
  refused<DuplicateSequence>([&] { manager.truncate(Ids{10, 10}, Ids{1, 1}); });
  manager.truncate(ids, Ids{4, 0, 1});
  EXPECT_EQ(manager.num_free_blocks(), 10);
  manager.free(Ids{30, 10});
  EXPECT_EQ(manager.sequence_ids(), (Ids{20}));
  manager.free(Ids{});
  manager.check_integrity();
}

TEST_F(Batch, FreeInAnyOrderLeavesTheRightOnes) {
  Ids all;
  for (int64_t id = 0; id < 8; ++id) all.push_back(100 + id);
  manager.allocate(all, Ids(8, 4));
  manager.free(Ids{107, 100, 30, 103, 10, 106});
  for (const int64_t id : {20, 101, 102, 104, 105}) EXPECT_TRUE(manager.contains(id));
  EXPECT_EQ(manager.num_sequences(), 5);
  manager.check_integrity();
}

TEST_F(Batch, AllocateIsAllOrNothing) {
  refused<OutOfBlocks>([&] { manager.allocate(Ids{1, 2}, Ids{16, 17}); });
  refused<DuplicateSequence>([&] { manager.allocate(Ids{1, 10}, Ids{1, 1}); });
  refused<DuplicateSequence>([&] { manager.allocate(Ids{1, 2, 1}, Ids{1, 1, 1}); });
  refused<InvalidArgument>([&] { manager.allocate(Ids{1, 2}, Ids{1, -1}); });
  refused<InvalidArgument>([&] { manager.allocate(Ids{1, 2}, Ids{1}); });
  manager.allocate(Ids{1, 2}, Ids{16, 16});
  EXPECT_EQ(manager.num_free_blocks(), 0);
}

TEST_F(Batch, StepAndBuildRefuseWhatTheBuffersCannotHold) {
  const Ids five = {1, 2, 3, 4, 5};
  manager.allocate(five, Ids(5, 0));
  refused<InvalidArgument>([&] { manager.step(five, Ids(5, 1), buffers.view, copies); });
  refused<InvalidArgument>([&] { manager.build(five, Ids(5, 0), buffers.view); });
  refused<InvalidArgument>([&] { manager.step(ids, Ids{7, 0, 0}, buffers.view, copies); });
  refused<InvalidArgument>([&] { manager.step(ids, Ids{4, 4, 3}, buffers.view, copies); });
  refused<InvalidArgument>([&] { manager.step(ids, Ids{1, kMaxTokens, 1}, buffers.view, copies); });
  refused<InvalidArgument>([&] { manager.build(ids, Ids{7, 1, 1}, buffers.view); });
  refused<OutOfBlocks>([&] {
    KVCacheManager small(2, 4);
    small.allocate(1, 8);
    small.step(Ids{1}, Ids{1}, buffers.view, copies);
  });
}

TEST_F(Batch, BuffersThatDoNotFitEachOtherAreRefused) {
  const auto broken = [&](auto damage) {
    BatchBuffers view = buffers.view;
    damage(view);
    refused<InvalidArgument>([&] { manager.step(ids, Ids{1, 1, 1}, view, copies); });
  };
  broken([](BatchBuffers& view) { view.seq_lens = view.seq_lens.first(3); });
  broken([](BatchBuffers& view) { view.query_start_loc = view.query_start_loc.first(4); });
  broken([](BatchBuffers& view) { view.positions = view.positions.first(9); });
  broken([](BatchBuffers& view) { view.row_stride = 2; });
  broken([](BatchBuffers& view) { view.max_sequences = -1; });
  broken([](BatchBuffers& view) { view.positions = view.slot_mapping; });
  broken([](BatchBuffers& view) { view.seq_lens = view.query_start_loc.last(4); });
  broken([](BatchBuffers& view) { view.block_tables = view.seq_lens.data(); });
}

TEST_F(Batch, ReorderTakesParentsAsTheyWereBefore) {
  manager.reorder(ids, Ids{20, 10, 20});
  EXPECT_EQ(manager.block_table(10), (Lengths{2}));
  EXPECT_EQ(manager.block_table(20), (Lengths{0, 1}));
  EXPECT_EQ(manager.block_table(30), (Lengths{2}));
  EXPECT_EQ(manager.num_tokens(20), 6);
  EXPECT_EQ(manager.num_free_blocks(), 9);  // block 3 has no reader left
  manager.check_integrity();

  const Snapshot before = TestAccess::snapshot(manager);
  manager.reorder(ids, ids);
  EXPECT_EQ(TestAccess::snapshot(manager), before);
  manager.reorder(Ids{10}, Ids{20});  // a parent that is not itself reordered
  EXPECT_EQ(manager.block_table(10), (Lengths{0, 1}));
  manager.check_integrity();
}

TEST_F(Batch, ReorderIsAllOrNothing) {
  refused<UnknownSequence>([&] { manager.reorder(ids, Ids{10, 20, 31}); });
  refused<UnknownSequence>([&] { manager.reorder(Ids{10, 31}, Ids{10, 20}); });
  refused<DuplicateSequence>([&] { manager.reorder(Ids{10, 10}, Ids{10, 20}); });
  refused<InvalidArgument>([&] { manager.reorder(ids, Ids{10, 20}); });
}

}  // namespace
}  // namespace vllm_kernels::kv_cache
