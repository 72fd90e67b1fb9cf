// Moving sequences to host blocks and back. The caller copies the blocks; the manager moves only
// the tables.
#include <algorithm>
#include <utility>

#include "kv_cache/errors.h"
#include "kv_cache/kv_cache_manager.h"

namespace vllm_kernels::kv_cache {

int64_t KVCacheManager::num_table_entries(std::span<const int64_t> ids) const {
  const auto guard = lock();
  int64_t total = 0;
  for (const int64_t id : ids) {
    total += static_cast<int64_t>(find("num_table_entries", id).blocks.size());
  }
  return total;
}

// The blocks of the batch's tokens, ascending, each once.
std::vector<int32_t> KVCacheManager::blocks_of(const BatchPlan& plan) const {
  std::vector<int32_t> blocks;
  for (const BatchItem& item : plan.items) {
    const Sequence& sequence = sequences_[item.position];
    const int64_t used = blocks_for(sequence.num_tokens) * num_groups();
    for (int64_t i = 0; i < used; ++i) {
      if (!is_null(sequence.blocks[i])) blocks.push_back(sequence.blocks[i]);
    }
  }
  std::sort(blocks.begin(), blocks.end());
  blocks.erase(std::unique(blocks.begin(), blocks.end()), blocks.end());
  return blocks;
}

bool KVCacheManager::can_swap_out(std::span<const int64_t> ids) {
  const auto guard = lock();
  const BatchPlan& plan = plan_batch("can_swap_out", ids, nullptr, {});
  const int64_t free = host_pool_ ? host_pool_->num_free() : 0;
  return static_cast<int64_t>(blocks_of(plan).size()) <= free;
}

int64_t KVCacheManager::swap_out(std::span<const int64_t> ids, std::span<BlockCopy> copies) {
  const auto guard = lock();
  const BatchPlan& plan = plan_batch("swap_out", ids, nullptr, {});
  const std::vector<int32_t> blocks = blocks_of(plan);
  const int64_t free = host_pool_ ? host_pool_->num_free() : 0;
  const auto needed = static_cast<int64_t>(blocks.size());
  if (needed > free) throw OutOfBlocks("swap_out: host", needed, free);
  check_copies("swap_out", needed, copies.size());
  std::vector<bool> claimed(blocks.size());  // a table already owns the first reference

  for (size_t i = 0; i < blocks.size(); ++i) copies[i] = {blocks[i], host_pool_->take()};
  for (const BatchItem& item : plan.items) {
    Sequence& sequence = sequences_[item.position];
    drop_entries(sequence, blocks_for(sequence.num_tokens));
    for (size_t i = sequence.blocks.size(); i-- > 0;) {
      int32_t& entry = sequence.blocks[i];
      if (is_null(entry)) {
        entry = kNoHostBlock;
        continue;
      }
      const auto found = std::lower_bound(blocks.begin(), blocks.end(), entry) - blocks.begin();
      pool_.release(entry);
      entry = static_cast<int32_t>(copies[found].destination);
      if (claimed[found]) host_pool_->add_reference(entry);
      claimed[found] = true;
    }
    sequence.swapped = true;
    ++sequence.edits;
  }
  return needed;
}

// The host blocks of the batch, ascending, each once. A swap's destination is the cached block with
// the same tokens, or kNone: a block is to be taken. `needed` becomes the number of blocks that
// leave the free lists.
std::vector<KVCacheManager::Swap> KVCacheManager::plan_swap_in(const BatchPlan& plan,
                                                               int64_t& needed) const {
  std::vector<Swap> swaps;
  for (const BatchItem& item : plan.items) {
    const Sequence& sequence = sequences_[item.position];
    int32_t node = sequence.node;
    for (int64_t index = entries(sequence) - 1; index >= 0; --index) {
      const bool hashed = tracks_tokens(sequence) && index < sequence.num_hashed;
      for (int64_t group = 0; group < num_groups(); ++group) {
        const int32_t source = sequence.blocks[index * num_groups() + group];
        if (source == kNoHostBlock) continue;
        swaps.push_back({.source = source,
                         .destination = kNone,
                         .node = hashed ? node : kNone,
                         .group = static_cast<int32_t>(group)});
      }
      if (hashed) node = cache_->parent(node);
    }
  }
  // Among the holders of a block, one with recorded tokens comes first, and unique() keeps it.
  std::sort(swaps.begin(), swaps.end(), [](const Swap& left, const Swap& right) {
    return std::pair(left.source, -left.node) < std::pair(right.source, -right.node);
  });
  const auto same = [](const Swap& left, const Swap& right) { return left.source == right.source; };
  swaps.erase(std::unique(swaps.begin(), swaps.end(), same), swaps.end());

  const auto sharers = static_cast<int64_t>(plan.items.size());
  std::vector<int32_t> revived;
  needed = 0;
  for (Swap& swap : swaps) {
    const int32_t block = swap.node == kNone ? kNone : cache_->block(swap.node, swap.group);
    if (block == kNone || pool_.references(block) > pool_.max_references() - sharers) {
      ++needed;
    } else {
      swap.destination = block;
      if (pool_.references(block) == 0) revived.push_back(block);
    }
  }
  std::sort(revived.begin(), revived.end());
  needed += std::unique(revived.begin(), revived.end()) - revived.begin();
  // The watermark is for running sequences. Without any, even a very long sequence may come back.
  const bool some_run = std::any_of(sequences_.begin(), sequences_.end(),
                                    [](const Sequence& sequence) { return !sequence.swapped; });
  if (some_run) needed += watermark(needed);
  return swaps;
}

bool KVCacheManager::can_swap_in(std::span<const int64_t> ids) {
  const auto guard = lock();
  const BatchPlan& plan = plan_batch("can_swap_in", ids, nullptr, {}, Where::kHost);
  int64_t needed;
  plan_swap_in(plan, needed);
  return needed <= pool_.num_free();
}

int64_t KVCacheManager::swap_in(std::span<const int64_t> ids, std::span<BlockCopy> copies) {
  const auto guard = lock();
  const BatchPlan& plan = plan_batch("swap_in", ids, nullptr, {}, Where::kHost);
  int64_t needed;
  std::vector<Swap> swaps = plan_swap_in(plan, needed);
  if (needed > pool_.num_free()) throw OutOfBlocks("swap_in", needed, pool_.num_free());
  const int64_t to_copy = std::count_if(swaps.begin(), swaps.end(),
                                        [](const Swap& swap) { return swap.destination == kNone; });
  check_copies("swap_in", to_copy, copies.size());
  reserve_events(to_copy, to_copy);

  // Cached blocks first, so that none of them is taken for the rest.
  for (const Swap& swap : swaps) {
    if (swap.destination != kNone) pool_.add_reference(swap.destination);
  }
  int64_t num_copies = 0;
  for (Swap& swap : swaps) {
    if (swap.destination != kNone) continue;
    swap.destination = take_block();
    copies[num_copies++] = {swap.source, swap.destination};
    if (swap.node != kNone) register_block(swap.destination, swap.node, swap.group);
  }
  for (const BatchItem& item : plan.items) {
    Sequence& sequence = sequences_[item.position];
    for (int32_t& entry : sequence.blocks) {
      if (entry == kNoHostBlock) {
        entry = kNullBlock;
        continue;
      }
      const auto found =
          std::lower_bound(swaps.begin(), swaps.end(), entry,
                           [](const Swap& swap, int32_t source) { return swap.source < source; });
      host_pool_->release(entry);
      entry = found->destination;
      if (found->claimed) pool_.add_reference(entry);
      found->claimed = true;
    }
    sequence.swapped = false;
    sequence.own_tail = false;
    ++sequence.edits;
  }
  return num_copies;
}

}  // namespace vllm_kernels::kv_cache
