// Statistics of the whole state, and the check of its invariants.
#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "kv_cache/errors.h"
#include "kv_cache/kv_cache_manager.h"

namespace vllm_kernels::kv_cache {
namespace {

void require(bool condition, const char* what, int64_t id) {
  if (!condition) throw IntegrityError(concat("KVCacheManager: ", what, ", at sequence ", id));
}

void check_holders(const BlockPool& pool, const std::vector<int32_t>& holders, const char* name) {
  for (int32_t block = pool.has_null_block() ? 1 : 0; block < pool.num_blocks(); ++block) {
    if (holders[block] != pool.references(block)) {
      throw IntegrityError(concat("KVCacheManager: ", name, " ", block, " has ",
                                  pool.references(block), " references but stands in ",
                                  holders[block], " tables"));
    }
  }
}

}  // namespace

Statistics KVCacheManager::statistics() const {
  const auto guard = lock();
  Statistics result{.total_blocks = pool_.num_usable(),
                    .used_blocks = pool_.num_used() - num_held_,
                    .held_blocks = num_held_,
                    .cached_blocks = pool_.num_cached(),
                    .free_blocks = pool_.num_free() - pool_.num_cached(),
                    .shared_blocks = pool_.num_shared(),
                    .peak_used_blocks = pool_.peak_used(),
                    .num_sequences = static_cast<int64_t>(sequences_.size()),
                    .total_host_blocks = host_pool_ ? host_pool_->num_usable() : 0,
                    .used_host_blocks = host_pool_ ? host_pool_->num_used() : 0,
                    .num_copies = num_copies_,
                    .num_evictions = pool_.num_evictions(),
                    .queried_tokens = queried_tokens_,
                    .hit_tokens = hit_tokens_};
  std::vector<std::pair<int32_t, int64_t>> shared_tails;  // block, and tokens of one sequence in it
  for (const Sequence& sequence : sequences_) {
    if (sequence.swapped) {
      ++result.num_swapped_sequences;
      continue;
    }
    const int64_t num_tokens = shard_.local_tokens(sequence.num_tokens);
    result.num_tokens += num_tokens;
    for (const int32_t block : sequence.blocks) result.table_entries += !is_null(block);
    // The blocks that are not full: the last one, and the lookahead, which is never shared.
    const int64_t full = block_of(sequence.num_tokens) * num_groups();
    for (auto i = full; i < static_cast<int64_t>(sequence.blocks.size()); ++i) {
      const int64_t index = i / num_groups();
      const int64_t filled = std::max<int64_t>(0, num_tokens - index * shard_.block_size);
      const int32_t block = sequence.blocks[i];
      if (pool_.references(block) == 1) {
        result.waste_slots += shard_.block_size - filled;
      } else {
        shared_tails.emplace_back(block, filled);
      }
    }
  }
  // A shared last block is as full as its longest holder makes it. If it is not the last block of
  // some holder, it is full.
  std::sort(shared_tails.begin(), shared_tails.end());
  size_t first = 0;
  for (size_t i = 0; i < shared_tails.size(); ++i) {
    const auto [block, filled] = shared_tails[i];
    if (i + 1 < shared_tails.size() && shared_tails[i + 1].first == block) continue;
    const auto readers = static_cast<int64_t>(i + 1 - first);
    if (readers == pool_.references(block)) result.waste_slots += shard_.block_size - filled;
    first = i + 1;
  }
  return result;
}

// Pins the sequence's last node, and checks that its ancestors match the blocks of the table.
void KVCacheManager::check_recorded_blocks(const Sequence& sequence,
                                           std::map<int32_t, int64_t>& pins) const {
  require(cache_.has_value(), "tokens are known without a cache", sequence.id);
  require(static_cast<int64_t>(sequence.tail.size()) < block_tokens_,
          "tail is not shorter than a block", sequence.id);
  require(num_recorded(sequence) <= sequence.num_tokens, "more tokens recorded than present",
          sequence.id);
  ++pins[sequence.node];
  int32_t node = sequence.node;
  for (int64_t index = sequence.num_hashed - 1; index >= 0; --index) {
    for (int64_t group = 0; group < num_groups() && !sequence.swapped; ++group) {
      const int32_t block = sequence.blocks[index * num_groups() + group];
      const bool registered = !is_null(block) && pool_.content(block) != BlockPool::kNoContent;
      require(!registered || pool_.content(block) == node, "block is registered for other tokens",
              sequence.id);
    }
    node = cache_->parent(node);
    require(node != kNone, "fewer nodes than hashed blocks", sequence.id);
  }
  require(cache_->parent(node) == kNone, "more nodes than hashed blocks", sequence.id);
}

void KVCacheManager::check_integrity() const {
  const auto guard = lock();
  pool_.check_integrity();
  if (host_pool_) host_pool_->check_integrity();
  require(index_.size() == sequences_.size(), "index and sequences differ in number", 0);
  std::vector<int32_t> holders(pool_.num_blocks());
  std::vector<int32_t> host_holders(num_host_blocks());
  std::map<int32_t, int64_t> pins;
  for (size_t i = 0; i < sequences_.size(); ++i) {
    const Sequence& sequence = sequences_[i];
    require(index_.find(sequence.id) == static_cast<int32_t>(i), "index points elsewhere",
            sequence.id);
    require(sequence.num_tokens >= 0 && sequence.num_tokens <= kMaxTokens,
            "number of tokens out of range", sequence.id);
    const int64_t needed = blocks_for(sequence.num_tokens);
    require(entries(sequence) * num_groups() == static_cast<int64_t>(sequence.blocks.size()) &&
                entries(sequence) >= needed && (entries(sequence) == needed || !sequence.swapped),
            "number of blocks does not fit the tokens", sequence.id);
    std::vector<int32_t>& held = sequence.swapped ? host_holders : holders;
    for (size_t entry = 0; entry < sequence.blocks.size(); ++entry) {
      const int32_t block = sequence.blocks[entry];
      const auto group = static_cast<int64_t>(entry) % num_groups();
      if (sequence.swapped ? block == kNoHostBlock : is_null(block)) {
        require(
            static_cast<int64_t>(entry) / num_groups() < first_visible(sequence.num_tokens, group),
            "block that can be seen is missing", sequence.id);
        continue;
      }
      require(block >= 0 && block < static_cast<int32_t>(held.size()), "block id out of range",
              sequence.id);
      ++held[block];
    }
    if (tracks_tokens(sequence)) check_recorded_blocks(sequence, pins);
  }
  for (size_t block = 0; block < held_.size(); ++block) holders[block] += held_[block];
  check_holders(pool_, holders, "block");
  const int64_t held = std::count(held_.begin(), held_.end(), true);
  if (held != num_held_) {
    throw IntegrityError(
        concat("KVCacheManager: ", num_held_, " blocks are held, ", held, " are marked"));
  }
  if (host_pool_) check_holders(*host_pool_, host_holders, "host block");
  if (!cache_) return;
  cache_->check_integrity(pins);
  int64_t registered = 0;
  for (int32_t block = pool_.has_null_block() ? 1 : 0; block < pool_.num_blocks(); ++block) {
    if (pool_.content(block) == BlockPool::kNoContent) continue;
    ++registered;
    if (!cache_->has_block(pool_.content(block), block)) {
      throw IntegrityError(concat("KVCacheManager: block ", block, " is registered at node ",
                                  pool_.content(block), ", which does not have it"));
    }
  }
  if (registered != cache_->count_blocks()) {
    throw IntegrityError(concat("KVCacheManager: ", registered, " blocks are registered, nodes ",
                                "have ", cache_->count_blocks()));
  }
}

}  // namespace vllm_kernels::kv_cache
