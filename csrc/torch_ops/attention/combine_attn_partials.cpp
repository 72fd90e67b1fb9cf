// Binding of combine_attn_partials: out_partial [num_partials, num_tokens, num_heads, head_size] ->
// output [num_tokens, num_heads, head_size]. ops/combine_attn_partials.h has the formula.
#include "ops/combine_attn_partials.h"

#include "torch_ops/base/check.h"
#include "torch_ops/base/device.h"

namespace vllm_kernels {
namespace {

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
  if (num_partials > INT32_MAX) p.fail("expected fewer than 2^31 out_partial");
  expect.apart(o, p);
  expect.apart(o, l);
  float* out_lse = nullptr;
  if (output_lse) {
    const Argument ol = expect.tensor("output_lse", *output_lse)
                            .float32()
                            .shape({&num_tokens, &num_heads})
                            .contiguous()
                            .written();
    for (const Argument* other : {&o, &p, &l}) expect.apart(ol, *other);
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
                                         .num_partials = static_cast<int32_t>(num_partials),
                                         .num_heads = static_cast<int32_t>(num_heads),
                                         .head_size = static_cast<int32_t>(head_size),
                                         .dtype = p.dtype()};
  launch(params, output);
}

}  // namespace
}  // namespace vllm_kernels

VLLM_KERNELS_IMPL(library) {
  library.impl("combine_attn_partials", TORCH_BOX(&vllm_kernels::combine_attn_partials));
}
