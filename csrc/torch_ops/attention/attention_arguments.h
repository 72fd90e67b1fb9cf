// What the ops over paged attention share.
#pragma once
#include <optional>

#include "ops/paged_attention.h"
#include "torch_ops/base/check.h"

namespace vllm_kernels {

// At most one query token a sequence: v1, v2, and on a CPU any plain decode.
void launch_decode(const PagedAttentionParams& params, const Tensor& query);

// Runs the kernel of paged_attention; `workspace` from read_workspace(), or null. It throws no
// finding of check mode: the caller does, before its first launch.
void launch_paged_attention(const PagedAttentionParams& params, const Tensor& query,
                            const Argument* workspace);

// CPU: tells which kernel runs; true where the call is only explained (ops/report.h).
bool report_cpu_kernel(const char* op, const char* kernel);

// --- the arguments of paged_attention, varlen_attention and fused_decode_attention

// The query's tokens and the sequences they belong to.
struct Queries {
  Argument query;
  Argument out;
  std::optional<Argument> lse;               // [num_tokens, num_heads]
  const int32_t* query_start_loc = nullptr;  // [num_seqs + 1]
  Size num_tokens{"num_tokens"};
  Size num_heads{"num_heads"};
  Size num_seqs{"num_seqs"};
};
Queries read_queries(Expect& expect, const Tensor& out, const std::optional<Tensor>& lse,
                     const Tensor& query, Size& head_size);

// Null: one query token a sequence. `read` gets it where it is given.
void read_query_start_loc(Expect& expect, Queries& queries, const Tensor* query_start_loc,
                          int64_t max_query_len, Arguments& read);

// Heads and head sizes of the query and of `kv`, which comes from the argument `source`.
void check_sizes(const Queries& queries, const PagedKv& kv, const char* source);

// What is written lies apart from what is read (`others`), and from what else is written.
void require_apart(const Expect& expect, const Queries& queries,
                   const std::optional<Argument>& scratch, Arguments& others);

// Heads [num_tokens, num_heads, head_size] of which only the stride of the tokens is free.
void require_contiguous_heads(const Argument& heads, const Size& num_tokens);

// Of the cache; `named` is the argument to name where it does not fit.
void check_head_size(const Argument& named, const PagedKv& kv);

void check_numbers(const Expect& expect, int64_t sliding_window, double softcap,
                   int64_t fixed_split_size);

void check_query_len(const Expect& expect, int64_t max_query_len);

// PagedAttentionParams::window_right of -1 (all) or a number of tokens.
int32_t right_window(const Expect& expect, int64_t window_right);

// Numbers of tokens whose size beyond 2^31 does not matter.
int32_t at_most_int32(int64_t value);

// PagedAttentionParams::sliding_window; beyond 2^30 tokens its size does not matter.
int32_t window_of(int64_t sliding_window);

// float32 [num_heads], or null; `read` gets it where it is given.
const float* read_per_head(Expect& expect, const char* name, const std::optional<Tensor>& values,
                           Size& num_heads, Arguments& read);

// uint8, and on CUDA large enough.
std::optional<Argument> read_workspace(Expect& expect, const std::optional<Tensor>& workspace);

struct Pages {
  Argument tables;  // [num_seqs, max_blocks_per_seq] int32
  Argument lens;    // [num_seqs] int32
  int32_t max_blocks;
};

// Looked at last: with shapes, strides and query_start_loc (or null) known to be right.
Pages read_pages(Expect& expect, const Tensor& block_tables, const Tensor& seq_lens, Size& num_seqs,
                 const PagedKv& kv, const int32_t* query_start_loc, int32_t sliding_window);

}  // namespace vllm_kernels
