// Which sequence owns which cache block.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "export.h"
#include "kv_cache/batch_buffers.h"
#include "kv_cache/block_pool.h"
#include "kv_cache/events.h"
#include "kv_cache/options.h"
#include "kv_cache/prefix_cache.h"
#include "kv_cache/sequence_index.h"
#include "kv_cache/statistics.h"

namespace vllm_kernels::kv_cache {

// Copy the keys and values of block `source` to block `destination`, in every layer. Two int64, so
// that an array of them is copy_blocks' or swap_blocks' block_mapping [n, 2].
struct BlockCopy {
  int64_t source;
  int64_t destination;
};

// What append() may be told beside the counts.
struct AppendOptions {
  std::optional<std::span<const int32_t>> tokens;  // ids of all appended tokens, one sequence after
                                                   // the other; they must not change meanwhile
  int64_t lookahead = 0;  // slots to have ready behind them, for speculative tokens
};

// Maps sequence ids (any int64 that the caller likes) to tables of block ids, one table a group of
// layers. Token i of a sequence lies in slot table[i / block_size] * block_size + i % block_size; a
// table has ceil(tokens / block_size) entries, and more where lookahead asked for them. Sequences
// may share blocks (fork, reorder, a common prefix); a sequence that appends to a shared, partly
// filled block gets a block of its own first, and the caller is told to copy: run all copies in the
// order in which they were returned, before anything is written to the cache. Memory that the
// manager hands out is the caller's; it never touches it.
//
// Prefix caching: where token ids are known (allocate and append with tokens, record_tokens), every
// full block is registered under them, and later sequences that start with the same ones share it;
// it stays findable after its last sequence is freed, until the block is needed. Blocks are
// registered when they are handed out: a batch that reads a block must not run before the batch
// that was to fill it.
//
// Sliding windows: append() gives back the blocks that no token from the first appended one on can
// see; kNullBlock stands in the table instead.
//
// Errors: every call is all or nothing. Whatever it throws (errors.h, std::bad_alloc), the state
// and the caller's buffers are as before. Ids in one batch are distinct.
//
// Threads: every call takes the manager's mutex, so calls from several threads are safe and happen
// one after the other. A copy of the manager that fork(2) made in a child process refuses every
// call: parent and child would hand out the same blocks.
class VLLM_KERNELS_EXPORT KVCacheManager {
 public:
  explicit KVCacheManager(const Options& options);
  // num_blocks in [1, kMaxBlocks], block_size (tokens) >= 1, their product an int64;
  // max_references: sequences that may share one block.
  KVCacheManager(int64_t num_blocks, int64_t block_size, int64_t max_references = kMaxReferences);

  KVCacheManager(const KVCacheManager&) = delete;
  KVCacheManager& operator=(const KVCacheManager&) = delete;

  int64_t num_blocks() const noexcept { return pool_.num_blocks(); }
  int64_t num_host_blocks() const noexcept { return host_pool_ ? host_pool_->num_blocks() : 0; }
  int64_t block_size() const noexcept { return block_size_; }
  int64_t num_groups() const noexcept { return static_cast<int64_t>(windows_.size()); }
  const std::vector<int64_t>& windows() const noexcept { return windows_; }
  bool has_null_block() const noexcept { return pool_.has_null_block(); }
  // Blocks that no sequence holds: empty ones and cached ones.
  int64_t num_free_blocks() const;
  int64_t num_free_host_blocks() const;
  int64_t num_sequences() const;

  // --- one sequence ---
  // Whether allocate(id, num_tokens) would find enough free blocks.
  bool can_allocate(int64_t num_tokens) const;
  // A new sequence of num_tokens >= 0 tokens. Throws DuplicateSequence, OutOfBlocks.
  void allocate(int64_t id, int64_t num_tokens);
  // Lengthens a sequence by num_tokens >= 0; at most one pair a group. Throws UnknownSequence,
  // OutOfBlocks.
  std::vector<BlockCopy> append(int64_t id, int64_t num_tokens, const AppendOptions& options = {});
  // A new sequence `child` that shares all blocks of `parent`, those for lookahead excepted.
  void fork(int64_t parent, int64_t child);
  // Forgets a sequence; blocks that nobody else holds become free, the last one first.
  void free(int64_t id);
  // Shortens a sequence to num_tokens in [0, its tokens], but not to where a window has passed.
  void truncate(int64_t id, int64_t num_tokens);
  bool contains(int64_t id) const;
  bool is_swapped(int64_t id) const;
  int64_t num_tokens(int64_t id) const;
  // Leading tokens whose ids are known; -1 where none will be registered (any more).
  int64_t num_known_tokens(int64_t id) const;
  std::vector<int32_t> block_table(int64_t id, int64_t group = 0) const;
  // Slots of tokens [start, start + slots.size()) into `slots`; -1 in the null block.
  void slot_mapping(int64_t id, int64_t start, std::span<int64_t> slots, int64_t group = 0) const;
  std::vector<int64_t> sequence_ids() const;

  // --- prefixes ---
  // How many leading tokens are cached: whole blocks, and fewer than all tokens, so that at least
  // one is left to compute.
  int64_t match(std::span<const int32_t> tokens, const PrefixKeys& keys) const;
  bool can_allocate(std::span<const int32_t> tokens, const PrefixKeys& keys) const;
  // A new sequence that shares what is cached of `tokens`, with slots for up to num_new tokens
  // beyond (kMaxTokens: all). Returns the number of cached tokens.
  int64_t allocate(int64_t id, std::span<const int32_t> tokens, int64_t num_new,
                   const PrefixKeys& keys);
  // The ids of the next num_tokens[i] tokens of each sequence that has slots for them.
  void record_tokens(std::span<const int64_t> ids, std::span<const int64_t> num_tokens,
                     std::span<const int32_t> tokens);
  // Leading blocks that all sequences share (for cascade attention).
  int64_t num_common_prefix_blocks(std::span<const int64_t> ids, int64_t group = 0) const;
  // Makes blocks unfindable; sequences that hold them keep them.
  void evict_blocks(std::span<const int64_t> blocks);
  // Makes all blocks unfindable, and those too that sequences alive now will fill.
  void reset_prefix_cache();
  // Events since the last call.
  Events take_events();

  // --- many sequences in one call; arrays of one length ---
  void allocate(std::span<const int64_t> ids, std::span<const int64_t> num_tokens);
  // Writes the pairs to `copies` and returns how many; room for ids.size() * num_groups() is always
  // enough, and less is an error before anything changes if it does not do.
  int64_t append(std::span<const int64_t> ids, std::span<const int64_t> num_tokens,
                 std::span<BlockCopy> copies, const AppendOptions& options = {});
  void free(std::span<const int64_t> ids);
  void truncate(std::span<const int64_t> ids, std::span<const int64_t> num_tokens);
  // Beam search: ids[i] becomes what parents[i] was before the call (its blocks shared, its own
  // given back). Parents may repeat, and need not be among the ids.
  void reorder(std::span<const int64_t> ids, std::span<const int64_t> parents);
  // Fills the buffers, one set a group, for a forward pass over the last num_query_tokens[i] tokens
  // of every sequence. Returns their number in all.
  int64_t build(std::span<const int64_t> ids, std::span<const int64_t> num_query_tokens,
                std::span<BatchBuffers* const> buffers);
  // append and build in one: the appended tokens are the query tokens.
  int64_t step(std::span<const int64_t> ids, std::span<const int64_t> num_tokens,
               std::span<BatchBuffers* const> buffers, std::span<BlockCopy> copies,
               const AppendOptions& options = {});

  // --- host blocks ---
  // Blocks of the sequences' tables: an upper bound for the pairs of swap_out and swap_in.
  int64_t num_table_entries(std::span<const int64_t> ids) const;
  bool can_swap_out(std::span<const int64_t> ids) const;
  bool can_swap_in(std::span<const int64_t> ids) const;
  // Moves sequences to host blocks; (device block, host block) pairs, each block once. Blocks that
  // they share among each other stay shared. Returns the number of pairs.
  int64_t swap_out(std::span<const int64_t> ids, std::span<BlockCopy> copies);
  // And back; (host block, device block) pairs. A block that is still cached is not copied.
  int64_t swap_in(std::span<const int64_t> ids, std::span<BlockCopy> copies);

  // --- all ---
  // Forgets every sequence and every cached block, and sets the statistics to zero.
  void reset();
  Statistics statistics() const;
  // Throws IntegrityError unless pools, tables, prefixes and lengths agree. O(blocks + table
  // entries).
  void check_integrity() const;
