// The ledger: which instance lends cache blocks to which other one, and for which sequence.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <span>
#include <vector>

#include "export.h"
#include "kv_cache/kv_cache_manager.h"

namespace vllm_kernels::kv_cache {

// A block of one instance's cache.
struct InstanceBlock {
  int32_t instance;
  int32_t block;
  bool operator==(const InstanceBlock&) const = default;
};

// An order to copy a block from one instance's cache to another's.
struct BlockMove {
  int64_t sequence;
  int64_t source_instance;
  int64_t source_block;
  int64_t destination_instance;
  int64_t destination_block;
};

// Blocks of an instance: total = lent + used + free.
struct InstanceCounts {
  int64_t total = 0;
  int64_t lent = 0;      // to other instances
  int64_t used = 0;      // by its own sequences
  int64_t free = 0;      // empty ones and cached ones
  int64_t borrowed = 0;  // of other instances
  int64_t reserve = 0;   // set_reserve()
  bool lost = false;
};

// The debt ledger of Infinite-LLM (arXiv:2401.02669). Its gManager is this class, and its rManagers
// are the managers of the instances. An instance that has no block left for a long sequence borrows
// blocks of another one. The keys and values stay where they are: each instance attends to its own
// blocks, and the partial results are merged.
//
// A sequence has one home, the instance whose manager has its first tokens. The ledger lists the
// blocks of its further tokens in the order of the tokens. So only the last one may be partly
// filled. The home's own blocks may be among them; they are no debt.
//
// A manager belongs to one ledger. Neither touches the memory of a cache, so one process can have
// them for all instances.
//
// Errors: every call is all or nothing, as with KVCacheManager. It checks and reserves memory on
// all sides first. What follows cannot fail.
//
// Threads: calls from several threads are safe and run one after the other.
class VLLM_KERNELS_EXPORT Ledger {
 public:
  static constexpr int64_t kAnyInstance = -1;
  static constexpr int64_t kMaxInstances = 1024;

  // Instance i has managers[i]. The managers are distinct, have one block size, and outlive this.
  explicit Ledger(std::vector<KVCacheManager*> managers);
  Ledger(const Ledger&) = delete;
  Ledger& operator=(const Ledger&) = delete;

  int64_t num_instances() const noexcept { return static_cast<int64_t>(instances_.size()); }

  // The blocks that the instance's next step needs. lend() and recall() leave so many free.
  void set_reserve(int64_t instance, int64_t num_blocks);
  // Gives blocks.size() >= 1 more blocks to a sequence of `borrower`. With kAnyInstance they are
  // the borrower's own, if it has so many, or those of the instance with the most free blocks.
  // Throws OutOfBlocks.
  void lend(int64_t lender, int64_t borrower, int64_t sequence, std::span<InstanceBlock> blocks);
  // Returns the last num_blocks blocks of a sequence to their owners.
  void give_back(int64_t sequence, int64_t num_blocks);
  // Returns all of them. Throws UnknownSequence.
  void free(int64_t sequence);
  // Frees moves.size() >= 1 lent blocks: their contents move to blocks of the sequence's home, or
  // of the instance with the most free blocks. Run the moves before anything is written. Sequences
  // are taken in descending order of id, and blocks from the last one on. Throws OutOfBlocks.
  void recall(int64_t lender, std::span<BlockMove> moves);
  // The instance's cache is gone. Frees every sequence with a block there or with this home. First
  // it calls deliver(ids): the sequences to compute again, ascending. Those are the ones above, and
  // all of the instance's manager.
  void instance_lost(int64_t instance,
                     const std::function<void(std::span<const int64_t>)>& deliver);
  // A lost instance is back with an empty cache. Resets its manager.
  void instance_back(int64_t instance);

  bool contains(int64_t sequence) const;
  // The blocks of a sequence, in the order of its tokens.
  std::vector<InstanceBlock> blocks(int64_t sequence) const;
  // Blocks that `borrower` has of `lender`.
  int64_t owed(int64_t borrower, int64_t lender) const;
  InstanceCounts counts(int64_t instance) const;
  // Throws IntegrityError unless the loans, the debts and the managers agree. Checks the managers
  // as well.
  void check_integrity() const;

 private:
  friend struct TestAccess;

  struct Instance {
    KVCacheManager* manager;
    int64_t reserve = 0;
    bool lost = false;
  };
  struct Loan {
    int64_t home;
    std::vector<InstanceBlock> blocks;
  };
  using Loans = std::map<int64_t, Loan>;
  struct RecallPlan;

  std::unique_lock<std::mutex> lock() const;
  int64_t& debt(int64_t borrower, int64_t lender) {
    return debts_[borrower * num_instances() + lender];
  }
  int64_t debt(int64_t borrower, int64_t lender) const {
    return debts_[borrower * num_instances() + lender];
  }
  int64_t lent_blocks(int64_t lender) const noexcept;
  // Blocks that the instance can spare.
  int64_t spare_blocks(int64_t instance) const;
  int64_t choose_lender(int64_t borrower, int64_t num_blocks) const;
  void check_instance(const char* call, const char* argument, int64_t instance) const;
  void check_present(const char* call, const char* argument, int64_t instance) const;
  RecallPlan plan_recall(int64_t lender, int64_t num_blocks);
  void change_debt(int64_t borrower, int64_t lender, int64_t change) noexcept;
  void return_blocks(Loan& loan, int64_t num_blocks);

  std::vector<Instance> instances_;
  std::vector<int64_t> debts_;  // [borrower, lender]; 0 on the diagonal
  Loans loans_;                 // by sequence id; none is empty
  mutable std::mutex mutex_;
};

}  // namespace vllm_kernels::kv_cache
