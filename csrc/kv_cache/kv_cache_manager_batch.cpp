// One step of a whole batch: append to every sequence, and write what the ops read.
#include <algorithm>
#include <array>
#include <functional>

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

  struct Range {
    const char* name;
    const void* begin;
    const void* end;
  };
  const auto range = [](const char* name, const auto* data, int64_t size) {
    return Range{name, data, data + size};
  };
  const int64_t table_size =
      buffers.max_sequences == 0
          ? 0
          : (buffers.max_sequences - 1) * buffers.row_stride + buffers.max_blocks;
  const std::array<Range, 5> ranges = {
      range("block_tables", buffers.block_tables, table_size),
      range("seq_lens", buffers.seq_lens.data(), buffers.seq_lens.size()),
      range("query_start_loc", buffers.query_start_loc.data(), buffers.query_start_loc.size()),
      range("slot_mapping", buffers.slot_mapping.data(), buffers.slot_mapping.size()),
      range("positions", buffers.positions.data(), buffers.positions.size())};
  const std::less<const void*> before;  // a total order, also across arrays
  for (size_t i = 0; i < ranges.size(); ++i) {
    for (size_t j = i + 1; j < ranges.size(); ++j) {
      if (before(ranges[i].begin, ranges[j].end) && before(ranges[j].begin, ranges[i].end)) {
        throw InvalidArgument(concat("buffers: ", ranges[j].name,
                                     ": expected memory of its own, got memory that overlaps ",
                                     ranges[i].name));
      }
    }
  }
}

int64_t KVCacheManager::append(std::span<const int64_t> ids, std::span<const int64_t> num_tokens,
                               std::span<BlockCopy> copies) {
  const auto guard = lock();
  resolve("append", ids, "num_tokens", num_tokens);
  plan_append("append", copies.size());
  return commit_append(copies);
}

void KVCacheManager::build(std::span<const int64_t> ids, std::span<const int64_t> num_query_tokens,
                           const BatchBuffers& buffers) {
  const auto guard = lock();
  resolve("build", ids, "num_query_tokens", num_query_tokens);
  check_room("build", buffers, false);
  fill(buffers);
}

int64_t KVCacheManager::step(std::span<const int64_t> ids, std::span<const int64_t> num_tokens,
                             const BatchBuffers& buffers, std::span<BlockCopy> copies) {
  const auto guard = lock();
  resolve("step", ids, "num_tokens", num_tokens);
  check_room("step", buffers, true);
  plan_append("step", copies.size());
  const int64_t count = commit_append(copies);
  fill(buffers);
  return count;
}

// Without `counts_name`, the batch has no counts. Each of the caller's values is read once.
void KVCacheManager::resolve(const char* call, std::span<const int64_t> ids,
                             const char* counts_name, std::span<const int64_t> counts) {
  if (counts_name != nullptr && ids.size() != counts.size()) {
    throw InvalidArgument(concat(call, ": ", counts_name, ": expected ", ids.size(),
                                 " elements (as sequence_ids), got ", counts.size()));
  }
  batch_.resize(ids.size());
  ++batch_number_;
  for (size_t i = 0; i < ids.size(); ++i) {
    const int64_t id = ids[i];
    const int32_t position = position_of(call, id);
    Sequence& sequence = sequences_[position];
    if (sequence.batch == batch_number_) {
      throw DuplicateSequence(
          concat(call, ": sequence_ids: expected distinct ids, got id ", id, " twice"));
    }
    sequence.batch = batch_number_;
    batch_[i] = {position, counts_name == nullptr ? 0 : counts[i]};
    if (batch_[i].num_tokens < 0) {
      throw InvalidArgument(concat(call, ": ", counts_name, ": expected >= 0, got ",
                                   batch_[i].num_tokens, " at index ", i));
    }
  }
}

// Blocks of the table after `appended` tokens more. No division where the last block has room,
// which is all but one in block_size decode steps.
int64_t KVCacheManager::blocks_after(const Sequence& sequence, int64_t appended) const noexcept {
  const auto blocks = static_cast<int64_t>(sequence.blocks.size());
  const int64_t beyond = sequence.num_tokens + appended - blocks * block_size_;
  return beyond <= 0 ? blocks : blocks + blocks_for(beyond);
}

// After this, commit_append() cannot fail: enough blocks are free, and tables have the capacity.
KVCacheManager::AppendPlan KVCacheManager::plan_append(const char* call, size_t copies_room) {
  AppendPlan plan;
  shared_tails_.clear();
  for (const BatchItem& item : batch_) {
    if (item.num_tokens == 0) continue;
    const Sequence& sequence = sequences_[item.position];
    if (item.num_tokens > kMaxTokens - sequence.num_tokens) {
      throw InvalidArgument(concat(call, ": num_tokens: expected at most ",
                                   kMaxTokens - sequence.num_tokens, " (sequence ", sequence.id,
                                   " has ", sequence.num_tokens, "), got ", item.num_tokens));
    }
    const auto blocks = static_cast<int64_t>(sequence.blocks.size());
    plan.blocks += blocks_after(sequence, item.num_tokens) - blocks;
    const bool partly_filled = sequence.num_tokens != blocks * block_size_;
    if (partly_filled && pool_.references(sequence.blocks.back()) > 1) {
      shared_tails_.push_back(sequence.blocks.back());
    }
  }
  // Of the sharers that append, each gets a copy, but for the one left alone with the block.
  std::sort(shared_tails_.begin(), shared_tails_.end());
  for (size_t i = 0; i < shared_tails_.size(); ++i) {
    const int32_t block = shared_tails_[i];
    const bool last_of_block = i + 1 == shared_tails_.size() || shared_tails_[i + 1] != block;
    if (!last_of_block) {
      ++plan.copies;
    } else {
      const auto first = std::lower_bound(shared_tails_.begin(), shared_tails_.end(), block);
      const int64_t appending = shared_tails_.begin() + i + 1 - first;
      if (appending < pool_.references(block)) ++plan.copies;
    }
  }
  plan.blocks += plan.copies;

  if (plan.blocks > pool_.num_free()) throw OutOfBlocks(call, plan.blocks, pool_.num_free());
  if (plan.copies > static_cast<int64_t>(copies_room)) {
    throw InvalidArgument(
        concat(call, ": copies: expected room for ", plan.copies, " pairs, got ", copies_room));
  }
  for (const BatchItem& item : batch_) {
    std::vector<int32_t>& blocks = sequences_[item.position].blocks;
    const size_t wanted = blocks_after(sequences_[item.position], item.num_tokens);
    if (wanted > blocks.capacity()) blocks.reserve(std::max(wanted, 2 * blocks.capacity()));
  }
  return plan;
}

int64_t KVCacheManager::commit_append(std::span<BlockCopy> copies) {
  int64_t num_copies = 0;
  for (const BatchItem& item : batch_) {
    if (item.num_tokens == 0) continue;
    Sequence& sequence = sequences_[item.position];
    std::vector<int32_t>& blocks = sequence.blocks;
    const int64_t wanted = blocks_after(sequence, item.num_tokens);
    const bool partly_filled =
        sequence.num_tokens != static_cast<int64_t>(blocks.size()) * block_size_;
    if (partly_filled && pool_.references(blocks.back()) > 1) {
      const int32_t source = blocks.back();
      const int32_t destination = pool_.take();
      copies[num_copies++] = {source, destination};
      pool_.release(source);
      blocks.back() = destination;
    }
    while (static_cast<int64_t>(blocks.size()) < wanted) blocks.push_back(pool_.take());
    sequence.num_tokens += item.num_tokens;
  }
  num_copies_ += num_copies;
  return num_copies;
}

// `appended`: the batch's tokens are still to be appended; else they are the last ones there.
void KVCacheManager::check_room(const char* call, const BatchBuffers& buffers,
                                bool appended) const {
  check_buffers(buffers);
  const auto num_sequences = static_cast<int64_t>(batch_.size());
  if (num_sequences > buffers.max_sequences) {
    throw InvalidArgument(concat(call, ": sequence_ids: expected at most ", buffers.max_sequences,
                                 " (rows of block_tables), got ", num_sequences));
  }
  const int64_t max_tokens =
      std::min(static_cast<int64_t>(buffers.slot_mapping.size()), kMaxTokens);
  int64_t total = 0;
  for (const BatchItem& item : batch_) {
    const Sequence& sequence = sequences_[item.position];
    if (!appended && item.num_tokens > sequence.num_tokens) {
      throw InvalidArgument(concat(call, ": num_query_tokens: expected at most ",
                                   sequence.num_tokens, " (the tokens of sequence ", sequence.id,
                                   "), got ", item.num_tokens));
    }
    if (item.num_tokens > max_tokens - total) {
      throw InvalidArgument(concat(call, ": tokens in all: expected at most ", max_tokens,
                                   " (elements of slot_mapping), got more"));
    }
    total += item.num_tokens;
    const int64_t blocks = appended ? blocks_after(sequence, item.num_tokens)
                                    : static_cast<int64_t>(sequence.blocks.size());
    if (blocks > buffers.max_blocks) {
      throw InvalidArgument(concat(call, ": blocks of sequence ", sequence.id,
                                   ": expected at most ", buffers.max_blocks,
                                   " (columns of block_tables), got ", blocks));
    }
  }
}

void KVCacheManager::fill(const BatchBuffers& buffers) const noexcept {
  const bool with_positions = !buffers.positions.empty();
  int64_t written = 0;  // query tokens so far
  int64_t row = 0;
  for (const BatchItem& item : batch_) {
    const Sequence& sequence = sequences_[item.position];
    const int32_t* blocks = sequence.blocks.data();
    std::copy_n(blocks, sequence.blocks.size(), buffers.block_tables + row * buffers.row_stride);
    buffers.seq_lens[row] = static_cast<int32_t>(sequence.num_tokens);
    buffers.query_start_loc[row] = static_cast<int32_t>(written);
    ++row;
    if (item.num_tokens == 0) continue;

    int64_t token = sequence.num_tokens - item.num_tokens;
    const int64_t last = static_cast<int64_t>(sequence.blocks.size()) - 1;
    int64_t column = token >= last * block_size_ ? last : token / block_size_;
    int64_t offset = token - column * block_size_;
    while (token < sequence.num_tokens) {
      const int64_t count = std::min(block_size_ - offset, sequence.num_tokens - token);
      const int64_t slot = blocks[column] * block_size_ + offset;
      for (int64_t i = 0; i < count; ++i) buffers.slot_mapping[written + i] = slot + i;
      if (with_positions) {
        for (int64_t i = 0; i < count; ++i) buffers.positions[written + i] = token + i;
      }
      written += count;
      token += count;
      ++column;
      offset = 0;
    }
  }
  std::fill(buffers.seq_lens.begin() + row, buffers.seq_lens.end(), 0);
  std::fill(buffers.query_start_loc.begin() + row, buffers.query_start_loc.end(),
            static_cast<int32_t>(written));
  std::fill(buffers.slot_mapping.begin() + written, buffers.slot_mapping.end(), -1);
  if (with_positions) {
    std::fill(buffers.positions.begin() + written, buffers.positions.end(), 0);
  }
}

}  // namespace vllm_kernels::kv_cache
