// Every call, with its k-th memory allocation failing, for every k: the state must be as before,
// and the same call must succeed afterwards.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <new>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "kv_cache/errors.h"
#include "kv_cache/failing_new.h"
#include "kv_cache/kv_cache_manager.h"
#include "kv_cache/test_access.h"

namespace vllm_kernels::kv_cache {
namespace {

using Ids = std::vector<int64_t>;
using Tokens = std::vector<int32_t>;

Tokens range(int32_t size) {
  Tokens tokens(size);
  std::iota(tokens.begin(), tokens.end(), 0);
  return tokens;
}

// Arguments live outside of the calls, so that all allocations counted are the manager's.
struct Arguments {
  const Ids ids{1, 2, 3, 4};
  const Ids new_ids{5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17};
  const Ids counts{1, 17, 0, 40};
  const Ids new_counts{1, 17, 0, 40, 1, 2, 3, 4, 5, 6, 7, 8, 9};
  const Ids parents{2, 2, 1, 3};
  TestBuffers buffers{8, 40, 200};
  TestBuffers buffers_of_window{8, 40, 200};
  std::vector<BlockCopy> copies{64};

  // One a group of layers.
  std::vector<BatchBuffers*> views(const KVCacheManager& manager) {
    std::vector<BatchBuffers*> views{&buffers.view, &buffers_of_window.view};
    views.resize(manager.num_groups());
    return views;
  }
  bool untouched() const { return buffers.untouched() && buffers_of_window.untouched(); }

  const Tokens prompt = range(70);  // its first 20 tokens are cached
  const Tokens tokens = range(18);
  const Ids known{1, 2, 4};  // sequences whose tokens are known
  const Ids known_counts{1, 17, 0};
  const Ids swapped{1000};
  const Ids blocks{0, 1, 2};
  const PrefixKeys salted{.salt = "a salt that is longer than a string's own room",
                          .adapter = {},
                          .cache_dtype = {},
                          .multimodal = {{.start = 2, .num_tokens = 40, .digest = "an image"}}};
};

using MakeManager = std::unique_ptr<KVCacheManager> (*)();
struct Call {
  std::string name;
  std::function<void(KVCacheManager&, Arguments&)> run;
  MakeManager make = nullptr;  // make_manager
};

void PrintTo(const Call& call, std::ostream* stream) {
  *stream << call.name;
}

// Sequences with shared full blocks, shared partly filled ones, one in host blocks, and cached
// blocks among the free ones.
void add_sequences(KVCacheManager& manager) {
  manager.allocate(1, range(6), kMaxTokens, {});
  manager.fork(1, 2);
  manager.fork(1, 3);
  manager.allocate(100, range(21), kMaxTokens, {});
  manager.allocate(1000, range(22), kMaxTokens, {});
  manager.allocate(4, Tokens{9, 9, 9}, kMaxTokens, {});
  manager.append(3, 4);
  manager.free(100);
  std::vector<BlockCopy> copies(8);
  manager.swap_out(Ids{1000}, copies);
}

std::unique_ptr<KVCacheManager> make_manager() {
  auto manager = std::make_unique<KVCacheManager>(Options{.num_blocks = 64,
                                                          .block_size = 4,
                                                          .num_host_blocks = 32,
                                                          .events = true,
                                                          .hash_key = HashKey{}});
  add_sequences(*manager);
  return manager;
}

// No block is empty: what is taken was cached.
std::unique_ptr<KVCacheManager> make_full_manager() {
  auto manager = make_manager();
  const Tokens occupying_tokens = range(4 * manager->num_blocks());
  const auto free = manager->num_free_blocks();
  manager->allocate(2000, std::span(occupying_tokens).last(4 * free), kMaxTokens, {});
  manager->free(2000);
  EXPECT_EQ(manager->statistics().free_blocks, 0);
  return manager;
}

// A group that sees everything and one that sees 5 tokens; the next tokens of every sequence let
// its window move on, and no block is empty.
std::unique_ptr<KVCacheManager> make_windowed_manager() {
  auto manager = std::make_unique<KVCacheManager>(Options{.num_blocks = 64,
                                                          .block_size = 4,
                                                          .num_host_blocks = 32,
                                                          .windows = {kFullAttention, 5},
                                                          .events = true,
                                                          .hash_key = HashKey{}});
  manager->allocate(1, range(14), kMaxTokens, {});
  manager->fork(1, 2);
  manager->fork(1, 3);
  manager->allocate(4, range(11), kMaxTokens, {});
  manager->allocate(1000, range(9), kMaxTokens, {});
  std::vector<BlockCopy> copies(16);
  manager->swap_out(Ids{1000}, copies);
  const Tokens occupying_tokens(4 * (manager->num_free_blocks() / 2), 7);
  manager->allocate(2000, occupying_tokens, kMaxTokens, {});
  manager->free(2000);
  return manager;
}

// The second of two ranks that hold the sequences of make_manager() together.
std::unique_ptr<KVCacheManager> make_shard() {
  auto manager = std::make_unique<KVCacheManager>(Options{.num_blocks = 64,
                                                          .block_size = 2,
                                                          .shards = 2,
                                                          .shard = 1,
                                                          .num_host_blocks = 32,
                                                          .events = true,
                                                          .hash_key = HashKey{}});
  add_sequences(*manager);
  return manager;
}

class EveryAllocation : public ::testing::TestWithParam<Call> {};

TEST_P(EveryAllocation, FailsWithoutATrace) {
  const Call& call = GetParam();
  const MakeManager make = call.make ? call.make : make_manager;
  Snapshot after;
  {
    const auto manager = make();
    Arguments arguments;
    call.run(*manager, arguments);
    after = TestAccess::snapshot(*manager);
  }
  constexpr int64_t kFarTooMany = 1000;
  for (int64_t k = 0; k < kFarTooMany; ++k) {
    const auto manager = make();
    Arguments arguments;
    const Snapshot before = TestAccess::snapshot(*manager);
    bool thrown = false;
    bool failed = false;
    {
      const FailAllocation fail(k);
      try {
        call.run(*manager, arguments);
      } catch (const std::bad_alloc&) {
        thrown = true;
      }
      failed = fail.failed();
    }
    ASSERT_EQ(thrown, failed) << call.name << ", allocation " << k;
    manager->check_integrity();
    if (!failed) {
      EXPECT_EQ(TestAccess::snapshot(*manager), after) << call.name;
      RecordProperty("allocations", static_cast<int>(k));
      return;
    }
    ASSERT_EQ(TestAccess::snapshot(*manager), before) << call.name << ", allocation " << k;
    ASSERT_TRUE(arguments.untouched()) << call.name << ", allocation " << k;
    call.run(*manager, arguments);
    ASSERT_EQ(TestAccess::snapshot(*manager), after) << call.name << ", allocation " << k;
  }
  FAIL() << call.name << ": the calls never ran out of allocations";
}

using Manager = KVCacheManager;
INSTANTIATE_TEST_SUITE_P(
    Calls, EveryAllocation,
    ::testing::Values(
        Call{"allocate", [](Manager& m, Arguments&) { m.allocate(50, 33); }},
        Call{"allocate_batch",
             [](Manager& m, Arguments& a) { m.allocate(a.new_ids, a.new_counts); }},
        Call{"append", [](Manager& m, Arguments&) { m.append(1, 30); }},
        Call{"append_batch", [](Manager& m, Arguments& a) { m.append(a.ids, a.counts, a.copies); }},
        Call{"allocate_tokens",
             [](Manager& m, Arguments& a) { m.allocate(50, a.prompt, kMaxTokens, {}); }},
        Call{"allocate_tokens_with_keys",
             [](Manager& m, Arguments& a) { m.allocate(50, a.prompt, kMaxTokens, a.salted); }},
        Call{"allocate_prefix", [](Manager& m, Arguments& a) { m.allocate(50, a.prompt, 0, {}); }},
        Call{"match", [](Manager& m, Arguments& a) { m.match(a.prompt, a.salted); }},
        Call{"can_allocate", [](Manager& m, Arguments& a) { m.can_allocate(a.prompt, {}); }},
        Call{"append_tokens",
             [](Manager& m, Arguments& a) {
               m.append(a.known, a.known_counts, a.copies, {.tokens = a.tokens, .lookahead = 9});
             }},
        Call{"record_tokens",
             [](Manager& m, Arguments& a) {
               m.record_tokens(Ids{3}, Ids{4}, std::span(a.tokens).first(4));
             }},
        Call{"step_tokens",
             [](Manager& m, Arguments& a) {
               m.step(a.known, a.known_counts, a.buffers.view, a.copies, {.tokens = a.tokens});
             }},
        Call{"swap_out", [](Manager& m, Arguments& a) { m.swap_out(a.ids, a.copies); }},
        Call{"swap_in", [](Manager& m, Arguments& a) { m.swap_in(a.swapped, a.copies); }},
        Call{"can_swap_out", [](Manager& m, Arguments& a) { m.can_swap_out(a.ids); }},
        Call{"can_swap_in", [](Manager& m, Arguments& a) { m.can_swap_in(a.swapped); }},
        Call{"evict_blocks", [](Manager& m, Arguments& a) { m.evict_blocks(a.blocks); }},
        Call{"reset_prefix_cache", [](Manager& m, Arguments&) { m.reset_prefix_cache(); }},
        Call{"fork", [](Manager& m, Arguments&) { m.fork(1, 50); }},
        Call{"forks",  // past the room for sequences and ids
             [](Manager& m, Arguments&) {
               // A failure leaves some forks behind, so they are undone: one call, as it were.
               int64_t next = 50;
               try {
                 for (; next < 80; ++next) m.fork(1, next);
               } catch (...) {
                 while (next > 50) m.free(--next);
                 throw;
               }
             }},
        Call{"reorder", [](Manager& m, Arguments& a) { m.reorder(a.ids, a.parents); }},
        Call{"free", [](Manager& m, Arguments&) { m.free(2); }},
        Call{"free_batch", [](Manager& m, Arguments& a) { m.free(a.ids); }},
        Call{"free_computed", [](Manager& m, Arguments& a) { m.free(a.ids, Ids{0, 4, 6, 3}); }},
        Call{"truncate", [](Manager& m, Arguments&) { m.truncate(3, 2); }},
        Call{"truncate_computed",
             [](Manager& m, Arguments& a) { m.truncate(a.ids, Ids{5, 3, 7, 1}, Ids{0, 4, 6, 3}); }},
        Call{"build",
             [](Manager& m, Arguments& a) { m.build(a.ids, Ids{1, 2, 3, 0}, a.buffers.view); }},
        Call{"step",
             [](Manager& m, Arguments& a) { m.step(a.ids, a.counts, a.buffers.view, a.copies); }},
        Call{"block_table", [](Manager& m, Arguments&) { m.block_table(1); }},
        Call{"sequence_ids", [](Manager& m, Arguments&) { m.sequence_ids(); }},
        Call{"statistics", [](Manager& m, Arguments&) { m.statistics(); }},
        Call{"check_integrity", [](Manager& m, Arguments&) { m.check_integrity(); }},
        Call{"reset", [](Manager& m, Arguments&) { m.reset(); }}),
    [](const auto& info) { return info.param.name; });

// Calls that evict, and calls that move windows on.
std::vector<Call> calls_when_full() {
  const std::vector<Call> calls{
      {"allocate", [](Manager& m, Arguments&) { m.allocate(50, 33); }},
      {"allocate_batch",
       [](Manager& m, Arguments& a) { m.allocate(Ids{60, 61}, std::span(a.new_counts).first(2)); }},
      {"allocate_tokens",
       [](Manager& m, Arguments& a) { m.allocate(50, a.prompt, kMaxTokens, a.salted); }},
      {"append", [](Manager& m, Arguments& a) { m.append(a.ids, a.counts, a.copies); }},
      {"step", [](Manager& m, Arguments& a) { m.step(a.ids, a.counts, a.views(m), a.copies); }},
      {"step_tokens",
       [](Manager& m, Arguments& a) {
         m.step(a.known, a.known_counts, a.views(m), a.copies,
                {.tokens = a.tokens, .lookahead = 9});
       }},
      {"build", [](Manager& m, Arguments& a) { m.build(a.ids, Ids{1, 2, 3, 0}, a.views(m)); }},
      {"fork", [](Manager& m, Arguments&) { m.fork(1, 50); }},
      {"reorder", [](Manager& m, Arguments& a) { m.reorder(a.ids, a.parents); }},
      {"swap_out", [](Manager& m, Arguments& a) { m.swap_out(a.ids, a.copies); }},
      {"swap_in", [](Manager& m, Arguments& a) { m.swap_in(a.swapped, a.copies); }},
      {"free_computed", [](Manager& m, Arguments& a) { m.free(a.ids, Ids{0, 4, 6, 3}); }},
      {"statistics", [](Manager& m, Arguments&) { m.statistics(); }}};
  std::vector<Call> all;
  for (const auto& [suffix, make] : {std::pair{"_evicts", &make_full_manager},
                                     std::pair{"_with_windows", &make_windowed_manager},
                                     std::pair{"_of_a_shard", &make_shard}}) {
    for (Call call : calls) {
      call.name += suffix;
      call.make = make;
      all.push_back(std::move(call));
    }
  }
  return all;
}
INSTANTIATE_TEST_SUITE_P(CallsWhenFull, EveryAllocation, ::testing::ValuesIn(calls_when_full()),
                         [](const auto& info) { return info.param.name; });

// That they do what their names say.
TEST(EveryAllocationsManagers, EvictAndMoveWindows) {
  const auto full = make_full_manager();
  Arguments a;
  full->append(a.ids, a.counts, a.copies);
  EXPECT_GT(full->statistics().num_evictions, 10);
  const auto windowed = make_windowed_manager();
  const auto nulls = [&] {
    const auto table = windowed->block_table(2, 1);
    return std::count(table.begin(), table.end(), kNullBlock);
  };
  const auto before = nulls();
  windowed->append(a.ids, a.counts, a.copies);
  EXPECT_GT(nulls(), before);
  EXPECT_GT(windowed->statistics().num_evictions, 0);
}

// Once its plan and tables have grown, a step allocates nothing: not for shared tails, not for
// blocks that fill up, and not for blocks that are evicted.
TEST(SteadyState, AStepAllocatesNothing) {
  const auto manager = make_full_manager();
  Arguments a;
  const Tokens four = range(4);
  const Ids ones{1, 1, 1, 1};
  const Ids lengths{6, 6, 6, 3};
  const auto step = [&] { manager->step(a.ids, ones, a.buffers.view, a.copies, {.tokens = four}); };
  const auto start_again = [&] {  // with a tail that three sequences share
    manager->truncate(a.ids, lengths);
    manager->reorder(Ids{2, 3}, Ids{1, 1});
    const Tokens occupying_tokens(4 * manager->num_free_blocks(), 7);
    manager->allocate(2000, occupying_tokens, kMaxTokens, {});
    manager->free(2000);
    manager->drop_events(1'000'000);
  };
  manager->record_tokens(Ids{3}, Ids{4}, four);
  for (int round = 0; round < 4; ++round) {
    start_again();
    for (int i = 0; i < 30; ++i) step();
  }
  start_again();
  for (int64_t id = 1; id <= 3; ++id) manager->append(id, 8, {.tokens = range(8)});
  manager->truncate(a.ids, lengths);  // the tables keep their room
  manager->fork(1, 50);
  const Statistics before = manager->statistics();
  for (int i = 0; i < 8; ++i) {
    const FailAllocation fail(0);
    ASSERT_NO_THROW(step()) << "step " << i;
    ASSERT_FALSE(fail.failed());
  }
  EXPECT_GT(manager->statistics().num_copies, before.num_copies);
  EXPECT_GT(manager->statistics().num_evictions, before.num_evictions);
  manager->check_integrity();
}

TEST(EveryAllocationOfTheConstructor, FailsWithoutALeak) {
  for (int64_t k = 0; k < 100; ++k) {
    const FailAllocation fail(k);
    try {
      KVCacheManager manager(64, 4);
      ASSERT_FALSE(fail.failed());
      EXPECT_GE(k, 5);  // windows, blocks, and the root's chunk, index and name
      return;
    } catch (const std::bad_alloc&) {
      ASSERT_TRUE(fail.failed());
    }
  }
  FAIL();
}

// Errors allocate their messages; that this fails as well must not make it worse.
TEST(EveryAllocationOfAnError, LeavesTheStateAsItWas) {
  for (int64_t k = 0; k < 40; ++k) {
    const auto manager = make_manager();
    Arguments arguments;
    const Snapshot before = TestAccess::snapshot(*manager);
    const Ids unknown = {1, 2, 99};
    const Ids too_many = {1, 2, 3, 1000};
    const auto fails = [&](auto call) {
      bool thrown = false;
      {
        const FailAllocation fail(k);
        try {
          call();
        } catch (const std::exception&) {
          thrown = true;
        }
      }
      ASSERT_TRUE(thrown);
      ASSERT_EQ(TestAccess::snapshot(*manager), before);
      manager->check_integrity();
    };
    fails([&] { manager->free(unknown); });
    fails([&] { manager->append(arguments.ids, too_many, arguments.copies); });
    fails([&] { manager->allocate(1, 1); });
    fails([&] { manager->truncate(1, 100); });
    fails([&] { manager->allocate(50, Tokens(1000), kMaxTokens, arguments.salted); });
    fails([&] {
      manager->append(arguments.known, Ids{1, 1, 500}, arguments.copies, {.tokens = Tokens(502)});
    });
    fails([&] { manager->swap_in(arguments.swapped, {}); });
    fails([&] { manager->swap_out(arguments.ids, {}); });
  }
}

// The error comes up after the first references of the new order were taken.
TEST(EveryAllocationOfAnError, LeavesReorderAsItWas) {
  for (int64_t k = 0; k < 40; ++k) {
    KVCacheManager manager(64, 4, 2);
    manager.allocate(1, 12);
    manager.allocate(2, 8);
    manager.allocate(3, 4);
    manager.fork(3, 4);
    const Snapshot before = TestAccess::snapshot(manager);
    const Ids ids = {2, 1};
    const Ids parents = {1, 3};
    bool thrown = false;
    {
      const FailAllocation fail(k);
      try {
        manager.reorder(ids, parents);
      } catch (const std::exception&) {
        thrown = true;
      }
    }
    ASSERT_TRUE(thrown);
    manager.check_integrity();
    ASSERT_EQ(TestAccess::snapshot(manager), before) << "allocation " << k;
  }
}

}  // namespace
}  // namespace vllm_kernels::kv_cache
