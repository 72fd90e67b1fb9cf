// Sequences come, share and go: allocate, fork, reorder, free, truncate. Each call checks and plans
// first, and then changes the state without failing. prompt.cpp allocates for a prompt's tokens.
#include <algorithm>
#include <atomic>
#include <limits>
#include <utility>

#include "kv_cache/errors.h"
#include "kv_cache/kv_cache_manager.h"

namespace vllm_kernels::kv_cache {
namespace {

uint64_t next_serial() {
  static std::atomic<uint64_t> serial{0};
  return ++serial;
}

}  // namespace

bool KVCacheManager::can_allocate(int64_t num_tokens) const {
  checked("can_allocate", "num_tokens", num_tokens, 0, kMaxTokens);
  const auto guard = lock();
  const int64_t needed = blocks_for(num_tokens) * num_groups();
  return needed + watermark(needed) <= pool_.num_free();
}

void KVCacheManager::allocate(int64_t id, int64_t num_tokens, const PrefixKeys& keys) {
  allocate(std::span(&id, 1), std::span(&num_tokens, 1), keys);
}

void KVCacheManager::allocate(std::span<const int64_t> ids, std::span<const int64_t> num_tokens,
                              const PrefixKeys& keys) {
  check_items("allocate", keys.multimodal, kMaxTokens);
  const auto extras = make_extras(keys);
  const auto guard = lock();
  check_size("allocate", "num_tokens", ids.size(), num_tokens.size());
  // The caller's arrays are read once, because another thread may write to them meanwhile.
  std::vector<Sequence> added(ids.size());
  std::vector<int64_t> sorted(ids.size());
  int64_t needed = 0;
  for (size_t i = 0; i < added.size(); ++i) {
    const int64_t id = added[i].id = sorted[i] = ids[i];
    const int64_t tokens = added[i].num_tokens = num_tokens[i];
    checked("allocate", "num_tokens", tokens, 0, kMaxTokens);
    check_items("allocate", keys.multimodal, tokens);
    check_new("allocate", "sequence", id);
    if (__builtin_add_overflow(needed, blocks_for(tokens) * num_groups(), &needed)) {
      throw InvalidArgument("allocate: num_tokens: expected blocks that an int64 can count");
    }
  }
  std::sort(sorted.begin(), sorted.end());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice != sorted.end()) {
    throw DuplicateSequence(
        concat("allocate: sequence_ids: expected distinct ids, got id ", *twice, " twice"));
  }
  needed += std::min(watermark(needed), std::numeric_limits<int64_t>::max() - needed);
  if (needed > pool_.num_free()) throw OutOfBlocks("allocate", needed, pool_.num_free());
  std::optional<HeldRoot> root;
  if (cache_) root.emplace(*cache_, cache_->find_or_add_root(encode_keys(keys)));
  reserve_sequences(added.size());
  reserve_events(0, record_events_ ? needed : 0);
  std::vector<int32_t>& evicted = plan_.evicted;
  evicted.reserve(needed);
  for (Sequence& sequence : added) {
    sequence.blocks.reserve(blocks_for(sequence.num_tokens) * num_groups());
  }

  for (Sequence& sequence : added) {
    take_blocks(blocks_for(sequence.num_tokens) * num_groups(), sequence.blocks, evicted);
    if (cache_) {
      cache_->hold(sequence.node = root->node());
      sequence.extras = extras;
    }
    push_sequence(std::move(sequence));
  }
}

void KVCacheManager::reserve_sequences(size_t extra) {
  const size_t wanted = sequences_.size() + extra;
  if (wanted > sequences_.capacity()) {
    sequences_.reserve(std::max({size_t{16}, wanted, 2 * sequences_.capacity()}));
  }
  index_.reserve(extra);
}

KVCacheManager::Sequence& KVCacheManager::push_sequence(Sequence&& sequence) {
  sequence.serial = next_serial();
  index_.insert(sequence.id, static_cast<int32_t>(sequences_.size()));
  return sequences_.emplace_back(std::move(sequence));
}

void KVCacheManager::fork(int64_t parent, int64_t child) {
  const auto guard = lock();
  const int32_t position = position_of("fork", parent);
  check_where("fork", sequences_[position], Where::kDevice);
  check_new("fork", "child", child);
  reserve_sequences(1);
  Sequence copy = share(sequences_[position]);
  copy.id = child;
  for (const int32_t block : copy.blocks) {
    if (!is_null(block) && pool_.references(block) >= pool_.max_references()) {
      throw ReferenceOverflow(concat("fork: parent: expected fewer than ", pool_.max_references(),
                                     " sequences to share block ", block, " of sequence ", parent));
    }
  }

  for (const int32_t block : copy.blocks) {
    if (!is_null(block)) pool_.add_reference(block);
  }
  if (tracks_tokens(copy)) cache_->hold(copy.node);
  sequences_[position].own_tail = false;
  push_sequence(std::move(copy));
}

// A sequence with the parent's tokens in the parent's blocks, before any reference is counted.
KVCacheManager::Sequence KVCacheManager::share(const Sequence& parent) const {
  Sequence copy;
  copy.num_tokens = parent.num_tokens;
  const int64_t used = blocks_for(parent.num_tokens) * num_groups();
  copy.blocks.assign(parent.blocks.begin(), parent.blocks.begin() + used);
  copy.node = parent.node;
  copy.num_hashed = parent.num_hashed;
  copy.own_tail = false;
  if (tracks_tokens(parent)) copy.tail.reserve(block_tokens_);
  copy.tail.assign(parent.tail.begin(), parent.tail.end());
  copy.extras = parent.extras;
  return copy;
}

void KVCacheManager::reorder(std::span<const int64_t> ids, std::span<const int64_t> parents) {
  const auto guard = lock();
  check_size("reorder", "parents", ids.size(), parents.size());
  BatchPlan& plan = plan_batch("reorder", ids, nullptr, {});
  for (size_t i = 0; i < parents.size(); ++i) {
    const int32_t parent = position_of("reorder", parents[i]);
    check_where("reorder", sequences_[parent], Where::kDevice);
    plan.items[i].parent = parent;
  }
  std::vector<Sequence> replacements = plan_reorder(plan);
  add_references(replacements);
  commit_reorder(plan, replacements);
}

// What each sequence becomes. A sequence that is its own parent gets an empty replacement.
std::vector<KVCacheManager::Sequence> KVCacheManager::plan_reorder(const BatchPlan& plan) const {
  std::vector<Sequence> replacements;
  replacements.reserve(plan.items.size());
  for (const BatchItem& item : plan.items) {
    const bool same = item.parent == item.position;
    replacements.push_back(same ? Sequence() : share(sequences_[item.parent]));
  }
  return replacements;
}

// Adds a reference to every block of the sequences, or to none. A count may overflow halfway, and
// the message about it may find no memory: then the references are given back.
void KVCacheManager::add_references(const std::vector<Sequence>& sequences) {
  size_t done = 0;
  size_t done_blocks = 0;
  try {
    for (; done < sequences.size(); ++done) {
      const std::vector<int32_t>& blocks = sequences[done].blocks;
      for (done_blocks = 0; done_blocks < blocks.size(); ++done_blocks) {
        const int32_t block = blocks[done_blocks];
        if (!is_null(block)) pool_.add_reference(block);
      }
    }
  } catch (...) {
    for (size_t i = 0; i <= done; ++i) {
      const std::vector<int32_t>& blocks = sequences[i].blocks;
      const size_t count = i == done ? done_blocks : blocks.size();
      for (size_t j = 0; j < count; ++j) {
        if (!is_null(blocks[j])) pool_.release(blocks[j]);
      }
    }
    throw;
  }
}

// The replacements hold their references already, so no block of theirs becomes free here.
void KVCacheManager::commit_reorder(const BatchPlan& plan, std::vector<Sequence>& replacements) {
  for (const Sequence& replacement : replacements) {
    if (tracks_tokens(replacement)) cache_->hold(replacement.node);
  }
  for (size_t i = 0; i < replacements.size(); ++i) {
    const BatchItem& item = plan.items[i];
    if (item.parent == item.position) continue;
    Sequence& sequence = sequences_[item.position];
    sequences_[item.parent].own_tail = sequence.own_tail = false;
    drop_entries(sequence, 0);
    if (tracks_tokens(sequence)) cache_->drop(sequence.node);
    Sequence& replacement = replacements[i];
    sequence.num_tokens = replacement.num_tokens;
    sequence.blocks.swap(replacement.blocks);
    sequence.node = replacement.node;
    sequence.num_hashed = replacement.num_hashed;
    sequence.tail.swap(replacement.tail);
    sequence.extras.swap(replacement.extras);
  }
}

void KVCacheManager::free(int64_t id, int64_t num_computed) {
  free(std::span(&id, 1), std::span(&num_computed, 1));
}

void KVCacheManager::free(std::span<const int64_t> ids, std::span<const int64_t> num_computed) {
  const auto guard = lock();
  const bool given = !num_computed.empty();
  BatchPlan& plan =
      plan_batch("free", ids, given ? "num_computed" : nullptr, num_computed, Where::kAnywhere);
  plan.num_computed.clear();
  for (const BatchItem& item : plan.items) {
    if (given) plan.num_computed.push_back(item.num_tokens);
  }
  plan_forget_uncomputed(plan);
  commit_forget_uncomputed(plan);
  commit_free(plan);
}

// Reserves the events of commit_forget_uncomputed().
void KVCacheManager::plan_forget_uncomputed(const BatchPlan& plan) {
  int64_t blocks = 0;
  for (size_t i = 0; i < plan.num_computed.size(); ++i) {
    const Sequence& sequence = sequences_[plan.items[i].position];
    if (tracks_tokens(sequence)) {
      blocks += std::max<int64_t>(0, sequence.num_hashed - block_of(plan.num_computed[i]));
    }
  }
  reserve_events(0, blocks * num_groups());
}

// Makes the blocks past the computed tokens unfindable: no forward pass has filled them.
void KVCacheManager::commit_forget_uncomputed(const BatchPlan& plan) {
  for (size_t i = 0; i < plan.num_computed.size(); ++i) {
    const Sequence& sequence = sequences_[plan.items[i].position];
    if (!tracks_tokens(sequence)) continue;
    int32_t node = sequence.node;  // the sequence holds it, and so the nodes above stay as well
    for (int64_t index = sequence.num_hashed; index > block_of(plan.num_computed[i]); --index) {
      for (int64_t group = 0; group < num_groups(); ++group) {
        const int32_t block = cache_->block(node, group);
        if (block != kNone) unregister_block(block);
      }
      node = cache_->parent(node);
    }
  }
}

void KVCacheManager::commit_free(BatchPlan& plan) {
  for (const BatchItem& item : plan.items) {
    Sequence& sequence = sequences_[item.position];
    drop_entries(sequence, 0);
    if (tracks_tokens(sequence)) cache_->drop(sequence.node);
  }
  // From the back: remove() fills the gap with the last sequence, which then is never one that is
  // still to be removed.
  std::sort(
      plan.items.begin(), plan.items.end(),
      [](const BatchItem& left, const BatchItem& right) { return left.position > right.position; });
  for (const BatchItem& item : plan.items) remove(item.position);
}

void KVCacheManager::truncate(int64_t id, int64_t num_tokens, int64_t num_computed) {
  truncate(std::span(&id, 1), std::span(&num_tokens, 1), std::span(&num_computed, 1));
}

void KVCacheManager::truncate(std::span<const int64_t> ids, std::span<const int64_t> num_tokens,
                              std::span<const int64_t> num_computed) {
  const auto guard = lock();
  BatchPlan& plan = plan_batch("truncate", ids, "num_tokens", num_tokens);
  if (!num_computed.empty()) {
    check_size("truncate", "num_computed", ids.size(), num_computed.size());
  }
  plan.num_computed.assign(num_computed.begin(), num_computed.end());
  for (const int64_t computed : plan.num_computed) {
    if (computed >= 0) continue;
    throw InvalidArgument(concat("truncate: num_computed: expected >= 0, got ", computed));
  }
  for (const BatchItem& item : plan.items) {
    const Sequence& sequence = sequences_[item.position];
    if (item.num_tokens > sequence.num_tokens) {
      throw InvalidArgument(concat("truncate: num_tokens: expected 0 to ", sequence.num_tokens,
                                   " (the tokens of sequence ", sequence.id, "), got ",
                                   item.num_tokens));
    }
    check_visible(sequence, item.num_tokens);
  }
  plan_forget_uncomputed(plan);

  commit_forget_uncomputed(plan);
  for (const BatchItem& item : plan.items) {
    Sequence& sequence = sequences_[item.position];
    if (item.num_tokens < sequence.num_tokens) sequence.own_tail = false;
    sequence.num_tokens = item.num_tokens;
    drop_entries(sequence, blocks_for(item.num_tokens));
    if (tracks_tokens(sequence) && item.num_tokens < num_recorded(sequence)) {
      forget_tokens(sequence, item.num_tokens);
    }
  }
}

// Throws unless all blocks are present that the token after the first `num_tokens` sees.
void KVCacheManager::check_visible(const Sequence& sequence, int64_t num_tokens) const {
  for (int64_t group = 0; has_windows_ && group < num_groups(); ++group) {
    const int64_t first = first_visible(num_tokens, group);
    if (first < blocks_for(num_tokens) && is_null(sequence.blocks[first * num_groups() + group])) {
      throw InvalidArgument(concat("truncate: num_tokens: expected more tokens of sequence ",
                                   sequence.id, ": the window of group ", group,
                                   " has passed block ", first,
                                   ", which the next token would see; "
                                   "got ",
                                   num_tokens));
    }
  }
}

// Moves to the node before the first truncated block. The new tail is the start of that block.
void KVCacheManager::forget_tokens(Sequence& sequence, int64_t keep) {
  const int64_t hashed = block_of(keep);
  const auto rest = static_cast<size_t>(keep - hashed * block_tokens_);
  if (hashed < sequence.num_hashed) {
    int32_t node = sequence.node;
    for (; sequence.num_hashed > hashed + 1; --sequence.num_hashed) node = cache_->parent(node);
    const int32_t* tokens = cache_->tokens(node);
    sequence.tail.assign(tokens, tokens + rest);
    --sequence.num_hashed;
    node = cache_->parent(node);
    cache_->hold(node);
    cache_->drop(sequence.node);
    sequence.node = node;
  } else {
    sequence.tail.resize(rest);
  }
}

// Releases the last block first. It is the least likely to be reused, and the pool gives out the
// block that was released first.
void KVCacheManager::drop_entries(Sequence& sequence, int64_t keep) {
  std::vector<int32_t>& blocks = sequence.blocks;
  const auto wanted = static_cast<size_t>(keep * num_groups());
  if (blocks.size() > wanted) ++sequence.edits;
  BlockPool& pool = sequence.swapped ? *host_pool_ : pool_;
  for (; blocks.size() > wanted; blocks.pop_back()) {
    const int32_t block = blocks.back();
    if (blocks.size() > wanted + kPrefetchDistance) {
      const int32_t ahead = blocks[blocks.size() - 1 - kPrefetchDistance];
      if (ahead >= 0) pool.prefetch(ahead);
    }
    if (sequence.swapped ? block != kNoHostBlock : !is_null(block)) pool.release(block);
  }
}

void KVCacheManager::remove(int32_t position) {
  index_.erase(sequences_[position].id);
  if (position + 1 != static_cast<int32_t>(sequences_.size())) {
    sequences_[position] = std::move(sequences_.back());
    index_.insert(sequences_[position].id, position);
  }
  sequences_.pop_back();
}

}  // namespace vllm_kernels::kv_cache
