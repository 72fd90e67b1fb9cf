// Checks that the bindings of all ops that rotate share: rotary_embedding, rope_and_cache,
// fused_qk_norm_rope and fused_decode_attention.
#pragma once
#include "ops/rope_and_cache.h"
#include "torch_ops/base/check.h"
#include "torch_ops/base/index_check.h"

namespace vllm_kernels {

// [max_position, rotary_size]: cosines, then sines.
inline Argument read_cos_sin_cache(Expect& expect, const Tensor& cos_sin_cache, int64_t head_size) {
  Size max_position("max_position"), rotary_size("rotary_size");
  const Argument c = expect.tensor("cos_sin_cache", cos_sin_cache)
                         .floating()
                         .shape({&max_position, &rotary_size})
                         .inner_contiguous();
  if (rotary_size % 2 != 0 || rotary_size > head_size || rotary_size == 0) {
    c.fail("expected an even rotary_size from 2 to head_size = " + std::to_string(head_size) +
           " at dimension 1, got shape " + c.shape_text());
  }
  return c;
}

inline void check_positions(const Expect& expect, const Argument& positions,
                            const Argument& cos_sin_cache) {
  check_index(expect, positions, {.noun = "a position", .low = 0, .high = cos_sin_cache.size(0)});
}

// positions [num_tokens] int64 and cos_sin_cache [max_position, rotary_size].
struct RopeTables {
  Argument positions;
  Argument cos_sin_cache;
};

inline RopeTables rope_tables(Expect& expect, const char* positions_name, const Tensor& positions,
                              const Tensor& cos_sin_cache, Size& num_tokens, int64_t head_size) {
  return {
      .positions =
          expect.tensor(positions_name, positions).int64().shape({&num_tokens}).inner_contiguous(),
      .cos_sin_cache = read_cos_sin_cache(expect, cos_sin_cache, head_size)};
}

// Checks the values of the positions. Packs all but the heads and the cache; `x` has their dtype.
inline RopeAndCacheParams pack_rope(const Expect& expect, const RopeTables& tables,
                                    const Argument& x, int64_t head_size, float epsilon,
                                    bool is_neox) {
  const auto& [positions, c] = tables;
  check_positions(expect, positions, c);
  RopeAndCacheParams params{};
  params.positions = positions.as<const int64_t>();
  params.cos_sin_cache = c.data();
  params.cos_sin_stride = c.stride(0);
  params.max_position = c.size(0);
  params.num_tokens = positions.size(0);
  params.kv.dtype = x.dtype();
  params.head_size = int32_size(x, "head_size", head_size);
  params.rotary_size = int32_size(c, "rotary_size", c.size(1));
  params.epsilon = epsilon;
  params.is_neox = is_neox;
  params.dtype = x.dtype();
  params.cos_sin_dtype = c.dtype();
  params.op = expect.op();
  return params;
}

// Heads [first, first + count) of the rows of `qkv`, and of `bias` if it is not null.
inline ProjectedHeads qkv_heads(const Argument& qkv, int64_t head_size, int64_t first,
                                int64_t count, const void* weight, const void* bias = nullptr) {
  const int64_t offset = first * head_size * qkv.element_size();  // bytes
  return {.data = qkv.as<char>() + offset,
          .token_stride = qkv.stride(0),
          .head_stride = head_size,
          .bias = bias == nullptr ? nullptr : static_cast<const char*>(bias) + offset,
          .weight = weight,
          .count = int32_size(qkv, "heads", count)};
}

// Key and value go into slots of the cache.
inline void store_in(RopeAndCacheParams& params, const PagedKv& kv, const Argument& slots) {
  params.stores = true;
  params.slot_mapping = slots.as<const int64_t>();
  params.num_slots = slots.numel();
  params.kv = kv;
}

}  // namespace vllm_kernels
