// The ledger, and the blocks that managers hold for it.
#include "kv_cache/ledger.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "kv_cache/errors.h"

namespace vllm_kernels::kv_cache {
namespace {

void require(bool condition, const char* what, int64_t where) {
  if (!condition) throw IntegrityError(concat("Ledger: ", what, ", at ", where));
}

template <typename Loans>
auto find_loan(const char* call, Loans& loans, int64_t sequence) {
  const auto found = loans.find(sequence);
  if (found != loans.end()) return found;
  throw UnknownSequence(concat(
      call, ": sequence: expected one with blocks in the ledger, got unknown id ", sequence));
}

}  // namespace

// --- the manager's half ---

// Checks that keep_free others stay free, and reserves memory.
void KVCacheManager::plan_hold(const char* call, int64_t num_blocks, int64_t keep_free) {
  const int64_t free = std::max<int64_t>(0, pool_.num_free() - keep_free);
  if (num_blocks > free) throw OutOfBlocks(call, num_blocks, free);
  if (held_.empty()) held_.resize(pool_.num_blocks());
  plan_.taken.reserve(num_blocks);
  plan_.evicted.reserve(num_blocks);
  reserve_events(0, num_blocks);
}

void KVCacheManager::commit_hold(std::span<int32_t> blocks) {
  plan_.taken.clear();
  take_blocks(static_cast<int64_t>(blocks.size()), plan_.taken, plan_.evicted);
  std::copy(plan_.taken.begin(), plan_.taken.end(), blocks.begin());
  for (const int32_t block : blocks) held_[block] = true;
  num_held_ += static_cast<int64_t>(blocks.size());
}

void KVCacheManager::release_held(int32_t block) {
  pool_.release(block);
  held_[block] = false;
  --num_held_;
}

// --- checks and policy ---

Ledger::Ledger(std::vector<KVCacheManager*> managers) {
  const auto count = static_cast<int64_t>(managers.size());
  checked("Ledger", "managers (their number)", count, 1, kMaxInstances);
  for (KVCacheManager* manager : managers) {
    if (manager == nullptr) throw InvalidArgument("Ledger: managers: expected managers, got null");
    for (const Instance& other : instances_) {
      if (other.manager == manager) {
        throw InvalidArgument("Ledger: managers: expected each once, got one twice");
      }
    }
    if (manager->block_size() != managers.front()->block_size()) {
      throw InvalidArgument(
          concat("Ledger: managers: expected block_size = ", managers.front()->block_size(),
                 " (as the first), got ", manager->block_size(), " at index ", instances_.size()));
    }
    instances_.push_back({manager});
  }
  debts_.resize(count * count);
}

std::unique_lock<std::mutex> Ledger::lock() const {
  instances_.front().manager->check_process();
  return std::unique_lock(mutex_);
}

void Ledger::check_instance(const char* call, const char* argument, int64_t instance) const {
  checked(call, argument, instance, 0, num_instances() - 1);
}

void Ledger::check_present(const char* call, const char* argument, int64_t instance) const {
  check_instance(call, argument, instance);
  if (!instances_[instance].lost) return;
  throw InvalidArgument(
      concat(call, ": ", argument, ": expected an instance that is not lost, got ", instance));
}

int64_t Ledger::lent_blocks(int64_t lender) const noexcept {
  int64_t blocks = 0;
  for (int64_t borrower = 0; borrower < num_instances(); ++borrower) {
    blocks += debt(borrower, lender);
  }
  return blocks;
}

int64_t Ledger::spare_blocks(int64_t instance) const {
  const Instance& one = instances_[instance];
  return one.lost ? 0 : std::max<int64_t>(0, one.manager->num_free_blocks() - one.reserve);
}

// The borrower itself, if it has enough blocks. Else the instance with the most; of equals the
// first one.
int64_t Ledger::choose_lender(int64_t borrower, int64_t num_blocks) const {
  int64_t most = spare_blocks(borrower);
  int64_t lender = borrower;
  if (most >= num_blocks) return lender;
  for (int64_t instance = 0; instance < num_instances(); ++instance) {
    const int64_t blocks = spare_blocks(instance);
    if (blocks > most) {
      most = blocks;
      lender = instance;
    }
  }
  return lender;
}

// --- changes ---

void Ledger::set_reserve(int64_t instance, int64_t num_blocks) {
  const auto guard = lock();
  check_present("set_reserve", "instance", instance);
  instances_[instance].reserve = checked("set_reserve", "num_blocks", num_blocks, 0, kMaxBlocks);
}

void Ledger::change_debt(int64_t borrower, int64_t lender, int64_t change) noexcept {
  if (borrower != lender) debt(borrower, lender) += change;
}

void Ledger::lend(int64_t lender, int64_t borrower, int64_t sequence,
                  std::span<InstanceBlock> blocks) {
  const auto guard = lock();
  const auto count = static_cast<int64_t>(blocks.size());
  check_present("lend", "borrower", borrower);
  checked("lend", "num_blocks", count, 1, kMaxBlocks);
  if (lender == kAnyInstance) {
    lender = choose_lender(borrower, count);
  } else {
    check_present("lend", "lender", lender);
  }
  const int64_t spare = spare_blocks(lender);
  if (count > spare) throw OutOfBlocks("lend", count, spare);  // before memory for them is reserved
  Loans added;  // a new loan joins the others without an allocation
  auto loan = loans_.find(sequence);
  if (loan == loans_.end()) {
    loan = added.emplace(sequence, Loan{borrower, {}}).first;
  } else if (loan->second.home != borrower) {
    throw InvalidArgument(concat("lend: borrower: expected ", loan->second.home,
                                 " (the home of sequence ", sequence, "), got ", borrower));
  }
  std::vector<InstanceBlock>& list = loan->second.blocks;
  const size_t wanted = list.size() + blocks.size();
  if (wanted > list.capacity()) list.reserve(std::max(wanted, 2 * list.capacity()));
  std::vector<int32_t> taken(count);
  KVCacheManager& manager = *instances_[lender].manager;
  const auto manager_guard = manager.lock();
  manager.plan_hold("lend", count, instances_[lender].reserve);

  manager.commit_hold(taken);
  for (int64_t i = 0; i < count; ++i) {
    list.push_back(blocks[i] = {static_cast<int32_t>(lender), taken[i]});
  }
  change_debt(borrower, lender, count);
  loans_.merge(added);
}

// Returns the last blocks of a loan. This cannot fail.
void Ledger::return_blocks(Loan& loan, int64_t num_blocks) {
  std::unique_lock<std::mutex> guard;
  int32_t locked = -1;  // the instance whose manager is locked; one at a time
  for (; num_blocks > 0; --num_blocks) {
    const auto [instance, block] = loan.blocks.back();
    KVCacheManager& manager = *instances_[instance].manager;
    if (instance != locked) {
      if (guard.owns_lock()) guard.unlock();
      guard = manager.lock();
      locked = instance;
    }
    manager.release_held(block);
    change_debt(loan.home, instance, -1);
    loan.blocks.pop_back();
  }
}

void Ledger::give_back(int64_t sequence, int64_t num_blocks) {
  const auto guard = lock();
  const auto found = find_loan("give_back", loans_, sequence);
  Loan& loan = found->second;
  checked("give_back", "num_blocks", num_blocks, 0, static_cast<int64_t>(loan.blocks.size()));

  return_blocks(loan, num_blocks);
  if (loan.blocks.empty()) loans_.erase(found);
}

void Ledger::free(int64_t sequence) {
  const auto guard = lock();
  const auto found = find_loan("free", loans_, sequence);

  return_blocks(found->second, static_cast<int64_t>(found->second.blocks.size()));
  loans_.erase(found);
}

// --- recall ---

struct Ledger::RecallPlan {
  struct Item {
    int64_t sequence;
    int64_t home;
    InstanceBlock* entry;  // in the sequence's list
    int64_t destination;
  };
  std::vector<Item> items;
  std::vector<int64_t> num_blocks;  // to take, of each instance
};

Ledger::RecallPlan Ledger::plan_recall(int64_t lender, int64_t num_blocks) {
  std::vector<int64_t> spare(num_instances());
  for (int64_t instance = 0; instance < num_instances(); ++instance) {
    spare[instance] = instance == lender ? 0 : spare_blocks(instance);
  }
  const int64_t total = std::accumulate(spare.begin(), spare.end(), int64_t{0});
  if (num_blocks > total) throw OutOfBlocks("recall", num_blocks, total);

  RecallPlan plan{.items = {}, .num_blocks = std::vector<int64_t>(num_instances())};
  plan.items.reserve(num_blocks);
  for (auto loan = loans_.rbegin(); loan != loans_.rend(); ++loan) {
    auto& [home, list] = loan->second;
    if (home == lender) continue;  // its own blocks
    for (auto entry = list.rbegin(); entry != list.rend(); ++entry) {
      if (static_cast<int64_t>(plan.items.size()) == num_blocks) return plan;
      if (entry->instance != lender) continue;
      const int64_t destination =
          spare[home] > 0 ? home : std::max_element(spare.begin(), spare.end()) - spare.begin();
      --spare[destination];
      ++plan.num_blocks[destination];
      plan.items.push_back({loan->first, home, &*entry, destination});
    }
  }
  return plan;
}

void Ledger::recall(int64_t lender, std::span<BlockMove> moves) {
  const auto guard = lock();
  check_present("recall", "lender", lender);
  const auto count = static_cast<int64_t>(moves.size());
  checked("recall", "num_blocks", count, 0, lent_blocks(lender));
  if (count == 0) return;
  RecallPlan plan = plan_recall(lender, count);
  // All managers concerned are locked until the end, so that no plan of theirs is overtaken. They
  // are locked in ascending order.
  std::vector<std::unique_lock<std::mutex>> guards;
  guards.reserve(num_instances());
  std::vector<std::vector<int32_t>> taken(num_instances());
  for (int64_t i = 0; i < num_instances(); ++i) {
    if (plan.num_blocks[i] == 0 && i != lender) continue;
    guards.push_back(instances_[i].manager->lock());
    taken[i].resize(plan.num_blocks[i]);
    instances_[i].manager->plan_hold("recall", plan.num_blocks[i], instances_[i].reserve);
  }

  for (int64_t i = 0; i < num_instances(); ++i) {
    if (!taken[i].empty()) instances_[i].manager->commit_hold(taken[i]);
  }
  for (int64_t i = 0; i < count; ++i) {
    const RecallPlan::Item& item = plan.items[i];
    const int32_t block = taken[item.destination].back();
    taken[item.destination].pop_back();
    const InstanceBlock source = *item.entry;
    moves[i] = {item.sequence, source.instance, source.block, item.destination, block};
    *item.entry = {static_cast<int32_t>(item.destination), block};
    instances_[lender].manager->release_held(source.block);
    change_debt(item.home, lender, -1);
    change_debt(item.home, item.destination, 1);
  }
}

// --- lost instances ---

void Ledger::instance_lost(int64_t instance,
                           const std::function<void(std::span<const int64_t>)>& deliver) {
  const auto guard = lock();
  check_present("instance_lost", "instance", instance);
  const auto touches = [&](const Loan& loan) {
    return loan.home == instance ||
           std::any_of(loan.blocks.begin(), loan.blocks.end(),
                       [&](const InstanceBlock& entry) { return entry.instance == instance; });
  };
  std::vector<int64_t> lost = instances_[instance].manager->sequence_ids();
  for (const auto& [sequence, loan] : loans_) {
    if (touches(loan)) lost.push_back(sequence);
  }
  std::sort(lost.begin(), lost.end());
  lost.erase(std::unique(lost.begin(), lost.end()), lost.end());
  deliver(lost);

  for (auto loan = loans_.begin(); loan != loans_.end();) {
    if (touches(loan->second)) {
      return_blocks(loan->second, static_cast<int64_t>(loan->second.blocks.size()));
      loan = loans_.erase(loan);
    } else {
      ++loan;
    }
  }
  instances_[instance].lost = true;
  instances_[instance].reserve = 0;
}

void Ledger::instance_back(int64_t instance) {
  const auto guard = lock();
  check_instance("instance_back", "instance", instance);
  if (!instances_[instance].lost) {
    throw InvalidArgument(
        concat("instance_back: instance: expected one that is lost, got ", instance));
  }
  instances_[instance].manager->reset();
  instances_[instance].lost = false;
}

// --- questions ---

bool Ledger::contains(int64_t sequence) const {
  const auto guard = lock();
  return loans_.contains(sequence);
}

std::vector<InstanceBlock> Ledger::blocks(int64_t sequence) const {
  const auto guard = lock();
  return find_loan("blocks", loans_, sequence)->second.blocks;
}

int64_t Ledger::owed(int64_t borrower, int64_t lender) const {
  const auto guard = lock();
  check_instance("owed", "borrower", borrower);
  check_instance("owed", "lender", lender);
  return debt(borrower, lender);
}

InstanceCounts Ledger::counts(int64_t instance) const {
  const auto guard = lock();
  check_instance("counts", "instance", instance);
  const Statistics now = instances_[instance].manager->statistics();
  const int64_t lent = lent_blocks(instance);
  int64_t borrowed = 0;
  for (int64_t lender = 0; lender < num_instances(); ++lender) borrowed += debt(instance, lender);
  return {.total = now.total_blocks,
          .lent = lent,
          .used = now.used_blocks + now.held_blocks - lent,
          .free = now.free_blocks + now.cached_blocks,
          .borrowed = borrowed,
          .reserve = instances_[instance].reserve,
          .lost = instances_[instance].lost};
}

void Ledger::check_integrity() const {
  const auto guard = lock();
  std::vector<std::vector<int32_t>> held(num_instances());
  std::vector<int64_t> debts(debts_.size());
  for (const auto& [sequence, loan] : loans_) {
    require(!loan.blocks.empty(), "no block is lent to the sequence", sequence);
    require(loan.home >= 0 && loan.home < num_instances() && !instances_[loan.home].lost,
            "the home is no present instance, of the sequence", sequence);
    for (const auto& [instance, block] : loan.blocks) {
      require(instance >= 0 && instance < num_instances() && !instances_[instance].lost,
              "a block is of no present instance, of the sequence", sequence);
      held[instance].push_back(block);
      if (instance != loan.home) ++debts[loan.home * num_instances() + instance];
    }
  }
  require(debts == debts_, "debts differ from the loans", num_instances());
  for (int64_t instance = 0; instance < num_instances(); ++instance) {
    const KVCacheManager& manager = *instances_[instance].manager;
    manager.check_integrity();
    const auto manager_guard = manager.lock();
    std::vector<bool> lent(manager.held_.size());
    for (const int32_t block : held[instance]) {
      require(block >= 0 && block < static_cast<int64_t>(lent.size()) && !lent[block],
              "a block is lent twice, or not held by its manager, of instance", instance);
      lent[block] = true;
    }
    require(lent == manager.held_, "a manager holds a block that is not lent, of instance",
            instance);
  }
}

}  // namespace vllm_kernels::kv_cache
