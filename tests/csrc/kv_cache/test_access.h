// The tests' access to the manager's private state.
#pragma once

#include <algorithm>
#include <cstdint>
#include <ostream>
#include <tuple>
#include <vector>

#include "kv_cache/kv_cache_manager.h"
#include "kv_cache/ledger.h"

namespace vllm_kernels::kv_cache {

// Everything that a later call could notice.
struct Snapshot {
  // id, tokens, table, recorded tokens, in host blocks
  std::vector<std::tuple<int64_t, int64_t, std::vector<int32_t>, int64_t, bool>> sequences;
  std::vector<int32_t> references;
  std::vector<int32_t> contents;
  std::vector<int32_t> free_host_blocks;
  size_t events = 0;
  int64_t queried = 0;
  int64_t hits = 0;
  int64_t nodes = 0;
  std::vector<int32_t> free_list;  // in the order in which blocks will be taken
  int64_t shared = 0;
  int64_t peak = 0;
  int64_t copies = 0;

  bool operator==(const Snapshot&) const = default;
  friend std::ostream& operator<<(std::ostream& stream, const Snapshot& snapshot) {
    for (const auto& [id, tokens, table, known, swapped] : snapshot.sequences) {
      stream << id << ": " << tokens << " tokens (" << known << " known) in"
             << (swapped ? " host blocks" : "");
      for (const int32_t block : table) stream << ' ' << block;
      stream << "; ";
    }
    return stream << "free: " << snapshot.free_list.size() << ", shared " << snapshot.shared
                  << ", peak " << snapshot.peak << ", copies " << snapshot.copies;
  }
};

struct LedgerSnapshot {
  std::vector<std::tuple<int64_t, int64_t, std::vector<InstanceBlock>>> loans;  // id, home, blocks
  std::vector<int64_t> debts;
  std::vector<std::pair<int64_t, bool>> instances;  // reserve, lost
  bool operator==(const LedgerSnapshot&) const = default;
};

struct TestAccess {
  static LedgerSnapshot snapshot(const Ledger& ledger) {
    LedgerSnapshot result{.loans = {}, .debts = ledger.debts_, .instances = {}};
    for (const auto& [sequence, loan] : ledger.loans_) {
      result.loans.emplace_back(sequence, loan.home, loan.blocks);
    }
    for (const auto& one : ledger.instances_) result.instances.emplace_back(one.reserve, one.lost);
    return result;
  }
  static int64_t& debt(Ledger& ledger, int64_t borrower, int64_t lender) {
    return ledger.debt(borrower, lender);
  }
  static std::vector<InstanceBlock>& loan(Ledger& ledger, int64_t sequence) {
    return ledger.loans_.at(sequence).blocks;
  }
  static int64_t& home(Ledger& ledger, int64_t sequence) { return ledger.loans_.at(sequence).home; }
  static bool& lost(Ledger& ledger, int64_t instance) { return ledger.instances_[instance].lost; }
  static void release_held(KVCacheManager& manager, int32_t block) { manager.release_held(block); }
  static void hold(KVCacheManager& manager) {
    int32_t block;
    manager.plan_hold("test", 1, 0);
    manager.commit_hold(std::span(&block, 1));
  }
  static int64_t& num_held(KVCacheManager& manager) { return manager.num_held_; }

  static Snapshot snapshot(const KVCacheManager& manager) {
    Snapshot result;
    for (const auto& sequence : manager.sequences_) {
      result.sequences.emplace_back(
          sequence.id, sequence.num_tokens, sequence.blocks,
          manager.tracks_tokens(sequence) ? manager.num_recorded(sequence) : -1, sequence.swapped);
    }
    std::sort(result.sequences.begin(), result.sequences.end());
    for (const auto& block : manager.pool_.blocks_) result.references.push_back(block.references);
    for (const auto& block : manager.pool_.blocks_) result.contents.push_back(block.content);
    result.free_list = free_list(manager.pool_);
    if (manager.host_pool_) result.free_host_blocks = free_list(*manager.host_pool_);
    result.events = manager.events_.events.size();
    result.queried = manager.queried_tokens_;
    result.hits = manager.hit_tokens_;
    if (manager.cache_) result.nodes = manager.cache_->num_nodes();
    result.shared = manager.pool_.num_shared();
    result.peak = manager.pool_.peak_used();
    result.copies = manager.num_copies_;
    return result;
  }

  // Empty blocks, then cached ones: as they will be taken.
  static std::vector<int32_t> free_list(const BlockPool& pool) {
    std::vector<int32_t> blocks;
    for (const int32_t head : {pool.empty_head(), pool.cached_head()}) {
      for (int32_t block = pool.blocks_[head].next; block != head;
           block = pool.blocks_[block].next) {
        blocks.push_back(block);
      }
    }
    return blocks;
  }

  // Ways to break the state, to see check_integrity() notice.
  static int32_t& references(BlockPool& pool, int64_t i) { return pool.blocks_[i].references; }
  static int32_t& content(BlockPool& pool, int64_t i) { return pool.blocks_[i].content; }
  static int32_t& next(BlockPool& pool, int64_t i) { return pool.blocks_[i].next; }
  static int32_t& previous(BlockPool& pool, int64_t i) { return pool.blocks_[i].previous; }
  static int32_t& num_empty(BlockPool& pool) { return pool.num_empty_; }
  static int32_t& num_shared(BlockPool& pool) { return pool.num_shared_; }
  static BlockPool& pool(KVCacheManager& manager) { return manager.pool_; }
  static std::vector<int32_t>& table(KVCacheManager& manager, int64_t id) {
    return manager.sequences_[manager.index_.find(id)].blocks;
  }
  static int64_t& tokens(KVCacheManager& manager, int64_t id) {
    return manager.sequences_[manager.index_.find(id)].num_tokens;
  }
  static PrefixCache& cache(KVCacheManager& manager) { return *manager.cache_; }
  static SequenceIndex& index(KVCacheManager& manager) { return manager.index_; }
};

// Own memory for a batch, filled with a mark so that untouched elements show.
struct TestBuffers {
  static constexpr int32_t kMark = 77;

  TestBuffers(int64_t max_sequences, int64_t max_blocks, int64_t max_tokens)
      : block_tables(max_sequences * max_blocks, kMark),
        seq_lens(max_sequences, kMark),
        query_start_loc(max_sequences + 1, kMark),
        slot_mapping(max_tokens, kMark),
        positions(max_tokens, kMark),
        view{.block_tables = block_tables.data(),
             .max_sequences = max_sequences,
             .max_blocks = max_blocks,
             .row_stride = max_blocks,
             .seq_lens = seq_lens,
             .query_start_loc = query_start_loc,
             .slot_mapping = slot_mapping,
             .positions = positions} {}
  TestBuffers(const TestBuffers&) = delete;

  bool untouched() const {
    const auto marked = [](const auto& values) {
      return std::all_of(values.begin(), values.end(), [](auto value) { return value == kMark; });
    };
    return marked(block_tables) && marked(seq_lens) && marked(query_start_loc) &&
           marked(slot_mapping) && marked(positions);
  }

  std::vector<int32_t> block_tables, seq_lens, query_start_loc;
  std::vector<int64_t> slot_mapping, positions;
  BatchBuffers view;
};

}  // namespace vllm_kernels::kv_cache
