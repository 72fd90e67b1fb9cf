// Bindings of rotary_embedding and batched_rotary_embedding: query and key, updated in place.
// positions may have one or two dimensions. ops/rotary_embedding.h has the formula.
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

// Checks cos_sin_cache_offsets, [tokens], added to the positions.
Argument read_offsets(Expect& expect, const Tensor& offsets, const Argument& positions) {
  Size tokens("tokens", positions.numel(), "positions");
  return expect.tensor("cos_sin_cache_offsets", offsets).int64().shape({&tokens}).contiguous();
}

// CUDA leaves out a token whose sum is out of range. Its check mode sees only the summands.
void check_offsets(const Expect& expect, const RotaryParams& params, const Argument& offsets) {
  check_index(expect, offsets, {.noun = "a row", .low = 0, .high = params.max_position});
  if (!kOnCpu || offsets.data() == nullptr) return;
  for (int64_t token = 0; token < offsets.numel(); ++token) {
    const int64_t position = params.positions[params.position_rows.offset(token)];
    const int64_t offset = params.offsets[token];
    if (params.has_angles(position, offset)) continue;
    expect.fail("cos_sin_cache_offsets[" + std::to_string(token) + "] = " + std::to_string(offset) +
                ": expected at most " + std::to_string(params.max_position - 1 - position) +
                ", for the position is " + std::to_string(position) + " and cos_sin_cache has " +
                std::to_string(params.max_position) + " rows");
  }
}

struct Batched {
  int64_t rot_dim;
  const Tensor& offsets;
};

void rotate(const char* op, const Tensor& positions, const Tensor& query,
            const std::optional<Tensor>& key, int64_t head_size, const Tensor& cos_sin_cache,
            bool is_neox, const Batched* batched = nullptr) {
  Expect expect(op);
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
  Arguments written, read(t, c);
  std::optional<Argument> offsets;
  if (batched != nullptr) {
    expect.that(batched->rot_dim == params.rotary_size,
                "rot_dim: expected " + std::to_string(params.rotary_size) +
                    " (from cos_sin_cache), got " + std::to_string(batched->rot_dim));
    offsets = read_offsets(expect, batched->offsets, t);
    params.offsets = offsets->as<const int64_t>();
    read.add(*offsets);
  }
  if (key.has_value()) {
    Argument k = expect.tensor("key", *key).same_dtype(q);
    params.key = heads_of(expect, k, t, head_size);
    written.add(k);
  }
  written.add(q);
  expect.apart(written, read);
  if (t.numel() == 0 || params.query.count + params.key.count == 0) return;
  check_positions(expect, t, c);
  if (offsets) check_offsets(expect, params, *offsets);
  launch(params, query);
}

void rotary_embedding(const Tensor& positions, const Tensor& query,
                      const std::optional<Tensor>& key, int64_t head_size,
                      const Tensor& cos_sin_cache, bool is_neox) {
  rotate("rotary_embedding", positions, query, key, head_size, cos_sin_cache, is_neox);
}

void batched_rotary_embedding(const Tensor& positions, const Tensor& query,
                              const std::optional<Tensor>& key, int64_t head_size,
                              const Tensor& cos_sin_cache, bool is_neox, int64_t rot_dim,
                              const Tensor& cos_sin_cache_offsets) {
  const Batched batched{.rot_dim = rot_dim, .offsets = cos_sin_cache_offsets};
  rotate("batched_rotary_embedding", positions, query, key, head_size, cos_sin_cache, is_neox,
         &batched);
}

}  // namespace
}  // namespace vllm_kernels

VLLM_KERNELS_IMPL(library) {
  library.impl("rotary_embedding", TORCH_BOX(&vllm_kernels::rotary_embedding));
  library.impl("batched_rotary_embedding", TORCH_BOX(&vllm_kernels::batched_rotary_embedding));
}
