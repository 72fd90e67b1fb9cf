// Sequences that several ranks hold together. tests/kv_cache/test_state_machine.py runs all calls
// on all ranks.
#include "kv_cache/shard.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "kv_cache/errors.h"
#include "kv_cache/kv_cache_manager.h"
#include "kv_cache/test_access.h"

namespace vllm_kernels::kv_cache {
namespace {

using Ids = std::vector<int64_t>;

std::string message_of(const Options& options) {
  try {
    KVCacheManager manager(options);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "no error";
}

TEST(Shard, CountsAndRunsAreThoseOfTokenByToken) {
  for (const int64_t count : {1, 2, 3, 4, 8}) {
    for (const int64_t interleave : {1, 2, 3, 4, 16}) {
      for (int64_t rank = 0; rank < count; ++rank) {
        const Shard shard{count, rank, interleave, 4 * interleave};
        Ids slots;  // of every token, or -1
        int64_t local = 0;
        for (int64_t token = 0; token < 150; ++token) {
          ASSERT_EQ(shard.local_tokens(token), local) << token;
          slots.push_back(token / interleave % count == rank ? local++ : -1);
        }
        for (const int64_t first : {0, 1, 7, 64}) {
          Ids found;
          shard.for_each_run(first, 150 - first, [&](int64_t start, int64_t size, int64_t slot) {
            ASSERT_EQ(start, static_cast<int64_t>(found.size()));
            for (int64_t i = 0; i < size; ++i) found.push_back(slot < 0 ? -1 : slot + i);
          });
          ASSERT_EQ(found, Ids(slots.begin() + first, slots.end()));
        }
      }
    }
  }
}

TEST(Shard, EachTokenHasOneSlotOnOneRank) {
  std::vector<std::unique_ptr<KVCacheManager>> ranks;
  for (int64_t rank = 0; rank < 3; ++rank) {
    ranks.push_back(std::make_unique<KVCacheManager>(
        Options{.num_blocks = 8, .block_size = 4, .shards = 3, .shard = rank, .interleave = 2}));
  }
  const std::vector<Ids> expected{{0, 1, -1, -1, -1, -1, 2, 3, -1, -1, -1, -1, 4},
                                  {-1, -1, 0, 1, -1, -1, -1, -1, 2, 3, -1, -1, -1},
                                  {-1, -1, -1, -1, 0, 1, -1, -1, -1, -1, 2, 3, -1}};
  const Ids lengths{5, 4, 4};
  for (int64_t rank = 0; rank < 3; ++rank) {
    KVCacheManager& manager = *ranks[rank];
    EXPECT_EQ(manager.block_tokens(), 12);
    manager.allocate(7, 0);
    TestBuffers buffers(1, 4, 16);
    manager.step(Ids{7}, Ids{13}, buffers.view, {});
    Ids slots(13);
    manager.slot_mapping(7, 0, slots);
    EXPECT_EQ(slots, expected[rank]);
    EXPECT_EQ(Ids(buffers.slot_mapping.begin(), buffers.slot_mapping.begin() + 13), slots);
    EXPECT_EQ(buffers.positions[12], 12);
    EXPECT_EQ(buffers.seq_lens[0], lengths[rank]);
    EXPECT_EQ(manager.num_tokens(7), 13);
    EXPECT_EQ(manager.num_local_tokens(7), lengths[rank]);
    EXPECT_EQ(manager.block_table(7), (std::vector<int32_t>{0, 1}));
    EXPECT_EQ(manager.statistics().num_tokens, lengths[rank]);
    EXPECT_EQ(manager.statistics().waste_slots, 8 - lengths[rank]);
    manager.check_integrity();
  }
}

TEST(Shard, PrefixesAreFoundByBlocksOfAllRanks) {
  for (const int64_t rank : {0, 1}) {
    KVCacheManager manager(
        Options{.num_blocks = 8, .block_size = 4, .shards = 2, .shard = rank, .interleave = 4});
    std::vector<int32_t> prompt(20, 5);
    EXPECT_EQ(manager.allocate(1, prompt, kMaxTokens, {}), 0);
    EXPECT_EQ(manager.match(prompt, {}), 16);
    prompt[15] = 6;
    EXPECT_EQ(manager.match(prompt, {}), 8);
  }
}

TEST(Shard, ConstructorRefusesImpossibleShards) {
  EXPECT_EQ(message_of({.num_blocks = 1, .block_size = 4, .shards = 0}),
            "KVCacheManager: shards: expected 1 to 536870911, got 0");
  EXPECT_EQ(message_of({.num_blocks = 1, .block_size = 4, .shards = int64_t{1} << 60}),
            "KVCacheManager: shards: expected 1 to 536870911, got 1152921504606846976");
  EXPECT_EQ(message_of({.num_blocks = 1, .block_size = 4, .shards = 2, .shard = 2}),
            "KVCacheManager: shard: expected 0 to 1, got 2");
  EXPECT_EQ(message_of({.num_blocks = 1, .block_size = 4, .shard = -1}),
            "KVCacheManager: shard: expected 0 to 0, got -1");
  for (const int64_t interleave : {0, 3, 8, -1}) {
    EXPECT_EQ(message_of({.num_blocks = 1, .block_size = 4, .shards = 2, .interleave = interleave}),
              concat("KVCacheManager: interleave: expected a divisor of block_size = 4, got ",
                     interleave));
  }
  EXPECT_EQ(message_of({.num_blocks = 1, .block_size = 4096, .shards = 17}),
            "KVCacheManager: shards * block_size (with prefix_caching): expected 1 to 65536, got "
            "69632");
}

}  // namespace
}  // namespace vllm_kernels::kv_cache
