// Binding of varlen_attention: query [num_tokens, num_heads, head_size] over contiguous key and
// value [num_keys, num_kv_heads, head_size], without pages. It fills PagedAttentionParams with
// key_start_loc, and launches as paged_attention does. attention_arguments.h has the shared checks.
#include <cmath>

#include "torch_ops/attention/attention_arguments.h"
#include "torch_ops/base/allocate.h"
#include "torch_ops/base/device.h"
#include "torch_ops/base/index_check.h"
#include "torch_ops/cache/paged_kv.h"

namespace vllm_kernels {
namespace {

// Converts window_left to PagedAttentionParams::sliding_window. window_left counts tokens before
// the query token, -1: all. sliding_window includes the query token's own position, 0: all.
int32_t left_window(const Expect& expect, int64_t window_left) {
  const int32_t tokens = number_of_tokens(
      expect, window_left, -1, "window_left: expected a number of tokens >= 0 (-1: all)");
  return tokens < 0 ? 0 : window_of(tokens + int64_t{1});
}

// key_start_loc [num_seqs + 1]: the first key of each sequence, then the end; ascending.
Argument read_key_start_loc(Expect& expect, const Tensor& key_start_loc, const Queries& queries,
                            int64_t num_keys) {
  Size ends("num_seqs + 1", queries.num_seqs + 1, "query_start_loc");
  const Argument starts =
      expect.tensor("key_start_loc", key_start_loc).int32().shape({&ends}).contiguous();
  check_index(expect, starts,
              {.noun = "a token of key, not before the one before,",
               .high = num_keys + 1,
               .max_increase = num_keys});
  return starts;
}

void varlen_attention(const Tensor& out, const std::optional<Tensor>& lse, const Tensor& query,
                      const Tensor& key, const Tensor& value, const Tensor& query_start_loc,
                      const Tensor& key_start_loc, double scale,
                      const std::optional<Tensor>& alibi_slopes, int64_t window_left,
                      int64_t window_right, double softcap, const std::optional<Tensor>& sinks,
                      const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale,
                      int64_t max_query_len, const std::optional<Tensor>& workspace,
                      bool zero_unowned, const std::optional<Tensor>& q_scale,
                      int64_t fixed_split_size, int64_t max_key_len) {
  Expect expect("varlen_attention");
  Size head_size("head_size");
  Arguments read, written;
  Queries queries =
      read_queries(expect, out, lse, query, head_size, written, EightBitQuery::kTaken);
  Argument k = expect.tensor("key", key);
  Argument v = expect.tensor("value", value);
  PagedKv kv = contiguous_kv(queries.query, k, v, head_size);
  check_sizes(queries, kv, "key");
  set_scales(expect, kv, k_scale, v_scale, read);
  PagedAttentionParams params =
      read_scores(expect, queries.num_heads, scale, softcap, alibi_slopes, sinks, read);
  params.kv = kv;
  read_query_scale(expect, kv, queries, q_scale, read);
  params.max_seq_len = k.size(0);
  params.sliding_window = left_window(expect, window_left);
  params.window_right = right_window(expect, window_right);
  params.fixed_split_size = split_size(expect, fixed_split_size);
  params.max_key_len = number_of_tokens(expect, max_key_len, 0,
                                        "max_key_len: expected a length >= 0 (0: not known)");
  void* scratch = read_workspace(expect, workspace, written);
  read_query_start_loc(expect, params, queries, &query_start_loc, max_query_len, read);
  const Argument key_starts = read_key_start_loc(expect, key_start_loc, queries, k.size(0));
  params.key_start_loc = key_starts.as<const int32_t>();
  read.add(queries.query, k, v, key_starts);
  expect.apart(written, read);
  read_zero_unowned(params, queries, zero_unowned);
  if (is_done(params, queries, out, or_null(lse))) return;
  set_queries(params, queries);
  launch_paged_attention(params, query, scratch, queries.e4m3);
}

// A new tensor for the result, and the arguments that flash_attn's callers give.
torch::stable::Tensor varlen_attention_result(const Tensor& query, const Tensor& key,
                                              const Tensor& value, const Tensor& query_start_loc,
                                              const Tensor& key_start_loc, int64_t max_query_len,
                                              std::optional<double> scale, int64_t window_left,
                                              int64_t window_right, double softcap,
                                              const std::optional<Tensor>& sinks,
                                              int64_t max_key_len) {
  const Argument x = Expect("varlen_attention").tensor("query", query).floating().rank(3, 3);
  Tensor out = empty(x.sizes(), x.scalar_type(), query);
  const double factor = scale.value_or(1.0 / std::sqrt(x.size(2)));
  varlen_attention(out, {}, query, key, value, query_start_loc, key_start_loc, factor, {},
                   window_left, window_right, softcap, sinks, {}, {}, max_query_len, {}, true, {},
                   0, max_key_len);
  return torch::stable::Tensor(out.release());
}

}  // namespace
}  // namespace vllm_kernels

VLLM_KERNELS_IMPL(library) {
  library.impl("varlen_attention", TORCH_BOX(&vllm_kernels::varlen_attention));
  library.impl("varlen_attention.result", TORCH_BOX(&vllm_kernels::varlen_attention_result));
}
