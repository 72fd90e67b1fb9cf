// One step of a whole batch: append to every sequence, and fill the buffers that the ops read.
//
// append() is plan_append() and commit_append(). step() also checks the buffers before the commit,
// and fills them after it. Buffers keep what the last call wrote, so that fill() writes only
// changes.
#include <algorithm>
#include <array>
#include <functional>
#include <numeric>
#include <utility>

#include "kv_cache/errors.h"
#include "kv_cache/kv_cache_manager.h"

namespace vllm_kernels::kv_cache {
namespace {

void require_size(const char* buffer, size_t got, int64_t expected, const char* meaning) {
  if (static_cast<int64_t>(got) != expected) {
    throw InvalidArgument(concat("buffers: ", buffer, ": expected ", expected, " elements (",
                                 meaning, "), got ", got));
  }
}

struct Range {
  const char* name;
  const void* begin;
  const void* end;
  bool per_group;  // differs from group to group
};
using Ranges = std::array<Range, 5>;

Ranges ranges_of(const BatchBuffers& buffers) {
  const auto range = [](const char* name, const auto* data, int64_t size, bool per_group) {
    return Range{name, data, data + size, per_group};
  };
  const auto whole = [&](const char* name, const auto& values, bool per_group) {
    return range(name, values.data(), static_cast<int64_t>(values.size()), per_group);
  };
  const int64_t table_size =
      buffers.max_sequences == 0
          ? 0
          : (buffers.max_sequences - 1) * buffers.row_stride + buffers.max_blocks;
  return {range("block_tables", buffers.block_tables, table_size, true),
          whole("seq_lens", buffers.seq_lens, false),
          whole("query_start_loc", buffers.query_start_loc, false),
          whole("slot_mapping", buffers.slot_mapping, true),
          whole("positions", buffers.positions, false)};
}

bool overlap(const Range& left, const Range& right) {
  const std::less<const void*> before;  // a total order, also across arrays
  return before(left.begin, right.end) && before(right.begin, left.end);
}

// Throws if two groups share memory, other than the buffers that are equal for all groups.
void check_apart(const BatchBuffers& first, const BatchBuffers& second) {
  const Ranges ranges = ranges_of(first);
  const Ranges others = ranges_of(second);
  for (size_t i = 0; i < ranges.size(); ++i) {
    for (size_t j = 0; j < others.size(); ++j) {
      const bool shared = i == j && !ranges[i].per_group && ranges[i].begin == others[j].begin;
      if (!shared && overlap(ranges[i], others[j])) {
        throw InvalidArgument(concat("buffers: ", others[j].name,
                                     ": expected memory of its own, got memory that overlaps ",
                                     ranges[i].name, " of another group"));
      }
    }
  }
}

// Sorts `blocks`, and calls use(block, how often it occurs) for each.
template <typename Use>
void for_each_block(std::vector<int32_t>& blocks, const Use& use) {
  std::sort(blocks.begin(), blocks.end());
  size_t first = 0;  // of the run with the same block
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (i + 1 < blocks.size() && blocks[i + 1] == blocks[i]) continue;
    use(blocks[i], static_cast<int64_t>(i + 1 - first));
    first = i + 1;
  }
}

}  // namespace

void check_buffers(const BatchBuffers& buffers) {
  if (buffers.max_sequences < 0 || buffers.max_blocks < 0 ||
      buffers.row_stride < buffers.max_blocks) {
    throw InvalidArgument(concat(
        "buffers: block_tables: expected rows of max_blocks elements that "
        "do not overlap, got shape [",
        buffers.max_sequences, ", ", buffers.max_blocks, "] with row stride ", buffers.row_stride));
  }
  require_size("seq_lens", buffers.seq_lens.size(), buffers.max_sequences, "rows of block_tables");
  require_size("query_start_loc", buffers.query_start_loc.size(), buffers.max_sequences + 1,
               "rows of block_tables + 1");
  if (!buffers.positions.empty()) {
    require_size("positions", buffers.positions.size(),
                 static_cast<int64_t>(buffers.slot_mapping.size()), "as slot_mapping");
  }

  const Ranges ranges = ranges_of(buffers);
  for (size_t i = 0; i < ranges.size(); ++i) {
    for (size_t j = i + 1; j < ranges.size(); ++j) {
      if (overlap(ranges[i], ranges[j])) {
        throw InvalidArgument(concat("buffers: ", ranges[j].name,
                                     ": expected memory of its own, got memory that overlaps ",
                                     ranges[i].name));
      }
    }
  }
}

void WrittenBatch::make_room(const BatchBuffers& buffers) {
  if (static_cast<int64_t>(rows.size()) == buffers.max_sequences) return;
  changed_rows.reserve(buffers.max_sequences);
  rows.assign(buffers.max_sequences, Row{});
  num_sequences = buffers.max_sequences;
  num_tokens = static_cast<int64_t>(buffers.slot_mapping.size());
}

int64_t KVCacheManager::append(std::span<const int64_t> ids, std::span<const int64_t> num_tokens,
                               std::span<BlockCopy> copies, const AppendOptions& options) {
  const auto guard = lock();
  BatchPlan& plan = plan_batch("append", ids, "num_tokens", num_tokens);
  plan_append("append", copies.size(), options, plan);
  return commit_append(options, copies, plan);
}

int64_t KVCacheManager::build(std::span<const int64_t> ids,
                              std::span<const int64_t> num_query_tokens,
                              std::span<BatchBuffers* const> buffers) {
  const auto guard = lock();
  const BatchPlan& plan = plan_batch("build", ids, "num_query_tokens", num_query_tokens);
  check_room("build", buffers, plan, nullptr);
  return fill(buffers, plan);
}

int64_t KVCacheManager::step(std::span<const int64_t> ids, std::span<const int64_t> num_tokens,
                             std::span<BatchBuffers* const> buffers, std::span<BlockCopy> copies,
                             const AppendOptions& options) {
  const auto guard = lock();
  BatchPlan& plan = plan_batch("step", ids, "num_tokens", num_tokens);
  checked("step", "lookahead", options.lookahead, 0, kMaxTokens);
  check_room("step", buffers, plan, &options);
  plan_append("step", copies.size(), options, plan);
  const int64_t num_copies = commit_append(options, copies, plan);
  fill(buffers, plan);
  return num_copies;
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

// Prefetches the last entry of an item's table, if there is such an item.
inline void KVCacheManager::prefetch_last_block(const BatchPlan& plan, size_t item) const noexcept {
  if (item >= plan.items.size()) return;
  const std::vector<int32_t>& blocks = sequences_[plan.items[item].position].blocks;
  __builtin_prefetch(blocks.data() + blocks.size() - 1);
}

// --- the plan of an append ---

void KVCacheManager::plan_append(const char* call, size_t copies_room, const AppendOptions& options,
                                 BatchPlan& plan) {
  checked(call, "lookahead", options.lookahead, 0, kMaxTokens);
  if (options.tokens) plan_tokens(call, *options.tokens, false, plan);
  const int64_t new_entries = count_new_entries(call, options, plan);
  const int64_t freed = count_freed(plan);
  const int64_t copies = count_copies(plan);
  plan.num_blocks = new_entries + copies;

  const int64_t free = pool_.num_free() + freed;
  if (plan.num_blocks > free) throw OutOfBlocks(call, plan.num_blocks, free);
  check_copies(call, copies, copies_room);
  reserve_append(options, plan);
}

// Table entries that the batch adds. Also collects shared tails and blocks out of their window.
int64_t KVCacheManager::count_new_entries(const char* call, const AppendOptions& options,
                                          BatchPlan& plan) const {
  plan.shared_tails.clear();
  plan.out_of_window.clear();
  int64_t new_entries = 0;
  for (const BatchItem& item : plan.items) {
    const Sequence& sequence = sequences_[item.position];
    if (item.num_tokens > kMaxTokens - options.lookahead - sequence.num_tokens) {
      throw InvalidArgument(concat(call, ": num_tokens: expected at most ",
                                   kMaxTokens - options.lookahead - sequence.num_tokens,
                                   " (sequence ", sequence.id, " has ", sequence.num_tokens,
                                   "), got ", item.num_tokens));
    }
    const int64_t slots = item.num_tokens + options.lookahead;
    if (slots == 0) continue;
    new_entries += (entries_after(sequence, slots) - entries(sequence)) * num_groups();
    if (has_windows_) find_out_of_window(sequence, plan);
    const int64_t tail = block_of(sequence.num_tokens);
    if (sequence.own_tail || tail * block_tokens_ == sequence.num_tokens) continue;
    for (int64_t group = 0; group < num_groups(); ++group) {
      const int32_t block = sequence.blocks[tail * num_groups() + group];
      if (pool_.references(block) > 1) plan.shared_tails.push_back(block);
    }
  }
  return new_entries;
}

// Every appending holder of a shared tail gets a copy. The exception is a last holder: once all
// others have their copies, the block is its own.
int64_t KVCacheManager::count_copies(BatchPlan& plan) const {
  int64_t copies = 0;
  for_each_block(plan.shared_tails, [&](int32_t block, int64_t appending) {
    copies += appending < pool_.references(block) ? appending : appending - 1;
  });
  return copies;
}

// Collects the blocks that the sequence gives back when its windows move on.
inline void KVCacheManager::find_out_of_window(const Sequence& sequence, BatchPlan& plan) const {
  for (int64_t group = 0; group < num_groups(); ++group) {
    for (int64_t i = first_visible(sequence.num_tokens, group) - 1; i >= 0; --i) {
      const int32_t block = sequence.blocks[i * num_groups() + group];
      if (is_null(block)) break;
      plan.out_of_window.push_back(block);
    }
  }
}

// Blocks out of their window that become free: no sequence outside the batch holds them.
int64_t KVCacheManager::count_freed(BatchPlan& plan) const {
  int64_t freed = 0;
  for_each_block(plan.out_of_window, [&](int32_t block, int64_t leaving) {
    freed += leaving == pool_.references(block);
  });
  return freed;
}

void KVCacheManager::reserve_append(const AppendOptions& options, BatchPlan& plan) {
  for (const BatchItem& item : plan.items) {
    Sequence& sequence = sequences_[item.position];
    const int64_t slots = item.num_tokens + options.lookahead;
    const auto wanted = static_cast<size_t>(entries_after(sequence, slots) * num_groups());
    std::vector<int32_t>& blocks = sequence.blocks;
    if (slots > 0 && wanted > blocks.capacity()) {
      blocks.reserve(std::max(wanted, 2 * blocks.capacity()));
    }
  }
  plan.taken.reserve(plan.num_blocks);
  plan.evicted.reserve(plan.num_blocks);
  if (!record_events_) return;
  // A block that is taken may be evicted, and a tail that is written to becomes unfindable. The
  // tokens store blocks. This room covers the whole call; that of plan_tokens() is not added.
  const auto tails = static_cast<int64_t>(plan.items.size()) * num_groups();
  const int64_t stored =
      options.tokens ? static_cast<int64_t>(options.tokens->size()) / block_tokens_ : 0;
  reserve_events((stored + tails) * num_groups(), plan.num_blocks + tails);
}

// --- the commit of an append ---

inline void KVCacheManager::release_out_of_window(Sequence& sequence) {
  for (int64_t group = 0; group < num_groups(); ++group) {
    for (int64_t i = first_visible(sequence.num_tokens, group) - 1; i >= 0; --i) {
      int32_t& block = sequence.blocks[i * num_groups() + group];
      if (is_null(block)) break;
      pool_.release(block);
      block = kNullBlock;
      ++sequence.edits;
    }
  }
}

// Returns the number of copies.
int64_t KVCacheManager::commit_append(const AppendOptions& options, std::span<BlockCopy> copies,
                                      BatchPlan& plan) {
  if (has_windows_) {
    for (const BatchItem& item : plan.items) {
      if (item.num_tokens + options.lookahead > 0) {
        release_out_of_window(sequences_[item.position]);
      }
    }
  }
  plan.taken.clear();
  take_blocks(plan.num_blocks, plan.taken, plan.evicted);
  std::reverse(plan.taken.begin(), plan.taken.end());
  const auto take = [&plan] {
    const int32_t block = plan.taken.back();
    plan.taken.pop_back();
    return block;
  };
  const int32_t* tokens = options.tokens ? options.tokens->data() : nullptr;
  std::span<const Hash> first_hashes = plan.first_hashes;
  int64_t num_copies = 0;
  for (const BatchItem& item : plan.items) {
    const int64_t slots = item.num_tokens + options.lookahead;
    if (slots == 0) continue;
    Sequence& sequence = sequences_[item.position];
    std::vector<int32_t>& blocks = sequence.blocks;
    const auto wanted = static_cast<size_t>(entries_after(sequence, slots) * num_groups());
    const int64_t tail = block_of(sequence.num_tokens);
    if (!sequence.own_tail && tail * block_tokens_ != sequence.num_tokens) {
      for (int64_t group = 0; group < num_groups(); ++group) {
        int32_t& block = blocks[tail * num_groups() + group];
        if (pool_.references(block) > 1) {
          const int32_t source = std::exchange(block, take());
          copies[num_copies++] = {source, block};
          pool_.release(source);
          ++sequence.edits;
        } else {
          unregister_block(block);  // registered for a longer sequence that was truncated
        }
      }
    }
    while (blocks.size() < wanted) blocks.push_back(take());
    sequence.own_tail = true;
    sequence.num_tokens += item.num_tokens;
    if (tokens != nullptr) {
      commit_tokens(sequence, tokens, item.num_tokens, first_hashes);
      tokens += item.num_tokens;
    }
  }
  // A window may have given a holder's reference back, so that a planned copy was not needed.
  for (; !plan.taken.empty(); plan.taken.pop_back()) pool_.release(plan.taken.back());
  num_copies_ += num_copies;
  return num_copies;
}

// --- buffers ---

// With `append` the batch's tokens are still to be appended; without, they are the last ones of
// their sequences.
void KVCacheManager::check_room(const char* call, std::span<BatchBuffers* const> buffers,
                                const BatchPlan& plan, const AppendOptions* append) const {
  if (static_cast<int64_t>(buffers.size()) != num_groups()) {
    throw InvalidArgument(concat(call, ": buffers: expected ", num_groups(),
                                 " (one a group of layers), got ", buffers.size()));
  }
  const auto num_sequences = static_cast<int64_t>(plan.items.size());
  int64_t max_tokens = kMaxTokens;
  int64_t max_blocks = kMaxTokens;
  for (size_t i = 0; i < buffers.size(); ++i) {
    const BatchBuffers* group = buffers[i];
    check_buffers(*group);
    for (size_t j = 0; j < i; ++j) {
      if (group == buffers[j]) {
        throw InvalidArgument(
            concat(call, ": buffers: expected each once, got those of another group at ", i));
      }
      check_apart(*buffers[j], *group);
    }
    if (num_sequences > group->max_sequences) {
      throw InvalidArgument(concat(call, ": sequence_ids: expected at most ", group->max_sequences,
                                   " (rows of block_tables), got ", num_sequences));
    }
    max_tokens = std::min(max_tokens, static_cast<int64_t>(group->slot_mapping.size()));
    max_blocks = std::min(max_blocks, group->max_blocks);
  }
  int64_t total = 0;
  for (const BatchItem& item : plan.items) {
    const Sequence& sequence = sequences_[item.position];
    if (append == nullptr && item.num_tokens > sequence.num_tokens) {
      throw InvalidArgument(concat(call, ": num_query_tokens: expected at most ",
                                   sequence.num_tokens, " (the tokens of sequence ", sequence.id,
                                   "), got ", item.num_tokens));
    }
    if (item.num_tokens > max_tokens - total) {
      throw InvalidArgument(concat(call, ": tokens in all: expected at most ", max_tokens,
                                   " (elements of slot_mapping), got more"));
    }
    total += item.num_tokens;
    const int64_t blocks = append == nullptr
                               ? entries(sequence)
                               : entries_after(sequence, item.num_tokens + append->lookahead);
    if (blocks > max_blocks) {
      throw InvalidArgument(concat(call, ": blocks of sequence ", sequence.id,
                                   ": expected at most ", max_blocks,
                                   " (columns of block_tables), got ", blocks));
    }
  }
  for (BatchBuffers* group : buffers) group->written.make_room(*group);
}

template <bool kOneRank>
inline int64_t KVCacheManager::fill(BatchBuffers& buffers, int64_t group,
                                    const BatchPlan& plan) const noexcept {
  const bool with_positions = !buffers.positions.empty();
  WrittenBatch& before = buffers.written;
  before.changed_rows.clear();
  int64_t written = 0;  // query tokens so far
  int64_t row = 0;
  for (size_t i = 0; i < plan.items.size(); ++i) {
    prefetch_last_block(plan, i + kPrefetchDistance);
    const BatchItem& item = plan.items[i];
    const Sequence& sequence = sequences_[item.position];
    fill_row(buffers, row, sequence, group);
    const int64_t num_local =
        kOneRank ? sequence.num_tokens : shard_.local_tokens(sequence.num_tokens);
    buffers.seq_lens[row] = static_cast<int32_t>(num_local);
    buffers.query_start_loc[row] = static_cast<int32_t>(written);
    ++row;

    int64_t token = sequence.num_tokens - item.num_tokens;
    if constexpr (!kOneRank) {
      const auto count = static_cast<size_t>(item.num_tokens);
      fill_slots(sequence, group, token, buffers.slot_mapping.subspan(written, count));
      if (with_positions) {
        std::iota(&buffers.positions[written], &buffers.positions[written] + count, token);
      }
      written += item.num_tokens;
      continue;
    }
    int64_t column = block_of(token);
    int64_t offset = token - column * block_tokens_;
    while (token < sequence.num_tokens) {
      const int64_t count = std::min(block_tokens_ - offset, sequence.num_tokens - token);
      const int32_t block = sequence.blocks[column * num_groups() + group];
      int64_t* slots = &buffers.slot_mapping[written];
      if (is_null(block)) {
        std::fill_n(slots, count, -1);
      } else {
        const int64_t first = block * block_tokens_ + offset;
        std::iota(slots, slots + count, first);
      }
      if (with_positions) {
        std::iota(&buffers.positions[written], &buffers.positions[written] + count, token);
      }
      written += count;
      token += count;
      ++column;
      offset = 0;
    }
  }
  fill_padding(buffers, row, written);
  return written;
}

int64_t KVCacheManager::fill(std::span<BatchBuffers* const> buffers,
                             const BatchPlan& plan) const noexcept {
  int64_t written = 0;
  for (int64_t group = 0; group < num_groups(); ++group) {
    written = shard_.count == 1 ? fill<true>(*buffers[group], group, plan)
                                : fill<false>(*buffers[group], group, plan);
  }
  return written;
}

// Slots of the tokens from `token` on.
void KVCacheManager::fill_slots(const Sequence& sequence, int64_t group, int64_t token,
                                std::span<int64_t> slots) const noexcept {
  const auto count = static_cast<int64_t>(slots.size());
  shard_.for_each_run(token, count, [&](int64_t first, int64_t size, int64_t slot) {
    int64_t* const run = slots.data() + first;
    const int64_t column = slot / shard_.block_size;
    const int32_t block = slot < 0 ? kNullBlock : sequence.blocks[column * num_groups() + group];
    if (slot < 0 || is_null(block)) {
      std::fill_n(run, size, -1);
    } else {
      std::iota(run, run + size, block * shard_.block_size + slot % shard_.block_size);
    }
  });
}

// Writes the whole row, or only the new blocks if the row held this sequence before.
inline void KVCacheManager::fill_row(BatchBuffers& buffers, int64_t row, const Sequence& sequence,
                                     int64_t group) const noexcept {
  WrittenBatch::Row& before = buffers.written.rows[row];
  const int64_t count = entries(sequence);
  const bool same = before.sequence == sequence.serial && before.edits == sequence.edits;
  const int64_t first = same ? before.blocks : 0;
  if (same && first == count) return;
  int32_t* table = buffers.block_tables + row * buffers.row_stride;
  if (num_groups() == 1) {
    std::copy(sequence.blocks.begin() + first, sequence.blocks.end(), table + first);
  } else {
    for (int64_t i = first; i < count; ++i) table[i] = sequence.blocks[i * num_groups() + group];
  }
  before = {sequence.serial, sequence.edits, count};
  buffers.written.changed_rows.push_back(static_cast<int32_t>(row));
}

// Pads past `rows` rows and `tokens` tokens, where the last batch left other values.
void KVCacheManager::fill_padding(BatchBuffers& buffers, int64_t rows, int64_t tokens) noexcept {
  WrittenBatch& before = buffers.written;
  const auto set = [](auto& values, int64_t first, int64_t last, auto value) {
    if (first < last) std::fill(values.begin() + first, values.begin() + last, value);
  };
  set(buffers.seq_lens, rows, before.num_sequences, 0);
  const int64_t starts = tokens == before.num_tokens ? before.num_sequences : buffers.max_sequences;
  set(buffers.query_start_loc, rows, starts + 1, static_cast<int32_t>(tokens));
  set(buffers.slot_mapping, tokens, before.num_tokens, int64_t{-1});
  if (!buffers.positions.empty()) set(buffers.positions, tokens, before.num_tokens, int64_t{0});
  before.num_sequences = rows;
  before.num_tokens = tokens;
}

}  // namespace vllm_kernels::kv_cache
