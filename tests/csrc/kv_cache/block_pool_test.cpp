#include "kv_cache/block_pool.h"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "kv_cache/errors.h"
#include "kv_cache/test_access.h"

namespace vllm_kernels::kv_cache {
namespace {

using Blocks = std::vector<int32_t>;

TEST(BlockPool, ConstructorRefusesImpossibleSizes) {
  EXPECT_THROW(BlockPool(0), InvalidArgument);
  EXPECT_THROW(BlockPool(-1), InvalidArgument);
  EXPECT_THROW(BlockPool(kMaxBlocks + 1), InvalidArgument);
  EXPECT_THROW(BlockPool(std::numeric_limits<int64_t>::max()), InvalidArgument);
  EXPECT_THROW(BlockPool(4, 0), InvalidArgument);
  EXPECT_THROW(BlockPool(4, kMaxReferences + 1), InvalidArgument);
  EXPECT_EQ(BlockPool(1).num_free(), 1);
}

TEST(BlockPool, TakesWhatWasReleasedLongestAgo) {
  BlockPool pool(4);
  EXPECT_EQ(pool.take(), 0);
  EXPECT_EQ(pool.take(), 1);
  EXPECT_EQ(pool.take(), 2);
  pool.release(1);
  pool.release(0);
  EXPECT_EQ(TestAccess::free_list(pool), (Blocks{3, 1, 0}));
  EXPECT_EQ(pool.take(), 3);
  EXPECT_EQ(pool.take(), 1);
  EXPECT_EQ(pool.take(), 0);
  pool.check_integrity();
}

TEST(BlockPool, TakeFromAnEmptyPoolThrowsAndChangesNothing) {
  BlockPool pool(1);
  pool.take();
  try {
    pool.take();
    FAIL() << "expected OutOfBlocks";
  } catch (const OutOfBlocks& error) {
    EXPECT_EQ(error.needed(), 1);
    EXPECT_EQ(error.free(), 0);
  }
  EXPECT_EQ(pool.references(0), 1);
  pool.release(0);
  EXPECT_EQ(pool.take(), 0);
}

TEST(BlockPool, DoubleFreeAndBadIdsThrow) {
  BlockPool pool(2);
  const int32_t block = pool.take();
  pool.release(block);
  EXPECT_THROW(pool.release(block), InvalidArgument);
  for (const int32_t bad : {-1, 2, std::numeric_limits<int32_t>::min()}) {
    EXPECT_THROW(pool.release(bad), InvalidArgument);
    EXPECT_THROW(pool.add_reference(bad), InvalidArgument);
    EXPECT_THROW(pool.references(bad), InvalidArgument);
  }
  EXPECT_EQ(pool.num_free(), 2);
  pool.check_integrity();
}

TEST(BlockPool, ReferencesAreCountedAndDoNotWrap) {
  BlockPool pool(2, 3);
  const int32_t block = pool.take();
  pool.add_reference(block);
  EXPECT_EQ(pool.num_shared(), 1);
  pool.add_reference(block);
  EXPECT_THROW(pool.add_reference(block), ReferenceOverflow);
  EXPECT_EQ(pool.references(block), 3);
  pool.release(block);
  pool.release(block);
  EXPECT_EQ(pool.num_shared(), 0);
  EXPECT_EQ(pool.num_used(), 1);
  pool.release(block);
  EXPECT_EQ(pool.num_used(), 0);
  pool.check_integrity();
}

TEST(BlockPool, RevivesAFreeBlockOutOfTheMiddleOfTheListOnce) {
  BlockPool pool(4);
  pool.add_reference(2);
  EXPECT_EQ(pool.references(2), 1);
  EXPECT_EQ(TestAccess::free_list(pool), (Blocks{0, 1, 3}));
  pool.add_reference(2);  // the second time it is only shared
  EXPECT_EQ(pool.num_free(), 3);
  EXPECT_EQ(pool.take(), 0);
  EXPECT_EQ(pool.take(), 1);
  EXPECT_EQ(pool.take(), 3);
  EXPECT_THROW(pool.take(), OutOfBlocks);
  pool.check_integrity();
}

TEST(BlockPool, PeakIsTheMostThatWasUsedAtOnce) {
  BlockPool pool(4);
  pool.take();
  pool.take();
  pool.release(0);
  pool.take();
  EXPECT_EQ(pool.peak_used(), 2);
  pool.reset();
  EXPECT_EQ(pool.peak_used(), 0);
  EXPECT_EQ(TestAccess::free_list(pool), (Blocks{0, 1, 2, 3}));
}

TEST(BlockPool, CheckIntegrityNoticesEveryKindOfDamage) {
  const auto damaged = [](auto damage) {
    BlockPool pool(6);
    pool.take();
    pool.take();
    pool.add_reference(0);
    pool.check_integrity();
    damage(pool);
    EXPECT_THROW(pool.check_integrity(), IntegrityError);
  };
  damaged([](BlockPool& pool) { TestAccess::references(pool, 3) = 1; });
  damaged([](BlockPool& pool) { TestAccess::references(pool, 1) = 0; });
  damaged([](BlockPool& pool) { TestAccess::references(pool, 1) = 2; });
  damaged([](BlockPool& pool) { TestAccess::references(pool, 1) = -1; });
  damaged([](BlockPool& pool) { TestAccess::next(pool, 4) = 2; });   // a shorter ring
  damaged([](BlockPool& pool) { TestAccess::next(pool, 4) = 4; });   // does not end
  damaged([](BlockPool& pool) { TestAccess::next(pool, 4) = -3; });  // leaves the pool
  damaged([](BlockPool& pool) { TestAccess::next(pool, 4) = 6; });   // loses its end
  damaged([](BlockPool& pool) { TestAccess::next(pool, 1) = 3; });   // used, yet linked
  damaged([](BlockPool& pool) { TestAccess::previous(pool, 4) = 2; });
  damaged([](BlockPool& pool) { TestAccess::num_empty(pool) = 3; });
  damaged([](BlockPool& pool) { TestAccess::num_shared(pool) = 0; });
  damaged([](BlockPool& pool) { TestAccess::content(pool, 3) = 5; });   // cached, in the other list
  damaged([](BlockPool& pool) { TestAccess::content(pool, 0) = -2; });  // no number of a content
}

TEST(BlockPool, EmptyBlocksAreTakenBeforeCachedOnesAndThoseInTheOrderOfRelease) {
  BlockPool pool(4);
  for (int i = 0; i < 4; ++i) pool.take();
  pool.set_content(2, 20);
  pool.set_content(0, 10);
  for (const int32_t block : {2, 3, 0, 1}) pool.release(block);
  EXPECT_EQ(pool.num_cached(), 2);
  EXPECT_EQ(pool.num_free(), 4);
  EXPECT_EQ(TestAccess::free_list(pool), (Blocks{3, 1, 2, 0}));
  int32_t evicted = 0;
  EXPECT_EQ(pool.take(evicted), 3);
  EXPECT_EQ(evicted, BlockPool::kNoContent);
  EXPECT_EQ(pool.take(evicted), 1);
  EXPECT_EQ(pool.take(evicted), 2);
  EXPECT_EQ(evicted, 20);
  EXPECT_EQ(pool.content(2), BlockPool::kNoContent);
  EXPECT_EQ(pool.num_evictions(), 1);
  pool.add_reference(0);  // revived: its content stays
  EXPECT_EQ(pool.content(0), 10);
  EXPECT_EQ(pool.num_free(), 0);
  pool.check_integrity();
}

TEST(BlockPool, ABlockThatLosesItsContentIsEmpty) {
  BlockPool pool(3);
  const int32_t block = pool.take();
  pool.set_content(block, 7);
  EXPECT_THROW(pool.set_content(block, 8), InvalidArgument);
  EXPECT_THROW(pool.set_content(1, -1), InvalidArgument);
  EXPECT_THROW(pool.clear_content(3), InvalidArgument);
  pool.release(block);
  EXPECT_EQ(pool.num_cached(), 1);
  pool.clear_content(block);
  EXPECT_EQ(pool.num_cached(), 0);
  EXPECT_EQ(pool.num_free(), 3);
  pool.check_integrity();
}

TEST(BlockPool, TheNullBlockIsNeverHeld) {
  EXPECT_THROW(BlockPool(1, 5, true), InvalidArgument);
  BlockPool pool(3, 5, true);
  EXPECT_EQ(pool.num_usable(), 2);
  EXPECT_EQ(pool.take(), 1);
  EXPECT_EQ(pool.take(), 2);
  EXPECT_THROW(pool.take(), OutOfBlocks);
  EXPECT_THROW(pool.add_reference(kNullBlock), InvalidArgument);
  EXPECT_THROW(pool.release(kNullBlock), InvalidArgument);
  EXPECT_THROW(pool.set_content(kNullBlock, 1), InvalidArgument);
  pool.check_integrity();
  pool.reset();
  EXPECT_EQ(pool.take(), 1);
  pool.check_integrity();
}

}  // namespace
}  // namespace vllm_kernels::kv_cache
