// Blocks become findable or unfindable, and events tell of it. The commits in the other files take
// blocks and register them here. Public calls evict blocks, reset the cache and hand out events.
#include <algorithm>
#include <utility>

#include "kv_cache/errors.h"
#include "kv_cache/kv_cache_manager.h"

namespace vllm_kernels::kv_cache {

// Makes a block findable, unless another block with the same tokens is findable already.
void KVCacheManager::register_block(int32_t block, int32_t node, int64_t group) {
  if (is_null(block) || cache_->block(node, group) != kNone) return;
  if (pool_.content(block) != BlockPool::kNoContent) return;
  pool_.set_content(block, node);
  cache_->set_block(node, group, block);
  if (!record_events_) return;
  events_.events.push_back({Event::Kind::kStored, static_cast<int32_t>(group), block,
                            cache_->hash_of(node), cache_->hash_of(cache_->parent(node))});
  const int32_t* tokens = cache_->tokens(node);
  events_.tokens.insert(events_.tokens.end(), tokens, tokens + block_tokens_);
}

void KVCacheManager::detach(int32_t block, int32_t node) {
  const int64_t group = cache_->group_of(node, block);
  if (record_events_) {
    events_.events.push_back(
        {Event::Kind::kRemoved, static_cast<int32_t>(group), block, cache_->hash_of(node), Hash{}});
  }
  cache_->clear_block(node, group);
}

int32_t KVCacheManager::take_block() {
  int32_t evicted;
  const int32_t block = pool_.take(evicted);
  if (evicted != BlockPool::kNoContent) detach(block, evicted);
  return block;
}

// Calls take_block() `count` times, in passes. Each pass prefetches for the next one: the evicted
// nodes, then their entries in the index. Both vectors have the room already.
void KVCacheManager::take_blocks(int64_t count, std::vector<int32_t>& blocks,
                                 std::vector<int32_t>& evicted) {
  evicted.clear();
  for (int64_t i = 0; i < count; ++i) {
    int32_t node;
    blocks.push_back(pool_.take(node));
    evicted.push_back(node);
    if (node != BlockPool::kNoContent) cache_->prefetch_node(node);
  }
  for (const int32_t node : evicted) {
    if (node == BlockPool::kNoContent) continue;
    cache_->prefetch(cache_->hash_of(node));
    if (cache_->parent(node) != kNone) cache_->prefetch_node(cache_->parent(node));
  }
  const int32_t* block = blocks.data() + blocks.size() - count;
  for (const int32_t node : evicted) {
    if (node != BlockPool::kNoContent) detach(*block, node);
    ++block;
  }
}

void KVCacheManager::unregister_block(int32_t block) {
  const int32_t node = pool_.content(block);
  if (node == BlockPool::kNoContent) return;
  pool_.clear_content(block);
  detach(block, node);
}

// Grows by doubling: events may pile up until somebody takes them.
void KVCacheManager::reserve_events(int64_t stored, int64_t removed) {
  if (!record_events_) return;
  const auto reserve = [](auto& list, size_t wanted) {
    if (wanted > list.capacity()) list.reserve(std::max(wanted, 2 * list.capacity()));
  };
  reserve(events_.events, events_.events.size() + stored + removed);
  reserve(events_.tokens, events_.tokens.size() + stored * block_tokens_);
}

void KVCacheManager::evict_blocks(std::span<const int64_t> blocks) {
  const auto guard = lock();
  const int64_t first = pool_.has_null_block() ? 1 : 0;
  std::vector<int32_t> wanted;
  wanted.reserve(blocks.size());
  for (const int64_t block : blocks) {
    wanted.push_back(static_cast<int32_t>(
        checked("evict_blocks", "blocks", block, first, pool_.num_blocks() - 1)));
  }
  reserve_events(0, static_cast<int64_t>(blocks.size()));
  for (const int32_t block : wanted) unregister_block(block);
}

void KVCacheManager::reset_prefix_cache() {
  const auto guard = lock();
  reserve_events(0, 1);
  clear_cache();
}

// Stops tracking the present sequences: their next blocks depend on the nodes that are cleared.
void KVCacheManager::clear_cache() {
  if (!cache_) return;
  for (int32_t block = pool_.has_null_block() ? 1 : 0; block < pool_.num_blocks(); ++block) {
    const int32_t node = pool_.content(block);
    if (node == BlockPool::kNoContent) continue;
    pool_.clear_content(block);
    cache_->clear_block(node, cache_->group_of(node, block));
  }
  for (Sequence& sequence : sequences_) {
    if (tracks_tokens(sequence)) cache_->drop(sequence.node);
    sequence.node = kNone;
    sequence.num_hashed = 0;
    sequence.tail.clear();
    sequence.extras.reset();
  }
  if (record_events_) events_.events.push_back(Event{});
}

Events KVCacheManager::take_events() {
  const auto guard = lock();
  return std::exchange(events_, Events{});
}

Events KVCacheManager::peek_events() const {
  const auto guard = lock();
  return events_;
}

void KVCacheManager::drop_events(size_t count) {
  const auto guard = lock();
  auto& [events, tokens] = events_;
  const auto last = events.begin() + static_cast<int64_t>(std::min(count, events.size()));
  const auto stored = std::count_if(
      events.begin(), last, [](const Event& event) { return event.kind == Event::Kind::kStored; });
  events.erase(events.begin(), last);
  tokens.erase(tokens.begin(), tokens.begin() + stored * block_tokens_);
}

}  // namespace vllm_kernels::kv_cache
