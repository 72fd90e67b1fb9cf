// rotary_embedding: rotates pairs of a head's first rotary_size elements by the angle of the
// token's position.
//   (x, y) -> (x cos - y sin, y cos + x sin)    in float32, in place
// batched_rotary_embedding: the same; a token's offset selects one of several tables of angles.
// Pairs: (i, i + rotary_size / 2) in Neox style, (2i, 2i + 1) in GPT-J style.
#pragma once
#include "ops/dtype.h"
#include "ops/rows.h"

namespace vllm_kernels {

// The heads of the query or key.
struct RotaryHeads {
  void* data = nullptr;  // [tokens, count, head_size]
  int64_t count = 0;     // 0: no such tensor
  int64_t stride = 0;    // elements between heads
  Rows tokens;
};

struct RotaryParams {
  RotaryHeads query;
  RotaryHeads key;
  const int64_t* positions;   // [tokens]
  Rows position_rows;         // addresses of the positions
  const void* cos_sin_cache;  // [max_position, rotary_size]: cosines, then sines
  int64_t cache_stride;       // elements between rows
  int64_t max_position;
  int64_t rotary_size;  // even, <= head_size
  bool is_neox;
  DType dtype;                       // of query and key
  DType cache_dtype;                 // of cos_sin_cache
  const int64_t* offsets = nullptr;  // [tokens], added to the positions; or null

  // Whether position + offset is a row of cos_sin_cache.
  VLLM_KERNELS_HOST_DEVICE bool has_angles(int64_t position, int64_t offset) const {
    return position >= 0 && offset >= 0 && position < max_position &&
           offset < max_position - position;
  }
};

}  // namespace vllm_kernels
