// Checks and launches that the attention bindings share. paged_attention.cpp implements them.
#pragma once
#include <optional>

#include "ops/paged_attention.h"
#include "ops/pages/page_list.h"
#include "ops/upcast_query.h"
#include "torch_ops/base/check.h"

namespace vllm_kernels {

// At most one query token a sequence: v1, v2, and on a CPU any plain decode.
void launch_decode(const PagedAttentionParams& params, const Tensor& query);

// Runs the kernel of paged_attention; `workspace` from read_workspace(), or null.
void launch_paged_attention(const PagedAttentionParams& params, const Tensor& query,
                            void* workspace, const E4M3Query& e4m3 = {});

// CPU: reports which kernel runs. Returns true if the call is only explained (ops/report.h).
bool report_cpu_kernel(const char* op, const char* kernel);

// --- the arguments of paged_attention, varlen_attention and fused_decode_attention

// The query's tokens and the sequences they belong to.
struct Queries {
  Argument query;
  Argument out;
  std::optional<Argument> lse;  // [num_tokens, num_heads]
  Size num_tokens{"num_tokens"};
  Size num_heads{"num_heads"};
  Size num_seqs{"num_seqs"};
  E4M3Query e4m3;
};
// `written` gets out and lse. The `out` of an e4m3 query has 16 bits.
enum class EightBitQuery : uint8_t { kRefused, kTaken };
Queries read_queries(Expect& expect, const Tensor& out, const std::optional<Tensor>& lse,
                     const Tensor& query, Size& head_size, Arguments& written,
                     EightBitQuery e4m3 = EightBitQuery::kRefused);

// Sets q_scale, of an e4m3 query alone. `read` gets it where it is given.
void read_query_scale(Expect& expect, const PagedKv& kv, Queries& queries,
                      const std::optional<Tensor>& q_scale, Arguments& read);

// Sets query_start_loc and max_query_len. Null: one query token a sequence. `read` gets it where it
// is given.
void read_query_start_loc(Expect& expect, PagedAttentionParams& params, Queries& queries,
                          const Tensor* query_start_loc, int64_t max_query_len, Arguments& read);

// Packs `queries`. Called after read_query_start_loc().
void set_queries(PagedAttentionParams& params, const Queries& queries);

// Sets PagedAttentionParams::zero_unowned, for an `out` without gaps.
void read_zero_unowned(PagedAttentionParams& params, Queries& queries, bool zero_unowned);

// Whether no kernel has to run. Without sequences it clears the rows of `out` and `lse`.
bool is_done(const PagedAttentionParams& params, const Queries& queries, const Tensor& out,
             const Tensor* lse);

// Checks heads and head sizes of the query against `kv`, which comes from the argument `source`.
void check_sizes(const Queries& queries, const PagedKv& kv, const char* source);

// Requires contiguous heads [num_tokens, num_heads, head_size]. Only the stride of the tokens is
// free.
void require_contiguous_heads(const Argument& heads, const Size& num_tokens);

// Checks the head size for a cache of this dtype. The error names the argument `named`.
void check_head_size(const Argument& named, int64_t head_size, DType dtype);

// Reads what changes the scores: scale, softcap, ALiBi and sinks. `read` gets the tensors that are
// given.
PagedAttentionParams read_scores(Expect& expect, Size& num_heads, double scale, double softcap,
                                 const std::optional<Tensor>& alibi_slopes,
                                 const std::optional<Tensor>& sinks, Arguments& read);

// float32 [num_heads], or null; `read` gets it where it is given.
const float* read_per_head(Expect& expect, const char* name, const std::optional<Tensor>& values,
                           Size& num_heads, Arguments& read);

// A number of tokens; its size beyond 2^31 does not matter. Below `low` it throws `expected`.
int32_t number_of_tokens(const Expect& expect, int64_t value, int64_t low, const char* expected);

// PagedAttentionParams::sliding_window; beyond 2^30 tokens its size does not matter.
int32_t window_of(int64_t sliding_window);

// Sets sliding_window and fixed_split_size.
void read_window_and_split(const Expect& expect, PagedAttentionParams& params,
                           int64_t sliding_window, int64_t fixed_split_size);

// PagedAttentionParams::fixed_split_size.
int32_t split_size(const Expect& expect, int64_t fixed_split_size);

// PagedAttentionParams::window_right of -1 (all) or a number of tokens.
int32_t right_window(const Expect& expect, int64_t window_right);

// uint8, and on CUDA large enough; or null. `written` gets it where it is given.
void* read_workspace(Expect& expect, const std::optional<Tensor>& workspace, Arguments& written);

// Sets block_tables [num_seqs, max_blocks_per_seq] and seq_lens [num_seqs], both int32, and
// max_seq_len, cut to what block_tables has. Called last: it reads values, by the kv,
// query_start_loc and sliding_window of `params`. seq_lens may have more elements, where
// `params` has cumulative lengths.
void read_pages(Expect& expect, PagedAttentionParams& params, const Tensor& block_tables,
                const Tensor& seq_lens, Size& num_seqs, Arguments& read,
                int64_t max_seq_len = INT64_MAX);

// The same for a table in CSR form: kv_indices [num_ids], last_page_len [num_seqs] and kv_indptr
// [num_seqs + 1], all int32. max_pages: the caller's bound on a sequence's pages, or -1. Sets all
// but the pointers of block_tables and seq_lens.
PageListParams read_page_list(Expect& expect, PagedAttentionParams& params,
                              const Tensor& kv_indices, const Tensor& last_page_len,
                              const Tensor& kv_indptr, int64_t max_pages, Size& num_seqs,
                              Arguments& read);

// The memory of block_tables and seq_lens during the launch.
struct BlockTables {
  std::optional<Tensor> tables, seq_lens;
};
// Makes and sets block_tables and seq_lens.
BlockTables make_tables(Expect& expect, PagedAttentionParams& params, PageListParams list,
                        const Tensor& query);

}  // namespace vllm_kernels
