// The paged KV cache, described once: every kernel that reads or writes pages takes this struct. A
// page is a KV block.
//
// Layouts (shapes of the torch tensors):
//   vllm  K [num_blocks, num_kv_heads, head_size / x, block_size, x]   x = 16 bytes / element size
//         V [num_blocks, num_kv_heads, head_size, block_size]
//   NHD   K, V [num_blocks, block_size, num_kv_heads, head_size]
//   HND   K, V [num_blocks, num_kv_heads, block_size, head_size]
#pragma once
#include <cstdint>

#include "ops/dtype.h"
#include "ops/rows.h"

namespace vllm_kernels {

enum class KvLayout : uint8_t { kVllm, kNHD, kHND };

// Strides are in elements and 64-bit. A cache may have more than 2^31 elements. A layer may be a
// slice of a packed tensor with a very large page stride.
struct PagedKv {
  void* key = nullptr;
  void* value = nullptr;
  int64_t num_blocks = 0;
  int32_t num_kv_heads = 0;
  int32_t head_size = 0;          // elements a row; head_values() values
  int32_t block_size = 0;         // tokens a page
  DType dtype = DType::kFloat32;  // of the stored elements
  KvLayout layout = KvLayout::kVllm;

  // K element (block, head, token, d) is at
  //   block * key_block_stride + head * key_head_stride + token * key_token_stride
  //     + (d / x) * key_chunk_stride + d % x
  int32_t x = 1;
  int64_t key_block_stride = 0;
  int64_t key_head_stride = 0;
  int64_t key_token_stride = 0;
  int64_t key_chunk_stride = 0;
  // V element (block, head, token, d) is at
  //   block * value_block_stride + head * value_head_stride + token * value_token_stride
  //     + d * value_dim_stride
  int64_t value_block_stride = 0;
  int64_t value_head_stride = 0;
  int64_t value_token_stride = 0;
  int64_t value_dim_stride = 0;

  // An 8-bit element represents element * scale[head * scale_stride]. A scale is one float (stride
  // 0), or one a KV head (stride 1), on the cache's device. Null means 1.
  const float* k_scale = nullptr;
  const float* v_scale = nullptr;
  int32_t scale_stride = 0;

  // The head size of the model: an element of an int4 cache holds two values.
  VLLM_KERNELS_HOST_DEVICE int head_values() const { return head_size * values_of(dtype); }

  // Pages of one token of layout vllm are rows, as those of HND.
  PagedKv with_rows() const {
    PagedKv rows = *this;
    if (layout == KvLayout::kVllm && block_size == 1) {
      rows.layout = KvLayout::kHND;
      rows.key_token_stride = rows.value_token_stride = head_size;
    }
    return rows;
  }

  VLLM_KERNELS_HOST_DEVICE int64_t key_offset(int64_t block, int64_t head, int64_t token,
                                              int64_t d) const {
    return block * key_block_stride + head * key_head_stride + token * key_token_stride +
           (d / x) * key_chunk_stride + d % x;
  }
  VLLM_KERNELS_HOST_DEVICE int64_t value_offset(int64_t block, int64_t head, int64_t token,
                                                int64_t d) const {
    return block * value_block_stride + head * value_head_stride + token * value_token_stride +
           d * value_dim_stride;
  }
};

// A cache with a scale of its own for every token and KV head. Scale (block, head, token) is at
//   block * block_stride + head * head_stride + token
// A scale may be any float: 0 for a row of zeros, NaN for a row with a NaN. Those of slots that are
// not visible may hold anything.
//   int8  value d of a row = scale * element d
//   int4  value d of a row = scale * (n - 8) + zero. Element d of a row of head_size elements has
//         n of value d in its low 4 bits and n of value d + head_size in its high 4 bits.
// Zeros lie as the scales do.
struct TokenScales {
  const float* key = nullptr;  // [num_blocks, num_kv_heads, block_size]; null: one scale a head
  const float* value = nullptr;
  const float* key_zero = nullptr;  // int4 alone
  const float* value_zero = nullptr;
  int64_t key_block_stride = 0;
  int64_t key_head_stride = 0;
  int64_t value_block_stride = 0;
  int64_t value_head_stride = 0;

  VLLM_KERNELS_HOST_DEVICE bool any() const { return key != nullptr; }
  VLLM_KERNELS_HOST_DEVICE int64_t key_offset(int64_t block, int64_t head) const {
    return block * key_block_stride + head * key_head_stride;
  }
  VLLM_KERNELS_HOST_DEVICE int64_t value_offset(int64_t block, int64_t head) const {
    return block * value_block_stride + head * value_head_stride;
  }
};

// The tokens of a sequence that one shard of its cache has (context parallelism). Token t of a
// sequence is in shard t / interleave % shards. A shard stores its tokens one after the other, and
// seq_lens counts these.
struct Stripe {
  const int32_t* total_lens = nullptr;  // [num_seqs] tokens of all shards; null: there is but one
  int32_t others = 0;                   // number of other shards
  int32_t shard = 0;
  int32_t shift = 0;  // log2 of interleave

  VLLM_KERNELS_HOST_DEVICE bool any() const { return total_lens != nullptr; }
  // The place in the sequence of the shard's token `stored`; `stored` itself if there is one shard.
  template <typename Int>
  VLLM_KERNELS_HOST_DEVICE Int position_of(Int stored) const {
    return stored + (((stored >> shift) * others + shard) << shift);
  }
  // How many tokens of the shard have a place in the sequence before `position`.
  VLLM_KERNELS_HOST_DEVICE int32_t count_before(int32_t position) const {
    if (position <= 0) return 0;
    const uint32_t period = static_cast<uint32_t>(others + 1) << shift, most = 1u << shift;
    const uint32_t whole = static_cast<uint32_t>(position) / period;
    const int32_t rest = static_cast<int32_t>(position - whole * period) - (shard << shift);
    const uint32_t more = rest <= 0 ? 0 : static_cast<uint32_t>(rest) < most ? rest : most;
    return static_cast<int32_t>((whole << shift) + more);
  }
};

}  // namespace vllm_kernels
