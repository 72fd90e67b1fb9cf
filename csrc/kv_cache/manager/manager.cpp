// The manager as a whole: it is built, locked, asked about its sequences, and reset. The calls in
// the other files find their sequences here: one with find(), a batch with plan_batch().
#include "kv_cache/kv_cache_manager.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <random>

#include "kv_cache/errors.h"

namespace vllm_kernels::kv_cache {
namespace {

// Number of fork(2) calls between the first process and this one.
std::atomic<uint32_t> process_generation{0};
[[maybe_unused]] const int fork_handler =
    pthread_atfork(nullptr, nullptr, [] { ++process_generation; });

constexpr char kManager[] = "KVCacheManager";

void check_slots(int64_t num_blocks, int64_t block_size) {
  int64_t slots = 0;
  if (num_blocks > 0 && __builtin_mul_overflow(num_blocks, block_size, &slots)) {
    throw InvalidArgument(concat("KVCacheManager: num_blocks * block_size: expected an int64, got ",
                                 num_blocks, " * ", block_size));
  }
}

Shard checked_shard(const Options& options) {
  const int64_t block_size = checked(kManager, "block_size", options.block_size, 1, kMaxTokens);
  check_slots(options.num_blocks, block_size);
  const int64_t count = checked(kManager, "shards", options.shards, 1, kMaxTokens / block_size);
  checked(kManager, "shard", options.shard, 0, count - 1);
  if (options.interleave < 1 || block_size % options.interleave != 0) {
    throw InvalidArgument(concat("KVCacheManager: interleave: expected a divisor of block_size = ",
                                 block_size, ", got ", options.interleave));
  }
  return {count, options.shard, count == 1 ? block_size : options.interleave, block_size};
}

const std::vector<int64_t>& checked_windows(const std::vector<int64_t>& windows) {
  checked(kManager, "windows (their number)", static_cast<int64_t>(windows.size()), 1, 1024);
  for (const int64_t window : windows) {
    checked(kManager, "windows", window, kFullAttention, kMaxTokens);
  }
  return windows;
}

bool any_window(const std::vector<int64_t>& windows) {
  return std::any_of(windows.begin(), windows.end(),
                     [](int64_t window) { return window != kFullAttention; });
}

HashKey random_key() {
  std::random_device device;
  HashKey key;
  for (uint8_t& byte : key) byte = static_cast<uint8_t>(device());
  return key;
}

}  // namespace

KVCacheManager::KVCacheManager(int64_t num_blocks, int64_t block_size, int64_t max_references)
    : KVCacheManager(Options{
          .num_blocks = num_blocks, .block_size = block_size, .max_references = max_references}) {}

KVCacheManager::KVCacheManager(const Options& options)
    : shard_(checked_shard(options)),
      block_tokens_(shard_.count * shard_.block_size),
      block_shift_(std::has_single_bit(static_cast<uint64_t>(block_tokens_))
                       ? std::countr_zero(static_cast<uint64_t>(block_tokens_))
                       : -1),
      windows_(checked_windows(options.windows)),
      has_windows_(any_window(windows_)),
      watermark_blocks_(
          checked(kManager, "watermark_blocks", options.watermark_blocks, 0, kMaxBlocks)),
      record_events_(options.events),
      pool_(options.num_blocks, options.max_references, options.null_block || has_windows_),
      process_(process_generation) {
  checked(kManager, "num_host_blocks", options.num_host_blocks, 0, kMaxBlocks);
  checked(kManager, "hash_bits", options.hash_bits, 1, 128);
  if (options.num_host_blocks > 0) {
    check_slots(options.num_host_blocks, options.block_size);
    host_pool_.emplace(options.num_host_blocks, options.max_references);
  }
  if (options.prefix_caching) {
    checked(kManager,
            shard_.count == 1 ? "block_size (with prefix_caching)"
                              : "shards * block_size (with prefix_caching)",
            block_tokens_, 1, kMaxHashedBlock);
    cache_.emplace(block_tokens_, num_groups(), options.hash_key ? *options.hash_key : random_key(),
                   options.hash_bits);
  }
}

void KVCacheManager::check_process() const {
  if (process_ != process_generation) {
    throw Error(
        "KVCacheManager: expected use in the process that made it, got a fork of that process: "
        "make a manager (and a cache) of its own there");
  }
}

std::unique_lock<std::mutex> KVCacheManager::lock() const {
  check_process();  // before the mutex: another thread may have held it at the fork
  return std::unique_lock(mutex_);
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

void KVCacheManager::check_group(const char* call, int64_t group) const {
  checked(call, "group", group, 0, num_groups() - 1);
}

void KVCacheManager::check_new(const char* call, const char* argument, int64_t id) const {
  if (index_.find(id) != SequenceIndex::kAbsent) {
    throw DuplicateSequence(
        concat(call, ": ", argument, ": expected a new id, got id ", id, ", which exists"));
  }
}

void KVCacheManager::check_where(const char* call, const Sequence& sequence, Where where) const {
  if (where == Where::kAnywhere || sequence.swapped == (where == Where::kHost)) return;
  throw InvalidArgument(
      concat(call, ": sequence: expected one that is ",
             sequence.swapped ? "not swapped out (swap_in comes first)" : "swapped out",
             ", got id ", sequence.id));
}

// Finds the sequences of a batch. Without `counts_name` the batch has no counts. Each of the
// caller's values is read once: another thread may write to them meanwhile.
BatchPlan& KVCacheManager::plan_batch(const char* call, std::span<const int64_t> ids,
                                      const char* counts_name, std::span<const int64_t> counts,
                                      Where where) {
  if (counts_name != nullptr) check_size(call, counts_name, ids.size(), counts.size());
  std::vector<BatchItem>& items = plan_.items;
  items.resize(ids.size());
  ++batch_number_;
  for (size_t i = 0; i < ids.size(); ++i) {
    const int64_t id = ids[i];
    int32_t position = index_.find(id);
    if (position == SequenceIndex::kAbsent) position = position_of(call, id);  // throws
    items[i] = {position, BatchItem::kNoParent, counts_name == nullptr ? 0 : counts[i]};
    __builtin_prefetch(&sequences_[position]);
  }
  for (size_t i = 0; i < items.size(); ++i) {
    Sequence& sequence = sequences_[items[i].position];
    if (sequence.batch == batch_number_) {
      throw DuplicateSequence(
          concat(call, ": sequence_ids: expected distinct ids, got id ", sequence.id, " twice"));
    }
    sequence.batch = batch_number_;
    check_where(call, sequence, where);
    if (items[i].num_tokens < 0) {
      throw InvalidArgument(concat(call, ": ", counts_name, ": expected >= 0, got ",
                                   items[i].num_tokens, " at index ", i));
    }
  }
  return plan_;
}

int64_t KVCacheManager::num_free_blocks() const {
  const auto guard = lock();
  return pool_.num_free();
}

int64_t KVCacheManager::num_free_host_blocks() const {
  const auto guard = lock();
  return host_pool_ ? host_pool_->num_free() : 0;
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

int64_t KVCacheManager::num_local_tokens(int64_t id) const {
  const auto guard = lock();
  return shard_.local_tokens(find("num_local_tokens", id).num_tokens);
}

int64_t KVCacheManager::num_known_tokens(int64_t id) const {
  const auto guard = lock();
  const Sequence& sequence = find("num_known_tokens", id);
  return tracks_tokens(sequence) ? num_recorded(sequence) : -1;
}

bool KVCacheManager::is_swapped(int64_t id) const {
  const auto guard = lock();
  return find("is_swapped", id).swapped;
}

std::vector<int32_t> KVCacheManager::block_table(int64_t id, int64_t group) const {
  const auto guard = lock();
  check_group("block_table", group);
  const Sequence& sequence = find("block_table", id);
  std::vector<int32_t> table(entries(sequence));
  for (size_t i = 0; i < table.size(); ++i) {
    table[i] = sequence.blocks[i * num_groups() + group];
  }
  return table;
}

std::vector<int64_t> KVCacheManager::sequence_ids() const {
  const auto guard = lock();
  std::vector<int64_t> ids;
  ids.reserve(sequences_.size());
  for (const Sequence& sequence : sequences_) ids.push_back(sequence.id);
  return ids;
}

void KVCacheManager::slot_mapping(int64_t id, int64_t start, std::span<int64_t> slots,
                                  int64_t group) const {
  const auto guard = lock();
  check_group("slot_mapping", group);
  const Sequence& sequence = find("slot_mapping", id);
  check_where("slot_mapping", sequence, Where::kDevice);
  const auto count = static_cast<int64_t>(slots.size());
  if (start < 0 || start > sequence.num_tokens || count > sequence.num_tokens - start) {
    throw InvalidArgument(concat("slot_mapping: tokens: expected a range within ",
                                 sequence.num_tokens, " tokens, got ", count, " from ", start));
  }
  fill_slots(sequence, group, start, slots);
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

void KVCacheManager::reset() {
  const auto guard = lock();
  if (num_held_ > 0) {
    throw InvalidArgument(concat("reset: expected no lent blocks, got ", num_held_));
  }
  if (record_events_) reserve_events(0, 1);
  clear_cache();
  pool_.reset();
  if (host_pool_) host_pool_->reset();
  index_.clear();
  sequences_.clear();
  num_copies_ = queried_tokens_ = hit_tokens_ = 0;
}

}  // namespace vllm_kernels::kv_cache
