// Appending to the sequences of a batch. append() is plan_append() and commit_append(), which
// step() in buffers.cpp calls as well.
#include <algorithm>
#include <utility>

#include "kv_cache/errors.h"
#include "kv_cache/kv_cache_manager.h"

namespace vllm_kernels::kv_cache {
namespace {

// Sorts `blocks`, and calls use(block, how often it occurs) for each.
template <typename Use>
void for_each_block(std::vector<int32_t>& blocks, const Use& use) {
  std::sort(blocks.begin(), blocks.end());
  size_t first = 0;  // of the run with the same block
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (i + 1 < blocks.size() && blocks[i + 1] == blocks[i]) continue;
    use(blocks[i], static_cast<int64_t>(i + 1 - first));
    first = i + 1;
  }
}

}  // namespace

std::vector<BlockCopy> KVCacheManager::append(int64_t id, int64_t num_tokens,
                                              const AppendOptions& options) {
  std::vector<BlockCopy> copies(num_groups());
  copies.resize(append(std::span(&id, 1), std::span(&num_tokens, 1), copies, options));
  return copies;
}

int64_t KVCacheManager::append(std::span<const int64_t> ids, std::span<const int64_t> num_tokens,
                               std::span<BlockCopy> copies, const AppendOptions& options) {
  const auto guard = lock();
  BatchPlan& plan = plan_batch("append", ids, "num_tokens", num_tokens);
  plan_append("append", copies.size(), options, plan);
  return commit_append(options, copies, plan);
}

// --- the plan of an append ---

void KVCacheManager::plan_append(const char* call, size_t copies_room, const AppendOptions& options,
                                 BatchPlan& plan) {
  checked(call, "lookahead", options.lookahead, 0, kMaxTokens);
  if (options.tokens) plan_tokens(call, *options.tokens, false, plan);
  const int64_t new_entries = count_new_entries(call, options, plan);
  const int64_t freed = count_freed(plan);
  const int64_t copies = count_copies(plan);
  plan.num_blocks = new_entries + copies;

  const int64_t free = pool_.num_free() + freed;
  if (plan.num_blocks > free) throw OutOfBlocks(call, plan.num_blocks, free);
  check_copies(call, copies, copies_room);
  reserve_append(options, plan);
}

// Table entries that the batch adds. Also collects shared tails and blocks out of their window.
int64_t KVCacheManager::count_new_entries(const char* call, const AppendOptions& options,
                                          BatchPlan& plan) const {
  plan.shared_tails.clear();
  plan.out_of_window.clear();
  int64_t new_entries = 0;
  for (const BatchItem& item : plan.items) {
    const Sequence& sequence = sequences_[item.position];
    if (item.num_tokens > kMaxTokens - options.lookahead - sequence.num_tokens) {
      throw InvalidArgument(concat(call, ": num_tokens: expected at most ",
                                   kMaxTokens - options.lookahead - sequence.num_tokens,
                                   " (sequence ", sequence.id, " has ", sequence.num_tokens,
                                   "), got ", item.num_tokens));
    }
    const int64_t slots = item.num_tokens + options.lookahead;
    if (slots == 0) continue;
    new_entries += (entries_after(sequence, slots) - entries(sequence)) * num_groups();
    if (has_windows_) find_out_of_window(sequence, plan);
    const int64_t tail = block_of(sequence.num_tokens);
    if (sequence.own_tail || tail * block_tokens_ == sequence.num_tokens) continue;
    for (int64_t group = 0; group < num_groups(); ++group) {
      const int32_t block = sequence.blocks[tail * num_groups() + group];
      if (pool_.references(block) > 1) plan.shared_tails.push_back(block);
    }
  }
  return new_entries;
}

// Every appending holder of a shared tail gets a copy. The exception is a last holder: once all
// others have their copies, the block is its own.
int64_t KVCacheManager::count_copies(BatchPlan& plan) const {
  int64_t copies = 0;
  for_each_block(plan.shared_tails, [&](int32_t block, int64_t appending) {
    copies += appending < pool_.references(block) ? appending : appending - 1;
  });
  return copies;
}

// Collects the blocks that the sequence gives back when its windows move on.
inline void KVCacheManager::find_out_of_window(const Sequence& sequence, BatchPlan& plan) const {
  for (int64_t group = 0; group < num_groups(); ++group) {
    for (int64_t i = first_visible(sequence.num_tokens, group) - 1; i >= 0; --i) {
      const int32_t block = sequence.blocks[i * num_groups() + group];
      if (is_null(block)) break;
      plan.out_of_window.push_back(block);
    }
  }
}

// Blocks out of their window that become free: no sequence outside the batch holds them.
int64_t KVCacheManager::count_freed(BatchPlan& plan) const {
  int64_t freed = 0;
  for_each_block(plan.out_of_window, [&](int32_t block, int64_t leaving) {
    freed += leaving == pool_.references(block);
  });
  return freed;
}

void KVCacheManager::reserve_append(const AppendOptions& options, BatchPlan& plan) {
  for (const BatchItem& item : plan.items) {
    Sequence& sequence = sequences_[item.position];
    const int64_t slots = item.num_tokens + options.lookahead;
    const auto wanted = static_cast<size_t>(entries_after(sequence, slots) * num_groups());
    std::vector<int32_t>& blocks = sequence.blocks;
    if (slots > 0 && wanted > blocks.capacity()) {
      blocks.reserve(std::max(wanted, 2 * blocks.capacity()));
    }
  }
  plan.taken.reserve(plan.num_blocks);
  plan.evicted.reserve(plan.num_blocks);
  if (!record_events_) return;
  // A block that is taken may be evicted, and a tail that is written to becomes unfindable. The
  // tokens store blocks. This room covers the whole call; that of plan_tokens() is not added.
  const auto tails = static_cast<int64_t>(plan.items.size()) * num_groups();
  const int64_t stored =
      options.tokens ? static_cast<int64_t>(options.tokens->size()) / block_tokens_ : 0;
  reserve_events((stored + tails) * num_groups(), plan.num_blocks + tails);
}

// --- the commit of an append ---

inline void KVCacheManager::release_out_of_window(Sequence& sequence) {
  for (int64_t group = 0; group < num_groups(); ++group) {
    for (int64_t i = first_visible(sequence.num_tokens, group) - 1; i >= 0; --i) {
      int32_t& block = sequence.blocks[i * num_groups() + group];
      if (is_null(block)) break;
      pool_.release(block);
      block = kNullBlock;
      ++sequence.edits;
    }
  }
}

// Returns the number of copies.
int64_t KVCacheManager::commit_append(const AppendOptions& options, std::span<BlockCopy> copies,
                                      BatchPlan& plan) {
  if (has_windows_) {
    for (const BatchItem& item : plan.items) {
      if (item.num_tokens + options.lookahead > 0) {
        release_out_of_window(sequences_[item.position]);
      }
    }
  }
  plan.taken.clear();
  take_blocks(plan.num_blocks, plan.taken, plan.evicted);
  std::reverse(plan.taken.begin(), plan.taken.end());
  const auto take = [&plan] {
    const int32_t block = plan.taken.back();
    plan.taken.pop_back();
    return block;
  };
  const int32_t* tokens = options.tokens ? options.tokens->data() : nullptr;
  std::span<const Hash> first_hashes = plan.first_hashes;
  int64_t num_copies = 0;
  for (const BatchItem& item : plan.items) {
    const int64_t slots = item.num_tokens + options.lookahead;
    if (slots == 0) continue;
    Sequence& sequence = sequences_[item.position];
    std::vector<int32_t>& blocks = sequence.blocks;
    const auto wanted = static_cast<size_t>(entries_after(sequence, slots) * num_groups());
    const int64_t tail = block_of(sequence.num_tokens);
    if (!sequence.own_tail && tail * block_tokens_ != sequence.num_tokens) {
      for (int64_t group = 0; group < num_groups(); ++group) {
        int32_t& block = blocks[tail * num_groups() + group];
        if (pool_.references(block) > 1) {
          const int32_t source = std::exchange(block, take());
          copies[num_copies++] = {source, block};
          pool_.release(source);
          ++sequence.edits;
        } else {
          unregister_block(block);  // registered for a longer sequence that was truncated
        }
      }
    }
    while (blocks.size() < wanted) blocks.push_back(take());
    sequence.own_tail = true;
    sequence.num_tokens += item.num_tokens;
    if (tokens != nullptr) {
      commit_tokens(sequence, tokens, item.num_tokens, first_hashes);
      tokens += item.num_tokens;
    }
  }
  // A window may have given a holder's reference back, so that a planned copy was not needed.
  for (; !plan.taken.empty(); plan.taken.pop_back()) pool_.release(plan.taken.back());
  num_copies_ += num_copies;
  return num_copies;
}

}  // namespace vllm_kernels::kv_cache
