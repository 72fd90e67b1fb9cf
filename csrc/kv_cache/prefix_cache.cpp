// Records of nodes in chunks of memory, and an index of them with linear probing. Unused records
// form a list, so that a new node reuses one.
#include "kv_cache/prefix_cache.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "kv_cache/errors.h"

namespace vllm_kernels::kv_cache {
namespace {

constexpr size_t kChunkBytes = 64 * 1024;

void require(bool condition, const char* what, int64_t node) {
  if (!condition) throw IntegrityError(concat("PrefixCache: ", what, ", at node ", node));
}

void append_bytes(std::string& bytes, int64_t value) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
}

// Tag, length, bytes: two different lists of fields never have the same bytes.
void append_field(std::string& bytes, char tag, const std::optional<std::string>& field) {
  if (!field) return;
  bytes += tag;
  append_bytes(bytes, static_cast<int64_t>(field->size()));
  bytes += *field;
}

}  // namespace

std::string encode_keys(const PrefixKeys& keys) {
  std::string bytes;
  append_field(bytes, 's', keys.salt);
  append_field(bytes, 'a', keys.adapter);
  append_field(bytes, 'd', keys.cache_dtype);
  return bytes;
}

void append_item(std::string& bytes, const MultimodalItem& item, int64_t begin) {
  bytes += 'm';
  append_bytes(bytes, item.start - begin);
  append_bytes(bytes, item.num_tokens);
  append_bytes(bytes, static_cast<int64_t>(item.digest.size()));
  bytes += item.digest;
}

void check_items(const char* call, const std::vector<MultimodalItem>& items, int64_t num_tokens) {
  for (const MultimodalItem& item : items) {
    if (item.start < 0 || item.num_tokens < 1 || item.start > num_tokens ||
        item.num_tokens > num_tokens - item.start) {
      throw InvalidArgument(concat(call, ": multimodal: expected items of at least one token ",
                                   "within the ", num_tokens, " tokens, got ", item.num_tokens,
                                   " from ", item.start));
    }
  }
}

PrefixCache::PrefixCache(int64_t block_size, int64_t num_groups, const HashKey& key, int hash_bits)
    : block_size_(block_size),
      num_groups_(num_groups),
      stride_((sizeof(Header) + (num_groups + block_size) * sizeof(int32_t) + 7) / 8 * 8),
      chunk_shift_(std::max(0, static_cast<int>(std::bit_width(kChunkBytes / stride_)) - 1)),
      sip_(key),
      hash_bits_(hash_bits),
      message_(std::make_unique_for_overwrite<uint8_t[]>(2 * sizeof(Hash) +
                                                         block_size * sizeof(int32_t))) {
  hold(find_or_add_root(""));
}

int32_t PrefixCache::find_root(const std::string& keys) const noexcept {
  const auto found = roots_.find(keys);
  return found == roots_.end() ? kNone : found->second;
}

int32_t PrefixCache::find_or_add_root(const std::string& keys) {
  const auto found = roots_.find(keys);
  if (found != roots_.end()) return found->second;
  reserve(1, 1);
  Extra extra = std::make_shared<const std::string>(keys);
  const auto added = roots_.emplace(keys, kNone).first;
  const auto* bytes = reinterpret_cast<const uint8_t*>(keys.data());
  added->second = new_node(kNone, cut(sip_(bytes, keys.size())));
  keep_extra(added->second, std::move(extra));
  return added->second;
}

void PrefixCache::reserve(size_t nodes, size_t extras) {
  const size_t records = num_made_ + nodes;  // as if no record were unused
  const size_t in_chunk = size_t{1} << chunk_shift_;
  const size_t chunks = (records + in_chunk - 1) / in_chunk;
  if (chunks > chunks_.capacity()) chunks_.reserve(std::max(chunks, 2 * chunks_.capacity()));
  while (chunks_.size() < chunks) {
    chunks_.push_back(std::make_unique_for_overwrite<std::byte[]>(in_chunk * stride_));
  }
  const size_t slots = extras_.size() + extras;
  if (slots > extras_.capacity()) extras_.reserve(std::max(slots, 2 * extras_.capacity()));
  if (unused_extras_.capacity() < extras_.capacity()) unused_extras_.reserve(extras_.capacity());
  reserve_index(nodes);
}

void PrefixCache::reserve_index(size_t extra) {
  const size_t wanted = 2 * (num_indexed_ + extra);
  if (wanted <= index_.size()) return;
  size_t capacity = std::max<size_t>(16, index_.size());
  while (capacity < wanted) capacity *= 2;
  std::vector<Entry> old(capacity);
  old.swap(index_);
  num_indexed_ = 0;
  for (const Entry& entry : old) {
    if (entry.node != kNone) index_insert(entry.tag, entry.node);
  }
}

void PrefixCache::index_insert(uint32_t tag, int32_t node) noexcept {
  const size_t mask = index_.size() - 1;
  size_t i = home(tag);
  while (index_[i].node != kNone) i = (i + 1) & mask;
  index_[i] = {tag, node};
  ++num_indexed_;
}

void PrefixCache::index_erase(uint32_t tag, int32_t node) noexcept {
  const size_t mask = index_.size() - 1;
  size_t hole = home(tag);
  while (index_[hole].node != node) hole = (hole + 1) & mask;
  // Later entries move up if their probe path crosses the hole.
  for (size_t next = (hole + 1) & mask; index_[next].node != kNone; next = (next + 1) & mask) {
    const size_t from_home = (next - home(index_[next].tag)) & mask;
    if (from_home >= ((next - hole) & mask)) {
      index_[hole] = index_[next];
      hole = next;
    }
  }
  index_[hole] = Entry{};
  --num_indexed_;
}

Hash PrefixCache::cut(Hash hash) const noexcept {
  if (hash_bits_ < 64) hash.low &= (uint64_t{1} << hash_bits_) - 1;
  if (hash_bits_ <= 64) hash.high = 0;
  if (hash_bits_ > 64 && hash_bits_ < 128) hash.high &= (uint64_t{1} << (hash_bits_ - 64)) - 1;
  return hash;
}

Hash PrefixCache::hash(const Hash& parent, const int32_t* tokens,
                       const std::string* extra) const noexcept {
  uint8_t* message = message_.get();
  std::memcpy(message, &parent, sizeof parent);
  size_t size = sizeof parent;
  std::memcpy(message + size, tokens, block_size_ * sizeof(int32_t));
  size += block_size_ * sizeof(int32_t);
  if (extra != nullptr) {  // as a hash of their own; the message's length shows their presence
    const Hash bytes = sip_(reinterpret_cast<const uint8_t*>(extra->data()), extra->size());
    std::memcpy(message + size, &bytes, sizeof bytes);
    size += sizeof bytes;
  }
  return cut(sip_(message, size));
}

int32_t PrefixCache::find(int32_t parent, const Hash& hash, const int32_t* tokens,
                          const std::string* extra) const noexcept {
  if (index_.empty()) return kNone;
  const uint32_t tag = tag_of(hash);
  const size_t mask = index_.size() - 1;
  for (size_t i = home(tag); index_[i].node != kNone; i = (i + 1) & mask) {
    if (index_[i].tag != tag) continue;
    const int32_t node = index_[i].node;
    const Header& candidate = header(node);
    if (!(candidate.hash == hash) || candidate.parent != parent) continue;
    if (std::memcmp(this->tokens(node), tokens, block_size_ * sizeof(int32_t)) != 0) continue;
    if ((candidate.extra != kNone) != (extra != nullptr)) continue;
    if (extra != nullptr && *extras_[candidate.extra] != *extra) continue;
    return node;
  }
  return kNone;
}

int32_t PrefixCache::new_node(int32_t parent, const Hash& hash) noexcept {
  int32_t node = unused_;
  if (node == kNone) {
    node = num_made_++;
  } else {
    unused_ = header(node).parent;
    if (unused_ != kNone) prefetch_node(unused_);
  }
  header(node) = {.hash = hash, .parent = parent, .holders = 0, .extra = kNone, .padding = 0};
  std::fill_n(blocks(node), num_groups_, kNone);
  ++num_nodes_;
  return node;
}

int32_t PrefixCache::add(int32_t parent, const Hash& hash, const int32_t* tokens,
                         const Extra& extra) noexcept {
  const int32_t node = new_node(parent, hash);
  std::memcpy(blocks(node) + num_groups_, tokens, block_size_ * sizeof(int32_t));
  if (extra != nullptr) keep_extra(node, extra);
  hold(parent);
  index_insert(tag_of(hash), node);
  return node;
}

void PrefixCache::keep_extra(int32_t node, Extra extra) noexcept {
  if (unused_extras_.empty()) {
    header(node).extra = static_cast<int32_t>(extras_.size());
    extras_.push_back(std::move(extra));
  } else {
    header(node).extra = unused_extras_.back();
    extras_[unused_extras_.back()] = std::move(extra);
    unused_extras_.pop_back();
  }
}

void PrefixCache::drop(int32_t node) noexcept {
  while (node != kNone && --header(node).holders == 0) {
    Header& gone = header(node);
    const int32_t parent = gone.parent;
    if (parent == kNone) {
      roots_.erase(*extras_[gone.extra]);
    } else {
      index_erase(tag_of(gone.hash), node);
    }
    if (gone.extra != kNone) {
      extras_[gone.extra].reset();
      unused_extras_.push_back(gone.extra);
    }
    gone.holders = kUnused;
    gone.parent = unused_;
    unused_ = node;
    --num_nodes_;
    node = parent;
  }
}

void PrefixCache::set_block(int32_t node, int64_t group, int32_t block) noexcept {
  blocks(node)[group] = block;
  hold(node);
}

void PrefixCache::clear_block(int32_t node, int64_t group) noexcept {
  blocks(node)[group] = kNone;
  drop(node);
}

int64_t PrefixCache::group_of(int32_t node, int32_t block) const noexcept {
  int64_t group = 0;
  while (blocks(node)[group] != block) ++group;
  return group;
}

bool PrefixCache::has_block(int32_t node, int32_t block) const noexcept {
  if (node < 0 || node >= num_made_ || header(node).holders == kUnused) return false;
  const int32_t* first = blocks(node);
  return std::find(first, first + num_groups_, block) != first + num_groups_;
}

int64_t PrefixCache::count_blocks() const noexcept {
  int64_t count = 0;
  for (int32_t node = 0; node < num_made_; ++node) {
    if (header(node).holders == kUnused) continue;
    for (int64_t group = 0; group < num_groups_; ++group) count += block(node, group) != kNone;
  }
  return count;
}

void PrefixCache::check_integrity(const std::map<int32_t, int64_t>& pins) const {
  std::vector<int64_t> holders(num_made_);
  int64_t used = 0;
  int64_t indexed = 0;
  for (int32_t node = 0; node < num_made_; ++node) {
    if (header(node).holders == kUnused) continue;
    ++used;
    require(header(node).holders > 0, "nobody holds it", node);
    for (int64_t group = 0; group < num_groups_; ++group) {
      if (block(node, group) != kNone) ++holders[node];
    }
    const int32_t above = parent(node);
    if (above == kNone) {
      require(header(node).extra != kNone && find_root(*extras_[header(node).extra]) == node,
              "root is not found by its keys", node);
      continue;
    }
    ++indexed;
    require(above >= 0 && above < num_made_ && header(above).holders != kUnused,
            "parent is not in use", node);
    ++holders[above];
    const std::string* extra =
        header(node).extra == kNone ? nullptr : extras_[header(node).extra].get();
    require(hash(hash_of(above), tokens(node), extra) == hash_of(node), "hash differs", node);
    require(find(above, hash_of(node), tokens(node), extra) == node, "index points elsewhere",
            node);
  }
  ++holders[default_root()];
  for (const auto& [node, count] : pins) {
    require(node >= 0 && node < num_made_, "held node is out of range", node);
    holders[node] += count;
  }
  for (int32_t node = 0; node < num_made_; ++node) {
    if (header(node).holders == kUnused) {
      require(holders[node] == 0, "is held but not in use", node);
    } else {
      require(holders[node] == header(node).holders, "holders differ in number", node);
    }
  }
  require(used == num_nodes_, "nodes differ in number", used);
  require(indexed == num_indexed_, "indexed nodes differ in number", indexed);
  require(used - indexed == static_cast<int64_t>(roots_.size()), "roots differ in number", used);
}

}  // namespace vllm_kernels::kv_cache
