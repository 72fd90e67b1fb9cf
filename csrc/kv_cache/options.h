// The options of a KVCacheManager, its limits, and the keys of a prefix.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

namespace vllm_kernels::kv_cache {

// Block ids are int32, the dtype of block tables. The two largest values are list heads.
inline constexpr int64_t kMaxBlocks = std::numeric_limits<int32_t>::max() - 2;
inline constexpr int64_t kMaxReferences = std::numeric_limits<int32_t>::max();
// seq_lens and query_start_loc are int32.
inline constexpr int64_t kMaxTokens = std::numeric_limits<int32_t>::max();

// Limit of shards * block_size with prefix caching: a block is hashed as one message.
inline constexpr int64_t kMaxHashedBlock = 65536;

// The window of a group of layers whose tokens see all earlier tokens.
inline constexpr int64_t kFullAttention = 0;
// Replaces blocks out of their sliding window in block tables. It never holds a token.
inline constexpr int32_t kNullBlock = 0;

// Its counterpart in the table of a swapped sequence. Every host block may hold tokens.
inline constexpr int32_t kNoHostBlock = -1;

using HashKey = std::array<uint8_t, 16>;

struct Options {
  int64_t num_blocks = 0;                           // [1, kMaxBlocks], the null block included
  int64_t block_size = 0;                           // tokens, >= 1
  int64_t shards = 1;                               // ranks that hold a sequence together
  int64_t shard = 0;                                // this rank
  int64_t interleave = 1;                           // consecutive tokens on one of them
  int64_t max_references = kMaxReferences;          // sequences that may share one block
  int64_t num_host_blocks = 0;                      // for swap_out(), [0, kMaxBlocks]
  int64_t watermark_blocks = 0;                     // allocate() and swap_in() leave them free
  std::vector<int64_t> windows = {kFullAttention};  // of each group of layers: tokens visible to a
                                                    // token and itself; or kFullAttention
  bool null_block = false;     // block 0 is never given out; implied by a window
  bool prefix_caching = true;  // of full blocks with recorded tokens
  bool events = false;         // record them for take_events()
  int hash_bits = 128;         // used bits of the prefix hash; tests use fewer for collisions
  std::optional<HashKey> hash_key = std::nullopt;  // none: random
};

// An image, say. Its placeholder tokens do not identify it, so its digest does.
struct MultimodalItem {
  int64_t start = 0;       // first token in the sequence
  int64_t num_tokens = 0;  // >= 1
  std::string digest;      // of its contents
};

// Besides the tokens, these must be equal for a prefix to be shared.
struct PrefixKeys {
  std::optional<std::string> salt;         // of a tenant: separates the cached blocks of tenants
  std::optional<std::string> adapter;      // LoRA
  std::optional<std::string> cache_dtype;  // if the sequences of one cache differ in it
  std::vector<MultimodalItem> multimodal;
};

}  // namespace vllm_kernels::kv_cache
