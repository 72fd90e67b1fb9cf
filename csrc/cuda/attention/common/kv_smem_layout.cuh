// Where the tokens of a stage lie in shared memory, and which of them a lane loads: what the
// products of warp_mma.cuh and warpgroup_mma.cuh have in common.
//
// K and V lie in shared memory in one of three ways:
//   as pages  of layout vllm: K [D/x][tokens][x] is a row of 8x8 core matrices as ldmatrix wants
//             them, V [D][tokens] is V^T already (forms kPackedPages and kBoxes)
//   as rows   [columns of 128 bytes][tokens][128 bytes], the 16-byte chunks of a row permuted by
//             chunk ^ (token % 8), which is the 128-byte swizzle of a tensor map: 8 tokens' chunks
//             lie in different banks (form kSwizzledRows); V is transposed by ldmatrix. Dense rows
//             of 64 bytes lie two a line of 128, as they are in memory, permuted by line % 8: a
//             copy engine takes as long for half a line as for all of it.
//   as dense  rows [tokens][D] of no whole lines (form kPlainRows): pages of HND are copied as they
//             are, those of NHD in boxes of whole rows. Of 8 tokens' chunks, those of rows of 80
//             or 112 bytes lie in different banks, of 96, 160 or 224 two in the same, of 192 four
#pragma once
#include <type_traits>

#include "cuda/attention/common/kernel_choice.h"
#include "cuda/base/ptx.cuh"
#include "cuda/base/types.cuh"

namespace vllm_kernels::cuda {

// Of a stage of 16, 32 or 64 tokens.
template <int kTokens>
constexpr int kStageShift = kTokens == 64   ? 6
                            : kTokens == 32 ? 5
                                            : 4;  // log2
template <int kTokens>
constexpr int kColumnStride = kTokens * kColumnBytes;  // from one column to the next
template <int kTokens>
using TokenBits = std::conditional_t<kTokens == 64, uint64_t, uint32_t>;
template <int kTokens>
constexpr TokenBits<kTokens> kAllTokens = ~TokenBits<kTokens>{0} >> (kTokens == 16 ? 16 : 0);

// Form kBoxes: tokens that are copied together and lie like a page of that many. V's rows of 16
// bytes would be slow to copy.
template <typename Cache, int kTokens>
constexpr int kBoxTokens = sizeof(Cache) == 2 || kTokens < 32 ? 16 : 32;

// Form kRows: whether dense rows are so short that two share a column's line.
template <typename Cache, int kMaxHeadSize, KvForm kForm>
constexpr bool kMayPairRows = may_pair_rows(kForm, kMaxHeadSize, sizeof(Cache));

// How pages lie in a stage.
struct KvStageLayout {
  int page_tokens;  // 8, 16 or 32
  int page_stride;  // bytes from one page's K to the next
  int page_bytes;   // bytes from one page's V to the next
  int key_step;     // bytes from the K of 16 tokens to that of the next 16
  int value_step;   // likewise of V
  // Stages of 64 tokens: bytes from the first 32 to the second 32.
  int key_half, value_half;
};

// What a lane of a warp loads of 16 tokens of a stage of kTokens.
template <typename Cache, int kMaxHeadSize, int kTokens, KvForm kForm>
struct KvFragments {
  static constexpr bool kCacheIs16Bit = sizeof(Cache) == 2;  // 16-bit cache, multiplied as it is
  static constexpr bool kIsPlain = kForm == KvForm::kPlainRows;
  static constexpr bool kRows = kForm == KvForm::kSwizzledRows || kIsPlain;
  // Pages: their tokens in a stage; 0 where only the layout knows (8 or 16).
  static constexpr int kPageTokens = kForm == KvForm::kPackedBoxes ? kBoxTokens<Cache, kTokens>
                                     : kCacheIs16Bit               ? 0
                                                                   : 16;

  // Rows of a page that this lane addresses for ldmatrix, or loads V of 16-bit pages from.
  uint32_t key_row, value_row;      // byte offsets inside a stage
  uint32_t key_step, value_step;    // pages: bytes from one step to the next
  uint32_t key_chunk, value_chunk;  // rows: byte offset of step 0's chunk in a line

  // The token (0 .. 15) of this lane's score element j, and the dimension of output element j.
  static __device__ __forceinline__ int token_of(int lane, int j) {
    const int row = lane / 4, high = j >> 1;
    return kRows ? row + 8 * high : page_token(row, high);
  }
  // Pages: the token in row `row` of the first or the second 8 rows of K. A lane's slots
  // {2j, 2j+1, 2j+8, 2j+9} of V's product are tokens 4j .. 4j+3, which lie in a row; of K, the
  // later two come first where j > 1, so that no two of 8 tokens lie in the same banks.
  static __device__ __forceinline__ int page_token(int row, int second) {
    return (row >> 1) * 4 + (row & 1) + 2 * (second ^ row >> 2);
  }
  // So weights of the first and the second 8 rows change places before that product in these lanes.
  static __device__ __forceinline__ void order_probs(uint32_t& first, uint32_t& second, int lane) {
    if (kRows || lane < 16) return;
    const uint32_t kept = first;
    first = second;
    second = kept;
  }
  static __device__ __forceinline__ int dimension_of(int lane, int k, int high) {
    return k * 16 + (kRows && !kCacheIs16Bit ? lane / 4 * 2 + high : lane / 4 + 8 * high);
  }
  __device__ __forceinline__ void set_addresses(const KvStageLayout& layout, int lane) {
    const int page_tokens = kPageTokens > 0 ? kPageTokens : layout.page_tokens;
    const int row = lane & 7, second = lane >> 3 & 1, upper = lane >> 4;
    if constexpr (kIsPlain) {
      constexpr int kRowBytes = kMaxHeadSize * sizeof(Cache);
      key_row = (row + second * 8) * kRowBytes + upper * 16;
      value_row = kCacheIs16Bit ? (row + upper * 8) * kRowBytes + second * 16 : key_row;
    } else if constexpr (kRows) {
      // K matrices: (tokens 0-7, chunk 0) (8-15, 0) (0-7, 1) (8-15, 1).
      const bool paired =
          kMayPairRows<Cache, kMaxHeadSize, kForm> && layout.key_step < 16 * kColumnBytes;
      const int line_shift = paired ? 1 : 0;
      const int token = row + second * 8, line = token >> line_shift;
      key_row = line * kColumnBytes;
      key_chunk = ((token & line_shift) * 4 + upper ^ line % 8) * 16;
      // V matrices: 16-bit as their transposes (dims 0-7, tokens 0-7) (8-15, 0-7) (0-7, 8-15)
      // (8-15, 8-15); 8-bit as K's.
      value_row = kCacheIs16Bit ? (row + upper * 8) * kColumnBytes : key_row;
      value_chunk = kCacheIs16Bit ? (second ^ row) * 16 : key_chunk;
    } else if constexpr (kCacheIs16Bit) {
      // K matrices: (rows 0-7, chunk 0) (8-15, 0) (0-7, 1) (8-15, 1); a chunk is 8 dimensions.
      const int chunk_bytes = page_tokens * 16;
      // Of 8 tokens, the second 8 lie in the next page.
      const int within = page_tokens - 1, next_page = page_tokens == 8 ? 1 : 0;
      const int token = page_token(row, second);
      key_row = upper * chunk_bytes + (token & within) * 16 +
                (token >> 3 & next_page) * layout.page_stride;
      key_step = 2 * chunk_bytes;
      // V: 4 tokens of dimension lane / 4, and of that + 8. Rows of 16 tokens lie in half of the
      // banks for ldmatrix; those of pages of 8 would not, and conflict this way.
      const int four = lane % 4 * 4;
      value_row = lane / 4 * page_tokens * 2 + (four & within) * 2 +
                  (four >> 3 & next_page) * layout.page_bytes;
      value_step = 16 * page_tokens * 2;
    } else {
      // K matrices: (rows 0-7, chunk 0) (8-15, 0) (0-7, 1) (8-15, 1); a chunk is 16 dimensions.
      key_row = upper * page_tokens * 16 + page_token(row, second) * 16;
      key_step = page_tokens * 16;
      // V matrices: 32 rows of 16 tokens, two steps at once.
      value_row = lane * page_tokens;
      value_step = 16 * page_tokens;
    }
  }
  // Else the compiler would compute them again for every stage.
  __device__ __forceinline__ void keep_addresses() {
    key_row = opaque(key_row);
    value_row = opaque(value_row);
    if constexpr (!kRows && kPageTokens == 0) {
      key_step = opaque(key_step);
      value_step = opaque(value_step);
    }
  }
  // This lane's address for step k, from the stage's K or V on.
  __device__ __forceinline__ uint32_t key_at(int k) const {
    if constexpr (!kRows) return key_row + k * key_step;
    if constexpr (kIsPlain) return key_row + k * 16 * sizeof(Cache);
    return key_row + column_of(k, key_chunk);
  }
  __device__ __forceinline__ uint32_t value_at(int k) const {
    if constexpr (!kRows) return value_row + k * value_step;
    if constexpr (kIsPlain) return value_row + k * 16 * sizeof(Cache);
    return value_row + column_of(k, value_chunk);
  }
  static __device__ __forceinline__ uint32_t column_of(int k, uint32_t lane_chunk) {
    const int chunk = kCacheIs16Bit ? 2 * k : k;
    return chunk / 8 * kColumnStride<kTokens> + (lane_chunk ^ (chunk % 8 * 16));
  }

  // This lane's part of 16 dimensions x 16 tokens of V from its address of a step on; of 8-bit
  // pages, of 32 bytes in each of 16 rows.
  __device__ __forceinline__ void load_value(uint32_t (&loaded)[4], uint32_t from) const {
    if constexpr (kRows) {
      load_transposed(loaded, from);
    } else if constexpr (kCacheIs16Bit) {
      const uint2 low = load_shared<uint2>(from), high = load_shared<uint2>(from + value_step / 2);
      loaded[0] = low.x;
      loaded[1] = high.x;
      loaded[2] = low.y;
      loaded[3] = high.y;
    } else {
      load_matrices(loaded, from);
    }
  }

  // V of tokens that do not count must not reach a product, whatever lies there: 0 * NaN is NaN.
  // Bits to keep of what a lane loads of V of 16 tokens, of which those of `tokens` count.
  static __device__ __forceinline__ void value_masks(uint32_t (&masks)[2], uint32_t tokens,
                                                     int lane) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      masks[i] = 0;
      if constexpr (kCacheIs16Bit || kRows) {
        // Rows: tokens 2j and 2j + 1 of the first 8, of the second 8; pages: 4j on, 4j + 2 on.
        const uint32_t pair = tokens >> (kRows ? lane % 4 * 2 + 8 * i : lane % 4 * 4 + 2 * i);
        masks[i] = (pair & 1 ? 0xffffu : 0u) | (pair & 2 ? 0xffff0000u : 0u);
      } else {  // tokens 4j .. 4j + 3
        const uint32_t four = tokens >> (lane % 4 * 4);
#pragma unroll
        for (int t = 0; t < 4; ++t) masks[i] |= four >> t & 1 ? 0xffu << 8 * t : 0u;
      }
    }
  }
};

}  // namespace vllm_kernels::cuda
