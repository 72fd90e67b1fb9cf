// Prefixes: what is cached of a sequence's tokens, and registering what it fills.
#include <algorithm>
#include <string>
#include <utility>

#include "kv_cache/errors.h"
#include "kv_cache/kv_cache_manager.h"

namespace vllm_kernels::kv_cache {
namespace {

constexpr int32_t kNone = PrefixCache::kNone;
constexpr int64_t kHashedAtOnce = 64;  // blocks, before the first of them is looked for

void check_size(const char* call, size_t size) {
  if (size > static_cast<size_t>(kMaxTokens)) {
    throw InvalidArgument(concat(call, ": tokens: expected at most ", kMaxTokens, ", got ", size));
  }
}

}  // namespace

// Extra bytes of every block that an item reaches into, ascending; null if there are none. The
// items may come in any order, but not overlap, so that the work grows with their tokens only.
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
      append_item(*bytes, *item, index * block_size_);
    }
  }
  return extras;
}

const PrefixCache::Extra* KVCacheManager::extra_of(const std::vector<BlockExtra>* extras,
                                                   int64_t index) noexcept {
  if (extras == nullptr) return nullptr;
  const auto found = std::lower_bound(
      extras->begin(), extras->end(), index,
      [](const BlockExtra& extra, int64_t wanted) { return extra.index < wanted; });
  return found == extras->end() || found->index != index ? nullptr : &found->bytes;
}

// Fills found_ with the nodes of the leading blocks of `tokens` as far as there are any, and
// hashes_ with the hashes of these and some more. Hashes are computed ahead so that the index's
// memory is on its way when it is read.
void KVCacheManager::walk(int32_t root, std::span<const int32_t> tokens,
                          const std::vector<BlockExtra>* extras) const {
  hashes_.clear();
  found_.clear();
  if (root == kNone) return;
  const int64_t blocks = block_of(static_cast<int64_t>(tokens.size()));
  hashes_.reserve(blocks);
  found_.reserve(blocks);
  Hash hash = cache_->hash_of(root);
  int32_t node = root;
  while (static_cast<int64_t>(found_.size()) < blocks) {
    const int64_t end = std::min(blocks, static_cast<int64_t>(hashes_.size()) + kHashedAtOnce);
    for (auto i = static_cast<int64_t>(hashes_.size()); i < end; ++i) {
      const PrefixCache::Extra* extra = extra_of(extras, i);
      hash = cache_->hash(hash, tokens.data() + i * block_size_, extra ? extra->get() : nullptr);
      hashes_.push_back(hash);
      cache_->prefetch(hash);
    }
    for (auto i = static_cast<int64_t>(found_.size()); i < end; ++i) {
      const PrefixCache::Extra* extra = extra_of(extras, i);
      node = cache_->find(node, hashes_[i], tokens.data() + i * block_size_,
                          extra ? extra->get() : nullptr);
      if (node == kNone) return;
      found_.push_back(node);
    }
  }
}

// The longest prefix, in blocks up to `limit` <= found_.size(), of which every group has all the
// blocks that the next token sees.
int64_t KVCacheManager::usable_blocks(int64_t limit) const {
  const auto usable = [&](int64_t index, int64_t group) {
    const int32_t block = cache_->block(found_[index], group);
    return block != kNone && pool_.references(block) < pool_.max_references();
  };
  int64_t hits = limit;
  for (int64_t group = 0; group < num_groups(); ++group) {
    if (windows_[group] != kFullAttention) continue;
    int64_t have = 0;
    while (have < hits && usable(have, group)) ++have;
    hits = have;
  }
  // A block that is missing here is missing for every prefix that ends behind it, as a shorter one
  // sees blocks no later than a longer one does.
  for (int64_t group = 0, agreed = 0; agreed < num_groups(); group = (group + 1) % num_groups()) {
    int64_t index = hits - 1;
    const int64_t first = first_visible(hits * block_size_, group);
    while (index >= first && usable(index, group)) --index;
    agreed = index < first ? agreed + 1 : 0;
    if (index >= first) hits = index;
  }
  return hits;
}

// Of found_, in a sequence that shares the first `hits` blocks.
int32_t KVCacheManager::hit_block(int64_t index, int64_t hits, int64_t group) const {
  const bool seen = index >= first_visible(hits * block_size_, group);
  return seen ? cache_->block(found_[index], group) : kNullBlock;
}

// Free blocks that sharing the first `hits` blocks would revive.
int64_t KVCacheManager::revived_blocks(int64_t hits) const {
  int64_t revived = 0;
  for (int64_t group = 0; group < num_groups(); ++group) {
    for (int64_t i = first_visible(hits * block_size_, group); i < hits; ++i) {
      revived += pool_.references(hit_block(i, hits, group)) == 0;
    }
  }
  return revived;
}

// Leading blocks of `tokens` that allocate() would share; found_ and hashes_ are theirs.
int64_t KVCacheManager::look_up(int32_t root, std::span<const int32_t> tokens,
                                const std::vector<BlockExtra>* extras) const {
  walk(root, tokens, extras);
  const int64_t limit = tokens.empty() ? 0 : block_of(static_cast<int64_t>(tokens.size()) - 1);
  return usable_blocks(std::min(limit, static_cast<int64_t>(found_.size())));
}

int64_t KVCacheManager::match(std::span<const int32_t> tokens, const PrefixKeys& keys) const {
  check_size("match", tokens.size());
  check_items("match", keys.multimodal, static_cast<int64_t>(tokens.size()));
  const auto extras = make_extras(keys);
  const auto guard = lock();
  if (!cache_) return 0;
  return look_up(cache_->find_root(encode_keys(keys)), tokens, extras.get()) * block_size_;
}

bool KVCacheManager::can_allocate(std::span<const int32_t> tokens, const PrefixKeys& keys) const {
  check_size("can_allocate", tokens.size());
  check_items("can_allocate", keys.multimodal, static_cast<int64_t>(tokens.size()));
  const auto extras = make_extras(keys);
  const auto guard = lock();
  int64_t hits = 0;
  int64_t needed = blocks_for(static_cast<int64_t>(tokens.size())) * num_groups();
  if (cache_) {
    hits = look_up(cache_->find_root(encode_keys(keys)), tokens, extras.get());
    needed += revived_blocks(hits) - hits * num_groups();
  }
  return needed + watermark(needed) <= pool_.num_free();
}

int64_t KVCacheManager::allocate(int64_t id, std::span<const int32_t> tokens, int64_t num_new,
                                 const PrefixKeys& keys) {
  check_size("allocate", tokens.size());
  check_items("allocate", keys.multimodal, static_cast<int64_t>(tokens.size()));
  auto extras = make_extras(keys);
  const auto guard = lock();
  check_new("allocate", "sequence", id);
  if (num_new < 0) {
    throw InvalidArgument(concat("allocate: num_new: expected >= 0, got ", num_new));
  }
  const auto size = static_cast<int64_t>(tokens.size());
  Sequence sequence;
  sequence.id = id;
  std::optional<HeldRoot> root;
  int64_t hits = 0;
  if (cache_) {
    sequence.node = cache_->find_or_add_root(encode_keys(keys));
    root.emplace(*cache_, sequence.node);
    sequence.extras = std::move(extras);
    hits = look_up(sequence.node, tokens, sequence.extras.get());
    sequence.tail.reserve(block_size_);
  }
  sequence.num_tokens = hits * block_size_;
  sequence.num_tokens += std::min(size - sequence.num_tokens, num_new);
  const int64_t total = blocks_for(sequence.num_tokens);
  const int64_t taken = (total - hits) * num_groups();
  int64_t needed = taken + revived_blocks(hits);
  needed += watermark(needed);
  if (needed > pool_.num_free()) throw OutOfBlocks("allocate", needed, pool_.num_free());
  sequence.blocks.reserve(total * num_groups());
  evicted_.reserve(taken);
  reserve_sequences(1);
  if (cache_) {
    const int64_t filled = block_of(sequence.num_tokens) - hits;
    cache_->reserve(filled, sequence.extras ? filled : 0);
    reserve_events(filled * num_groups(), taken);
  }

  // What is found first, so that no block of it is given out; and its node, which may have no block
  // left when a window of one token wants none.
  if (hits > 0) sequence.node = found_[hits - 1];
  if (cache_) cache_->hold(sequence.node);
  for (int64_t i = 0; i < hits; ++i) {
    for (int64_t group = 0; group < num_groups(); ++group) {
      const int32_t block = hit_block(i, hits, group);
      if (!is_null(block)) pool_.add_reference(block);
      sequence.blocks.push_back(block);
    }
  }
  take_blocks(taken, sequence.blocks);
  Sequence& added = push_sequence(std::move(sequence));
  if (cache_) {
    added.num_hashed = hits;
    const int64_t found = hits * block_size_;
    const auto hashes = std::span<const Hash>(hashes_);
    add_tokens(added, tokens.data() + found, added.num_tokens - found,
               hashes.subspan(std::min<size_t>(hits, hashes.size())));
    queried_tokens_ += size;
    hit_tokens_ += found;
  }
  return hits * block_size_;
}

// `hashes`: of the blocks that they fill, as far as they are computed already.
void KVCacheManager::add_tokens(Sequence& sequence, const int32_t* tokens, int64_t count,
                                std::span<const Hash> hashes) {
  const int64_t first = sequence.num_hashed;
  bool parent_is_new = false;  // and thus has no children
  while (count > 0) {
    const int64_t missing = block_size_ - static_cast<int64_t>(sequence.tail.size());
    const int64_t used = std::min(missing, count);
    const int32_t* block = tokens;
    if (used < block_size_) {
      sequence.tail.insert(sequence.tail.end(), tokens, tokens + used);
      if (used < missing) return;
      block = sequence.tail.data();
    }
    tokens += used;
    count -= used;

    const int64_t index = sequence.num_hashed;
    const PrefixCache::Extra* extra = extra_of(sequence.extras.get(), index);
    const std::string* bytes = extra ? extra->get() : nullptr;
    const Hash hash = index - first < static_cast<int64_t>(hashes.size())
                          ? hashes[index - first]
                          : cache_->hash(cache_->hash_of(sequence.node), block, bytes);
    int32_t node = parent_is_new ? kNone : cache_->find(sequence.node, hash, block, bytes);
    parent_is_new = node == kNone;
    if (parent_is_new) {
      node = cache_->add(sequence.node, hash, block, extra ? *extra : PrefixCache::Extra());
    }
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

// Of several blocks with one content, one is findable.
void KVCacheManager::register_block(int32_t block, int32_t node, int64_t group) {
  if (is_null(block) || cache_->block(node, group) != kNone) return;
  if (pool_.content(block) != BlockPool::kNoContent) return;
  pool_.set_content(block, node);
  cache_->set_block(node, group, block);
  if (!record_events_) return;
  events_.events.push_back({Event::Kind::kStored, static_cast<int32_t>(group), block,
                            cache_->hash_of(node), cache_->hash_of(cache_->parent(node))});
  const int32_t* tokens = cache_->tokens(node);
  events_.tokens.insert(events_.tokens.end(), tokens, tokens + block_size_);
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

// As many calls of take_block(), in passes that start to read ahead what the next one needs: the
// evicted nodes, and where they stand in the index. Room for the blocks and evicted_ is there.
void KVCacheManager::take_blocks(int64_t count, std::vector<int32_t>& blocks) {
  evicted_.clear();
  for (int64_t i = 0; i < count; ++i) {
    int32_t evicted;
    blocks.push_back(pool_.take(evicted));
    evicted_.push_back(evicted);
    if (evicted != BlockPool::kNoContent) cache_->prefetch_node(evicted);
  }
  for (const int32_t node : evicted_) {
    if (node == BlockPool::kNoContent) continue;
    cache_->prefetch(cache_->hash_of(node));
    if (cache_->parent(node) != kNone) cache_->prefetch_node(cache_->parent(node));
  }
  const int32_t* block = blocks.data() + blocks.size() - count;
  for (const int32_t node : evicted_) {
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

// Amortised, as nothing takes events for a while.
void KVCacheManager::reserve_events(int64_t stored, int64_t removed) {
  if (!record_events_) return;
  const auto reserve = [](auto& list, size_t wanted) {
    if (wanted > list.capacity()) list.reserve(std::max(wanted, 2 * list.capacity()));
  };
  reserve(events_.events, events_.events.size() + stored + removed);
  reserve(events_.tokens, events_.tokens.size() + stored * block_size_);
}

void KVCacheManager::record_tokens(std::span<const int64_t> ids,
                                   std::span<const int64_t> num_tokens,
                                   std::span<const int32_t> tokens) {
  const auto guard = lock();
  resolve("record_tokens", ids, "num_tokens", num_tokens);
  plan_tokens("record_tokens", tokens, true);
  const int32_t* next = tokens.data();
  size_t filled = 0;
  for (const BatchItem& item : batch_) {
    commit_tokens(sequences_[item.position], next, item.num_tokens, filled);
    next += item.num_tokens;
  }
}

// An item's tokens, after plan_tokens(); `filled`: items so far that filled a block.
void KVCacheManager::commit_tokens(Sequence& sequence, const int32_t* tokens, int64_t count,
                                   size_t& filled) {
  if (!follows(sequence)) return;
  const bool fills = static_cast<int64_t>(sequence.tail.size()) + count >= block_size_;
  add_tokens(sequence, tokens, count,
             fills ? std::span(&hashes_[filled++], 1) : std::span<const Hash>());
}

// Starts to read what is known of an item's tokens, if there are that many items.
void KVCacheManager::prefetch_known(size_t item) const noexcept {
  if (item < batch_.size()) __builtin_prefetch(&sequences_[batch_[item].position].num_hashed);
}

// Makes room for the tokens of batch_; `with_slots`: they have slots already. hashes_ becomes the
// hashes of the first blocks that they fill.
void KVCacheManager::plan_tokens(const char* call, std::span<const int32_t> tokens,
                                 bool with_slots) {
  int64_t total = 0;
  int64_t filled = 0;
  int64_t extras = 0;
  fills_.clear();
  fills_.reserve(batch_.size());
  for (size_t i = 0; i < batch_.size(); ++i) {
    prefetch_known(i + kPrefetched);
    const BatchItem& item = batch_[i];
    Sequence& sequence = sequences_[item.position];
    if (item.num_tokens > kMaxTokens - total) {
      throw InvalidArgument(concat(call, ": tokens in all: expected at most ", kMaxTokens));
    }
    const int64_t first = std::exchange(total, total + item.num_tokens);
    if (!follows(sequence)) continue;
    const int64_t known_tokens = known(sequence);
    if (with_slots && item.num_tokens > sequence.num_tokens - known_tokens) {
      throw InvalidArgument(
          concat(call, ": num_tokens: expected at most ", sequence.num_tokens - known_tokens,
                 " (unknown tokens of sequence ", sequence.id, "), got ", item.num_tokens));
    }
    if (!with_slots && item.num_tokens > 0 && known_tokens != sequence.num_tokens) {
      throw InvalidArgument(concat(call, ": tokens: expected sequences of known tokens, got one ",
                                   "(sequence ", sequence.id, ") with ", known_tokens, " of ",
                                   sequence.num_tokens, " known: record_tokens comes first"));
    }
    const auto tail = static_cast<int64_t>(sequence.tail.size());
    if (sequence.tail.capacity() < static_cast<size_t>(block_size_) && item.num_tokens > 0) {
      sequence.tail.reserve(block_size_);
    }
    __builtin_prefetch(sequence.tail.data() + tail);
    if (tail + item.num_tokens < block_size_) continue;
    const int64_t blocks = block_of(tail + item.num_tokens);
    filled += blocks;
    if (sequence.extras) extras += blocks;
    fills_.push_back({item.position, first, blocks});
    __builtin_prefetch(sequence.tail.data());
    cache_->prefetch_node(sequence.node);
    // Appended tokens may have their block yet to come.
    const int64_t entry = sequence.num_hashed * num_groups();
    if (entry < static_cast<int64_t>(sequence.blocks.size())) {
      __builtin_prefetch(&sequence.blocks[entry]);
    }
  }
  if (total != static_cast<int64_t>(tokens.size())) {
    throw InvalidArgument(concat(call, ": tokens: expected ", total,
                                 " elements (sum of num_tokens), got ", tokens.size()));
  }
  if (fills_.empty()) return;
  if (with_slots) check_told(call, tokens);
  cache_->reserve(filled, extras);
  reserve_events(filled * num_groups(), 0);
  hashes_.clear();
  hashes_.reserve(fills_.size());
  block_tokens_.reserve(block_size_);
  for (const Fill& fill : fills_) {
    const Sequence& sequence = sequences_[fill.position];
    const std::vector<int32_t>& tail = sequence.tail;
    const int32_t* appended = tokens.data() + fill.first;
    block_tokens_.assign(tail.begin(), tail.end());
    block_tokens_.insert(block_tokens_.end(), appended, appended + block_size_ - tail.size());
    const PrefixCache::Extra* extra = extra_of(sequence.extras.get(), sequence.num_hashed);
    hashes_.push_back(cache_->hash(cache_->hash_of(sequence.node), block_tokens_.data(),
                                   extra ? extra->get() : nullptr));
    cache_->prefetch(hashes_.back());
    const int64_t entry = sequence.num_hashed * num_groups();
    if (entry < static_cast<int64_t>(sequence.blocks.size())) {
      pool_.prefetch(sequence.blocks[entry]);
    }
  }
}

// Throws if a block that fills_ fill holds other tokens by what its other holders were told.
void KVCacheManager::check_told(const char* call, std::span<const int32_t> tokens) {
  const auto token_at = [&](const Told& told, int64_t i) {
    const auto tail = static_cast<int64_t>(told.sequence->tail.size());
    const int64_t place = told.index * block_size_ + i;
    return place < tail ? told.sequence->tail[place] : tokens[told.first + place - tail];
  };
  const auto check = [&](const Told& told, auto expected) {
    for (int64_t i = 0; i < block_size_; ++i) {
      if (token_at(told, i) == expected(i)) continue;
      throw InvalidArgument(concat(call, ": tokens: expected those that another holder of block ",
                                   told.block, " was told to have there, got others for sequence ",
                                   told.sequence->id));
    }
  };
  told_.clear();
  for (const Fill& fill : fills_) {
    const Sequence& sequence = sequences_[fill.position];
    for (int64_t index = 0; index < fill.blocks; ++index) {
      for (int64_t group = 0; group < num_groups(); ++group) {
        const int32_t block = sequence.blocks[(sequence.num_hashed + index) * num_groups() + group];
        if (is_null(block) || pool_.references(block) < 2) continue;
        const Told told{block, &sequence, fill.first, index};
        const int32_t node = pool_.content(block);
        if (node != kNone) {
          check(told, [&](int64_t i) { return cache_->tokens(node)[i]; });
        } else {
          told_.push_back(told);
        }
      }
    }
  }
  std::sort(told_.begin(), told_.end(),
            [](const Told& left, const Told& right) { return left.block < right.block; });
  for (size_t i = 1; i < told_.size(); ++i) {
    if (told_[i].block != told_[i - 1].block) continue;
    check(told_[i], [&](int64_t j) { return token_at(told_[i - 1], j); });
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
    if (num_groups() == 1 && &sequence != first &&  // whose null blocks have bounded `common`
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
  std::vector<int32_t> checked;
  checked.reserve(blocks.size());
  for (const int64_t block : blocks) {
    if (block < first || block >= pool_.num_blocks()) {
      throw InvalidArgument(concat("evict_blocks: blocks: expected ", first, " to ",
                                   pool_.num_blocks() - 1, ", got ", block));
    }
    checked.push_back(static_cast<int32_t>(block));
  }
  reserve_events(0, static_cast<int64_t>(blocks.size()));
  for (const int32_t block : checked) unregister_block(block);
}

void KVCacheManager::reset_prefix_cache() {
  const auto guard = lock();
  reserve_events(0, 1);
  clear_cache();
}

// The sequences alive are not followed any more: what they will fill depends on what was cleared.
void KVCacheManager::clear_cache() {
  if (!cache_) return;
  for (int32_t block = pool_.has_null_block() ? 1 : 0; block < pool_.num_blocks(); ++block) {
    const int32_t node = pool_.content(block);
    if (node == BlockPool::kNoContent) continue;
    pool_.clear_content(block);
    cache_->clear_block(node, cache_->group_of(node, block));
  }
  for (Sequence& sequence : sequences_) {
    if (follows(sequence)) cache_->drop(sequence.node);
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
  tokens.erase(tokens.begin(), tokens.begin() + stored * block_size_);
}

}  // namespace vllm_kernels::kv_cache
