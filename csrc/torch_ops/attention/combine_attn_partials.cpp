#include "ops/combine_attn_partials.h"

#include "torch_ops/base/check.h"
#include "torch_ops/base/device.h"

namespace vllm_kernels {
namespace {

void merge_attn_parts(const Tensor& output, const std::optional<Tensor>& output_lse,
                      const Tensor& parts, const Tensor& part_lses) {
  Expect expect("merge_attn_parts");
  Size num_parts("num_parts"), num_tokens("num_tokens"), num_heads("num_heads");
  Size head_size("head_size");
  const Argument p = expect.tensor("parts", parts)
                         .floating()
                         .shape({&num_parts, &num_tokens, &num_heads, &head_size})
                         .inner_contiguous();
  const Argument o = expect.tensor("output", output)
                         .same_dtype(p)
                         .shape({&num_tokens, &num_heads, &head_size})
                         .inner_contiguous()
                         .written();
  const Argument l = expect.tensor("part_lses", part_lses)
                         .float32()
                         .shape({&num_parts, &num_tokens, &num_heads})
                         .contiguous();
  if (num_parts > INT32_MAX) p.fail("expected fewer than 2^31 parts");
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

  const MergeAttnPartsParams params{.output = o.mutable_data(),
                                    .output_token_stride = o.stride(0),
                                    .output_head_stride = o.stride(1),
                                    .output_lse = out_lse,
                                    .parts = p.data(),
                                    .part_stride = p.stride(0),
                                    .token_stride = p.stride(1),
                                    .head_stride = p.stride(2),
                                    .part_lses = l.as<const float>(),
                                    .num_tokens = num_tokens,
                                    .num_parts = static_cast<int32_t>(num_parts),
                                    .num_heads = static_cast<int32_t>(num_heads),
                                    .head_size = static_cast<int32_t>(head_size),
                                    .dtype = p.dtype()};
  launch(params, output);
}

}  // namespace
}  // namespace vllm_kernels

VLLM_KERNELS_IMPL(library) {
  library.impl("merge_attn_parts", TORCH_BOX(&vllm_kernels::merge_attn_parts));
}
