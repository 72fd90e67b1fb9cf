// Reference counts, and two doubly linked rings of free blocks in one array. A used block is in no
// ring: its links are kUnlinked. Evicting, reviving and releasing a block take O(1).
#include "kv_cache/block_pool.h"

#include <algorithm>
#include <string>

#include "kv_cache/errors.h"

namespace vllm_kernels::kv_cache {
namespace {

constexpr int32_t kUnlinked = -1;

void require(bool condition, const char* what, int64_t block) {
  if (!condition) throw IntegrityError(concat("BlockPool: ", what, ", at block ", block));
}

}  // namespace

BlockPool::BlockPool(int64_t num_blocks, int64_t max_references, bool null_block)
    : num_blocks_(static_cast<int32_t>(
          checked("BlockPool", "num_blocks", num_blocks, null_block ? 2 : 1, kMaxBlocks))),
      first_(null_block ? 1 : 0),
      max_references_(checked("BlockPool", "max_references", max_references, 1, kMaxReferences)),
      blocks_(num_blocks + 2) {
  reset();
}

void BlockPool::reset() noexcept {
  const int32_t head = empty_head();
  for (int32_t block = first_; block < num_blocks_; ++block) {
    blocks_[block] = {.previous = block - 1, .next = block + 1};
  }
  blocks_[first_].previous = head;
  blocks_[head] = {.previous = num_blocks_ - 1, .next = first_};
  blocks_[cached_head()] = {.previous = cached_head(), .next = cached_head()};
  if (has_null_block()) blocks_[kNullBlock] = {.previous = kUnlinked, .next = kUnlinked};
  num_empty_ = num_usable();
  num_cached_ = 0;
  num_shared_ = 0;
  peak_used_ = 0;
  num_evictions_ = 0;
}

int32_t BlockPool::take(int32_t& evicted) {
  int32_t block = blocks_[empty_head()].next;
  if (block == empty_head()) {
    block = blocks_[cached_head()].next;
    if (block == cached_head()) throw OutOfBlocks("BlockPool::take", 1, 0);
    ++num_evictions_;
  }
  unlink(block);
  __builtin_prefetch(&blocks_[blocks_[block].content == kNoContent ? blocks_[empty_head()].next
                                                                   : blocks_[cached_head()].next]);
  evicted = blocks_[block].content;
  blocks_[block].content = kNoContent;
  blocks_[block].references = 1;
  count_use();
  return block;
}

void BlockPool::add_reference(int32_t block) {
  check_id("add_reference", block);
  int32_t& count = blocks_[block].references;
  if (count >= max_references_) {
    throw ReferenceOverflow(concat("BlockPool::add_reference: block ", block, ": expected at most ",
                                   max_references_, " references, got one more"));
  }
  if (count == 0) {
    unlink(block);
    count_use();
  }
  if (++count == 2) ++num_shared_;
}

void BlockPool::release(int32_t block) {
  check_id("release", block);
  int32_t& count = blocks_[block].references;
  if (count == 0) {
    throw InvalidArgument(concat("BlockPool::release: block: expected one in use, got block ",
                                 block, ", which is free"));
  }
  if (--count == 1) --num_shared_;
  if (count == 0) link_last(block);
}

void BlockPool::set_content(int32_t block, int32_t content) {
  check_id("set_content", block);
  if (content < 0 || blocks_[block].content != kNoContent) {
    throw InvalidArgument(concat("BlockPool::set_content: expected a content >= 0 for a block ",
                                 "without one, got ", content, " for block ", block, " with ",
                                 blocks_[block].content));
  }
  const bool free = blocks_[block].references == 0;
  if (free) unlink(block);
  blocks_[block].content = content;
  if (free) link_last(block);
}

void BlockPool::clear_content(int32_t block) {
  check_id("clear_content", block);
  const bool free = blocks_[block].references == 0;
  if (free) unlink(block);
  blocks_[block].content = kNoContent;
  if (free) link_last(block);
}

void BlockPool::unlink(int32_t index) noexcept {
  Block& block = blocks_[index];
  blocks_[block.previous].next = block.next;
  blocks_[block.next].previous = block.previous;
  block.previous = block.next = kUnlinked;
  --(block.content == kNoContent ? num_empty_ : num_cached_);
}

void BlockPool::link_last(int32_t index) noexcept {
  Block& block = blocks_[index];
  const int32_t head = block.content == kNoContent ? empty_head() : cached_head();
  block.previous = blocks_[head].previous;
  block.next = head;
  blocks_[block.previous].next = index;
  blocks_[head].previous = index;
  ++(block.content == kNoContent ? num_empty_ : num_cached_);
}

void BlockPool::count_use() noexcept {
  peak_used_ = std::max(peak_used_, num_used());
}

void BlockPool::throw_bad_id(const char* call, int32_t block) const {
  throw InvalidArgument(concat("BlockPool::", call, ": block: expected ", first_, " to ",
                               num_blocks_ - 1, ", got ", block));
}

// The list's length. The walk follows at most num_blocks + 1 links, so that it ends in a broken
// ring. A block cannot be in it twice: its one `previous` link would have to equal two blocks.
int64_t BlockPool::check_list(int32_t head, bool cached) const {
  int64_t length = 0;
  int32_t before = head;
  for (int32_t block = blocks_[head].next; block != head; block = blocks_[block].next) {
    require(block >= first_ && block < num_blocks_, "free list leaves the pool", before);
    require(blocks_[block].previous == before, "free list's links disagree", block);
    require(blocks_[block].references == 0, "block in the free list has references", block);
    require((blocks_[block].content != kNoContent) == cached, "block is in the wrong free list",
            block);
    require(++length <= num_blocks_, "free list does not end", block);
    before = block;
  }
  require(blocks_[head].previous == before, "free list's last link disagrees", before);
  return length;
}

void BlockPool::check_integrity() const {
  require(check_list(empty_head(), false) == num_empty_, "empty blocks differ from num_free",
          num_blocks_);
  require(check_list(cached_head(), true) == num_cached_, "cached blocks differ from num_cached",
          num_blocks_);
  int64_t unreferenced = 0;
  int64_t shared = 0;
  for (int32_t block = first_; block < num_blocks_; ++block) {
    const int32_t count = blocks_[block].references;
    require(count >= 0 && count <= max_references_, "reference count out of range", block);
    require(blocks_[block].content >= kNoContent, "content out of range", block);
    if (count == 0) ++unreferenced;
    if (count > 1) ++shared;
    require((count == 0) == (blocks_[block].next != kUnlinked),
            "used and linked as free, or neither", block);
  }
  if (has_null_block()) {
    require(blocks_[kNullBlock].references == 0 && blocks_[kNullBlock].next == kUnlinked,
            "null block is in use", kNullBlock);
  }
  require(unreferenced == num_free(), "blocks without references differ from num_free",
          num_blocks_);
  require(shared == num_shared_, "blocks with several references differ from num_shared",
          num_blocks_);
  require(peak_used_ >= num_used() && peak_used_ <= num_usable(), "peak_used out of range",
          num_blocks_);
}

}  // namespace vllm_kernels::kv_cache
