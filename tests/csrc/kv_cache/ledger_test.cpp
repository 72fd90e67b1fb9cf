// The ledger: loans between instances, what each error leaves behind, and its integrity check.
// tests/distributed/test_ledger.py runs random traces against a model.
#include "kv_cache/ledger.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <new>
#include <numeric>
#include <string>
#include <vector>

#include "kv_cache/errors.h"
#include "kv_cache/failing_new.h"
#include "kv_cache/kv_cache_manager.h"
#include "kv_cache/test_access.h"

namespace vllm_kernels::kv_cache {
namespace {

using Ids = std::vector<int64_t>;
using Blocks = std::vector<InstanceBlock>;
constexpr int64_t kAny = Ledger::kAnyInstance;

// Instances with 8 blocks of 4 tokens each.
struct Cluster {
  explicit Cluster(int64_t num_instances = 3) {
    std::vector<KVCacheManager*> pointers;
    for (int64_t i = 0; i < num_instances; ++i) {
      managers.push_back(std::make_unique<KVCacheManager>(
          Options{.num_blocks = 8, .block_size = 4, .events = true, .hash_key = HashKey{}}));
      pointers.push_back(managers.back().get());
    }
    ledger = std::make_unique<Ledger>(pointers);
  }

  Blocks lend(int64_t lender, int64_t borrower, int64_t sequence, int64_t count) {
    Blocks blocks(count);
    ledger->lend(lender, borrower, sequence, blocks);
    return blocks;
  }
  std::vector<BlockMove> recall(int64_t lender, int64_t count) {
    std::vector<BlockMove> moves(count);
    ledger->recall(lender, moves);
    return moves;
  }
  Ids lose(int64_t instance) {
    Ids ids;
    ledger->instance_lost(
        instance, [&](std::span<const int64_t> lost) { ids.assign(lost.begin(), lost.end()); });
    return ids;
  }
  void use(int64_t instance, int64_t sequence, int64_t num_blocks) {
    managers[instance]->allocate(sequence, 4 * num_blocks);
  }
  std::vector<Snapshot> snapshots() const {
    std::vector<Snapshot> all;
    for (const auto& manager : managers) all.push_back(TestAccess::snapshot(*manager));
    return all;
  }

  std::vector<std::unique_ptr<KVCacheManager>> managers;
  std::unique_ptr<Ledger> ledger;
};

// Everything that a later call could notice.
struct State {
  std::vector<Snapshot> managers;
  LedgerSnapshot ledger;
  explicit State(const Cluster& cluster)
      : managers(cluster.snapshots()), ledger(TestAccess::snapshot(*cluster.ledger)) {}
  bool operator==(const State&) const = default;
};

template <typename Error, typename Call>
std::string message_of(Cluster& cluster, const Call& call) {
  const State before(cluster);
  std::string message = "no error";
  try {
    call();
  } catch (const Error& error) {
    message = error.what();
  }
  EXPECT_EQ(State(cluster), before);
  cluster.ledger->check_integrity();
  return message;
}

TEST(Ledger, LendsAndTakesBack) {
  Cluster cluster;
  Ledger& ledger = *cluster.ledger;
  cluster.use(0, 1, 8);
  EXPECT_EQ(cluster.lend(1, 0, 1, 3), (Blocks{{1, 0}, {1, 1}, {1, 2}}));
  EXPECT_EQ(cluster.lend(2, 0, 1, 1), (Blocks{{2, 0}}));
  EXPECT_EQ(ledger.blocks(1), (Blocks{{1, 0}, {1, 1}, {1, 2}, {2, 0}}));
  EXPECT_EQ(ledger.owed(0, 1), 3);
  EXPECT_EQ(ledger.owed(1, 0), 0);
  const InstanceCounts lender = ledger.counts(1);
  EXPECT_EQ(lender.total, 8);
  EXPECT_EQ(lender.lent, 3);
  EXPECT_EQ(lender.used, 0);
  EXPECT_EQ(lender.free, 5);
  const InstanceCounts borrower = ledger.counts(0);
  EXPECT_EQ(borrower.borrowed, 4);
  EXPECT_EQ(borrower.used, 8);
  EXPECT_EQ(cluster.managers[1]->statistics().held_blocks, 3);
  EXPECT_EQ(cluster.managers[1]->statistics().used_blocks, 0);
  ledger.check_integrity();

  ledger.give_back(1, 2);
  EXPECT_EQ(ledger.blocks(1), (Blocks{{1, 0}, {1, 1}}));
  EXPECT_EQ(ledger.owed(0, 2), 0);
  ledger.check_integrity();
  ledger.free(1);
  EXPECT_FALSE(ledger.contains(1));
  EXPECT_EQ(ledger.counts(1).free, 8);
  ledger.check_integrity();
}

TEST(Ledger, TheInstanceWithMostFreeBlocksLendsButNotItsReserve) {
  Cluster cluster;
  Ledger& ledger = *cluster.ledger;
  cluster.use(0, 1, 8);
  cluster.use(1, 2, 1);  // 7 free
  EXPECT_EQ(cluster.lend(kAny, 0, 1, 1)[0].instance, 2);
  EXPECT_EQ(cluster.lend(kAny, 0, 1, 1)[0].instance, 1);  // of equals the first
  ledger.set_reserve(2, 6);                               // 7 free, 1 to spare
  EXPECT_EQ(cluster.lend(kAny, 0, 1, 1)[0].instance, 1);
  ledger.set_reserve(1, 3);  // 5 free, 2 to spare
  EXPECT_EQ(cluster.lend(kAny, 0, 1, 2)[0].instance, 1);
  ledger.set_reserve(2, 7);
  EXPECT_EQ(message_of<OutOfBlocks>(cluster, [&] { cluster.lend(kAny, 0, 1, 1); }),
            "lend: out of blocks: needed 1, free 0");
  EXPECT_EQ(message_of<OutOfBlocks>(cluster, [&] { cluster.lend(2, 0, 1, 1); }),
            "lend: out of blocks: needed 1, free 0");
  ledger.set_reserve(2, 0);
  cluster.managers[0]->truncate(1, 24);  // the borrower's own blocks come first, and are no debt
  EXPECT_EQ(cluster.lend(kAny, 0, 1, 2)[0].instance, 0);
  EXPECT_EQ(ledger.counts(0).lent, 0);
  EXPECT_EQ(ledger.counts(0).used, 8);
  EXPECT_EQ(ledger.counts(0).borrowed, 5);
  ledger.check_integrity();
}

TEST(Ledger, RecallMovesBlocksHomeOrToTheInstanceWithMostFreeBlocks) {
  Cluster cluster;
  Ledger& ledger = *cluster.ledger;
  cluster.use(0, 1, 7);  // 1 free
  cluster.lend(1, 0, 1, 3);
  cluster.lend(2, 0, 1, 1);
  const auto moves = cluster.recall(1, 3);
  EXPECT_EQ(ledger.blocks(1), (Blocks{{2, 1}, {2, 2}, {0, 7}, {2, 0}}));
  ASSERT_EQ(moves.size(), 3u);
  EXPECT_EQ(moves[0].sequence, 1);  // from the last block on
  EXPECT_EQ(moves[0].source_instance, 1);
  EXPECT_EQ(moves[0].source_block, 2);
  EXPECT_EQ(moves[0].destination_instance, 0);
  EXPECT_EQ(moves[0].destination_block, 7);
  EXPECT_EQ(moves[1].source_block, 1);
  EXPECT_EQ(moves[1].destination_instance, 2);
  EXPECT_EQ(ledger.counts(1).free, 8);
  EXPECT_EQ(ledger.owed(0, 2), 3);
  EXPECT_EQ(ledger.owed(0, 1), 0);
  ledger.check_integrity();
  EXPECT_TRUE(cluster.recall(1, 0).empty());
  EXPECT_EQ(message_of<InvalidArgument>(cluster, [&] { cluster.recall(2, 4); }),
            "recall: num_blocks: expected 0 to 3, got 4");
  cluster.use(1, 2, 6);
  EXPECT_EQ(message_of<OutOfBlocks>(cluster, [&] { cluster.recall(2, 3); }),
            "recall: out of blocks: needed 3, free 2");
}

// The sequence of the higher id moves first, and the home's own blocks are no loan to recall.
TEST(Ledger, RecallTakesSequencesInDescendingOrder) {
  Cluster cluster;
  cluster.lend(1, 0, 5, 2);
  cluster.lend(1, 0, 9, 2);
  cluster.lend(1, 1, 12, 1);
  const auto moves = cluster.recall(1, 3);
  EXPECT_EQ(moves[0].sequence, 9);
  EXPECT_EQ(moves[1].sequence, 9);
  EXPECT_EQ(moves[2].sequence, 5);
  EXPECT_EQ(cluster.ledger->owed(0, 1), 1);
  cluster.ledger->check_integrity();
}

TEST(Ledger, ALostInstanceTakesItsSequencesAlong) {
  Cluster cluster;
  Ledger& ledger = *cluster.ledger;
  cluster.use(1, 20, 1);
  cluster.lend(1, 0, 5, 2);  // has blocks there
  cluster.lend(2, 0, 5, 1);
  cluster.lend(2, 1, 6, 1);  // has its home there
  cluster.lend(2, 0, 7, 1);  // neither
  EXPECT_EQ(cluster.lose(1), (Ids{5, 6, 20}));
  EXPECT_FALSE(ledger.contains(5));
  EXPECT_FALSE(ledger.contains(6));
  EXPECT_EQ(ledger.counts(2).lent, 1);
  EXPECT_TRUE(ledger.counts(1).lost);
  ledger.check_integrity();
  const auto refused = [&](auto call) { return message_of<InvalidArgument>(cluster, call); };
  EXPECT_EQ(refused([&] { cluster.lend(1, 0, 5, 1); }),
            "lend: lender: expected an instance that is not lost, got 1");
  EXPECT_EQ(refused([&] { cluster.lend(0, 1, 5, 1); }),
            "lend: borrower: expected an instance that is not lost, got 1");
  EXPECT_EQ(refused([&] { cluster.recall(1, 1); }),
            "recall: lender: expected an instance that is not lost, got 1");
  EXPECT_EQ(refused([&] { ledger.set_reserve(1, 1); }),
            "set_reserve: instance: expected an instance that is not lost, got 1");
  EXPECT_EQ(refused([&] { cluster.lose(1); }),
            "instance_lost: instance: expected an instance that is not lost, got 1");
  EXPECT_EQ(refused([&] { ledger.instance_back(0); }),
            "instance_back: instance: expected one that is lost, got 0");
  EXPECT_EQ(cluster.lend(kAny, 2, 30, 8)[0].instance, 0) << "7 of instance 2 itself, 8 of 0";
  EXPECT_EQ(message_of<OutOfBlocks>(cluster, [&] { cluster.lend(kAny, 2, 30, 8); }),
            "lend: out of blocks: needed 8, free 7");

  ledger.instance_back(1);
  EXPECT_EQ(cluster.managers[1]->num_sequences(), 0);
  EXPECT_EQ(cluster.lend(kAny, 2, 30, 8)[0].instance, 1);
  ledger.check_integrity();
}

TEST(Ledger, BadArgumentsAreErrors) {
  Cluster cluster(2);
  Ledger& ledger = *cluster.ledger;
  cluster.lend(1, 0, 5, 2);
  const auto refused = [&](auto call) { return message_of<InvalidArgument>(cluster, call); };
  EXPECT_EQ(refused([&] { cluster.lend(2, 0, 5, 1); }), "lend: lender: expected 0 to 1, got 2");
  EXPECT_EQ(refused([&] { cluster.lend(-2, 0, 5, 1); }), "lend: lender: expected 0 to 1, got -2");
  EXPECT_EQ(refused([&] { cluster.lend(0, -1, 5, 1); }), "lend: borrower: expected 0 to 1, got -1");
  EXPECT_EQ(refused([&] { cluster.lend(1, 0, 5, 0); }),
            "lend: num_blocks: expected 1 to 2147483645, got 0");
  EXPECT_EQ(refused([&] { cluster.lend(0, 1, 5, 1); }),
            "lend: borrower: expected 0 (the home of sequence 5), got 1");
  EXPECT_EQ(refused([&] { ledger.give_back(5, 3); }),
            "give_back: num_blocks: expected 0 to 2, got 3");
  EXPECT_EQ(refused([&] { ledger.set_reserve(0, -1); }),
            "set_reserve: num_blocks: expected 0 to 2147483645, got -1");
  EXPECT_EQ(refused([&] { ledger.owed(0, 2); }), "owed: lender: expected 0 to 1, got 2");
  EXPECT_EQ(refused([&] { ledger.counts(2); }), "counts: instance: expected 0 to 1, got 2");
  EXPECT_EQ(refused([&] { cluster.managers[1]->reset(); }),
            "reset: expected no lent blocks, got 2");
  const auto unknown = [&](auto call) { return message_of<UnknownSequence>(cluster, call); };
  EXPECT_EQ(unknown([&] { ledger.free(6); }),
            "free: sequence: expected one with blocks in the ledger, got unknown id 6");
  EXPECT_EQ(unknown([&] { ledger.give_back(6, 0); }),
            "give_back: sequence: expected one with blocks in the ledger, got unknown id 6");
  EXPECT_EQ(unknown([&] { ledger.blocks(6); }),
            "blocks: sequence: expected one with blocks in the ledger, got unknown id 6");
  ledger.free(5);
  EXPECT_NE(unknown([&] { ledger.free(5); }), "no error") << "a double free";
}

TEST(Ledger, ConstructorRefusesManagersThatDoNotFit) {
  KVCacheManager one(4, 4);
  KVCacheManager other(4, 8);
  const auto message = [](std::vector<KVCacheManager*> managers) -> std::string {
    try {
      const Ledger ledger(std::move(managers));
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return "no error";
  };
  EXPECT_EQ(message({}), "Ledger: managers (their number): expected 1 to 1024, got 0");
  EXPECT_EQ(message({&one, nullptr}), "Ledger: managers: expected managers, got null");
  EXPECT_EQ(message({&one, &one}), "Ledger: managers: expected each once, got one twice");
  EXPECT_EQ(message({&one, &other}),
            "Ledger: managers: expected block_size = 4 (as the first), got 8 at index 1");
}

// A block that is lent evicts a cached one, like any other that is taken.
TEST(Ledger, LendingEvictsCachedBlocks) {
  Cluster cluster(2);
  const std::vector<int32_t> prompt(32, 3);
  cluster.managers[1]->allocate(1, prompt, kMaxTokens, {});
  cluster.managers[1]->free(1);
  EXPECT_EQ(cluster.managers[1]->match(prompt, {}), 28);
  cluster.lend(1, 0, 5, 6);
  EXPECT_EQ(cluster.managers[1]->match(prompt, {}), 8);
  EXPECT_EQ(cluster.managers[1]->statistics().num_evictions, 6);
  cluster.ledger->check_integrity();
}

// --- failing allocations ---

struct Call {
  const char* name;
  std::function<void(Cluster&, Blocks&, std::vector<BlockMove>&)> run;
};

std::unique_ptr<Cluster> make_cluster() {
  auto cluster = std::make_unique<Cluster>();
  const std::vector<int32_t> prompt(12, 3);
  cluster->managers[2]->allocate(1, prompt, kMaxTokens, {});  // cached blocks to evict
  cluster->managers[2]->free(1);
  cluster->managers[2]->take_events();  // leaves no room for those of an eviction
  cluster->use(0, 2, 7);
  cluster->lend(1, 0, 2, 4);
  cluster->lend(1, 0, 3, 2);
  return cluster;
}

TEST(LedgerFaults, EveryAllocationFailsWithoutATrace) {
  const auto ignore = [](std::span<const int64_t>) {};
  const std::vector<Call> calls{
      {"lend",
       [](Cluster& c, Blocks& b, auto&) { c.ledger->lend(2, 0, 2, std::span(b).first(5)); }},
      {"lend_to_a_new_sequence",
       [](Cluster& c, Blocks& b, auto&) { c.ledger->lend(kAny, 0, 9, std::span(b).first(6)); }},
      {"lend_too_many",
       [](Cluster& c, Blocks& b, auto&) { c.ledger->lend(1, 0, 9, std::span(b).first(3)); }},
      {"recall", [](Cluster& c, Blocks&, auto& m) { c.ledger->recall(1, std::span(m).first(5)); }},
      {"recall_too_many",
       [](Cluster& c, Blocks&, auto& m) {
         c.ledger->set_reserve(2, 5);
         c.ledger->recall(1, std::span(m).first(6));
       }},
      {"give_back", [](Cluster& c, Blocks&, auto&) { c.ledger->give_back(2, 2); }},
      {"free", [](Cluster& c, Blocks&, auto&) { c.ledger->free(2); }},
      {"free_unknown", [](Cluster& c, Blocks&, auto&) { c.ledger->free(10); }},
      {"instance_lost", [&](Cluster& c, Blocks&, auto&) { c.ledger->instance_lost(1, ignore); }},
      {"blocks", [](Cluster& c, Blocks&, auto&) { c.ledger->blocks(2); }},
      {"counts", [](Cluster& c, Blocks&, auto&) { c.ledger->counts(1); }},
      {"check_integrity", [](Cluster& c, Blocks&, auto&) { c.ledger->check_integrity(); }}};
  Blocks blocks(8);
  std::vector<BlockMove> moves(8);
  for (const Call& call : calls) {
    SCOPED_TRACE(call.name);
    const auto outcome = [&](Cluster& cluster) -> std::string {
      try {
        call.run(cluster, blocks, moves);
      } catch (const Error& error) {
        return error.what();
      }
      return "";
    };
    const auto reference = make_cluster();
    const std::string wanted = outcome(*reference);
    const State after(*reference);
    int64_t k = 0;
    for (bool failed = true; failed; ++k) {
      ASSERT_LT(k, 200);
      const auto cluster = make_cluster();
      if (std::string(call.name) == "recall_too_many") cluster->ledger->set_reserve(2, 5);
      const State before(*cluster);
      bool thrown = false;
      {
        const FailAllocation fail(k);
        try {
          call.run(*cluster, blocks, moves);
        } catch (const std::bad_alloc&) {
          thrown = true;
        } catch (const Error&) {
          ASSERT_FALSE(wanted.empty());
        }
        failed = fail.failed();
      }
      cluster->ledger->check_integrity();
      if (!failed) {
        EXPECT_EQ(State(*cluster), after);
        break;
      }
      ASSERT_TRUE(thrown || !wanted.empty()) << "allocation " << k;
      ASSERT_EQ(State(*cluster), before) << "allocation " << k;
      ASSERT_EQ(outcome(*cluster), wanted) << "allocation " << k;
      ASSERT_EQ(State(*cluster), after) << "allocation " << k;
    }
  }
}

// The caller could not take the list: nothing is lost with it.
TEST(LedgerFaults, AListThatIsNotDeliveredLeavesTheInstance) {
  const auto cluster = make_cluster();
  const State before(*cluster);
  EXPECT_THROW(
      cluster->ledger->instance_lost(1, [](std::span<const int64_t>) { throw std::bad_alloc(); }),
      std::bad_alloc);
  EXPECT_EQ(State(*cluster), before);
  cluster->ledger->check_integrity();
}

TEST(LedgerFaults, TheIntegrityCheckNotices) {
  const std::vector<std::function<void(Cluster&)>> faults{
      [](Cluster& c) { ++TestAccess::debt(*c.ledger, 0, 1); },
      [](Cluster& c) { ++TestAccess::debt(*c.ledger, 1, 1); },
      [](Cluster& c) { TestAccess::loan(*c.ledger, 2)[0] = {1, 7}; },  // not lent
      [](Cluster& c) { TestAccess::loan(*c.ledger, 2)[0] = {1, 4}; },  // lent to sequence 3
      [](Cluster& c) { TestAccess::loan(*c.ledger, 2)[0].instance = 3; },
      [](Cluster& c) { TestAccess::loan(*c.ledger, 2)[0].instance = 2; },
      [](Cluster& c) { TestAccess::loan(*c.ledger, 2).pop_back(); },
      [](Cluster& c) { TestAccess::loan(*c.ledger, 2).clear(); },
      [](Cluster& c) { TestAccess::home(*c.ledger, 2) = 2; },
      [](Cluster& c) { TestAccess::home(*c.ledger, 2) = -1; },
      [](Cluster& c) { TestAccess::lost(*c.ledger, 1) = true; },
      [](Cluster& c) { TestAccess::release_held(*c.managers[1], 0); },
      [](Cluster& c) { TestAccess::hold(*c.managers[1]); },
      [](Cluster& c) { TestAccess::hold(*c.managers[2]); },
      [](Cluster& c) {  // an own block twice, which is no debt
        const Blocks own = c.lend(1, 1, 30, 1);
        TestAccess::loan(*c.ledger, 30).push_back(own[0]);
      },
      [](Cluster& c) { ++TestAccess::num_held(*c.managers[1]); },
      [](Cluster& c) { TestAccess::references(TestAccess::pool(*c.managers[1]), 0) = 0; }};
  for (size_t i = 0; i < faults.size(); ++i) {
    const auto cluster = make_cluster();
    cluster->ledger->check_integrity();
    faults[i](*cluster);
    EXPECT_THROW(cluster->ledger->check_integrity(), IntegrityError) << "fault " << i;
  }
}

}  // namespace
}  // namespace vllm_kernels::kv_cache
