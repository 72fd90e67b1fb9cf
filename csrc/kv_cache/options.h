// What a KVCacheManager is made of.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

namespace vllm_kernels::kv_cache {

// Block ids are int32 (the dtype of block tables); the values beyond the last id are list heads.
inline constexpr int64_t kMaxBlocks = std::numeric_limits<int32_t>::max() - 2;
inline constexpr int64_t kMaxReferences = std::numeric_limits<int32_t>::max();
// seq_lens and query_start_loc are int32.
inline constexpr int64_t kMaxTokens = std::numeric_limits<int32_t>::max();

// Tokens of a block with prefix caching: its tokens are kept and hashed as one message.
inline constexpr int64_t kMaxHashedBlock = 65536;

// A group of layers whose tokens see all that came before them.
inline constexpr int64_t kFullAttention = 0;
// The block that stands in tables where a sliding window has passed; it never holds a token.
inline constexpr int32_t kNullBlock = 0;

// Stands for it in the table of a swapped sequence: every host block may hold tokens.
inline constexpr int32_t kNoHostBlock = -1;

using HashKey = std::array<uint8_t, 16>;

struct Options {
  int64_t num_blocks = 0;                           // [1, kMaxBlocks], the null block included
  int64_t block_size = 0;                           // tokens, >= 1
  int64_t max_references = kMaxReferences;          // sequences that may share one block
  int64_t num_host_blocks = 0;                      // for swap_out, [0, kMaxBlocks]
  int64_t watermark_blocks = 0;                     // that allocate() and swap_in() leave free
  std::vector<int64_t> windows = {kFullAttention};  // of each group of layers: tokens that a token
                                                    // sees, itself included; or kFullAttention
  bool null_block = false;     // block 0 is never given out; always so with a window
  bool prefix_caching = true;  // where token ids are known
  bool events = false;         // recorded for take_events()
  int hash_bits = 128;         // of the prefix hash that are used; fewer only to test collisions
  std::optional<HashKey> hash_key = std::nullopt;  // none: a random one
};

// An image or the like, whose placeholder tokens do not say which one it is.
struct MultimodalItem {
  int64_t start = 0;       // first token in the sequence
  int64_t num_tokens = 0;  // >= 1
  std::string digest;      // of its contents
};

// What else, beside the tokens, must be equal for cached keys and values to be the same ones.
struct PrefixKeys {
  std::optional<std::string> salt;         // of a tenant: no hit across tenants, nor by timing
  std::optional<std::string> adapter;      // LoRA
  std::optional<std::string> cache_dtype;  // where sequences of one cache differ in it
  std::vector<MultimodalItem> multimodal;
};

}  // namespace vllm_kernels::kv_cache
