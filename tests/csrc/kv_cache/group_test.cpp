// Groups of layers with sliding windows, slots for lookahead, and rows that are written again.
#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "kv_cache/errors.h"
#include "kv_cache/kv_cache_manager.h"
#include "kv_cache/test_access.h"

namespace vllm_kernels::kv_cache {
namespace {

using Blocks = std::vector<int32_t>;
using Ids = std::vector<int64_t>;
using Lengths = std::vector<int32_t>;
using Tokens = std::vector<int32_t>;
constexpr int32_t kMark = TestBuffers::kMark;

Tokens range(int32_t size) {
  Tokens tokens(size);
  std::iota(tokens.begin(), tokens.end(), 0);
  return tokens;
}

Options windowed(std::vector<int64_t> windows, int64_t num_blocks = 12) {
  return {.num_blocks = num_blocks, .block_size = 4, .windows = std::move(windows)};
}

TEST(Window, BlocksThatAreInvisibleToLaterTokensAreGivenBack) {
  KVCacheManager manager(windowed({5}));
  manager.allocate(1, range(9), kMaxTokens, {});
  EXPECT_EQ(manager.block_table(1), (Blocks{1, 2, 3}));
  manager.append(1, 1, {.tokens = Tokens{9}});  // token 9 sees tokens 5 to 9
  EXPECT_EQ(manager.block_table(1), (Blocks{kNullBlock, 2, 3}));
  EXPECT_EQ(manager.num_free_blocks(), 9);
  Ids slots(10);
  manager.slot_mapping(1, 0, slots);
  EXPECT_EQ(slots, (Ids{-1, -1, -1, -1, 8, 9, 10, 11, 12, 13}));
  manager.check_integrity();
}

TEST(Window, GroupsHaveTablesOfTheirOwnOverOnePool) {
  KVCacheManager manager(windowed({kFullAttention, 4}));
  manager.allocate(1, range(8), kMaxTokens, {});
  EXPECT_EQ(manager.block_table(1, 0), (Blocks{1, 3}));
  EXPECT_EQ(manager.block_table(1, 1), (Blocks{2, 4}));
  manager.append(1, 1, {.tokens = Tokens{8}});
  EXPECT_EQ(manager.block_table(1, 0), (Blocks{1, 3, 5}));
  EXPECT_EQ(manager.block_table(1, 1), (Blocks{kNullBlock, 4, 6}));
  EXPECT_THROW(manager.block_table(1, 2), InvalidArgument);
  manager.check_integrity();
}

TEST(Window, AHitNeedsOnlyTheBlocksVisibleToTheNextToken) {
  KVCacheManager manager(windowed({5}));
  manager.allocate(1, range(13), kMaxTokens, {});
  manager.evict_blocks(Ids{1});
  EXPECT_EQ(manager.allocate(2, range(13), kMaxTokens, {}), 12);  // token 12 sees 8 to 12
  EXPECT_EQ(manager.block_table(2), (Blocks{kNullBlock, kNullBlock, 3, 5}));
  manager.evict_blocks(Ids{3});
  EXPECT_EQ(manager.match(range(13), {}), 8);  // token 8 sees 4 to 8
  manager.evict_blocks(Ids{2});
  EXPECT_EQ(manager.match(range(13), {}), 0);  // token 4 sees 0 to 4
  manager.check_integrity();
}

TEST(Window, AHitIsWhatAllGroupsHave) {
  KVCacheManager manager(windowed({kFullAttention, 5}, 30));
  manager.allocate(1, range(16), kMaxTokens, {});
  EXPECT_EQ(manager.match(range(16), {}), 12);
  manager.evict_blocks(Ids{manager.block_table(1, 1)[2]});
  EXPECT_EQ(manager.match(range(17), {}), 16);  // token 16 sees 12 to 16
  EXPECT_EQ(manager.match(range(16), {}), 8);   // token 12 sees 8 to 12, token 8 only 4 to 8
  manager.evict_blocks(Ids{manager.block_table(1, 0)[1]});
  EXPECT_EQ(manager.match(range(17), {}), 4);
  manager.check_integrity();
}

TEST(Window, TruncationStopsWhereBlocksWereGivenBack) {
  KVCacheManager manager(windowed({5}));
  manager.allocate(1, range(12), kMaxTokens, {});
  manager.append(1, 1, {.tokens = Tokens{12}});  // block 0 and 1 are gone
  const Snapshot before = TestAccess::snapshot(manager);
  EXPECT_THROW(manager.truncate(1, 8), InvalidArgument);
  EXPECT_THROW(manager.truncate(1, 11), InvalidArgument);
  EXPECT_EQ(TestAccess::snapshot(manager), before);
  manager.truncate(1, 12);
  manager.truncate(1, 0);
  manager.check_integrity();
}

TEST(Window, WhatTheBatchGivesBackIsThereForTheBatch) {
  KVCacheManager manager(windowed({4}, 4));
  manager.allocate(1, 12);
  EXPECT_EQ(manager.num_free_blocks(), 0);
  manager.append(1, 1);
  EXPECT_EQ(manager.block_table(1), (Blocks{0, 0, 3, 2}));
  manager.check_integrity();
}

TEST(Lookahead, SlotsAreInTheTableButNoTokens) {
  KVCacheManager manager(12, 4);
  manager.allocate(1, range(3), kMaxTokens, {});
  manager.append(1, 1, {.tokens = Tokens{3}, .lookahead = 5});
  EXPECT_EQ(manager.num_tokens(1), 4);
  EXPECT_EQ(manager.block_table(1), (Blocks{0, 1, 2}));
  EXPECT_EQ(manager.statistics().waste_slots, 8);
  manager.append(1, 5, {.tokens = range(5), .lookahead = 0});
  EXPECT_EQ(manager.block_table(1), (Blocks{0, 1, 2}));
  manager.fork(1, 2);
  manager.append(1, 0, {.tokens = {}, .lookahead = 4});  // the tail is written to: a copy
  EXPECT_EQ(manager.num_tokens(1), 9);
  EXPECT_EQ(manager.block_table(1), (Blocks{0, 1, 3, 4}));
  manager.fork(1, 3);
  EXPECT_EQ(manager.block_table(3), (Blocks{0, 1, 3}));  // not what is there for lookahead
  manager.truncate(1, 9);
  EXPECT_EQ(manager.block_table(1), (Blocks{0, 1, 3}));
  EXPECT_THROW(manager.append(1, 1, {.tokens = {}, .lookahead = -1}), InvalidArgument);
  EXPECT_THROW(manager.append(1, 1, {.tokens = {}, .lookahead = kMaxTokens}), InvalidArgument);
  manager.check_integrity();
}

class Rows : public ::testing::Test {
 protected:
  void SetUp() override {
    manager.allocate(Ids{1, 2, 3}, Ids{4, 4, 4});
    manager.build(Ids{1, 2, 3}, Ids{4, 4, 4}, buffers.view);
    clear();
  }
  // Puts marks everywhere, so that what the next call writes shows.
  void clear() {
    std::fill(buffers.block_tables.begin(), buffers.block_tables.end(), kMark);
    std::fill(buffers.seq_lens.begin(), buffers.seq_lens.end(), kMark);
    std::fill(buffers.slot_mapping.begin(), buffers.slot_mapping.end(), int64_t{kMark});
  }
  Lengths row(int64_t index) {
    const auto first = buffers.block_tables.begin() + index * 4;
    return {first, first + 4};
  }

  KVCacheManager manager{16, 4};
  std::vector<BlockCopy> copies{8};
  TestBuffers buffers{5, 4, 14};
};

TEST_F(Rows, OnlyNewBlocksAreWritten) {
  manager.step(Ids{1, 2, 3}, Ids{1, 0, 5}, buffers.view, copies);
  EXPECT_EQ(row(0), (Lengths{kMark, 3, kMark, kMark}));
  EXPECT_EQ(row(1), (Lengths(4, kMark)));
  EXPECT_EQ(row(2), (Lengths{kMark, 4, 5, kMark}));
  EXPECT_EQ(buffers.view.written.changed_rows, (Lengths{0, 2}));
  // Of the padding, what the last batch had filled: 12 slots then, 6 now.
  EXPECT_EQ(buffers.seq_lens, (Lengths{5, 4, 9, kMark, kMark}));
  EXPECT_EQ(buffers.slot_mapping,
            (Ids{12, 16, 17, 18, 19, 20, -1, -1, -1, -1, -1, -1, kMark, kMark}));
  EXPECT_EQ(buffers.query_start_loc, (Lengths{0, 1, 1, 6, 6, 6}));
}

TEST_F(Rows, AnotherSequenceOrAnotherTableIsWrittenInFull) {
  manager.build(Ids{2, 1}, Ids{1, 1}, buffers.view);
  EXPECT_EQ(row(0), (Lengths{1, kMark, kMark, kMark}));
  EXPECT_EQ(row(1), (Lengths{0, kMark, kMark, kMark}));
  EXPECT_EQ(buffers.seq_lens, (Lengths{4, 4, 0, kMark, kMark}));
  clear();
  manager.free(2);
  manager.allocate(2, 8);  // the same id, not the same sequence
  manager.build(Ids{2, 1}, Ids{1, 1}, buffers.view);
  EXPECT_EQ(row(0), (Lengths{3, 4, kMark, kMark}));
  EXPECT_EQ(buffers.view.written.changed_rows, (Lengths{0}));
  clear();
  manager.truncate(2, 0);
  manager.append(2, 8);
  manager.build(Ids{2, 1}, Ids{1, 1}, buffers.view);
  EXPECT_EQ(row(0), (Lengths{5, 6, kMark, kMark}));
}

TEST_F(Rows, ACopyOnWriteChangesTheRow) {
  manager.truncate(1, 3);
  manager.fork(1, 4);
  manager.build(Ids{1, 4}, Ids{1, 1}, buffers.view);
  clear();
  EXPECT_EQ(manager.step(Ids{1, 4}, Ids{1, 1}, buffers.view, copies), 1);
  EXPECT_EQ(row(0)[0], copies[0].destination);
  EXPECT_EQ(row(1), (Lengths(4, kMark)));
}

TEST_F(Rows, InvalidatedBuffersAreWrittenInFull) {
  buffers.view.invalidate();
  manager.build(Ids{1, 2, 3}, Ids{4, 4, 4}, buffers.view);
  EXPECT_EQ(row(2), (Lengths{2, kMark, kMark, kMark}));
  EXPECT_EQ(buffers.seq_lens, (Lengths{4, 4, 4, 0, 0}));
  EXPECT_EQ(buffers.slot_mapping[13], -1);
  EXPECT_EQ(buffers.view.written.changed_rows, (Lengths{0, 1, 2}));
}

TEST(Groups, EveryGroupHasItsBuffers) {
  KVCacheManager manager(windowed({kFullAttention, 4}));
  manager.allocate(1, range(9), kMaxTokens, {});
  TestBuffers full(2, 4, 8), window(2, 4, 8);
  std::vector<BatchBuffers*> both{&full.view, &window.view};
  std::vector<BlockCopy> copies(4);
  manager.step(Ids{1}, Ids{1}, both, copies);
  EXPECT_EQ(full.block_tables[0], 1);
  EXPECT_EQ(window.block_tables[0], kNullBlock);
  EXPECT_EQ(full.slot_mapping[0], 5 * 4 + 1);
  EXPECT_EQ(window.slot_mapping[0], 6 * 4 + 1);
  EXPECT_EQ(window.positions[0], 9);
  EXPECT_THROW(manager.step(Ids{1}, Ids{1}, full.view, copies), InvalidArgument);
  manager.fork(1, 2);
  EXPECT_THROW(manager.step(Ids{1}, Ids{1}, both, std::span(copies).first(1)), InvalidArgument);
  EXPECT_EQ(manager.step(Ids{1}, Ids{1}, both, copies), 2);  // a pair a group
  manager.check_integrity();
}

}  // namespace
}  // namespace vllm_kernels::kv_cache
