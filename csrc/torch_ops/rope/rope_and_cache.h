// Checks that the bindings of rope_and_cache, fused_qk_norm_rope and fused_decode_attention share.
#pragma once
#include "ops/rope_and_cache.h"
#include "torch_ops/base/check.h"
#include "torch_ops/norm/rms_norm.h"
#include "torch_ops/rope/rotary_embedding.h"

namespace vllm_kernels {

// Packs heads [num_tokens, count, head_size]; the strides of tokens and heads are free.
inline ProjectedHeads projected_heads(const Argument& x) {
  ProjectedHeads heads;
  heads.data = x.mutable_data();
  heads.token_stride = x.stride(0);
  heads.head_stride = x.stride(1);
  heads.count = static_cast<int32_t>(x.size(1));
  return heads;
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

inline void set_tables(RopeAndCacheParams& params, const RopeTables& tables) {
  const Argument& c = tables.cos_sin_cache;
  params.positions = tables.positions.as<const int64_t>();
  params.cos_sin_cache = c.data();
  params.cos_sin_stride = c.stride(0);
  params.max_position = c.size(0);
  params.rotary_size = static_cast<int32_t>(c.size(1));
  params.cos_sin_dtype = c.dtype();
}

inline void expect_rope_head_size(const Expect& expect, const char* name, int64_t head_size) {
  expect.that(head_size >= 1 && head_size <= kMaxRopeHeadSize,
              std::string(name) + ": expected 1 to " + std::to_string(kMaxRopeHeadSize) + ", got " +
                  std::to_string(head_size));
}

// The kernels number the heads of a launch (8192 tokens) in 31 bits.
constexpr int64_t kMaxRopeHeads = 65536;

inline void expect_rope_heads(const Expect& expect, const char* name, int64_t count,
                              int64_t least = 1) {
  expect.that(count >= least && count <= kMaxRopeHeads,
              std::string(name) + ": expected " + std::to_string(least) + " to " +
                  std::to_string(kMaxRopeHeads) + " heads, got " + std::to_string(count));
}

}  // namespace vllm_kernels
