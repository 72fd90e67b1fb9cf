// Which cache blocks are free, and how many tables hold each of the others.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "export.h"

namespace vllm_kernels::kv_cache {

// Block ids are int32 (the dtype of block tables); one value beyond the last id is the list's head.
inline constexpr int64_t kMaxBlocks = std::numeric_limits<int32_t>::max() - 1;
inline constexpr int64_t kMaxReferences = std::numeric_limits<int32_t>::max();

// Blocks 0 .. num_blocks - 1. A block has a reference count, and is in the free list exactly while
// that count is 0. The free list is ordered by time of release: take() gives the block that was
// released longest ago, and a block anywhere in the list can be revived in O(1). 12 bytes a block.
//
// Not thread-safe: KVCacheManager locks around it. Every call either succeeds or throws with the
// pool unchanged; nothing but the constructor and check_integrity() allocates memory.
class VLLM_KERNELS_EXPORT BlockPool {
 public:
  // num_blocks in [1, kMaxBlocks]; max_references in [1, kMaxReferences], per block.
  explicit BlockPool(int64_t num_blocks, int64_t max_references = kMaxReferences);

  int32_t num_blocks() const noexcept { return num_blocks_; }
  int32_t num_free() const noexcept { return num_free_; }
  int32_t num_used() const noexcept { return num_blocks_ - num_free_; }
  // Blocks with two or more references.
  int32_t num_shared() const noexcept { return num_shared_; }
  // The largest num_used() since construction or reset().
  int32_t peak_used() const noexcept { return peak_used_; }
  int64_t max_references() const noexcept { return max_references_; }

  // References of a block; throws InvalidArgument for an id out of range.
  int32_t references(int32_t block) const {
    check_id("references", block);
    return references_[block];
  }

  // The block released longest ago, now with one reference. Throws OutOfBlocks.
  int32_t take();

  // One reference more. A free block is revived: it leaves the free list.
  // Throws InvalidArgument for an id out of range, ReferenceOverflow at max_references.
  void add_reference(int32_t block);

  // One reference less; at 0 the block goes to the end of the free list.
  // Throws InvalidArgument for an id out of range or a block without references (a double free).
  void release(int32_t block);

  // The state after construction.
  void reset() noexcept;

  // Throws IntegrityError unless links, counts and counters agree. O(num_blocks).
  void check_integrity() const;

 private:
  friend struct TestAccess;

  void check_id(const char* call, int32_t block) const {
    if (block < 0 || block >= num_blocks_) throw_bad_id(call, block);
  }
  [[noreturn]] void throw_bad_id(const char* call, int32_t block) const;
  void unlink(int32_t block) noexcept;
  void link_last(int32_t block) noexcept;
  void count_use() noexcept;

  int32_t num_blocks_;
  int32_t num_free_ = 0;
  int32_t num_shared_ = 0;
  int32_t peak_used_ = 0;
  int64_t max_references_;
  std::vector<int32_t> references_;  // [num_blocks]
  // The free list, a ring through the head at index num_blocks: next_[head] is taken first. Links
  // of used blocks are kUnlinked.
  std::vector<int32_t> previous_;  // [num_blocks + 1]
  std::vector<int32_t> next_;      // [num_blocks + 1]
};

}  // namespace vllm_kernels::kv_cache
