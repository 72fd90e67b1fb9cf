// build() and step(): fill the buffers that the ops read in a forward pass.
//
// step() also appends. It checks the buffers before the commit, and fills them after it. Buffers
// keep what the last call wrote, so that fill() writes only changes.
#include <algorithm>
#include <array>
#include <functional>
#include <numeric>

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

// Prefetches the last entry of an item's table, if there is such an item.
inline void KVCacheManager::prefetch_last_block(const BatchPlan& plan, size_t item) const noexcept {
  if (item >= plan.items.size()) return;
  const std::vector<int32_t>& blocks = sequences_[plan.items[item].position].blocks;
  __builtin_prefetch(blocks.data() + blocks.size() - 1);
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
