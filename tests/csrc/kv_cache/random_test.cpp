// Long random runs against a model that knows every token of every sequence, and a shadow of every
// slot: what a reader of the block tables would see.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "kv_cache/errors.h"
#include "kv_cache/kv_cache_manager.h"
#include "kv_cache/test_access.h"

namespace vllm_kernels::kv_cache {
namespace {

using Ids = std::vector<int64_t>;

class Simulation {
 public:
  Simulation(uint64_t seed, int64_t num_blocks, int64_t block_size)
      : random_(seed),
        block_size_(block_size),
        manager_(num_blocks, block_size),
        shadow_(num_blocks * block_size, -1) {}

  void run(int64_t steps, int64_t check_every) {
    for (int64_t i = 0; i < steps && !::testing::Test::HasFatalFailure(); ++i) {
      one_step();
      if (i % check_every == 0) check();
    }
    check();
  }

  int64_t refusals() const { return refusals_; }

 private:
  int64_t below(int64_t limit) { return static_cast<int64_t>(random_() % limit); }

  int64_t any_id() {
    auto found = tokens_.begin();
    std::advance(found, below(static_cast<int64_t>(tokens_.size())));
    return found->first;
  }

  void one_step() {
    const int64_t dice = below(100);
    try {
      if (tokens_.empty() || dice < 14) {
        const int64_t id = next_id_++;
        const int64_t count = below(5 * block_size_);
        manager_.allocate(id, count);
        tokens_[id] = {};
        write(id, count);
      } else if (dice < 50) {
        append_to_some();
      } else if (dice < 65) {
        const int64_t parent = any_id();
        const int64_t child = next_id_++;
        manager_.fork(parent, child);
        tokens_[child] = tokens_[parent];
      } else if (dice < 75) {
        const int64_t id = any_id();
        const int64_t keep = below(static_cast<int64_t>(tokens_[id].size()) + 1);
        manager_.truncate(id, keep);
        tokens_[id].resize(keep);
      } else if (dice < 85) {
        reorder_some();
      } else {
        const int64_t id = any_id();
        manager_.free(id);
        tokens_.erase(id);
      }
    } catch (const OutOfBlocks& error) {
      ++refusals_;
      ASSERT_GT(error.needed(), error.free());
      ASSERT_EQ(error.free(), manager_.num_free_blocks());
      if (!tokens_.empty()) {
        const int64_t id = any_id();
        manager_.free(id);
        tokens_.erase(id);
      }
    }
  }

  Ids some_ids() {
    Ids ids;
    for (const auto& entry : tokens_) {
      if (below(2)) ids.push_back(entry.first);
    }
    std::shuffle(ids.begin(), ids.end(), random_);
    return ids;
  }

  void append_to_some() {
    const Ids ids = some_ids();
    Ids counts;
    for (size_t i = 0; i < ids.size(); ++i) counts.push_back(below(3) ? 1 : below(2 * block_size_));
    std::vector<BlockCopy> copies(ids.size());
    copies.resize(manager_.append(ids, counts, copies));
    std::set<int64_t> destinations;
    for (const BlockCopy& copy : copies) {
      ASSERT_NE(copy.source, copy.destination);
      ASSERT_TRUE(destinations.insert(copy.destination).second);
      std::copy_n(shadow_.begin() + copy.source * block_size_, block_size_,
                  shadow_.begin() + copy.destination * block_size_);
    }
    for (const BlockCopy& copy : copies) ASSERT_FALSE(destinations.count(copy.source));
    for (size_t i = 0; i < ids.size(); ++i) write(ids[i], counts[i]);
  }

  void reorder_some() {
    const Ids ids = some_ids();
    Ids parents;
    for (size_t i = 0; i < ids.size(); ++i) parents.push_back(any_id());
    manager_.reorder(ids, parents);
    const auto before = tokens_;
    for (size_t i = 0; i < ids.size(); ++i) tokens_[ids[i]] = before.at(parents[i]);
  }

  // Puts new tokens where the manager says they belong: only into blocks of one owner.
  void write(int64_t id, int64_t count) {
    std::vector<int64_t>& tokens = tokens_[id];
    std::vector<int64_t> slots(count);
    manager_.slot_mapping(id, static_cast<int64_t>(tokens.size()), slots);
    for (const int64_t slot : slots) {
      ASSERT_EQ(TestAccess::pool(manager_).references(static_cast<int32_t>(slot / block_size_)), 1);
      shadow_[slot] = next_token_;
      tokens.push_back(next_token_++);
    }
  }

  void check() {
    manager_.check_integrity();
    ASSERT_EQ(manager_.num_sequences(), static_cast<int64_t>(tokens_.size()));
    std::map<int32_t, int64_t> filled;  // of each used block, by its longest reader
    int64_t num_tokens = 0;
    for (const auto& [id, tokens] : tokens_) {
      const std::vector<int32_t> table = manager_.block_table(id);
      ASSERT_EQ(manager_.num_tokens(id), static_cast<int64_t>(tokens.size()));
      for (size_t i = 0; i < tokens.size(); ++i) {
        const int32_t block = table[i / block_size_];
        const int64_t offset = static_cast<int64_t>(i) % block_size_;
        ASSERT_EQ(shadow_[block * block_size_ + offset], tokens[i]) << "sequence " << id;
        filled[block] = std::max(filled[block], offset + 1);
      }
      num_tokens += static_cast<int64_t>(tokens.size());
    }
    int64_t waste = 0;
    for (const auto& entry : filled) waste += block_size_ - entry.second;
    const Statistics statistics = manager_.statistics();
    ASSERT_EQ(statistics.used_blocks, static_cast<int64_t>(filled.size()));
    ASSERT_EQ(statistics.free_blocks + statistics.used_blocks, statistics.total_blocks);
    ASSERT_EQ(statistics.waste_slots, waste);
    ASSERT_EQ(statistics.num_tokens, num_tokens);
  }

  std::mt19937_64 random_;
  const int64_t block_size_;
  KVCacheManager manager_;
  std::vector<int64_t> shadow_;                     // token in each slot
  std::map<int64_t, std::vector<int64_t>> tokens_;  // of each sequence
  int64_t next_id_ = -3;
  int64_t next_token_ = 0;
  int64_t refusals_ = 0;
};

// VLLM_KERNELS_TEST_STEPS for a longer run.
int64_t steps(int64_t by_default) {
  const char* text = std::getenv("VLLM_KERNELS_TEST_STEPS");
  return text == nullptr ? by_default : std::stoll(text);
}

TEST(Random, MatchesTheModel) {
  for (const int64_t block_size : {1, 3, 4, 16}) {
    SCOPED_TRACE(block_size);
    Simulation simulation(static_cast<uint64_t>(block_size), 256, block_size);
    simulation.run(steps(5000), 40);
  }
}

TEST(Random, MatchesTheModelWhenBlocksAreFew) {
  Simulation simulation(7, 12, 4);
  simulation.run(steps(5000), 2);
  EXPECT_GT(simulation.refusals(), steps(5000) / 100);
}

// A day of requests: allocate, append, fork, free, a million calls in all, with prefixes that meet.
TEST(Random, AMillionCallsLeaveNothingBehind) {
  constexpr int64_t kBlocks = 80;
  KVCacheManager manager(Options{.num_blocks = kBlocks, .block_size = 8});
  std::mt19937_64 random(11);
  const auto below = [&](uint64_t limit) { return static_cast<int64_t>(random() % limit); };
  Ids alive;
  int64_t next_id = 0;
  int64_t refusals = 0;
  std::vector<int32_t> tokens;
  for (int64_t call = 0; call < 1'000'000; ++call) {
    const int64_t dice = below(16);
    try {
      if (alive.size() < 4 || dice == 0) {
        tokens.assign(1 + below(60), static_cast<int32_t>(below(3)));
        manager.allocate(next_id, tokens, kMaxTokens, {});
        alive.push_back(next_id++);
      } else if (dice == 1) {
        manager.fork(alive[below(alive.size())], next_id);
        alive.push_back(next_id++);
      } else if (dice == 2 || alive.size() > 40) {
        const auto gone = alive.begin() + below(alive.size());
        manager.free(*gone);
        alive.erase(gone);
      } else {
        const auto token = static_cast<int32_t>(below(2));
        BlockCopy copy;
        const int64_t id = alive[below(alive.size())];
        const int64_t one = 1;
        manager.append(std::span(&id, 1), std::span(&one, 1), std::span(&copy, 1),
                       {.tokens = std::span(&token, 1)});
      }
    } catch (const OutOfBlocks&) {
      ++refusals;
      manager.free(alive.back());
      alive.pop_back();
    }
    if (call % 20'000 == 0) manager.check_integrity();
  }
  EXPECT_GT(refusals, 0);
  EXPECT_GT(manager.statistics().num_evictions, 0);
  EXPECT_GT(manager.statistics().hit_tokens, 0);
  manager.free(alive);
  manager.check_integrity();
  EXPECT_EQ(manager.num_free_blocks(), kBlocks);
  manager.reset_prefix_cache();
  EXPECT_EQ(TestAccess::cache(manager).num_nodes(), 1);
  manager.check_integrity();
}

}  // namespace
}  // namespace vllm_kernels::kv_cache
