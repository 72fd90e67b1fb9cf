// Sequences one by one, and the batch calls that are loops of them.
#include "kv_cache/kv_cache_manager.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <utility>

#include "kv_cache/errors.h"

namespace vllm_kernels::kv_cache {
namespace {

// Number of fork(2) calls between the first process and this one.
std::atomic<uint32_t> process_generation{0};
[[maybe_unused]] const int fork_handler =
    pthread_atfork(nullptr, nullptr, [] { ++process_generation; });

int64_t checked_block_size(int64_t num_blocks, int64_t block_size) {
  int64_t slots = 0;
  if (block_size < 1) {
    throw InvalidArgument(concat("KVCacheManager: block_size: expected >= 1, got ", block_size));
  }
  if (num_blocks > 0 && __builtin_mul_overflow(num_blocks, block_size, &slots)) {
    throw InvalidArgument(concat("KVCacheManager: num_blocks * block_size: expected an int64, got ",
                                 num_blocks, " * ", block_size));
  }
  return block_size;
}

void check_tokens(const char* call, int64_t num_tokens) {
  if (num_tokens < 0 || num_tokens > kMaxTokens) {
    throw InvalidArgument(
        concat(call, ": num_tokens: expected 0 to ", kMaxTokens, ", got ", num_tokens));
  }
}

}  // namespace

KVCacheManager::KVCacheManager(int64_t num_blocks, int64_t block_size, int64_t max_references)
    : block_size_(checked_block_size(num_blocks, block_size)),
      pool_(num_blocks, max_references),
      process_(process_generation) {}

std::unique_lock<std::mutex> KVCacheManager::lock() const {
  // Before the mutex: another thread may have held it when the process was forked.
  if (process_ != process_generation) {
    throw Error(
        "KVCacheManager: expected use in the process that made it, got a fork of that process: "
        "make a manager (and a cache) of its own there");
  }
  return std::unique_lock(mutex_);
}

int64_t KVCacheManager::blocks_for(int64_t num_tokens) const noexcept {
  return num_tokens / block_size_ + (num_tokens % block_size_ != 0);
}

int32_t KVCacheManager::position_of(const char* call, int64_t id) const {
  const int32_t position = index_.find(id);
  if (position == SequenceIndex::kAbsent) {
    throw UnknownSequence(
        concat(call, ": sequence: expected one that is allocated, got unknown id ", id));
  }
  return position;
}

const KVCacheManager::Sequence& KVCacheManager::find(const char* call, int64_t id) const {
  return sequences_[position_of(call, id)];
}

int64_t KVCacheManager::num_free_blocks() const {
  const auto guard = lock();
  return pool_.num_free();
}

int64_t KVCacheManager::num_sequences() const {
  const auto guard = lock();
  return static_cast<int64_t>(sequences_.size());
}

bool KVCacheManager::contains(int64_t id) const {
  const auto guard = lock();
  return index_.find(id) != SequenceIndex::kAbsent;
}

int64_t KVCacheManager::num_tokens(int64_t id) const {
  const auto guard = lock();
  return find("num_tokens", id).num_tokens;
}

std::vector<int32_t> KVCacheManager::block_table(int64_t id) const {
  const auto guard = lock();
  return find("block_table", id).blocks;
}

std::vector<int64_t> KVCacheManager::sequence_ids() const {
  const auto guard = lock();
  std::vector<int64_t> ids;
  ids.reserve(sequences_.size());
  for (const Sequence& sequence : sequences_) ids.push_back(sequence.id);
  return ids;
}

void KVCacheManager::slot_mapping(int64_t id, int64_t start, std::span<int64_t> slots) const {
  const auto guard = lock();
  const Sequence& sequence = find("slot_mapping", id);
  const auto count = static_cast<int64_t>(slots.size());
  if (start < 0 || start > sequence.num_tokens || count > sequence.num_tokens - start) {
    throw InvalidArgument(concat("slot_mapping: tokens: expected a range within ",
                                 sequence.num_tokens, " tokens, got ", count, " from ", start));
  }
  for (int64_t i = 0; i < count; ++i) {
    const int64_t token = start + i;
    slots[i] = sequence.blocks[token / block_size_] * block_size_ + token % block_size_;
  }
}

bool KVCacheManager::can_allocate(int64_t num_tokens) const {
  check_tokens("can_allocate", num_tokens);
  const auto guard = lock();
  return blocks_for(num_tokens) <= pool_.num_free();
}

void KVCacheManager::allocate(int64_t id, int64_t num_tokens) {
  allocate(std::span(&id, 1), std::span(&num_tokens, 1));
}

void KVCacheManager::allocate(std::span<const int64_t> ids, std::span<const int64_t> num_tokens) {
  const auto guard = lock();
  if (ids.size() != num_tokens.size()) {
    throw InvalidArgument(concat("allocate: num_tokens: expected ", ids.size(),
                                 " elements (as sequence_ids), got ", num_tokens.size()));
  }
  // The caller's arrays are read once, into `added`: another thread may write to them meanwhile.
  std::vector<Sequence> added(ids.size());
  std::vector<int64_t> sorted(ids.size());
  int64_t needed = 0;
  for (size_t i = 0; i < added.size(); ++i) {
    const int64_t id = added[i].id = sorted[i] = ids[i];
    const int64_t tokens = added[i].num_tokens = num_tokens[i];
    check_tokens("allocate", tokens);
    if (index_.find(id) != SequenceIndex::kAbsent) {
      throw DuplicateSequence(
          concat("allocate: sequence: expected a new id, got id ", id, ", which exists"));
    }
    needed += blocks_for(tokens);
  }
  std::sort(sorted.begin(), sorted.end());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice != sorted.end()) {
    throw DuplicateSequence(
        concat("allocate: sequence_ids: expected distinct ids, got id ", *twice, " twice"));
  }
  if (needed > pool_.num_free()) throw OutOfBlocks("allocate", needed, pool_.num_free());
  if (sequences_.size() + added.size() > sequences_.capacity()) {
    sequences_.reserve(std::max(2 * sequences_.capacity(), sequences_.size() + added.size()));
  }
  index_.reserve(added.size());
  for (Sequence& sequence : added) sequence.blocks.reserve(blocks_for(sequence.num_tokens));

  for (Sequence& sequence : added) {
    const int64_t count = blocks_for(sequence.num_tokens);
    for (int64_t i = 0; i < count; ++i) sequence.blocks.push_back(pool_.take());
    index_.insert(sequence.id, static_cast<int32_t>(sequences_.size()));
    sequences_.push_back(std::move(sequence));
  }
}

std::vector<BlockCopy> KVCacheManager::append(int64_t id, int64_t num_tokens) {
  std::vector<BlockCopy> copies(1);
  copies.resize(append(std::span(&id, 1), std::span(&num_tokens, 1), copies));
  return copies;
}

void KVCacheManager::fork(int64_t parent, int64_t child) {
  const auto guard = lock();
  const int32_t position = position_of("fork", parent);
  if (index_.find(child) != SequenceIndex::kAbsent) {
    throw DuplicateSequence(
        concat("fork: child: expected a new id, got id ", child, ", which exists"));
  }
  if (sequences_.size() == sequences_.capacity()) {
    sequences_.reserve(std::max<size_t>(16, 2 * sequences_.capacity()));
  }
  index_.reserve(1);
  Sequence copy{.id = child,
                .num_tokens = sequences_[position].num_tokens,
                .blocks = sequences_[position].blocks,
                .batch = 0};
  for (const int32_t block : copy.blocks) {
    if (pool_.references(block) >= pool_.max_references()) {
      throw ReferenceOverflow(concat("fork: parent: expected fewer than ", pool_.max_references(),
                                     " sequences to share block ", block, " of sequence ", parent));
    }
  }

  for (const int32_t block : copy.blocks) pool_.add_reference(block);
  index_.insert(child, static_cast<int32_t>(sequences_.size()));
  sequences_.push_back(std::move(copy));
}

void KVCacheManager::reorder(std::span<const int64_t> ids, std::span<const int64_t> parents) {
  const auto guard = lock();
  // A parent's position in place of a count; counts are >= 0 as resolve() wants them.
  if (ids.size() != parents.size()) {
    throw InvalidArgument(concat("reorder: parents: expected ", ids.size(),
                                 " elements (as sequence_ids), got ", parents.size()));
  }
  std::vector<int64_t> parent_positions(parents.size());
  for (size_t i = 0; i < parents.size(); ++i) {
    parent_positions[i] = position_of("reorder", parents[i]);
  }
  resolve("reorder", ids, "parents", parent_positions);

  std::vector<Sequence> replacements;
  replacements.reserve(ids.size());
  for (const BatchItem& item : batch_) {
    const Sequence& parent = sequences_[item.num_tokens];
    Sequence& replacement = replacements.emplace_back();
    replacement.num_tokens = parent.num_tokens;
    if (item.num_tokens != item.position) replacement.blocks = parent.blocks;
  }

  // References first, so that no block is freed in between; undone if one of them overflows (or the
  // message about that finds no memory).
  size_t done = 0;
  size_t done_blocks = 0;
  try {
    for (; done < replacements.size(); ++done) {
      done_blocks = 0;
      for (const int32_t block : replacements[done].blocks) {
        pool_.add_reference(block);
        ++done_blocks;
      }
    }
  } catch (...) {
    for (size_t i = 0; i <= done; ++i) {
      const std::vector<int32_t>& blocks = replacements[i].blocks;
      const size_t count = i == done ? done_blocks : blocks.size();
      for (size_t j = 0; j < count; ++j) pool_.release(blocks[j]);
    }
    throw;
  }
  for (size_t i = 0; i < replacements.size(); ++i) {
    if (batch_[i].num_tokens == batch_[i].position) continue;
    Sequence& sequence = sequences_[batch_[i].position];
    sequence.blocks.swap(replacements[i].blocks);
    sequence.num_tokens = replacements[i].num_tokens;
    drop_blocks(replacements[i].blocks, 0);
  }
}

void KVCacheManager::free(int64_t id) {
  free(std::span<const int64_t>(&id, 1));
}

void KVCacheManager::free(std::span<const int64_t> ids) {
  const auto guard = lock();
  resolve("free", ids, nullptr, {});
  for (const BatchItem& item : batch_) drop_blocks(sequences_[item.position].blocks, 0);
  // From the back: filling a gap with the last sequence then moves none that is still to go.
  std::sort(batch_.begin(), batch_.end(), [](const BatchItem& left, const BatchItem& right) {
    return left.position > right.position;
  });
  for (const BatchItem& item : batch_) remove(item.position);
}

void KVCacheManager::truncate(int64_t id, int64_t num_tokens) {
  truncate(std::span(&id, 1), std::span(&num_tokens, 1));
}

void KVCacheManager::truncate(std::span<const int64_t> ids, std::span<const int64_t> num_tokens) {
  const auto guard = lock();
  resolve("truncate", ids, "num_tokens", num_tokens);
  for (const BatchItem& item : batch_) {
    const Sequence& sequence = sequences_[item.position];
    if (item.num_tokens > sequence.num_tokens) {
      throw InvalidArgument(concat("truncate: num_tokens: expected 0 to ", sequence.num_tokens,
                                   " (the tokens of sequence ", sequence.id, "), got ",
                                   item.num_tokens));
    }
  }
  for (const BatchItem& item : batch_) {
    Sequence& sequence = sequences_[item.position];
    sequence.num_tokens = item.num_tokens;
    drop_blocks(sequence.blocks, blocks_for(item.num_tokens));
  }
}

void KVCacheManager::reset() {
  const auto guard = lock();
  pool_.reset();
  index_.clear();
  sequences_.clear();
  num_copies_ = 0;
}

// The tail first: it is the part of a sequence that is least likely to be wanted again, and the
// pool gives out what was released longest ago.
void KVCacheManager::drop_blocks(std::vector<int32_t>& blocks, size_t keep) {
  while (blocks.size() > keep) {
    pool_.release(blocks.back());
    blocks.pop_back();
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
