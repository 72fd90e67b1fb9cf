// A tree of token blocks, which says what is cached in which block.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "kv_cache/options.h"
#include "kv_cache/siphash.h"

namespace vllm_kernels::kv_cache {

// A node is one block of tokens, and its ancestors are the tokens before it. Each combination of
// keys (salt, adapter and so on) has a root. A node is found by a hash that is chained on the hash
// of its parent. A hit counts only if parent, tokens and extra bytes are equal as well. However bad
// the hash, a node is never mistaken for another.
//
// A node names the block of each cache group that holds its keys and values, or kNone. It lives as
// long as it has such a block, a child, or a sequence that ends at it.
//
// Memory: a record for each node, in chunks (104 bytes with 16 tokens and one group). An index
// entry has 8 bytes, and at most half of the entries are used. Only reserve() and
// find_or_add_root() allocate. No other change of the tree can fail.
class PrefixCache {
 public:
  static constexpr int32_t kNone = -1;

  // Bytes that identify a block besides its tokens, such as the digest of an image.
  using Extra = std::shared_ptr<const std::string>;

  PrefixCache(int64_t block_size, int64_t num_groups, const HashKey& key, int hash_bits);

  // The root without keys; it always lives.
  int32_t default_root() const noexcept { return 0; }
  // The root of these tagged bytes (encode_keys), or kNone. A new root lives once it is held.
  int32_t find_root(const std::string& keys) const noexcept;
  int32_t find_or_add_root(const std::string& keys);

  // Reserves memory for more nodes, `extras` of them with extra bytes.
  void reserve(size_t nodes, size_t extras);

  // The hash of `tokens` [block_size] and extra bytes (or nullptr) after the hash of `parent`.
  Hash hash(const Hash& parent, const int32_t* tokens, const std::string* extra) const noexcept;
  // The child of `parent` with this hash, tokens and extra bytes, or kNone.
  int32_t find(int32_t parent, const Hash& hash, const int32_t* tokens,
               const std::string* extra) const noexcept;
  // Adds a child, which must not exist yet. It lives once it is held.
  int32_t add(int32_t parent, const Hash& hash, const int32_t* tokens, const Extra& extra) noexcept;
  // Prefetches the index entry of this hash.
  void prefetch(const Hash& hash) const noexcept {
    if (!index_.empty()) __builtin_prefetch(&index_[home(tag_of(hash))]);
  }

  void prefetch_node(int32_t node) const noexcept { __builtin_prefetch(record(node)); }

  // Count the sequences that end at a node.
  void hold(int32_t node) noexcept { ++header(node).holders; }
  void drop(int32_t node) noexcept;

  int32_t parent(int32_t node) const noexcept { return header(node).parent; }
  const Hash& hash_of(int32_t node) const noexcept { return header(node).hash; }
  const int32_t* tokens(int32_t node) const noexcept { return blocks(node) + num_groups_; }
  int32_t block(int32_t node, int64_t group) const noexcept { return blocks(node)[group]; }
  void set_block(int32_t node, int64_t group, int32_t block) noexcept;
  void clear_block(int32_t node, int64_t group) noexcept;
  // The group in which the node has this block. The node must have it.
  int64_t group_of(int32_t node, int32_t block) const noexcept;

  int64_t num_nodes() const noexcept { return num_nodes_; }

  // For checks: whether the node exists and has this block, and the blocks of all nodes. O(nodes).
  bool has_block(int32_t node, int32_t block) const noexcept;
  int64_t count_blocks() const noexcept;

  // Throws IntegrityError unless index, links and counts agree. `pins[node]` counts the sequences
  // that end at a node. O(nodes).
  void check_integrity(const std::map<int32_t, int64_t>& pins) const;

 private:
  friend struct TestAccess;

  struct Header {  // then int32 blocks[num_groups], int32 tokens[block_size]
    Hash hash;
    int32_t parent;   // kNone: a root; in the list of unused nodes: the next of them
    int32_t holders;  // children + blocks + sequences; kUnused: the node is not in use
    int32_t extra;    // index into extras_, or kNone
    int32_t padding;
  };
  struct Entry {
    uint32_t tag = 0;
    int32_t node = kNone;
  };
  static constexpr int32_t kUnused = -1;

  static uint32_t tag_of(const Hash& hash) noexcept {
    return static_cast<uint32_t>(hash.low ^ (hash.low >> 32));
  }
  size_t home(uint32_t tag) const noexcept { return tag & (index_.size() - 1); }
  std::byte* record(int32_t node) const noexcept {
    const auto index = static_cast<uint32_t>(node);
    return chunks_[index >> chunk_shift_].get() + (index & ((1u << chunk_shift_) - 1)) * stride_;
  }
  Header& header(int32_t node) const noexcept { return *reinterpret_cast<Header*>(record(node)); }
  int32_t* blocks(int32_t node) const noexcept {
    return reinterpret_cast<int32_t*>(record(node) + sizeof(Header));
  }
  int32_t new_node(int32_t parent, const Hash& hash) noexcept;
  void keep_extra(int32_t node, Extra extra) noexcept;
  Hash cut(Hash hash) const noexcept;
  void index_insert(uint32_t tag, int32_t node) noexcept;
  void index_erase(uint32_t tag, int32_t node) noexcept;
  void reserve_index(size_t extra);

  const int64_t block_size_;
  const int64_t num_groups_;
  const size_t stride_;    // bytes of a record
  const int chunk_shift_;  // log2 of the records in a chunk
  const SipHash sip_;
  const int hash_bits_;

  std::vector<std::unique_ptr<std::byte[]>> chunks_;
  int32_t num_made_ = 0;      // records that have ever been in use
  int32_t unused_ = kNone;    // list of the records not in use now
  int64_t num_nodes_ = 0;     // in use, roots included
  int64_t num_indexed_ = 0;   // without roots
  std::vector<Entry> index_;  // linear probing, a power of two, at most half full
  std::map<std::string, int32_t> roots_;
  std::vector<Extra> extras_;
  std::vector<int32_t> unused_extras_;
  std::unique_ptr<uint8_t[]> message_;  // input of hash(), which overwrites it
};

// Keeps a root alive until a new sequence holds it, or until an error.
class HeldRoot {
 public:
  HeldRoot(PrefixCache& cache, int32_t root) : cache_(cache), root_(root) { cache_.hold(root_); }
  ~HeldRoot() { cache_.drop(root_); }
  HeldRoot(const HeldRoot&) = delete;

  int32_t node() const noexcept { return root_; }

 private:
  PrefixCache& cache_;
  int32_t root_;
};

// The keys without multimodal items, as tagged bytes. They are equal only if every field is equal.
std::string encode_keys(const PrefixKeys& keys);
// Adds an item to the extra bytes of a block that starts at token `begin`.
void append_item(std::string& bytes, const MultimodalItem& item, int64_t begin);
// Throws InvalidArgument unless each item has tokens and lies within the `num_tokens` first ones.
void check_items(const char* call, const std::vector<MultimodalItem>& items, int64_t num_tokens);

}  // namespace vllm_kernels::kv_cache
