// Prefix caching: look up the cached prefix of a prompt, and register the blocks of recorded
// tokens.
//
// Hashes are computed ahead of the lookups: the index is large, and its memory is prefetched.
#include <algorithm>
#include <string>
#include <utility>

#include "kv_cache/errors.h"
#include "kv_cache/kv_cache_manager.h"

namespace vllm_kernels::kv_cache {
namespace {

constexpr int32_t kNone = PrefixCache::kNone;
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

// Records an item's tokens. If they complete a block, the item uses up one of `first_hashes`.
void KVCacheManager::commit_tokens(Sequence& sequence, const int32_t* tokens, int64_t count,
                                   std::span<const Hash>& first_hashes) {
  if (!tracks_tokens(sequence)) return;
  const bool fills = static_cast<int64_t>(sequence.tail.size()) + count >= block_tokens_;
  add_tokens(sequence, tokens, count, first_hashes.first(fills ? 1 : 0));
  if (fills) first_hashes = first_hashes.subspan(1);
}

// Prefetches the recorded tokens of an item, if there is such an item.
inline void KVCacheManager::prefetch_recorded(const BatchPlan& plan, size_t item) const noexcept {
  if (item >= plan.items.size()) return;
  __builtin_prefetch(&sequences_[plan.items[item].position].num_hashed);
}

// --- the plan of recording a batch's tokens ---

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

int64_t KVCacheManager::num_common_prefix_blocks(std::span<const int64_t> ids,
                                                 int64_t group) const {
  const auto guard = lock();
  check_group("num_common_prefix_blocks", group);
  const Sequence* first = nullptr;
  int64_t common = 0;
  for (const int64_t id : ids) {
    const Sequence& sequence = find("num_common_prefix_blocks", id);
    check_where("num_common_prefix_blocks", sequence, Where::kDevice);
    if (first == nullptr) {
      first = &sequence;
      common = block_of(sequence.num_tokens);
    }
    common = std::min(common, block_of(sequence.num_tokens));
    const auto begin = sequence.blocks.begin();
    if (num_groups() == 1 &&
        &sequence != first &&  // the loop below bounds `common` by its null blocks
        std::equal(begin, begin + common, first->blocks.begin())) {
      continue;
    }
    for (int64_t i = 0; i < common; ++i) {
      const int32_t block = sequence.blocks[i * num_groups() + group];
      if (is_null(block) || block != first->blocks[i * num_groups() + group]) common = i;
    }
  }
  return common;
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
