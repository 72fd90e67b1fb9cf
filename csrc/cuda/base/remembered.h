// Values that were computed from a key before. Host code without CUDA.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace vllm_kernels::cuda {

// The values of at most kSets * kWays keys, the latest ones of each set. A value must depend on
// nothing but its key, bit by bit, so none is ever out of date. Not for several threads at once.
template <typename Key, typename Value, size_t kSets, size_t kWays>
class Remembered {
  static_assert(std::has_unique_object_representations_v<Key>, "padding would take part");
  static_assert((kSets & (kSets - 1)) == 0);

 public:
  // The value of `key`: from memory, or make(key). If that throws, nothing has changed.
  template <typename Make>
  Value of(const Key& key, const Make& make) {
    Set& set = sets_[hash(key) % kSets];
    for (size_t way = 0; way < set.filled; ++way) {
      if (std::memcmp(&set.entries[way].key, &key, sizeof(Key)) == 0) {
        return set.entries[way].value;
      }
    }
    Value value = make(key);
    set.entries[set.next] = {key, value};
    if (set.filled < kWays) ++set.filled;
    set.next = (set.next + 1) % kWays;
    return value;
  }

 private:
  struct Entry {
    Key key;
    Value value;
  };
  struct Set {
    uint32_t filled;
    uint32_t next;  // the entry that is replaced next
    std::array<Entry, kWays> entries;
  };

  static uint64_t hash(const Key& key) {
    uint64_t words[sizeof(Key) / 8], hash = 0;
    static_assert(sizeof(words) == sizeof(Key));
    std::memcpy(words, &key, sizeof(Key));
    for (const uint64_t word : words) hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
    return hash >> 32;
  }

  std::array<Set, kSets> sets_{};
};

}  // namespace vllm_kernels::cuda
