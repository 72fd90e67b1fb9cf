// The tokens of a KV block that a query token sees: a range, masks, and the tree mask. See
// cpu/base/vec.h for the anonymous namespace.
#pragma once
#include "cpu/attention/packed_gemm.h"
#include "cpu/attention/paged_attention.h"
#include "cpu/base/vec_math.h"

namespace vllm_kernels::cpu {
namespace {

struct VisibleRange {
  int begin, end;  // tokens of the KV block
};

// A mask of the bits of a packed V word that belong to visible tokens.
template <typename Cache>
inline uint32_t word_mask(int word, VisibleRange visible) {
  const auto is_visible = [&](int token) { return token >= visible.begin && token < visible.end; };
  if constexpr (!kPairs<Cache>) return is_visible(word) ? ~0u : 0u;
  return (is_visible(2 * word) ? 0xffffu : 0u) | (is_visible(2 * word + 1) ? 0xffff0000u : 0u);
}

inline Vec lane_numbers() {
  Vec lanes;
  for (int i = 0; i < kLanes; ++i) lanes[i] = static_cast<float>(i);
  return lanes;
}

// numbers: lane_numbers() plus the first token.
inline VecInt is_visible(Vec numbers, VisibleRange visible) {
  return (VecInt)(numbers >= splat(static_cast<float>(visible.begin))) &
         (VecInt)(numbers < splat(static_cast<float>(visible.end)));
}

// -inf for tokens [token, token + kLanes) of the sequence that the tree mask hides.
inline Vec masked_by_tree(const TreeMask& mask, const QueryTile& tile, int query, int32_t token,
                          Vec score) {
  const int32_t index = tile.first_position + query - tile.first_new;
  const int32_t visible = tile.first_new - token;  // lanes before the query tokens
  for (int32_t lane = visible > 0 ? visible : 0; lane < kLanes; ++lane) {
    const int32_t other = lane - visible;
    if (!mask.is_visible(tile.first_token + query, index, other)) score[lane] = -kInfinity;
  }
  return score;
}

}  // namespace
}  // namespace vllm_kernels::cpu
