// Bindings of the ops that combine attention results over disjoint sets of keys. Their formulas are
// in the headers of csrc/ops.
//   merge_attn_states      prefix and suffix [num_tokens, num_heads, head_size] -> output of that
//                          shape; an lse is [num_heads, num_tokens]
//   combine_attn_partials  out_partial [num_partials, num_tokens, num_heads, head_size] -> output
//                          [num_tokens, num_heads, head_size]
#include "ops/merge_attn_states.h"

#include "torch_ops/base/check.h"
#include "torch_ops/base/device.h"

namespace vllm_kernels {
namespace {

void merge_attn_states(const Tensor& output, const std::optional<Tensor>& output_lse,
                       const Tensor& prefix_output, const Tensor& prefix_lse,
                       const Tensor& suffix_output, const Tensor& suffix_lse) {
  Expect expect("merge_attn_states");
  Size num_tokens("num_tokens"), num_heads("num_heads"), head_size("head_size");
  const Argument p = expect.tensor("prefix_output", prefix_output)
                         .floating()
                         .shape({&num_tokens, &num_heads, &head_size})
                         .inner_contiguous();
  const Argument s =
      expect.tensor("suffix_output", suffix_output).same_dtype(p).same_shape(p).inner_contiguous();
  const Argument o =
      expect.tensor("output", output).same_dtype(p).same_shape(p).inner_contiguous().written();
  const auto read_lse = [&](const char* name, const Tensor& lse) {
    return expect.tensor(name, lse).float32().shape({&num_heads, &num_tokens}).contiguous();
  };
  const Argument pl = read_lse("prefix_lse", prefix_lse);
  const Argument sl = read_lse("suffix_lse", suffix_lse);
  float* out_lse = nullptr;
  if (output_lse) {
    const Argument ol = read_lse("output_lse", *output_lse).written();
    expect.same_or_apart(ol, pl);
    expect.same_or_apart(ol, sl);
    expect.apart(ol, {o, p, s});
    out_lse = ol.as<float>();
  }
  expect.same_or_apart(o, p);
  expect.same_or_apart(o, s);
  expect.apart(o, {pl, sl});
  if (num_tokens == 0 || num_heads == 0) return;

  const MergeAttnStatesParams params{.output = o.mutable_data(),
                                     .output_token_stride = o.stride(0),
                                     .output_head_stride = o.stride(1),
                                     .output_lse = out_lse,
                                     .prefix = {p.data(), p.stride(0), p.stride(1)},
                                     .suffix = {s.data(), s.stride(0), s.stride(1)},
                                     .prefix_lse = pl.as<const float>(),
                                     .suffix_lse = sl.as<const float>(),
                                     .num_tokens = num_tokens,
                                     .num_heads = int32_size(p, "num_heads", num_heads),
                                     .head_size = int32_size(p, "head_size", head_size),
                                     .dtype = p.dtype()};
  launch(params, output);
}

void combine_attn_partials(const Tensor& output, const std::optional<Tensor>& output_lse,
                           const Tensor& out_partial, const Tensor& lse_partial) {
  Expect expect("combine_attn_partials");
  Size num_partials("num_partials"), num_tokens("num_tokens"), num_heads("num_heads");
  Size head_size("head_size");
  const Argument p = expect.tensor("out_partial", out_partial)
                         .floating()
                         .shape({&num_partials, &num_tokens, &num_heads, &head_size})
                         .inner_contiguous();
  const Argument o = expect.tensor("output", output)
                         .same_dtype(p)
                         .shape({&num_tokens, &num_heads, &head_size})
                         .inner_contiguous()
                         .written();
  const Argument l = expect.tensor("lse_partial", lse_partial)
                         .float32()
                         .shape({&num_partials, &num_tokens, &num_heads})
                         .contiguous();
  const int32_t partials = int32_size(p, "num_partials", num_partials);
  expect.apart(o, {p, l});
  float* out_lse = nullptr;
  if (output_lse) {
    const Argument ol = expect.tensor("output_lse", *output_lse)
                            .float32()
                            .shape({&num_tokens, &num_heads})
                            .contiguous()
                            .written();
    expect.apart(ol, {o, p, l});
    out_lse = ol.as<float>();
  }
  if (num_tokens == 0 || num_heads == 0) return;

  const CombineAttnPartialsParams params{.output = o.mutable_data(),
                                         .output_token_stride = o.stride(0),
                                         .output_head_stride = o.stride(1),
                                         .output_lse = out_lse,
                                         .out_partial = p.data(),
                                         .partial_stride = p.stride(0),
                                         .token_stride = p.stride(1),
                                         .head_stride = p.stride(2),
                                         .lse_partial = l.as<const float>(),
                                         .num_tokens = num_tokens,
                                         .num_partials = partials,
                                         .num_heads = int32_size(p, "num_heads", num_heads),
                                         .head_size = int32_size(p, "head_size", head_size),
                                         .dtype = p.dtype()};
  launch(params, output);
}

}  // namespace
}  // namespace vllm_kernels

VLLM_KERNELS_IMPL(library) {
  library.impl("merge_attn_states", TORCH_BOX(&vllm_kernels::merge_attn_states));
  library.impl("combine_attn_partials", TORCH_BOX(&vllm_kernels::combine_attn_partials));
}
