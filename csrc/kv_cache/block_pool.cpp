#include "kv_cache/block_pool.h"

#include <algorithm>
#include <string>

#include "kv_cache/errors.h"

namespace vllm_kernels::kv_cache {
namespace {

constexpr int32_t kUnlinked = -1;

int64_t checked(const char* argument, int64_t value, int64_t largest) {
  if (value < 1 || value > largest) {
    throw InvalidArgument(
        concat("BlockPool: ", argument, ": expected 1 to ", largest, ", got ", value));
  }
  return value;
}

void require(bool condition, const char* what, int64_t block) {
  if (!condition) throw IntegrityError(concat("BlockPool: ", what, ", at block ", block));
}

}  // namespace

BlockPool::BlockPool(int64_t num_blocks, int64_t max_references)
    : num_blocks_(static_cast<int32_t>(checked("num_blocks", num_blocks, kMaxBlocks))),
      max_references_(checked("max_references", max_references, kMaxReferences)),
      references_(num_blocks),
      previous_(num_blocks + 1),
      next_(num_blocks + 1) {
  reset();
}

void BlockPool::reset() noexcept {
  const int32_t head = num_blocks_;
  std::fill(references_.begin(), references_.end(), 0);
  for (int32_t block = 0; block < num_blocks_; ++block) {
    previous_[block] = block - 1;
    next_[block] = block + 1;
  }
  previous_[0] = head;
  previous_[head] = num_blocks_ - 1;
  next_[head] = 0;
  num_free_ = num_blocks_;
  num_shared_ = 0;
  peak_used_ = 0;
}

int32_t BlockPool::take() {
  const int32_t block = next_[num_blocks_];
  if (block == num_blocks_) throw OutOfBlocks("BlockPool::take", 1, 0);
  unlink(block);
  references_[block] = 1;
  count_use();
  return block;
}

void BlockPool::add_reference(int32_t block) {
  check_id("add_reference", block);
  int32_t& count = references_[block];
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
  int32_t& count = references_[block];
  if (count == 0) {
    throw InvalidArgument(concat("BlockPool::release: block: expected one in use, got block ",
                                 block, ", which is free"));
  }
  if (--count == 1) --num_shared_;
  if (count == 0) link_last(block);
}

void BlockPool::unlink(int32_t block) noexcept {
  next_[previous_[block]] = next_[block];
  previous_[next_[block]] = previous_[block];
  previous_[block] = next_[block] = kUnlinked;
  --num_free_;
}

void BlockPool::link_last(int32_t block) noexcept {
  const int32_t head = num_blocks_;
  previous_[block] = previous_[head];
  next_[block] = head;
  next_[previous_[head]] = block;
  previous_[head] = block;
  ++num_free_;
}

void BlockPool::count_use() noexcept {
  peak_used_ = std::max(peak_used_, num_used());
}

void BlockPool::throw_bad_id(const char* call, int32_t block) const {
  throw InvalidArgument(
      concat("BlockPool::", call, ": block: expected 0 to ", num_blocks_ - 1, ", got ", block));
}

void BlockPool::check_integrity() const {
  const int32_t head = num_blocks_;
  // Walking at most num_blocks + 1 links ends even where the ring is broken; a block that stands
  // twice in the ring would have two successors' previous links to satisfy.
  int64_t in_list = 0;
  int32_t before = head;
  for (int32_t block = next_[head]; block != head; block = next_[block]) {
    require(block >= 0 && block < num_blocks_, "free list leaves the pool", before);
    require(previous_[block] == before, "free list's links disagree", block);
    require(references_[block] == 0, "block in the free list has references", block);
    require(++in_list <= num_blocks_, "free list does not end", block);
    before = block;
  }
  require(previous_[head] == before, "free list's last link disagrees", before);
  require(in_list == num_free_, "free list's length differs from num_free", head);

  int64_t unreferenced = 0;
  int64_t shared = 0;
  for (int32_t block = 0; block < num_blocks_; ++block) {
    const int32_t count = references_[block];
    require(count >= 0 && count <= max_references_, "reference count out of range", block);
    if (count == 0) ++unreferenced;
    if (count > 1) ++shared;
    require((count == 0) == (next_[block] != kUnlinked), "used and linked as free, or neither",
            block);
  }
  require(unreferenced == num_free_, "blocks without references differ from num_free", head);
  require(shared == num_shared_, "blocks with several references differ from num_shared", head);
  require(peak_used_ >= num_used() && peak_used_ <= num_blocks_, "peak_used out of range", head);
}

}  // namespace vllm_kernels::kv_cache
