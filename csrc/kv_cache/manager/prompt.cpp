// A prompt and its cached prefix: match, can_allocate, allocate. look_up() finds the blocks that a
// new sequence shares.
//
// Hashes are computed ahead of the lookups: the index is large, and its memory is prefetched.
#include <algorithm>
#include <string>
#include <utility>

#include "kv_cache/errors.h"
#include "kv_cache/kv_cache_manager.h"

namespace vllm_kernels::kv_cache {
namespace {

const PrefixCache::Extra kNoExtra;
constexpr int64_t kHashedAtOnce = 64;  // blocks, before the first of them is looked for

// Checks a prompt's tokens and the items within them.
void check_prompt(const char* call, size_t size, const PrefixKeys& keys) {
  if (size > static_cast<size_t>(kMaxTokens)) {
    throw InvalidArgument(concat(call, ": tokens: expected at most ", kMaxTokens, ", got ", size));
  }
  check_items(call, keys.multimodal, static_cast<int64_t>(size));
}

}  // namespace

// The extra bytes of every block with a multimodal item, ascending; null if there are none. Items
// come in any order. They must not overlap, so that the work grows only with their tokens.
std::shared_ptr<const std::vector<KVCacheManager::BlockExtra>> KVCacheManager::make_extras(
    const PrefixKeys& keys) const {
  if (keys.multimodal.empty()) return nullptr;
  std::vector<const MultimodalItem*> items;
  for (const MultimodalItem& item : keys.multimodal) items.push_back(&item);
  std::sort(items.begin(), items.end(),
            [](const auto* left, const auto* right) { return left->start < right->start; });
  auto extras = std::make_shared<std::vector<BlockExtra>>();
  std::shared_ptr<std::string> bytes;  // of the last of them
  int64_t end = 0;                     // of the item before
  for (const MultimodalItem* item : items) {
    if (item->start < end) {
      throw InvalidArgument(concat("multimodal: expected items that do not overlap, got one from ",
                                   item->start, " behind one up to ", end));
    }
    end = item->start + item->num_tokens;
    for (int64_t index = block_of(item->start); index <= block_of(end - 1); ++index) {
      if (extras->empty() || extras->back().index != index) {
        bytes = std::make_shared<std::string>();
        extras->push_back({index, bytes});
      }
      append_item(*bytes, *item, index * block_tokens_);
    }
  }
  return extras;
}

const PrefixCache::Extra& KVCacheManager::extra_of(const std::vector<BlockExtra>* extras,
                                                   int64_t index) noexcept {
  if (extras == nullptr) return kNoExtra;
  const auto found = std::lower_bound(
      extras->begin(), extras->end(), index,
      [](const BlockExtra& extra, int64_t wanted) { return extra.index < wanted; });
  return found == extras->end() || found->index != index ? kNoExtra : found->bytes;
}

// Fills lookup.nodes with the nodes of the leading blocks of `tokens`, as far as there are any.
// lookup.hashes get ahead of them, so that the index's memory is prefetched when find() reads it.
void KVCacheManager::walk(int32_t root, std::span<const int32_t> tokens,
                          const std::vector<BlockExtra>* extras, PrefixLookup& lookup) const {
  auto& [hashes, nodes, num_blocks] = lookup;
  hashes.clear();
  nodes.clear();
  if (root == kNone) return;
  const int64_t blocks = block_of(static_cast<int64_t>(tokens.size()));
  hashes.reserve(blocks);
  nodes.reserve(blocks);
  Hash hash = cache_->hash_of(root);
  int32_t node = root;
  while (static_cast<int64_t>(nodes.size()) < blocks) {
    const int64_t end = std::min(blocks, static_cast<int64_t>(hashes.size()) + kHashedAtOnce);
    for (auto i = static_cast<int64_t>(hashes.size()); i < end; ++i) {
      hash = cache_->hash(hash, tokens.data() + i * block_tokens_, extra_of(extras, i).get());
      hashes.push_back(hash);
      cache_->prefetch(hash);
    }
    for (auto i = static_cast<int64_t>(nodes.size()); i < end; ++i) {
      node = cache_->find(node, hashes[i], tokens.data() + i * block_tokens_,
                          extra_of(extras, i).get());
      if (node == kNone) return;
      nodes.push_back(node);
    }
  }
}

// The longest usable prefix in blocks, at most `limit` <= lookup.nodes.size(). It is usable if
// every group has all blocks that the next token sees.
int64_t KVCacheManager::usable_blocks(const PrefixLookup& lookup, int64_t limit) const {
  const auto usable = [&](int64_t index, int64_t group) {
    const int32_t block = cache_->block(lookup.nodes[index], group);
    return block != kNone && pool_.references(block) < pool_.max_references();
  };
  int64_t hits = limit;
  for (int64_t group = 0; group < num_groups(); ++group) {
    if (windows_[group] != kFullAttention) continue;
    int64_t have = 0;
    while (have < hits && usable(have, group)) ++have;
    hits = have;
  }
  // A missing block is missing for every longer prefix whose window reaches it. A shorter prefix
  // sees no later blocks than a longer one, so `hits` only ever shrinks.
  for (int64_t group = 0, agreed = 0; agreed < num_groups(); group = (group + 1) % num_groups()) {
    int64_t index = hits - 1;
    const int64_t first = first_visible(hits * block_tokens_, group);
    while (index >= first && usable(index, group)) --index;
    agreed = index < first ? agreed + 1 : 0;
    if (index >= first) hits = index;
  }
  return hits;
}

// The block of a group at `index`, in the table of a sequence that shares the prefix.
int32_t KVCacheManager::hit_block(const PrefixLookup& lookup, int64_t index, int64_t group) const {
  const bool visible = index >= first_visible(lookup.num_blocks * block_tokens_, group);
  return visible ? cache_->block(lookup.nodes[index], group) : kNullBlock;
}

// Free blocks that sharing the prefix would revive.
int64_t KVCacheManager::revived_blocks(const PrefixLookup& lookup) const {
  int64_t revived = 0;
  for (int64_t group = 0; group < num_groups(); ++group) {
    const int64_t first = first_visible(lookup.num_blocks * block_tokens_, group);
    for (int64_t i = first; i < lookup.num_blocks; ++i) {
      revived += pool_.references(hit_block(lookup, i, group)) == 0;
    }
  }
  return revived;
}

// The cached prefix of `tokens` that allocate() would share. At least one token stays uncached. The
// result holds until the next lookup.
const PrefixLookup& KVCacheManager::look_up(int32_t root, std::span<const int32_t> tokens,
                                            const std::vector<BlockExtra>* extras) const {
  walk(root, tokens, extras, lookup_);
  const int64_t limit = tokens.empty() ? 0 : block_of(static_cast<int64_t>(tokens.size()) - 1);
  lookup_.num_blocks =
      usable_blocks(lookup_, std::min(limit, static_cast<int64_t>(lookup_.nodes.size())));
  return lookup_;
}

int64_t KVCacheManager::match(std::span<const int32_t> tokens, const PrefixKeys& keys) const {
  check_prompt("match", tokens.size(), keys);
  const auto extras = make_extras(keys);
  const auto guard = lock();
  if (!cache_) return 0;
  const int32_t root = cache_->find_root(encode_keys(keys));
  return look_up(root, tokens, extras.get()).num_blocks * block_tokens_;
}

bool KVCacheManager::can_allocate(std::span<const int32_t> tokens, const PrefixKeys& keys) const {
  check_prompt("can_allocate", tokens.size(), keys);
  const auto extras = make_extras(keys);
  const auto guard = lock();
  int64_t needed = blocks_for(static_cast<int64_t>(tokens.size())) * num_groups();
  if (cache_) {
    const int32_t root = cache_->find_root(encode_keys(keys));
    const PrefixLookup& lookup = look_up(root, tokens, extras.get());
    needed += revived_blocks(lookup) - lookup.num_blocks * num_groups();
  }
  return needed + watermark(needed) <= pool_.num_free();
}

int64_t KVCacheManager::allocate(int64_t id, std::span<const int32_t> tokens, int64_t num_new,
                                 const PrefixKeys& keys) {
  check_prompt("allocate", tokens.size(), keys);
  auto extras = make_extras(keys);
  const auto guard = lock();
  check_new("allocate", "sequence", id);
  if (num_new < 0) {
    throw InvalidArgument(concat("allocate: num_new: expected >= 0, got ", num_new));
  }
  Sequence sequence;
  sequence.id = id;
  std::optional<HeldRoot> root;
  if (cache_) {
    sequence.node = cache_->find_or_add_root(encode_keys(keys));
    root.emplace(*cache_, sequence.node);
    sequence.extras = std::move(extras);
    sequence.tail.reserve(block_tokens_);
  }
  const PrefixLookup& lookup = look_up(sequence.node, tokens, sequence.extras.get());
  const int64_t cached = lookup.num_blocks * block_tokens_;
  sequence.num_tokens = cached + std::min(static_cast<int64_t>(tokens.size()) - cached, num_new);
  reserve_prompt(lookup, plan_, sequence);
  commit_prompt(lookup, tokens, std::move(sequence), plan_);
  return cached;
}

// Counts the blocks that a new sequence of a prompt takes, and reserves its memory.
void KVCacheManager::reserve_prompt(const PrefixLookup& lookup, BatchPlan& plan,
                                    Sequence& sequence) {
  const int64_t total = blocks_for(sequence.num_tokens);
  plan.num_blocks = (total - lookup.num_blocks) * num_groups();
  int64_t needed = plan.num_blocks + revived_blocks(lookup);
  needed += watermark(needed);
  if (needed > pool_.num_free()) throw OutOfBlocks("allocate", needed, pool_.num_free());
  sequence.blocks.reserve(total * num_groups());
  plan.evicted.reserve(plan.num_blocks);
  reserve_sequences(1);
  if (cache_) {
    const int64_t filled = block_of(sequence.num_tokens) - lookup.num_blocks;
    cache_->reserve(filled, sequence.extras ? filled : 0);
    reserve_events(filled * num_groups(), plan.num_blocks);
  }
}

void KVCacheManager::commit_prompt(const PrefixLookup& lookup, std::span<const int32_t> tokens,
                                   Sequence&& sequence, BatchPlan& plan) {
  // Cached blocks first, so that none of them is taken for the rest. The node is held as well: with
  // a window of one token it may have no block left.
  const int64_t hits = lookup.num_blocks;
  if (hits > 0) sequence.node = lookup.nodes[hits - 1];
  if (cache_) cache_->hold(sequence.node);
  for (int64_t i = 0; i < hits; ++i) {
    for (int64_t group = 0; group < num_groups(); ++group) {
      const int32_t block = hit_block(lookup, i, group);
      if (!is_null(block)) pool_.add_reference(block);
      sequence.blocks.push_back(block);
    }
  }
  take_blocks(plan.num_blocks, sequence.blocks, plan.evicted);
  Sequence& added = push_sequence(std::move(sequence));
  if (!cache_) return;
  added.num_hashed = hits;
  const int64_t cached = hits * block_tokens_;
  const auto hashes = std::span<const Hash>(lookup.hashes);
  add_tokens(added, tokens.data() + cached, added.num_tokens - cached,
             hashes.subspan(std::min<size_t>(hits, hashes.size())));
  queried_tokens_ += static_cast<int64_t>(tokens.size());
  hit_tokens_ += cached;
}

}  // namespace vllm_kernels::kv_cache
