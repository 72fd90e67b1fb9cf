// Binding of fused_qk_norm_rope: qkv [num_tokens, (num_heads_q + num_heads_k + num_heads_v) *
// head_dim], query and key updated in place. It launches RopeAndCacheParams without a cache.
#include "torch_ops/base/check.h"
#include "torch_ops/base/device.h"
#include "torch_ops/base/index_check.h"
#include "torch_ops/rope/rope_and_cache.h"

namespace vllm_kernels {
namespace {

void fused_qk_norm_rope(const Tensor& qkv, int64_t num_heads_q, int64_t num_heads_k,
                        int64_t num_heads_v, int64_t head_dim, double eps, const Tensor& q_weight,
                        const Tensor& k_weight, const Tensor& cos_sin_cache, bool is_neox,
                        const Tensor& position_ids) {
  Expect expect("fused_qk_norm_rope");
  expect_rope_head_size(expect, "head_dim", head_dim);
  for (const auto& [name, count] :
       {std::pair{"num_heads_q", num_heads_q}, std::pair{"num_heads_k", num_heads_k},
        std::pair{"num_heads_v", num_heads_v}}) {
    expect_rope_heads(expect, name, count, 0);
  }
  Size num_tokens("num_tokens"), head_size("head_dim", head_dim, nullptr);
  Size width("(num_heads_q + num_heads_k + num_heads_v) * head_dim",
             (num_heads_q + num_heads_k + num_heads_v) * head_dim, nullptr);
  const Argument x = expect.tensor("qkv", qkv)
                         .floating()
                         .shape({&num_tokens, &width})
                         .inner_contiguous()
                         .written();
  const Argument qw =
      expect.tensor("q_weight", q_weight).same_dtype(x).shape({&head_size}).inner_contiguous();
  const Argument kw =
      expect.tensor("k_weight", k_weight).same_dtype(x).shape({&head_size}).inner_contiguous();
  const RopeTables tables =
      rope_tables(expect, "position_ids", position_ids, cos_sin_cache, num_tokens, head_dim);
  expect_epsilon(expect, eps, "eps");
  Arguments read;
  read.add(qw, kw, tables.positions, tables.cos_sin_cache);
  expect.apart(x, read);
  if (x.numel() == 0 || num_heads_q + num_heads_k == 0) return;
  check_index(expect, tables.positions,
              {.noun = "a position", .low = 0, .high = tables.cos_sin_cache.size(0)});

  RopeAndCacheParams params{};
  params.query = {.data = x.mutable_data(),
                  .token_stride = x.stride(0),
                  .head_stride = head_dim,
                  .weight = qw.data(),
                  .count = static_cast<int32_t>(num_heads_q)};
  params.key = params.query;
  params.key.data = x.as<char>() + num_heads_q * head_dim * x.element_size();
  params.key.weight = kw.data();
  params.key.count = static_cast<int32_t>(num_heads_k);
  set_tables(params, tables);
  params.num_tokens = num_tokens;
  params.kv.dtype = x.dtype();
  params.head_size = static_cast<int32_t>(head_dim);
  params.epsilon = static_cast<float>(eps);
  params.is_neox = is_neox;
  params.dtype = x.dtype();
  params.op = "fused_qk_norm_rope";
  launch(params, qkv);
}

}  // namespace
}  // namespace vllm_kernels

VLLM_KERNELS_IMPL(library) {
  library.impl("fused_qk_norm_rope", TORCH_BOX(&vllm_kernels::fused_qk_norm_rope));
}
