// Which sequence owns which cache block.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <mutex>
#include <span>
#include <vector>

#include "export.h"
#include "kv_cache/batch_buffers.h"
#include "kv_cache/block_pool.h"
#include "kv_cache/sequence_index.h"
#include "kv_cache/statistics.h"

namespace vllm_kernels::kv_cache {

// seq_lens and query_start_loc are int32.
inline constexpr int64_t kMaxTokens = std::numeric_limits<int32_t>::max();

// Copy the keys and values of block `source` to block `destination`, in every layer. Two int64, so
// that an array of them is copy_blocks' block_mapping [n, 2].
struct BlockCopy {
  int64_t source;
  int64_t destination;
};

// Maps sequence ids (any int64 that the caller likes) to tables of block ids. Token i of a sequence
// lies in slot table[i / block_size] * block_size + i % block_size, and a table holds exactly
// ceil(tokens / block_size) blocks. Sequences may share blocks (fork, reorder); a sequence that
// appends to a shared, partly filled last block gets a block of its own first, and the caller is
// told to copy: run the copies in the order in which they were returned, before anything is
// written to the cache. Memory that the manager hands out is the caller's; it never touches it.
//
// Errors: every call is all or nothing. Whatever it throws (errors.h, std::bad_alloc), the state
// and the caller's buffers are as before. Ids in one batch are distinct.
//
// Threads: every call takes the manager's mutex, so calls from several threads are safe and happen
// one after the other. A copy of the manager that fork(2) made in a child process refuses every
// call: parent and child would hand out the same blocks.
class VLLM_KERNELS_EXPORT KVCacheManager {
 public:
  // num_blocks in [1, kMaxBlocks], block_size (tokens) >= 1, their product an int64;
  // max_references: sequences that may share one block.
  KVCacheManager(int64_t num_blocks, int64_t block_size, int64_t max_references = kMaxReferences);

  KVCacheManager(const KVCacheManager&) = delete;
  KVCacheManager& operator=(const KVCacheManager&) = delete;

  int64_t num_blocks() const noexcept { return pool_.num_blocks(); }
  int64_t block_size() const noexcept { return block_size_; }
  int64_t num_free_blocks() const;
  int64_t num_sequences() const;

  // --- one sequence ---
  // Whether allocate(id, num_tokens) would find enough free blocks.
  bool can_allocate(int64_t num_tokens) const;
  // A new sequence of num_tokens >= 0 tokens. Throws DuplicateSequence, OutOfBlocks.
  void allocate(int64_t id, int64_t num_tokens);
  // Lengthens a sequence by num_tokens >= 0; at most one pair. Throws UnknownSequence, OutOfBlocks.
  std::vector<BlockCopy> append(int64_t id, int64_t num_tokens);
  // A new sequence `child` that shares all blocks of `parent`.
  void fork(int64_t parent, int64_t child);
  // Forgets a sequence; blocks that nobody else holds become free, the last one first.
  void free(int64_t id);
  // Shortens a sequence to num_tokens in [0, its tokens].
  void truncate(int64_t id, int64_t num_tokens);
  bool contains(int64_t id) const;
  int64_t num_tokens(int64_t id) const;
  std::vector<int32_t> block_table(int64_t id) const;
  // Slots of tokens [start, start + slots.size()) into `slots`.
  void slot_mapping(int64_t id, int64_t start, std::span<int64_t> slots) const;
  std::vector<int64_t> sequence_ids() const;

  // --- many sequences in one call; arrays of one length ---
  void allocate(std::span<const int64_t> ids, std::span<const int64_t> num_tokens);
  // Writes the pairs to `copies` and returns how many; room for ids.size() is always enough, and
  // less is an error before anything changes if it does not do.
  int64_t append(std::span<const int64_t> ids, std::span<const int64_t> num_tokens,
                 std::span<BlockCopy> copies);
  void free(std::span<const int64_t> ids);
  void truncate(std::span<const int64_t> ids, std::span<const int64_t> num_tokens);
  // Beam search: ids[i] becomes what parents[i] was before the call (its blocks shared, its own
  // given back). Parents may repeat, and need not be among the ids.
  void reorder(std::span<const int64_t> ids, std::span<const int64_t> parents);
  // Fills `buffers` for a forward pass over the last num_query_tokens[i] tokens of every sequence.
  void build(std::span<const int64_t> ids, std::span<const int64_t> num_query_tokens,
             const BatchBuffers& buffers);
  // append and build in one: the appended tokens are the query tokens.
  int64_t step(std::span<const int64_t> ids, std::span<const int64_t> num_tokens,
               const BatchBuffers& buffers, std::span<BlockCopy> copies);

  // --- all ---
  // Forgets every sequence and sets the statistics to zero.
  void reset();
  Statistics statistics() const;
  // Throws IntegrityError unless pool, tables and lengths agree. O(num_blocks + table entries).
  void check_integrity() const;

 private:
  friend struct TestAccess;

  struct Sequence {
    int64_t id = 0;
    int64_t num_tokens = 0;
    std::vector<int32_t> blocks;  // ceil(num_tokens / block_size)
    uint64_t batch = 0;           // last batch that named it: finds an id that stands there twice
  };
  struct BatchItem {
    int32_t position;    // in sequences_
    int64_t num_tokens;  // to append, to query or to keep
  };
  struct AppendPlan {
    int64_t blocks = 0;  // to take, those for copies included
    int64_t copies = 0;
  };

  std::unique_lock<std::mutex> lock() const;
  int64_t blocks_for(int64_t num_tokens) const noexcept;
  int64_t blocks_after(const Sequence& sequence, int64_t appended) const noexcept;
  int32_t position_of(const char* call, int64_t id) const;
  const Sequence& find(const char* call, int64_t id) const;

  // Validation: fills batch_ or throws.
  void resolve(const char* call, std::span<const int64_t> ids, const char* counts_name,
               std::span<const int64_t> counts);
  AppendPlan plan_append(const char* call, size_t copies_room);
  void check_room(const char* call, const BatchBuffers& buffers, bool appended) const;
  // Changes: cannot fail after the validation above.
  int64_t commit_append(std::span<BlockCopy> copies);
  void fill(const BatchBuffers& buffers) const noexcept;
  void drop_blocks(std::vector<int32_t>& blocks, size_t keep);
  void remove(int32_t position);

  const int64_t block_size_;
  BlockPool pool_;
  std::vector<Sequence> sequences_;  // dense, in no order
  SequenceIndex index_;
  int64_t num_copies_ = 0;

  uint64_t batch_number_ = 0;
  std::vector<BatchItem> batch_;       // scratch: the batch in work
  std::vector<int32_t> shared_tails_;  // scratch: its shared, partly filled last blocks

  mutable std::mutex mutex_;
  const uint32_t process_;  // generation of the process that built it
};

}  // namespace vllm_kernels::kv_cache
