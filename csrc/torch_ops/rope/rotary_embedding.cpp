// Binding of rotary_embedding: query and key, updated in place. positions may have one or two
// dimensions. ops/rotary_embedding.h has the formula.
#include "ops/rotary_embedding.h"

#include "torch_ops/base/check.h"
#include "torch_ops/base/device.h"
#include "torch_ops/rope/rope_and_cache.h"

namespace vllm_kernels {
namespace {

// Checks and packs query or key: [tokens..., heads * head_size] or [tokens..., heads, head_size].
// tokens... are the dimensions of positions.
RotaryHeads heads_of(const Expect& expect, Argument& x, const Argument& positions,
                     int64_t head_size) {
  const int64_t leading = positions.dim();
  x.rank(leading + 1, leading + 2).inner_contiguous().written();
  for (int64_t d = 0; d < leading; ++d) {
    Size tokens(leading == 1 ? "tokens" : d == 0 ? "batch" : "seq", positions.size(d), "positions");
    x.at(d, tokens);
  }
  RotaryHeads heads;
  heads.data = x.mutable_data();
  if (x.dim() == leading + 2) {
    Size size("head_size", head_size, nullptr);
    x.at(-1, size);
    heads.count = x.size(-2);
    heads.stride = x.stride(-2);
    heads.tokens = expect.rows(x, 2);
  } else {
    if (x.size(-1) % head_size != 0) {
      x.fail("expected a multiple of head_size = " + std::to_string(head_size) +
             " as last dimension, got shape " + x.shape_text());
    }
    heads.count = x.size(-1) / head_size;
    heads.stride = head_size;
    heads.tokens = expect.rows(x, 1);
  }
  return heads;
}

void rotary_embedding(const Tensor& positions, const Tensor& query,
                      const std::optional<Tensor>& key, int64_t head_size,
                      const Tensor& cos_sin_cache, bool is_neox) {
  Expect expect("rotary_embedding");
  const Argument t = expect.tensor("positions", positions).int64().rank(1, 2).inner_contiguous();
  Argument q = expect.tensor("query", query).floating();
  expect.that(head_size > 0, "head_size: expected a number > 0, got " + std::to_string(head_size));
  const Argument c = read_cos_sin_cache(expect, cos_sin_cache, head_size);
  RotaryParams params{.query = heads_of(expect, q, t, head_size),
                      .key = {},
                      .positions = t.as<int64_t>(),
                      .position_rows = expect.rows(t, 0),
                      .cos_sin_cache = c.data(),
                      .cache_stride = c.stride(0),
                      .max_position = c.size(0),
                      .rotary_size = c.size(1),
                      .is_neox = is_neox,
                      .dtype = q.dtype(),
                      .cache_dtype = c.dtype()};
  Arguments written;
  if (key.has_value()) {
    Argument k = expect.tensor("key", *key).same_dtype(q);
    params.key = heads_of(expect, k, t, head_size);
    written.add(k);
  }
  written.add(q);
  expect.apart(written, {t, c});
  if (t.numel() == 0 || params.query.count + params.key.count == 0) return;
  check_positions(expect, t, c);
  launch(params, query);
}

}  // namespace
}  // namespace vllm_kernels

VLLM_KERNELS_IMPL(library) {
  library.impl("rotary_embedding", TORCH_BOX(&vllm_kernels::rotary_embedding));
}
