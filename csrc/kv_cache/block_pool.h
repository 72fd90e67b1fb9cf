// The reference count of every cache block, the lists of free blocks, and the order of eviction.
#pragma once

#include <cstdint>
#include <vector>

#include "export.h"
#include "kv_cache/options.h"

namespace vllm_kernels::kv_cache {

// The pool has blocks 0 to num_blocks - 1 and needs 16 bytes for each. A block has a reference
// count. It may have a content: a number >= 0 for the tokens that a later sequence can find in it.
//
// A block without references is free and in one of two lists: empty blocks, and cached blocks,
// which have a content. Both lists are in the order of release. take() prefers an empty block.
// Without one, it evicts the cached block that was released longest ago. Any free block can be
// revived in O(1).
//
// A null block (block 0) is in no list and has no references. It cannot be held or released.
//
// The pool is not thread-safe: KVCacheManager locks around it. Every call either succeeds or throws
// with the pool unchanged. Only the constructor and check_integrity() allocate memory.
class VLLM_KERNELS_EXPORT BlockPool {
 public:
  static constexpr int32_t kNoContent = -1;

  // num_blocks in [1, kMaxBlocks] (2 with a null block); max_references in [1, kMaxReferences].
  explicit BlockPool(int64_t num_blocks, int64_t max_references = kMaxReferences,
                     bool null_block = false);

  int32_t num_blocks() const noexcept { return num_blocks_; }
  bool has_null_block() const noexcept { return first_ != 0; }
  // All blocks but the null block.
  int32_t num_usable() const noexcept { return num_blocks_ - first_; }
  // Blocks without references, cached ones included.
  int32_t num_free() const noexcept { return num_empty_ + num_cached_; }
  int32_t num_cached() const noexcept { return num_cached_; }
  int32_t num_used() const noexcept { return num_usable() - num_free(); }
  // Blocks with two or more references.
  int32_t num_shared() const noexcept { return num_shared_; }
  // The largest num_used() since construction or reset().
  int32_t peak_used() const noexcept { return peak_used_; }
  // Cached blocks that take() gave out, since construction or reset().
  int64_t num_evictions() const noexcept { return num_evictions_; }
  int64_t max_references() const noexcept { return max_references_; }

  // References and content of a block; throw InvalidArgument for an id out of range.
  int32_t references(int32_t block) const {
    check_id("references", block);
    return blocks_[block].references;
  }
  int32_t content(int32_t block) const {
    check_id("content", block);
    return blocks_[block].content;
  }

  // Prefetches what references() and content() read.
  void prefetch(int32_t block) const noexcept { __builtin_prefetch(&blocks_[block]); }

  // Returns a block with one reference and no content. `evicted` becomes its former content, or
  // kNoContent. Throws OutOfBlocks.
  int32_t take(int32_t& evicted);
  int32_t take() {
    int32_t evicted;
    return take(evicted);
  }

  // Adds a reference. A free block is revived: it leaves its list and keeps its content.
  // Throws InvalidArgument for an id out of range, ReferenceOverflow at max_references.
  void add_reference(int32_t block);

  // Drops a reference. Without references, the block goes to the end of its list.
  // Throws InvalidArgument for an id out of range or a block without references (a double free).
  void release(int32_t block);

  // Set or clear the content of a block. A free block moves to the other list. They throw
  // InvalidArgument for an id out of range, a content < 0, or a block that has a content already.
  void set_content(int32_t block, int32_t content);
  void clear_content(int32_t block);

  // Restores the state after construction.
  void reset() noexcept;

  // Throws IntegrityError unless links, counts and counters agree. O(num_blocks).
  void check_integrity() const;

 private:
  friend struct TestAccess;

  struct Block {
    int32_t references = 0;
    int32_t content = kNoContent;
    int32_t previous = 0;  // in its list, a ring through the list's head; kUnlinked while used
    int32_t next = 0;
  };

  // The list heads follow the blocks. The block after a head is taken first.
  int32_t empty_head() const noexcept { return num_blocks_; }
  int32_t cached_head() const noexcept { return num_blocks_ + 1; }

  void check_id(const char* call, int32_t block) const {
    if (block < first_ || block >= num_blocks_) throw_bad_id(call, block);
  }
  [[noreturn]] void throw_bad_id(const char* call, int32_t block) const;
  void unlink(int32_t block) noexcept;
  void link_last(int32_t block) noexcept;
  void count_use() noexcept;
  int64_t check_list(int32_t head, bool cached) const;

  int32_t num_blocks_;
  int32_t first_;  // 1 with a null block, else 0
  int32_t num_empty_ = 0;
  int32_t num_cached_ = 0;
  int32_t num_shared_ = 0;
  int32_t peak_used_ = 0;
  int64_t num_evictions_ = 0;
  int64_t max_references_;
  std::vector<Block> blocks_;  // [num_blocks + 2]
};

}  // namespace vllm_kernels::kv_cache
