// The KV-cache manager: block tables of many sequences over one pool of cache blocks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "export.h"
#include "kv_cache/batch_buffers.h"
#include "kv_cache/batch_plan.h"
#include "kv_cache/block_pool.h"
#include "kv_cache/events.h"
#include "kv_cache/options.h"
#include "kv_cache/prefix_cache.h"
#include "kv_cache/sequence_index.h"
#include "kv_cache/shard.h"
#include "kv_cache/statistics.h"

namespace vllm_kernels::kv_cache {

// An order to copy the keys and values of a block in every layer. It is two int64, so that an array
// of them is the block_mapping [n, 2] of copy_blocks and swap_blocks.
struct BlockCopy {
  int64_t source;
  int64_t destination;
};

// Optional arguments of append() and step().
struct AppendOptions {
  std::optional<std::span<const int32_t>> tokens;  // ids of all appended tokens, sequence by
                                                   // sequence; constant during the call
  int64_t lookahead = 0;  // slots past the appended tokens, for speculative tokens
};

// The manager maps sequence ids to tables of block ids, one table for each group of layers. An id
// is any int64 of the caller. Token i of a sequence is in slot table[i / block_size] * block_size +
// i % block_size. A table has ceil(tokens / block_size) entries, and more for lookahead. The
// manager never touches the memory of the cache.
//
// Sharing: sequences share blocks after fork, reorder, or with a common prefix. A sequence that
// appends to a shared, partly filled block gets a new block first. The call returns the copy to
// make. Run all copies in the returned order, before anything is written to the cache.
//
// Shards: with Options::shards = N, a sequence is held by N ranks together (shard.h). Each rank has
// a manager, and all get the same calls. A block then is N * block_size tokens, in tables, in
// prefixes and in windows, so each rank takes, shares, evicts and refuses the same blocks.
// Arguments count tokens of whole sequences. Slots and lengths are the rank's own: the slot of a
// token on another rank is -1.
//
// Prefix caching: allocate() and append() with tokens, and record_tokens(), record token ids. Every
// full block with recorded tokens is registered under them. Later sequences that start with the
// same tokens share it. The block stays findable after its last sequence is freed, until it is
// evicted. Blocks are registered when they are handed out. So a batch that reads a block must not
// run before the batch that fills it.
//
// Sliding windows: append() gives back the blocks that no appended or later token can see. The
// table then has kNullBlock in their stead.
//
// Errors: every call is all or nothing. After any error (errors.h, std::bad_alloc) the state and
// the caller's buffers are as before. The ids of one batch are distinct.
//
// Threads: every call takes the manager's mutex, so calls from several threads are safe and run one
// after the other. After fork(2) the child's copy of the manager refuses every call: otherwise
// parent and child would hand out the same blocks.
class VLLM_KERNELS_EXPORT KVCacheManager {
 public:
  explicit KVCacheManager(const Options& options);
  // num_blocks in [1, kMaxBlocks], block_size (tokens) >= 1, their product an int64;
  // max_references limits the sequences that share one block.
  KVCacheManager(int64_t num_blocks, int64_t block_size, int64_t max_references = kMaxReferences);

  KVCacheManager(const KVCacheManager&) = delete;
  KVCacheManager& operator=(const KVCacheManager&) = delete;

  int64_t num_blocks() const noexcept { return pool_.num_blocks(); }
  int64_t num_host_blocks() const noexcept { return host_pool_ ? host_pool_->num_blocks() : 0; }
  int64_t block_size() const noexcept { return shard_.block_size; }
  // Tokens of a block on all ranks: shards * block_size.
  int64_t block_tokens() const noexcept { return block_tokens_; }
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
  // Adds a sequence of num_tokens >= 0 tokens. record_tokens() may record their ids later, under
  // these keys. Throws DuplicateSequence, OutOfBlocks.
  void allocate(int64_t id, int64_t num_tokens, const PrefixKeys& keys = {});
  // Lengthens a sequence by num_tokens >= 0. Returns at most one copy for each group. Throws
  // UnknownSequence, OutOfBlocks.
  std::vector<BlockCopy> append(int64_t id, int64_t num_tokens, const AppendOptions& options = {});
  // Adds a sequence `child` that shares all blocks of `parent` except its lookahead.
  void fork(int64_t parent, int64_t child);
  // Forgets a sequence. Blocks without another holder become free, the last block first. Blocks
  // past the first num_computed tokens become unfindable: no forward pass has filled them.
  void free(int64_t id, int64_t num_computed = kMaxTokens);
  // Shortens a sequence to num_tokens in [0, its tokens]. The blocks in the window of the next
  // token must be present. num_computed is as for free(), and counts tokens before the call.
  void truncate(int64_t id, int64_t num_tokens, int64_t num_computed = kMaxTokens);
  bool contains(int64_t id) const;
  bool is_swapped(int64_t id) const;
  int64_t num_tokens(int64_t id) const;
  // The tokens of this rank among them.
  int64_t num_local_tokens(int64_t id) const;
  // Leading tokens with recorded ids; -1 if the manager does not track them (any more).
  int64_t num_known_tokens(int64_t id) const;
  std::vector<int32_t> block_table(int64_t id, int64_t group = 0) const;
  // Slots of tokens [start, start + slots.size()) into `slots`; -1 in the null block and on other
  // ranks.
  void slot_mapping(int64_t id, int64_t start, std::span<int64_t> slots, int64_t group = 0) const;
  std::vector<int64_t> sequence_ids() const;

  // --- prefixes ---
  // The number of leading tokens that are cached, in whole blocks. At least one token is left to
  // compute.
  int64_t match(std::span<const int32_t> tokens, const PrefixKeys& keys) const;
  bool can_allocate(std::span<const int32_t> tokens, const PrefixKeys& keys) const;
  // Adds a sequence that shares the cached prefix of `tokens`. It gets slots for up to num_new
  // further tokens (kMaxTokens: all). Returns the number of cached tokens.
  int64_t allocate(int64_t id, std::span<const int32_t> tokens, int64_t num_new,
                   const PrefixKeys& keys);
  // Records the ids of the next num_tokens[i] tokens of each sequence. They have slots already.
  void record_tokens(std::span<const int64_t> ids, std::span<const int64_t> num_tokens,
                     std::span<const int32_t> tokens);
  // Leading full blocks that all sequences share (for cascade attention).
  int64_t num_common_prefix_blocks(std::span<const int64_t> ids, int64_t group = 0) const;
  // Makes blocks unfindable. Sequences that hold them keep them.
  void evict_blocks(std::span<const int64_t> blocks);
  // Makes all blocks unfindable, and also the blocks that present sequences will fill.
  void reset_prefix_cache();
  // Events since the last call.
  Events take_events();
  // take_events() in two calls, for a caller that may fail in between. The first returns a copy,
  // the second forgets the first `count` events. Only one thread at a time may use them.
  Events peek_events() const;
  void drop_events(size_t count);

  // --- many sequences in one call; arrays of one length ---
  // The keys are the same for all sequences.
  void allocate(std::span<const int64_t> ids, std::span<const int64_t> num_tokens,
                const PrefixKeys& keys = {});
  // Writes the copies to make to `copies` and returns their number. Room for
  // ids.size() * num_groups() is always enough. Too little room is an error before any change.
  int64_t append(std::span<const int64_t> ids, std::span<const int64_t> num_tokens,
                 std::span<BlockCopy> copies, const AppendOptions& options = {});
  // num_computed is empty, or has a count for each sequence.
  void free(std::span<const int64_t> ids, std::span<const int64_t> num_computed = {});
  void truncate(std::span<const int64_t> ids, std::span<const int64_t> num_tokens,
                std::span<const int64_t> num_computed = {});
  // Beam search: ids[i] becomes a fork of parents[i] as it was before the call, and gives its own
  // blocks back. Parents may repeat, and need not be among the ids.
  void reorder(std::span<const int64_t> ids, std::span<const int64_t> parents);
  // Fills the buffers of each group for a forward pass. Its query tokens are the last
  // num_query_tokens[i] tokens of each sequence. Returns the number of query tokens.
  int64_t build(std::span<const int64_t> ids, std::span<const int64_t> num_query_tokens,
                std::span<BatchBuffers* const> buffers);
  // append() and build() in one call. The appended tokens are the query tokens.
  int64_t step(std::span<const int64_t> ids, std::span<const int64_t> num_tokens,
               std::span<BatchBuffers* const> buffers, std::span<BlockCopy> copies,
               const AppendOptions& options = {});

  // --- host blocks ---
  // Entries of the sequences' tables: an upper bound for the pairs of swap_out() and swap_in().
  int64_t num_table_entries(std::span<const int64_t> ids) const;
  bool can_swap_out(std::span<const int64_t> ids);
  bool can_swap_in(std::span<const int64_t> ids);
  // Moves sequences to host blocks. The pairs are (device block, host block), with each block once.
  // Blocks that the sequences share among each other stay shared. Returns the number of pairs.
  int64_t swap_out(std::span<const int64_t> ids, std::span<BlockCopy> copies);
  // Moves them back. The pairs are (host block, device block). A block still cached needs no copy.
  int64_t swap_in(std::span<const int64_t> ids, std::span<BlockCopy> copies);

  // Throws in a fork of the process that made the manager.
  void check_process() const;

  // --- all ---
  // Forgets every sequence and every cached block, and sets the statistics to zero. Throws
  // InvalidArgument while blocks are held.
  void reset();
  Statistics statistics() const;
  // Throws IntegrityError unless pools, tables, prefixes and lengths agree.
  // O(blocks + table entries).
  void check_integrity() const;

  // For one group of layers.
  int64_t build(std::span<const int64_t> ids, std::span<const int64_t> num_query_tokens,
                BatchBuffers& buffers) {
    BatchBuffers* one = &buffers;
    return build(ids, num_query_tokens, std::span(&one, 1));
  }
  int64_t step(std::span<const int64_t> ids, std::span<const int64_t> num_tokens,
               BatchBuffers& buffers, std::span<BlockCopy> copies,
               const AppendOptions& options = {}) {
    BatchBuffers* one = &buffers;
    return step(ids, num_tokens, std::span(&one, 1), copies, options);
  }

 private:
  friend struct TestAccess;
  friend class Ledger;

  // The extra bytes of one block, such as the image that its placeholder tokens stand for.
  struct BlockExtra {
    int64_t index;  // of the block in its sequence
    PrefixCache::Extra bytes;
  };
  // Two cache lines of the processor: the first for every step, the second for token ids.
  struct alignas(64) Sequence {
    int64_t num_tokens = 0;
    std::vector<int32_t> blocks;  // [entries, num_groups]; host blocks if swapped
    uint64_t batch = 0;           // number of the last batch with this sequence
    uint64_t serial = 0;          // unique in this process
    int64_t edits = 0;            // changes of existing table entries
    bool swapped = false;
    // True: the partly filled last block has one holder and is not findable, so append() need not
    // look at it. False: append() must look.
    bool own_tail = true;
    // The recorded tokens: num_hashed blocks, then the tail. With node kNone there are none.
    int32_t node = PrefixCache::kNone;                      // of the last hashed block, or a root
    int64_t num_hashed = 0;                                 // blocks
    std::vector<int32_t> tail;                              // tokens, fewer than block_tokens_
    std::shared_ptr<const std::vector<BlockExtra>> extras;  // ascending; or null
    int64_t id = 0;
  };
  static_assert(sizeof(Sequence) == 128);
  struct Swap {
    int32_t source;       // host block
    int32_t destination;  // block
    int32_t node;         // of its tokens, or kNone
    int32_t group;
    bool claimed = false;  // a table already owns the destination's first reference
  };

  // Members that are `inline` in a .cpp run once an item. The class is exported, so a member that
  // is not inline is called through the linkage table and never inlined.
  static constexpr size_t kPrefetchDistance = 12;       // batch items, or table entries
  static constexpr int32_t kNone = PrefixCache::kNone;  // no node, or no block of a node

  std::unique_lock<std::mutex> lock() const;
  int64_t block_of(int64_t token) const noexcept {
    return block_shift_ >= 0 ? token >> block_shift_ : token / block_tokens_;
  }
  int64_t blocks_for(int64_t num_tokens) const noexcept {
    return block_of(num_tokens + block_tokens_ - 1);
  }
  int64_t entries(const Sequence& sequence) const noexcept {
    const auto size = static_cast<int64_t>(sequence.blocks.size());
    return windows_.size() == 1 ? size : size / num_groups();
  }
  int64_t entries_after(const Sequence& sequence, int64_t appended) const noexcept {
    return std::max(entries(sequence), blocks_for(sequence.num_tokens + appended));
  }
  bool is_null(int32_t block) const noexcept {
    return block == kNullBlock && pool_.has_null_block();
  }
  // First block that a token at this position sees in a group.
  int64_t first_visible(int64_t position, int64_t group) const noexcept {
    const int64_t window = windows_[group];
    return window == kFullAttention || position < window ? 0 : block_of(position - window + 1);
  }
  bool tracks_tokens(const Sequence& sequence) const noexcept { return sequence.node != kNone; }
  int64_t num_recorded(const Sequence& sequence) const noexcept {
    return sequence.num_hashed * block_tokens_ + static_cast<int64_t>(sequence.tail.size());
  }
  int64_t watermark(int64_t needed) const noexcept { return needed > 0 ? watermark_blocks_ : 0; }

  // Checks. They throw, and change no sequence.
  enum class Where { kDevice, kHost, kAnywhere };
  int32_t position_of(const char* call, int64_t id) const;
  const Sequence& find(const char* call, int64_t id) const;
  void check_where(const char* call, const Sequence& sequence, Where where) const;
  void check_group(const char* call, int64_t group) const;
  void check_new(const char* call, const char* argument, int64_t id) const;
  void check_visible(const Sequence& sequence, int64_t num_tokens) const;
  [[noreturn]] void refuse_tokens(const char* call, const Sequence& sequence, int64_t num_tokens,
                                  bool have_slots) const;
  void check_shared_fills(const char* call, std::span<const int32_t> tokens, BatchPlan& plan) const;
  void check_room(const char* call, std::span<BatchBuffers* const> buffers, const BatchPlan& plan,
                  const AppendOptions* append) const;
  void check_recorded_blocks(const Sequence& sequence, std::map<int32_t, int64_t>& pins) const;

  // Plans. They throw, fill a plan and reserve memory, and change no sequence otherwise.
  BatchPlan& plan_batch(const char* call, std::span<const int64_t> ids, const char* counts_name,
                        std::span<const int64_t> counts, Where where = Where::kDevice);
  void plan_append(const char* call, size_t copies_room, const AppendOptions& options,
                   BatchPlan& plan);
  int64_t count_new_entries(const char* call, const AppendOptions& options, BatchPlan& plan) const;
  int64_t count_copies(BatchPlan& plan) const;
  int64_t count_freed(BatchPlan& plan) const;
  void find_out_of_window(const Sequence& sequence, BatchPlan& plan) const;
  void reserve_append(const AppendOptions& options, BatchPlan& plan);
  void plan_tokens(const char* call, std::span<const int32_t> tokens, bool have_slots,
                   BatchPlan& plan);
  void plan_fill(const BatchItem& item, Sequence& sequence, int64_t first_token, BatchPlan& plan);
  void reserve_fills(const BatchPlan& plan);
  void hash_first_blocks(std::span<const int32_t> tokens, BatchPlan& plan) const;
  void plan_forget_uncomputed(const BatchPlan& plan);
  std::vector<Sequence> plan_reorder(const BatchPlan& plan) const;
  void add_references(const std::vector<Sequence>& sequences);
  Sequence share(const Sequence& parent) const;
  void reserve_sequences(size_t extra);
  void reserve_events(int64_t stored, int64_t removed);
  void reserve_prompt(const PrefixLookup& lookup, BatchPlan& plan, Sequence& sequence);

  // Commits. They cannot fail after the plan.
  int64_t commit_append(const AppendOptions& options, std::span<BlockCopy> copies, BatchPlan& plan);
  void commit_tokens(Sequence& sequence, const int32_t* tokens, int64_t count,
                     std::span<const Hash>& first_hashes);
  void commit_forget_uncomputed(const BatchPlan& plan);
  void commit_free(BatchPlan& plan);
  void commit_reorder(const BatchPlan& plan, std::vector<Sequence>& replacements);
  void commit_prompt(const PrefixLookup& lookup, std::span<const int32_t> tokens,
                     Sequence&& sequence, BatchPlan& plan);
  void release_out_of_window(Sequence& sequence);
  void drop_entries(Sequence& sequence, int64_t keep);
  void forget_tokens(Sequence& sequence, int64_t keep);
  void remove(int32_t position);
  Sequence& push_sequence(Sequence&& sequence);

  // Buffers.
  int64_t fill(std::span<BatchBuffers* const> buffers, const BatchPlan& plan) const noexcept;
  template <bool kOneRank>  // whether this rank holds all tokens
  int64_t fill(BatchBuffers& buffers, int64_t group, const BatchPlan& plan) const noexcept;
  void fill_slots(const Sequence& sequence, int64_t group, int64_t token,
                  std::span<int64_t> slots) const noexcept;
  void fill_row(BatchBuffers& buffers, int64_t row, const Sequence& sequence,
                int64_t group) const noexcept;
  static void fill_padding(BatchBuffers& buffers, int64_t rows, int64_t tokens) noexcept;
  void prefetch_recorded(const BatchPlan& plan, size_t item) const noexcept;
  void prefetch_last_block(const BatchPlan& plan, size_t item) const noexcept;

  // Prefixes.
  std::shared_ptr<const std::vector<BlockExtra>> make_extras(const PrefixKeys& keys) const;
  static const PrefixCache::Extra& extra_of(const std::vector<BlockExtra>* extras,
                                            int64_t index) noexcept;
  const PrefixLookup& look_up(int32_t root, std::span<const int32_t> tokens,
                              const std::vector<BlockExtra>* extras) const;
  void walk(int32_t root, std::span<const int32_t> tokens, const std::vector<BlockExtra>* extras,
            PrefixLookup& lookup) const;
  int64_t usable_blocks(const PrefixLookup& lookup, int64_t limit) const;
  int32_t hit_block(const PrefixLookup& lookup, int64_t index, int64_t group) const;
  int64_t revived_blocks(const PrefixLookup& lookup) const;
  void add_tokens(Sequence& sequence, const int32_t* tokens, int64_t count,
                  std::span<const Hash> hashes = {});
  void register_block(int32_t block, int32_t node, int64_t group);
  void unregister_block(int32_t block);
  void detach(int32_t block, int32_t node);
  int32_t take_block();
  void take_blocks(int64_t count, std::vector<int32_t>& blocks, std::vector<int32_t>& evicted);
  void clear_cache();

  // Blocks for a Ledger (ledger.cpp), which lends them to other instances. They are in no table.
  // The ledger locks the manager around these calls.
  void plan_hold(const char* call, int64_t num_blocks, int64_t keep_free);
  void commit_hold(std::span<int32_t> blocks);
  void release_held(int32_t block);

  // Swapping.
  std::vector<int32_t> blocks_of(const BatchPlan& plan) const;
  std::vector<Swap> plan_swap_in(const BatchPlan& plan, int64_t& needed) const;

  const Shard shard_;
  const int64_t block_tokens_;
  const int block_shift_;  // log2 of block_tokens_; -1 if that is not a power of two
  const std::vector<int64_t> windows_;
  const bool has_windows_;
  const int64_t watermark_blocks_;
  const bool record_events_;
  BlockPool pool_;
  std::optional<BlockPool> host_pool_;
  std::optional<PrefixCache> cache_;
  std::vector<Sequence> sequences_;  // dense, in no order
  SequenceIndex index_;
  Events events_;
  std::vector<bool> held_;  // for a Ledger; [num_blocks], or empty: none so far
  int64_t num_held_ = 0;
  int64_t num_copies_ = 0;
  int64_t queried_tokens_ = 0;
  int64_t hit_tokens_ = 0;
  uint64_t batch_number_ = 0;

  // Memory for the plan of the current call. No call reads what an earlier one left in it.
  BatchPlan plan_;
  mutable PrefixLookup lookup_;

  mutable std::mutex mutex_;
  const uint32_t process_;  // generation of the process that built it
};

}  // namespace vllm_kernels::kv_cache
