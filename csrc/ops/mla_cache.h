// The cache of multi-head latent attention (DeepSeek V2, V3). A token has one entry: the latent
// kv_c, then the rotated key k_pe, which all heads share.
//   concat_and_cache_mla                   writes entries [kv_c | k_pe], as they are or in fp8
//   ... with "fp8_ds_mla"                  writes entries of 656 bytes (kDsMla...)
//   cp_gather_and_upconvert_fp8_kv_cache   reads these entries
//   concat_mla_q                           concatenates ql_nope and q_pe
#pragma once
#include "ops/dtype.h"
#include "ops/rows.h"

namespace vllm_kernels {

// An entry of "fp8_ds_mla": 512 e4m3 values of kv_c, a float32 scale for every 128 of them, and
// k_pe as 64 bfloat16. A scale is max(max |x| / 448, the smallest normal float).
constexpr int kDsMlaLatent = 512;
constexpr int kDsMlaTile = 128;
constexpr int kDsMlaRope = 64;
constexpr int kDsMlaScales = kDsMlaLatent;                     // bytes from the entry's start
constexpr int kDsMlaRopeStart = kDsMlaScales + 4 * 4;          // bytes from the entry's start
constexpr int kDsMlaEntry = kDsMlaRopeStart + 2 * kDsMlaRope;  // bytes
constexpr float kDsMlaSmallestScale = 0x1p-126f;

struct ConcatAndCacheMlaParams {
  const void* kv_c;      // [>= num_tokens, kv_lora_rank]
  const void* k_pe;      // [>= num_tokens, pe_dim]
  int64_t kv_c_stride;   // elements
  int64_t k_pe_stride;   // elements
  int32_t kv_lora_rank;  // 512 for ds_mla
  int32_t pe_dim;        // 64 for ds_mla
  void* cache;           // [num_blocks, block_size, kv_lora_rank + pe_dim, or 656 bytes]
  int64_t block_stride;  // elements; bytes for ds_mla
  int64_t token_stride;  // elements; bytes for ds_mla
  int64_t num_blocks;
  int32_t block_size;
  DType dtype;        // of kv_c and k_pe
  DType cache_dtype;  // equal to dtype, or fp8
  bool ds_mla;
  const float* scale;           // one element; not for ds_mla
  const int64_t* slot_mapping;  // [num_tokens]
  int64_t num_tokens;

  // Returns `slot`, or -1 if nothing is to be written. A cache holds < 2^31 tokens.
  VLLM_KERNELS_HOST_DEVICE int32_t usable(int64_t slot) const {
    const bool good = slot >= 0 && slot < num_blocks * block_size;
    return good ? static_cast<int32_t>(slot) : -1;
  }
};

// Token i < seq_lens[s] of sequence s goes to row workspace_starts[s] + i. Rows past num_rows are
// not written.
struct UpconvertMlaParams {
  const void* cache;     // entries of ds_mla, [num_blocks, block_size, 656] bytes
  int64_t block_stride;  // bytes, a multiple of 16
  int64_t token_stride;  // bytes, a multiple of 16
  int64_t num_blocks;
  int32_t block_size;
  void* rows;          // [num_rows, 576]
  int64_t row_stride;  // elements
  int64_t num_rows;
  DType dtype;                 // of the rows
  const int32_t* block_table;  // [>= num_seqs, blocks_per_seq]
  int64_t block_table_stride;
  int64_t blocks_per_seq;
  const int32_t* seq_lens;          // [num_seqs]
  const int32_t* workspace_starts;  // [num_seqs]
  int32_t num_seqs;

  // The entry of token `i` of sequence `seq`. Null if its page is invalid: the row is filled with
  // zeros.
  VLLM_KERNELS_HOST_DEVICE const char* entry(int64_t seq, int64_t i) const {
    const int64_t column = i / block_size;
    if (column >= blocks_per_seq) return nullptr;
    const int64_t block = block_table[seq * block_table_stride + column];
    if (block < 0 || block >= num_blocks) return nullptr;
    return static_cast<const char*>(cache) + block * block_stride +
           (i - column * block_size) * token_stride;
  }
};

// q_out[row] = [ql_nope[row] | q_pe[row]]. A row is one (token, head).
struct ConcatMlaQParams {
  const void* nope;
  const void* rope;
  void* out;
  Rows nope_rows;
  Rows rope_rows;
  Rows out_rows;
  int32_t nope_bytes;  // of a row
  int32_t rope_bytes;
  DType dtype;
};

}  // namespace vllm_kernels
