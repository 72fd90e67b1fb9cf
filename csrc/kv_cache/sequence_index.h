// A map from sequence ids to positions in the manager's array of sequences.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace vllm_kernels::kv_cache {

// A hash table with linear probing in one array, at most half full. Only reserve() allocates
// memory, so the other calls cannot fail. Any int64 is a valid key.
class SequenceIndex {
 public:
  static constexpr int32_t kAbsent = -1;

  size_t size() const noexcept { return size_; }

  // Reserves memory for `extra` more keys.
  void reserve(size_t extra) {
    const size_t wanted = 2 * (size_ + extra);
    if (wanted <= entries_.size()) return;
    size_t capacity = entries_.empty() ? 16 : entries_.size();
    while (capacity < wanted) capacity *= 2;
    std::vector<Entry> old(capacity);
    old.swap(entries_);
    size_ = 0;
    for (const Entry& entry : old) {
      if (entry.position != kAbsent) insert(entry.id, entry.position);
    }
  }

  int32_t find(int64_t id) const noexcept {
    return entries_.empty() ? kAbsent : entries_[probe(id)].position;
  }

  // Inserts or overwrites; a new key needs room from reserve().
  void insert(int64_t id, int32_t position) noexcept {
    Entry& entry = entries_[probe(id)];
    if (entry.position == kAbsent) ++size_;
    entry = {id, position};
  }

  void erase(int64_t id) noexcept {
    if (entries_.empty()) return;
    const size_t mask = entries_.size() - 1;
    size_t hole = probe(id);
    if (entries_[hole].position == kAbsent) return;
    --size_;
    // Later entries move up if their probe path crosses the hole.
    for (size_t next = (hole + 1) & mask; entries_[next].position != kAbsent;
         next = (next + 1) & mask) {
      const size_t from_home = (next - home(entries_[next].id)) & mask;
      if (from_home >= ((next - hole) & mask)) {
        entries_[hole] = entries_[next];
        hole = next;
      }
    }
    entries_[hole] = Entry{};
  }

  void clear() noexcept {
    for (Entry& entry : entries_) entry = Entry{};
    size_ = 0;
  }

 private:
  struct Entry {
    int64_t id = 0;
    int32_t position = kAbsent;
  };

  // Mixes all bits into the low ones, because ids often count up in steps of a power of two.
  size_t home(int64_t id) const noexcept {
    uint64_t bits = static_cast<uint64_t>(id) * 0x9e3779b97f4a7c15u;
    bits ^= bits >> 32;
    bits *= 0xd6e8feb86659fd93u;
    bits ^= bits >> 32;
    return static_cast<size_t>(bits) & (entries_.size() - 1);
  }

  // The entry of the key, or the empty entry where it would be inserted.
  size_t probe(int64_t id) const noexcept {
    const size_t mask = entries_.size() - 1;
    size_t i = home(id);
    while (entries_[i].position != kAbsent && entries_[i].id != id) i = (i + 1) & mask;
    return i;
  }

  std::vector<Entry> entries_;  // their number is a power of two
  size_t size_ = 0;
};

}  // namespace vllm_kernels::kv_cache
