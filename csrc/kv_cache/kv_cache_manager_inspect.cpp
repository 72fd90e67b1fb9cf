// Looking at the whole state: statistics, and whether it holds together.
#include <algorithm>
#include <utility>
#include <vector>

#include "kv_cache/errors.h"
#include "kv_cache/kv_cache_manager.h"

namespace vllm_kernels::kv_cache {
namespace {

void require(bool condition, const char* what, int64_t id) {
  if (!condition) throw IntegrityError(concat("KVCacheManager: ", what, ", at sequence ", id));
}

}  // namespace

Statistics KVCacheManager::statistics() const {
  const auto guard = lock();
  Statistics result{.total_blocks = pool_.num_blocks(),
                    .free_blocks = pool_.num_free(),
                    .used_blocks = pool_.num_used(),
                    .shared_blocks = pool_.num_shared(),
                    .peak_used_blocks = pool_.peak_used(),
                    .num_sequences = static_cast<int64_t>(sequences_.size()),
                    .num_copies = num_copies_};
  std::vector<std::pair<int32_t, int64_t>>
      shared_tails;  // block, tokens that one sequence has there
  for (const Sequence& sequence : sequences_) {
    const auto blocks = static_cast<int64_t>(sequence.blocks.size());
    const int64_t empty = blocks * block_size_ - sequence.num_tokens;
    result.num_tokens += sequence.num_tokens;
    result.table_entries += blocks;
    if (empty == 0) continue;
    if (pool_.references(sequence.blocks.back()) == 1) {
      result.waste_slots += empty;
    } else {
      shared_tails.emplace_back(sequence.blocks.back(), block_size_ - empty);
    }
  }
  // A shared last block is as full as its longest reader has it; where some reader is not among
  // the partly filled, it is full.
  std::sort(shared_tails.begin(), shared_tails.end());
  size_t first = 0;
  for (size_t i = 0; i < shared_tails.size(); ++i) {
    const auto [block, filled] = shared_tails[i];
    if (i + 1 < shared_tails.size() && shared_tails[i + 1].first == block) continue;
    const auto readers = static_cast<int64_t>(i + 1 - first);
    if (readers == pool_.references(block)) result.waste_slots += block_size_ - filled;
    first = i + 1;
  }
  return result;
}

void KVCacheManager::check_integrity() const {
  const auto guard = lock();
  pool_.check_integrity();
  require(index_.size() == sequences_.size(), "index and sequences differ in number", 0);
  std::vector<int32_t> holders(pool_.num_blocks());
  for (size_t i = 0; i < sequences_.size(); ++i) {
    const Sequence& sequence = sequences_[i];
    require(index_.find(sequence.id) == static_cast<int32_t>(i), "index points elsewhere",
            sequence.id);
    require(sequence.num_tokens >= 0 && sequence.num_tokens <= kMaxTokens,
            "number of tokens out of range", sequence.id);
    require(static_cast<int64_t>(sequence.blocks.size()) == blocks_for(sequence.num_tokens),
            "number of blocks does not fit the tokens", sequence.id);
    for (const int32_t block : sequence.blocks) {
      require(block >= 0 && block < pool_.num_blocks(), "block id out of range", sequence.id);
      ++holders[block];
    }
  }
  for (int32_t block = 0; block < pool_.num_blocks(); ++block) {
    if (holders[block] != pool_.references(block)) {
      throw IntegrityError(concat("KVCacheManager: block ", block, " has ", pool_.references(block),
                                  " references but stands in ", holders[block], " tables"));
    }
  }
}

}  // namespace vllm_kernels::kv_cache
