// Recording token ids, and registering the full blocks that they complete. record_tokens() does so
// for tokens that have slots already. append() and step() plan and commit it for the tokens that
// they append, and allocate() calls add_tokens() for a prompt.
#include <algorithm>
#include <utility>

#include "kv_cache/errors.h"
#include "kv_cache/kv_cache_manager.h"

namespace vllm_kernels::kv_cache {

void KVCacheManager::record_tokens(std::span<const int64_t> ids,
                                   std::span<const int64_t> num_tokens,
                                   std::span<const int32_t> tokens) {
  const auto guard = lock();
  BatchPlan& plan = plan_batch("record_tokens", ids, "num_tokens", num_tokens);
  plan_tokens("record_tokens", tokens, true, plan);
  const int32_t* next = tokens.data();
  std::span<const Hash> first_hashes = plan.first_hashes;
  for (const BatchItem& item : plan.items) {
    commit_tokens(sequences_[item.position], next, item.num_tokens, first_hashes);
    next += item.num_tokens;
  }
}

// --- the plan of recording a batch's tokens ---

// Prefetches the recorded tokens of an item, if there is such an item.
inline void KVCacheManager::prefetch_recorded(const BatchPlan& plan, size_t item) const noexcept {
  if (item >= plan.items.size()) return;
  __builtin_prefetch(&sequences_[plan.items[item].position].num_hashed);
}

// The error of an item whose tokens do not follow on the recorded ones.
void KVCacheManager::refuse_tokens(const char* call, const Sequence& sequence, int64_t num_tokens,
                                   bool have_slots) const {
  const int64_t recorded = num_recorded(sequence);
  if (have_slots) {
    throw InvalidArgument(concat(call, ": num_tokens: expected at most ",
                                 sequence.num_tokens - recorded, " (unknown tokens of sequence ",
                                 sequence.id, "), got ", num_tokens));
  }
  throw InvalidArgument(concat(call, ": tokens: expected sequences of known tokens, got one ",
                               "(sequence ", sequence.id, ") with ", recorded, " of ",
                               sequence.num_tokens, " known: record_tokens comes first"));
}

// Reserves the tail of an item's sequence, and adds a fill if its tokens complete a block.
inline void KVCacheManager::plan_fill(const BatchItem& item, Sequence& sequence,
                                      int64_t first_token, BatchPlan& plan) {
  const auto tail = static_cast<int64_t>(sequence.tail.size());
  if (sequence.tail.capacity() < static_cast<size_t>(block_tokens_) && item.num_tokens > 0) {
    sequence.tail.reserve(block_tokens_);
  }
  __builtin_prefetch(sequence.tail.data() + tail);
  if (tail + item.num_tokens < block_tokens_) return;
  plan.fills.push_back({item.position, first_token, block_of(tail + item.num_tokens)});
  __builtin_prefetch(sequence.tail.data());
  cache_->prefetch_node(sequence.node);
  // The block of appended tokens may not be in the table yet.
  const int64_t entry = sequence.num_hashed * num_groups();
  if (entry < static_cast<int64_t>(sequence.blocks.size())) {
    __builtin_prefetch(&sequence.blocks[entry]);
  }
}

// With `have_slots` the tokens have slots already; without, they are about to be appended.
void KVCacheManager::plan_tokens(const char* call, std::span<const int32_t> tokens, bool have_slots,
                                 BatchPlan& plan) {
  plan.fills.clear();
  plan.fills.reserve(plan.items.size());
  plan.first_hashes.clear();
  int64_t total = 0;
  for (size_t i = 0; i < plan.items.size(); ++i) {
    prefetch_recorded(plan, i + kPrefetchDistance);
    const BatchItem& item = plan.items[i];
    if (item.num_tokens > kMaxTokens - total) {
      throw InvalidArgument(concat(call, ": tokens in all: expected at most ", kMaxTokens));
    }
    const int64_t first_token = std::exchange(total, total + item.num_tokens);
    Sequence& sequence = sequences_[item.position];
    if (!tracks_tokens(sequence)) continue;
    const int64_t unrecorded = sequence.num_tokens - num_recorded(sequence);
    const bool follows =
        have_slots ? item.num_tokens <= unrecorded : item.num_tokens == 0 || unrecorded == 0;
    if (!follows) refuse_tokens(call, sequence, item.num_tokens, have_slots);
    plan_fill(item, sequence, first_token, plan);
  }
  if (total != static_cast<int64_t>(tokens.size())) {
    throw InvalidArgument(concat(call, ": tokens: expected ", total,
                                 " elements (sum of num_tokens), got ", tokens.size()));
  }
  if (plan.fills.empty()) return;
  if (have_slots) check_shared_fills(call, tokens, plan);
  reserve_fills(plan);
  hash_first_blocks(tokens, plan);
}

// Throws if another holder of a completed block has recorded other tokens there.
void KVCacheManager::check_shared_fills(const char* call, std::span<const int32_t> tokens,
                                        BatchPlan& plan) const {
  const auto token_at = [&](const SharedFill& fill, int64_t i) {
    const std::vector<int32_t>& tail = sequences_[fill.position].tail;
    const auto size = static_cast<int64_t>(tail.size());
    const int64_t token = fill.index * block_tokens_ + i;  // counted from the tail's first
    return token < size ? tail[token] : tokens[fill.first_token + token - size];
  };
  const auto check = [&](const SharedFill& fill, auto expected) {
    for (int64_t i = 0; i < block_tokens_; ++i) {
      if (token_at(fill, i) == expected(i)) continue;
      throw InvalidArgument(concat(call, ": tokens: expected the recorded tokens of another ",
                                   "holder of block ", fill.block, ", got others for sequence ",
                                   sequences_[fill.position].id));
    }
  };
  std::vector<SharedFill>& shared = plan.shared_fills;
  shared.clear();
  for (const BlockFill& fill : plan.fills) {
    const Sequence& sequence = sequences_[fill.position];
    for (int64_t index = 0; index < fill.num_blocks; ++index) {
      for (int64_t group = 0; group < num_groups(); ++group) {
        const int32_t block = sequence.blocks[(sequence.num_hashed + index) * num_groups() + group];
        if (is_null(block) || pool_.references(block) < 2) continue;
        const SharedFill one{block, fill.position, fill.first_token, index};
        const int32_t node = pool_.content(block);
        if (node != kNone) {
          check(one, [&](int64_t i) { return cache_->tokens(node)[i]; });
        } else {
          shared.push_back(one);
        }
      }
    }
  }
  std::sort(shared.begin(), shared.end(), [](const SharedFill& left, const SharedFill& right) {
    return left.block < right.block;
  });
  for (size_t i = 1; i < shared.size(); ++i) {
    if (shared[i].block != shared[i - 1].block) continue;
    check(shared[i], [&](int64_t j) { return token_at(shared[i - 1], j); });
  }
}

void KVCacheManager::reserve_fills(const BatchPlan& plan) {
  int64_t blocks = 0;
  int64_t extras = 0;
  for (const BlockFill& fill : plan.fills) {
    blocks += fill.num_blocks;
    if (sequences_[fill.position].extras) extras += fill.num_blocks;
  }
  cache_->reserve(blocks, extras);
  reserve_events(blocks * num_groups(), 0);
}

// Hashes ahead of the commit, so that the index's memory is prefetched when find() reads it.
void KVCacheManager::hash_first_blocks(std::span<const int32_t> tokens, BatchPlan& plan) const {
  plan.first_hashes.reserve(plan.fills.size());
  std::vector<int32_t>& block = plan.block_tokens;
  block.reserve(block_tokens_);
  for (const BlockFill& fill : plan.fills) {
    const Sequence& sequence = sequences_[fill.position];
    const std::vector<int32_t>& tail = sequence.tail;
    const int32_t* appended = tokens.data() + fill.first_token;
    block.assign(tail.begin(), tail.end());
    block.insert(block.end(), appended, appended + block_tokens_ - tail.size());
    const PrefixCache::Extra& extra = extra_of(sequence.extras.get(), sequence.num_hashed);
    plan.first_hashes.push_back(
        cache_->hash(cache_->hash_of(sequence.node), block.data(), extra.get()));
    cache_->prefetch(plan.first_hashes.back());
    const int64_t entry = sequence.num_hashed * num_groups();
    if (entry < static_cast<int64_t>(sequence.blocks.size())) {
      pool_.prefetch(sequence.blocks[entry]);
    }
  }
}

// --- the commit ---

// Records an item's tokens. If they complete a block, the item uses up one of `first_hashes`.
void KVCacheManager::commit_tokens(Sequence& sequence, const int32_t* tokens, int64_t count,
                                   std::span<const Hash>& first_hashes) {
  if (!tracks_tokens(sequence)) return;
  const bool fills = static_cast<int64_t>(sequence.tail.size()) + count >= block_tokens_;
  add_tokens(sequence, tokens, count, first_hashes.first(fills ? 1 : 0));
  if (fills) first_hashes = first_hashes.subspan(1);
}

// Records the ids of a sequence's next tokens, and registers the blocks that they complete.
// `hashes` are the hashes of these blocks, as far as they were computed before.
void KVCacheManager::add_tokens(Sequence& sequence, const int32_t* tokens, int64_t count,
                                std::span<const Hash> hashes) {
  const int64_t first = sequence.num_hashed;
  bool parent_is_new = false;  // and thus has no children
  while (count > 0) {
    const int64_t missing = block_tokens_ - static_cast<int64_t>(sequence.tail.size());
    const int64_t used = std::min(missing, count);
    const int32_t* block = tokens;
    if (used < block_tokens_) {
      sequence.tail.insert(sequence.tail.end(), tokens, tokens + used);
      if (used < missing) return;
      block = sequence.tail.data();
    }
    tokens += used;
    count -= used;

    const int64_t index = sequence.num_hashed;
    const PrefixCache::Extra& extra = extra_of(sequence.extras.get(), index);
    const Hash hash = index - first < static_cast<int64_t>(hashes.size())
                          ? hashes[index - first]
                          : cache_->hash(cache_->hash_of(sequence.node), block, extra.get());
    int32_t node = parent_is_new ? kNone : cache_->find(sequence.node, hash, block, extra.get());
    parent_is_new = node == kNone;
    if (parent_is_new) node = cache_->add(sequence.node, hash, block, extra);
    cache_->hold(node);
    cache_->drop(sequence.node);
    sequence.node = node;
    for (int64_t group = 0; group < num_groups(); ++group) {
      register_block(sequence.blocks[index * num_groups() + group], node, group);
    }
    ++sequence.num_hashed;
    sequence.tail.clear();
  }
}

}  // namespace vllm_kernels::kv_cache
