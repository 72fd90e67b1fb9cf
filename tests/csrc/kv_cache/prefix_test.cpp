// Prefix caching: what is found, what never is, and what is left when memory is short.
#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <vector>

#include "kv_cache/errors.h"
#include "kv_cache/kv_cache_manager.h"
#include "kv_cache/test_access.h"

namespace vllm_kernels::kv_cache {
namespace {

using Blocks = std::vector<int32_t>;
using Ids = std::vector<int64_t>;
using Tokens = std::vector<int32_t>;
constexpr int64_t kAll = kMaxTokens;

Tokens range(int32_t size, int32_t first = 0) {
  Tokens tokens(size);
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

Options small(int64_t num_blocks = 12) {
  return {.num_blocks = num_blocks, .block_size = 4, .events = true};
}

void append(KVCacheManager& manager, int64_t id, const Tokens& tokens) {
  EXPECT_TRUE(manager.append(id, static_cast<int64_t>(tokens.size()), {.tokens = tokens}).empty());
}

TEST(Prefix, ASecondSequenceSharesTheFullBlocksOfTheFirst) {
  KVCacheManager manager(small());
  EXPECT_EQ(manager.match(range(10), {}), 0);
  EXPECT_EQ(manager.allocate(1, range(10), kAll, {}), 0);
  EXPECT_EQ(manager.match(range(10), {}), 8);
  EXPECT_EQ(manager.allocate(2, range(10), kAll, {}), 8);
  EXPECT_EQ(manager.block_table(2), (Blocks{0, 1, 3}));
  EXPECT_EQ(manager.num_common_prefix_blocks(Ids{1, 2}), 2);
  EXPECT_EQ(manager.statistics().shared_blocks, 2);
  EXPECT_EQ(manager.statistics().queried_tokens, 20);
  EXPECT_EQ(manager.statistics().hit_tokens, 8);
  manager.check_integrity();
}

TEST(Prefix, DecodedBlocksAreFoundAsPromptsAre) {
  KVCacheManager manager(small());
  manager.allocate(1, range(3), kAll, {});
  for (int32_t token = 3; token < 9; ++token) append(manager, 1, {token});
  manager.free(1);
  EXPECT_EQ(manager.allocate(2, range(12), kAll, {}), 8);
  manager.check_integrity();
}

TEST(Prefix, OneTokenIsLeftToCompute) {
  KVCacheManager manager(small());
  manager.allocate(1, range(8), kAll, {});
  EXPECT_EQ(manager.match(range(8), {}), 4);
  EXPECT_EQ(manager.match(range(9), {}), 8);
  EXPECT_EQ(manager.allocate(2, range(8), kAll, {}), 4);
  EXPECT_EQ(manager.match(range(4), {}), 0);
  EXPECT_EQ(manager.match({}, {}), 0);
  EXPECT_EQ(manager.allocate(3, Tokens{}, kAll, {}), 0);
  EXPECT_EQ(manager.num_tokens(3), 0);
  manager.check_integrity();
}

TEST(Prefix, OnlyFullBlocksAreRegistered) {
  KVCacheManager manager(small());
  manager.allocate(1, range(7), kAll, {});
  EXPECT_EQ(manager.match(range(20), {}), 4);
  EXPECT_EQ(manager.take_events().events.size(), 1u);
  manager.append(1, 1);  // full, but nobody has said of what
  EXPECT_EQ(manager.match(range(20), {}), 4);
  manager.record_tokens(Ids{1}, Ids{1}, Tokens{7});
  EXPECT_EQ(manager.match(range(20), {}), 8);
  manager.check_integrity();
}

TEST(Prefix, ChunksAreRegisteredAsTheyComeIn) {
  KVCacheManager manager(small());
  EXPECT_EQ(manager.allocate(1, range(16), 0, {}), 0);
  EXPECT_EQ(manager.num_tokens(1), 0);
  EXPECT_EQ(manager.match(range(16), {}), 0);
  append(manager, 1, range(6));
  EXPECT_EQ(manager.match(range(16), {}), 4);
  append(manager, 1, range(10, 6));
  EXPECT_EQ(manager.allocate(2, range(16), 2, {}), 12);
  EXPECT_EQ(manager.num_tokens(2), 14);
  manager.check_integrity();
}

// Every field with its tag: "ab" as a salt is not "ab" as an adapter, nor "a" beside "b".
TEST(Prefix, OtherKeysAreOtherPrefixes) {
  KVCacheManager manager(small(200));
  std::vector<PrefixKeys> all(1);
  for (const char* text : {"", "a", "b", "ab"}) {
    all.push_back({.salt = text, .adapter = {}, .cache_dtype = {}, .multimodal = {}});
    all.push_back({.salt = {}, .adapter = text, .cache_dtype = {}, .multimodal = {}});
    all.push_back({.salt = {}, .adapter = {}, .cache_dtype = text, .multimodal = {}});
  }
  all.push_back({.salt = "a", .adapter = "b", .cache_dtype = {}, .multimodal = {}});
  all.push_back({.salt = "b", .adapter = "a", .cache_dtype = {}, .multimodal = {}});
  for (size_t i = 0; i < all.size(); ++i) {
    EXPECT_EQ(manager.match(range(8), all[i]), 0) << i;
    manager.allocate(static_cast<int64_t>(i), range(8), kAll, all[i]);
    EXPECT_EQ(manager.match(range(9), all[i]), 8) << i;
  }
  manager.check_integrity();
  for (size_t i = 0; i < all.size(); ++i) manager.free(static_cast<int64_t>(i));
  manager.reset_prefix_cache();
  EXPECT_EQ(TestAccess::cache(manager).num_nodes(), 1);  // roots go with their last node
}

TEST(Prefix, MultimodalItemsAreThePartOfTheBlocksTheyReachInto) {
  KVCacheManager manager(small(40));
  const auto with = [](int64_t start, int64_t size, const char* digest) {
    return PrefixKeys{.salt = {},
                      .adapter = {},
                      .cache_dtype = {},
                      .multimodal = {{.start = start, .num_tokens = size, .digest = digest}}};
  };
  manager.allocate(1, range(17), kAll, with(5, 6, "cat"));
  EXPECT_EQ(manager.match(range(17), with(5, 6, "cat")), 16);
  EXPECT_EQ(manager.match(range(17), with(5, 6, "dog")), 4);
  EXPECT_EQ(manager.match(range(17), with(5, 7, "cat")), 4);
  EXPECT_EQ(manager.match(range(17), with(6, 5, "cat")), 4);
  EXPECT_EQ(manager.match(range(17), {}), 4);
  EXPECT_EQ(manager.match(range(17), with(16, 1, "dog")), 4);  // 5 to 10 are another text there
  manager.fork(1, 2);
  manager.check_integrity();
  manager.free(1);
  manager.free(2);
  manager.reset_prefix_cache();
  manager.check_integrity();
  for (const auto& [start, size] :
       {std::pair<int64_t, int64_t>{-1, 2}, {0, 0}, {kMaxTokens, 1}, {2, 3}}) {
    EXPECT_THROW(manager.allocate(3, range(4), kAll, with(start, size, "")), InvalidArgument);
    EXPECT_THROW(manager.allocate(3, 4, with(start, size, "")), InvalidArgument);
    EXPECT_THROW(manager.match(range(4), with(start, size, "")), InvalidArgument);
  }
}

TEST(Prefix, MultimodalItemsMayComeInAnyOrderButNotOverlap) {
  KVCacheManager manager(small(40));
  const MultimodalItem cat{.start = 1, .num_tokens = 5, .digest = "cat"};
  const MultimodalItem dog{.start = 6, .num_tokens = 2, .digest = "dog"};
  const auto with = [](std::vector<MultimodalItem> items) {
    return PrefixKeys{.salt = {}, .adapter = {}, .cache_dtype = {}, .multimodal = std::move(items)};
  };
  manager.allocate(1, range(9), kAll, with({cat, dog}));
  EXPECT_EQ(manager.match(range(9), with({dog, cat})), 8);
  EXPECT_EQ(manager.match(range(9), with({cat})), 4);
  EXPECT_THROW(manager.match(range(9), with({cat, cat})), InvalidArgument);
  manager.check_integrity();
}

// Half of all blocks have the hash of another one: tokens, parents and extra bytes are compared.
TEST(Prefix, ForcedCollisionsAreMisses) {
  for (const int bits : {1, 8}) {
    Options options = small(4000);
    options.hash_bits = bits;
    KVCacheManager manager(options);
    for (int32_t i = 0; i < 300; ++i) {
      // The second block has the same tokens each time, behind another first one.
      Tokens tokens = range(4, 100 * i);
      for (const int32_t token : {1, 2, 3, 4, 5}) tokens.push_back(token);
      EXPECT_EQ(manager.match(tokens, {}), 0) << i;
      EXPECT_EQ(manager.allocate(i, tokens, kAll, {}), 0) << i;
      EXPECT_EQ(manager.match(tokens, {}), 8) << i;
    }
    manager.check_integrity();
  }
}

TEST(Prefix, FreedBlocksAreFoundUntilTheyAreNeeded) {
  KVCacheManager manager(small(6));
  manager.allocate(1, range(12), kAll, {});
  manager.allocate(2, range(8, 50), kAll, {});
  manager.free(1);
  manager.free(2);
  EXPECT_EQ(manager.statistics().cached_blocks, 5);
  EXPECT_EQ(manager.statistics().free_blocks, 1);
  manager.allocate(3, 4);  // the empty one
  EXPECT_EQ(manager.statistics().num_evictions, 0);
  manager.allocate(4, 8);  // the tail of what was freed first
  EXPECT_EQ(manager.statistics().num_evictions, 2);
  EXPECT_EQ(manager.match(range(13), {}), 4);
  EXPECT_EQ(manager.match(range(9, 50), {}), 8);
  EXPECT_EQ(manager.allocate(5, range(5), kAll, {}), 4);  // revives one, evicts another
  EXPECT_EQ(manager.match(range(9, 50), {}), 4);
  manager.check_integrity();
}

TEST(Prefix, WhatIsFoundIsNotGivenOutForTheRest) {
  KVCacheManager manager(small(4));
  manager.allocate(1, range(12), kAll, {});
  manager.free(1);
  EXPECT_TRUE(manager.can_allocate(range(16), {}));
  EXPECT_EQ(manager.allocate(2, range(16), kAll, {}), 12);
  manager.free(2);
  const Snapshot before = TestAccess::snapshot(manager);
  EXPECT_FALSE(manager.can_allocate(range(17), {}));
  try {
    manager.allocate(3, range(17), kAll, {});
    ADD_FAILURE();
  } catch (const OutOfBlocks& error) {
    EXPECT_EQ(error.needed(), 5);
    EXPECT_EQ(error.free(), 4);
  }
  EXPECT_EQ(TestAccess::snapshot(manager), before);
  manager.check_integrity();
}

TEST(Prefix, ARefusedSequenceLeavesNoRootBehind) {
  KVCacheManager manager(small(2));
  const Snapshot before = TestAccess::snapshot(manager);
  const PrefixKeys keys{.salt = "tenant", .adapter = {}, .cache_dtype = {}, .multimodal = {}};
  EXPECT_THROW(manager.allocate(1, range(30), kAll, keys), OutOfBlocks);
  EXPECT_EQ(TestAccess::snapshot(manager), before);
}

TEST(Prefix, AReferenceTooManyIsAMiss) {
  Options options = small();
  options.max_references = 2;
  KVCacheManager manager(options);
  manager.allocate(1, range(9), kAll, {});
  EXPECT_EQ(manager.allocate(2, range(9), kAll, {}), 8);
  EXPECT_EQ(manager.allocate(3, range(9), kAll, {}), 0);
  manager.check_integrity();
}

// Truncated into a registered block: what is written next must not be found as what was there.
TEST(Prefix, ATruncatedBlockIsForgottenWhenItIsWrittenTo) {
  KVCacheManager manager(small());
  manager.allocate(1, range(8), kAll, {});
  manager.truncate(1, 6);
  EXPECT_EQ(manager.match(range(9), {}), 8);  // still whole
  append(manager, 1, {77});
  EXPECT_EQ(manager.match(range(9), {}), 4);
  append(manager, 1, {78});
  EXPECT_EQ(manager.match(Tokens{0, 1, 2, 3, 4, 5, 77, 78, 79}, {}), 8);
  manager.truncate(1, 2);
  append(manager, 1, {2, 3});  // the same again
  EXPECT_EQ(manager.match(range(9), {}), 4);
  manager.check_integrity();
}

TEST(Prefix, AppendToATruncatedSharedBlockCopiesIt) {
  KVCacheManager manager(small());
  manager.allocate(1, range(9), kAll, {});
  manager.allocate(2, range(9), kAll, {});
  manager.truncate(2, 6);
  const std::vector<BlockCopy> copies = manager.append(2, 1, {.tokens = Tokens{77}});
  ASSERT_EQ(copies.size(), 1u);
  EXPECT_EQ(copies[0].source, 1);
  EXPECT_EQ(manager.match(range(9), {}), 8);
  manager.check_integrity();
}

TEST(Prefix, TokensForASequenceWithUnknownOnesAreRefused) {
  KVCacheManager manager(small());
  manager.allocate(1, 3);
  const Snapshot before = TestAccess::snapshot(manager);
  EXPECT_THROW(append(manager, 1, {3}), InvalidArgument);
  EXPECT_THROW(manager.append(1, 2, {.tokens = Tokens{3}}), InvalidArgument);
  EXPECT_THROW(manager.record_tokens(Ids{1}, Ids{4}, range(4)), InvalidArgument);
  EXPECT_THROW(manager.record_tokens(Ids{1}, Ids{3}, range(4)), InvalidArgument);
  EXPECT_EQ(TestAccess::snapshot(manager), before);
  manager.record_tokens(Ids{1}, Ids{3}, range(3));
  append(manager, 1, {3});
  EXPECT_EQ(manager.match(range(5), {}), 4);
}

TEST(Prefix, TokensThatContradictAnotherHolderAreRefused) {
  KVCacheManager manager(small());
  manager.allocate(1, 10);
  for (const int64_t child : {2, 3, 4}) manager.fork(1, child);
  manager.record_tokens(Ids{1}, Ids{8}, range(8));
  manager.record_tokens(Ids{2}, Ids{5}, range(5));  // the same
  Tokens others = range(8);
  others[6] = 77;
  const Snapshot before = TestAccess::snapshot(manager);
  EXPECT_THROW(manager.record_tokens(Ids{3}, Ids{8}, others), InvalidArgument);
  const Tokens rest(others.begin() + 5, others.end());
  EXPECT_THROW(manager.record_tokens(Ids{2}, Ids{3}, rest), InvalidArgument);
  EXPECT_EQ(TestAccess::snapshot(manager), before);
  manager.record_tokens(Ids{3}, Ids{8}, range(8));
  manager.check_integrity();

  KVCacheManager both(small());  // in one call
  both.allocate(1, 8);
  both.fork(1, 2);
  Tokens tokens = range(8);
  tokens.insert(tokens.end(), others.begin(), others.end());
  const Snapshot unrecorded = TestAccess::snapshot(both);
  EXPECT_THROW(both.record_tokens(Ids{1, 2}, Ids{8, 8}, tokens), InvalidArgument);
  EXPECT_EQ(TestAccess::snapshot(both), unrecorded);
  tokens[14] = 6;
  both.record_tokens(Ids{1, 2}, Ids{8, 8}, tokens);
  both.check_integrity();
}

TEST(Prefix, WhatNoPassHasFilledIsForgottenByTheBatchCallsToo) {
  KVCacheManager manager(small(20));
  const Tokens other = range(12, 100);
  manager.allocate(1, range(12), kAll, {});
  manager.allocate(2, other, kAll, {});
  manager.fork(1, 3);
  const Snapshot before = TestAccess::snapshot(manager);
  EXPECT_THROW(manager.free(Ids{1, 2}, Ids{3, -1}), InvalidArgument);
  EXPECT_THROW(manager.free(Ids{1, 2}, Ids{3}), InvalidArgument);
  EXPECT_THROW(manager.truncate(Ids{1, 2}, Ids{3, 3}, Ids{3, -1}), InvalidArgument);
  EXPECT_THROW(manager.truncate(Ids{1, 2}, Ids{3, 3}, Ids{3}), InvalidArgument);
  EXPECT_EQ(TestAccess::snapshot(manager), before);

  manager.truncate(Ids{1, 2}, Ids{9, 3}, Ids{8, 7});
  EXPECT_EQ(manager.match(range(13), {}), 8);
  EXPECT_EQ(manager.match(range(13, 100), {}), 4);
  manager.check_integrity();
  manager.free(Ids{3, 2, 1}, Ids{12, 4, 5});
  EXPECT_EQ(manager.match(range(13), {}), 4);
  EXPECT_EQ(manager.match(range(13, 100), {}), 4);
  EXPECT_EQ(manager.num_free_blocks(), 20);
  manager.check_integrity();
}

TEST(Prefix, ResetForgetsWhatLivingSequencesWillFillToo) {
  KVCacheManager manager(small());
  manager.allocate(1, range(7), kAll, {});
  manager.reset_prefix_cache();
  EXPECT_EQ(manager.match(range(9), {}), 0);
  append(manager, 1, {7});
  EXPECT_EQ(manager.match(range(9), {}), 0);
  EXPECT_EQ(manager.num_known_tokens(1), -1);
  EXPECT_EQ(manager.num_tokens(1), 8);
  manager.allocate(2, range(9), kAll, {});
  EXPECT_EQ(manager.match(range(9), {}), 8);
  manager.check_integrity();
}

TEST(Prefix, EvictedBlocksStayWithTheirSequences) {
  KVCacheManager manager(small());
  manager.allocate(1, range(8), kAll, {});
  manager.free(1);
  manager.allocate(2, range(12), kAll, {});
  const Snapshot before = TestAccess::snapshot(manager);
  EXPECT_THROW(manager.evict_blocks(Ids{0, 12}), InvalidArgument);
  EXPECT_EQ(TestAccess::snapshot(manager), before);
  manager.evict_blocks(Ids{0, 0, 11});
  EXPECT_EQ(manager.match(range(13), {}), 0);
  EXPECT_EQ(manager.num_tokens(2), 12);
  manager.check_integrity();
}

TEST(Prefix, WithoutCachingTokensAreTakenAndForgotten) {
  Options options = small();
  options.prefix_caching = false;
  KVCacheManager manager(options);
  EXPECT_EQ(manager.allocate(1, range(9), kAll, {}), 0);
  append(manager, 1, range(3, 9));
  EXPECT_EQ(manager.allocate(2, range(9), kAll, {}), 0);
  EXPECT_EQ(manager.num_known_tokens(1), -1);
  manager.free(1);
  EXPECT_EQ(manager.statistics().cached_blocks, 0);
  manager.check_integrity();
}

TEST(Prefix, EventsTellWhatIsFindable) {
  Options options = small(3);
  options.hash_key = HashKey{};
  KVCacheManager manager(options);
  manager.allocate(1, range(8), kAll, {});
  Events events = manager.take_events();
  ASSERT_EQ(events.events.size(), 2u);
  EXPECT_EQ(events.events[0].kind, Event::Kind::kStored);
  EXPECT_EQ(events.events[1].block, 1);
  EXPECT_EQ(events.events[1].parent, events.events[0].hash);
  EXPECT_EQ(events.tokens, range(8));
  const Hash second = events.events[1].hash;
  manager.free(1);
  manager.allocate(2, 8);  // one is empty, the other was the last of the prompt
  events = manager.take_events();
  ASSERT_EQ(events.events.size(), 1u);
  EXPECT_EQ(events.events[0].kind, Event::Kind::kRemoved);
  EXPECT_EQ(events.events[0].hash, second);
  manager.reset_prefix_cache();
  events = manager.take_events();
  ASSERT_EQ(events.events.size(), 1u);
  EXPECT_EQ(events.events[0].kind, Event::Kind::kCleared);
  EXPECT_TRUE(manager.take_events().events.empty());

  KVCacheManager same(options);  // a hash that is the same in every process with this key
  same.allocate(7, range(8), kAll, {});
  EXPECT_EQ(same.take_events().events[1].hash, second);
}

TEST(Prefix, TheWatermarkIsLeftFreeByNewSequencesOnly) {
  Options options = small(6);
  options.watermark_blocks = 2;
  KVCacheManager manager(options);
  EXPECT_FALSE(manager.can_allocate(20));
  EXPECT_FALSE(manager.can_allocate(range(17), {}));
  EXPECT_THROW(manager.allocate(1, 20), OutOfBlocks);
  EXPECT_THROW(manager.allocate(1, range(17), kAll, {}), OutOfBlocks);
  EXPECT_EQ(manager.num_free_blocks(), 6);
  EXPECT_TRUE(manager.can_allocate(16));
  manager.allocate(1, range(16), kAll, {});
  manager.allocate(2, 0);
  manager.append(1, 8);
  EXPECT_EQ(manager.num_free_blocks(), 0);
}

}  // namespace
}  // namespace vllm_kernels::kv_cache
