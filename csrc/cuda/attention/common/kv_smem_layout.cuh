// How the tokens of a pipeline stage lie in shared memory, and which of them each lane loads.
// warp_mma.cuh and warpgroup_mma.cuh share this; kv_pipeline.cuh writes the stages.
//
// A stage has one of four layouts:
//
// Packed pages (forms kPackedPages and kPackedBoxes): pages of layout vllm. K [D/x][tokens][x] is a
// row of 8x8 core matrices, as ldmatrix needs them. V [D][tokens] is V^T already.
//
// Swizzled rows (form kSwizzledRows): [columns][tokens][128 bytes]. A row is cut into columns of
// 128 bytes. Its 16-byte chunks are permuted by chunk ^ (token % 8), which is TMA's 128-byte
// swizzle: the chunks of 8 tokens lie in different banks. ldmatrix transposes V. Two contiguous
// rows of 64 bytes share a line of 128 bytes, as in global memory. Its chunks are permuted by line
// % 8. TMA takes as long for half a line as for a full one.
//
// Plain rows (form kPlainRows): [tokens][D], not padded to 128-byte lines. HND pages are copied as
// they are, NHD pages in TMA boxes of full rows. Bank conflicts of ldmatrix over 8 tokens: none
// with rows of 80 or 112 bytes, 2-way with 96, 160 or 224 bytes, 4-way with 192 bytes.
//
// Lines (form kLines): [boxes of 16 tokens][columns][16][128 bytes], swizzled like swizzled rows. A
// row has several KV heads of layout NHD, which fill whole columns together. Each warp of the
// consumer has one of these heads.
#pragma once
#include <type_traits>

#include "cuda/attention/common/kernel_choice.h"
#include "cuda/base/int4.cuh"
#include "cuda/base/ptx.cuh"
#include "cuda/base/types.cuh"

namespace vllm_kernels::cuda {

// log2 of the tokens of a stage: 16, 32 or 64.
template <int kTokens>
constexpr int kStageShift = kTokens == 64   ? 6
                            : kTokens == 32 ? 5
                                            : 4;  // 16 tokens
template <int kTokens>
constexpr int kColumnStride = kTokens * kColumnBytes;  // bytes from one column to the next
template <int kTokens>
using TokenBits = std::conditional_t<kTokens == 64, uint64_t, uint32_t>;
template <int kTokens>
constexpr TokenBits<kTokens> kAllTokens = ~TokenBits<kTokens>{0} >> (kTokens == 16 ? 16 : 0);

// Form kPackedBoxes: tokens per box. A box lies in shared memory like a page of that many tokens.
// In 8 bits a box has 32 tokens if the stage does. Rows of V of 16 bytes are slow to copy.
template <typename Cache, int kTokens>
constexpr int kBoxTokens = sizeof(Cache) == 2 || kTokens < 32 ? 16 : 32;
// The same for form kLines, too.
template <typename Cache, int kTokens, KvForm kForm>
constexpr int kTokensOfBox = kForm == KvForm::kLines ? kLineTokens : kBoxTokens<Cache, kTokens>;

// Form kSwizzledRows: whether contiguous rows are so short that two may share a line.
template <typename Cache, int kMaxHeadSize, KvForm kForm>
constexpr bool kMayPairRows = may_pair_rows(kForm, kMaxHeadSize, sizeof(Cache));

// How the pages of a stage lie in shared memory.
struct KvStageLayout {
  int page_tokens;  // packed pages: tokens of a page or box: 8, 16 or 32
  int page_stride;  // packed pages: bytes from one page's K to the next
  int page_bytes;   // packed pages: bytes from one page's V to the next
  int key_step;     // bytes from the K of 16 tokens to the K of the next 16
  int value_step;   // the same for V
  // Stages of 64 tokens: bytes from the first 32 tokens to the second 32.
  int key_half, value_half;
};

// The fragments of K and V that a lane loads for 16 tokens of a stage of kTokens. "Step k" is
// dimensions 16k .. 16k + 15.
template <typename Cache, int kMaxHeadSize, int kTokens, KvForm kForm>
struct KvFragments {
  static constexpr bool kCacheIs16Bit = sizeof(Cache) == 2;  // else upcast to fp16
  static constexpr bool kIsInt4 = kValuesOf<Cache> == 2;
  static constexpr bool kIsPlain = kForm == KvForm::kPlainRows, kIsLines = kForm == KvForm::kLines;
  static constexpr bool kRows = kForm == KvForm::kSwizzledRows || kIsPlain || kIsLines;
  static constexpr int kChunkPairs = (kMaxHeadSize / 16 + 1) / 2;  // of 16 bytes
  // Packed pages: tokens of a page in the stage. 0: only KvStageLayout knows (8 or 16).
  static constexpr int kPageTokens = kForm == KvForm::kPackedBoxes ? kBoxTokens<Cache, kTokens>
                                     : kCacheIs16Bit               ? 0
                                                                   : 16;

  // This lane's row for ldmatrix; for V of 16-bit packed pages, the row of its 8-byte loads.
  uint32_t key_row, value_row;      // bytes, from the stage's K or V
  uint32_t key_step, value_step;    // packed pages: bytes from one step to the next
  uint32_t key_chunk, value_chunk;  // swizzled rows: bytes, chunk of step 0 within its line
  uint32_t pairs[kIsLines ? kChunkPairs : 1];  // lines: bytes, of the head's chunks 0 1, 2 3, ...

  // The token (0 .. 15) of this lane's score element j. dimension_of(): the dimension of an output
  // element of step k.
  static __device__ __forceinline__ int token_of(int lane, int j) {
    const int row = lane / 4, high = j >> 1;
    return kRows ? row + 8 * high : page_token(row, high);
  }
  // Packed pages: which token lies in row `row` of the first (second = 0) or second 8 rows of K's
  // fragment. In the V mma, lane j of 4 has the k slots {2j, 2j+1, 2j+8, 2j+9}. They stand for
  // tokens 4j .. 4j+3, which are contiguous in a row of V. K's rows are permuted so that P comes
  // out in this order. Where j > 1 the upper two tokens come first: then no two of the 8 tokens
  // that ldmatrix reads share a bank. Int4: the upcast pairs tokens 4j and 4j+2, 4j+1 and 4j+3.
  static __device__ __forceinline__ int page_token(int row, int second) {
    if constexpr (kIsInt4) return (row >> 1) * 4 + (row & 1) * 2 + (second ^ row >> 2);
    return (row >> 1) * 4 + (row & 1) + 2 * (second ^ row >> 2);
  }
  // Undoes that exchange in P: lanes from 16 on swap the first and the second 8 rows.
  static __device__ __forceinline__ void order_probs(uint32_t& first, uint32_t& second, int lane) {
    if (kRows || lane < 16) return;
    const uint32_t kept = first;
    first = second;
    second = kept;
  }
  static __device__ __forceinline__ int dimension_of(int lane, int k, int high) {
    return k * 16 + (kRows && !kCacheIs16Bit ? lane / 4 * 2 + high : lane / 4 + 8 * high);
  }
  // Lines: `head` is this warp's KV head in them.
  __device__ __forceinline__ void set_addresses(const KvStageLayout& layout, int lane,
                                                int head = 0) {
    const int page_tokens = kPageTokens > 0 ? kPageTokens : layout.page_tokens;
    const int row = lane & 7, second = lane >> 3 & 1, upper = lane >> 4;
    if constexpr (kIsLines) {
      // As 8-bit swizzled rows, but a head may begin at any chunk, and two chunks lie in different
      // columns. A head of an odd number has no second chunk at its end.
      static_assert(!kCacheIs16Bit);
      constexpr int kChunks = kMaxHeadSize / 16;
#pragma unroll
      for (int i = 0; i < kChunkPairs; ++i) {
        const int chunk = head * kChunks + min(2 * i + upper, kChunks - 1);
        pairs[i] = opaque(chunk / 8 * kColumnStride<kLineTokens> + (lane & 15) * kColumnBytes +
                          (chunk % 8 ^ row) * 16);
      }
    } else if constexpr (kIsPlain) {
      constexpr int kRowBytes = kMaxHeadSize * sizeof(Cache);
      key_row = (row + second * 8) * kRowBytes + upper * 16;
      value_row = kCacheIs16Bit ? (row + upper * 8) * kRowBytes + second * 16 : key_row;
    } else if constexpr (kRows) {
      // ldmatrix of K: (tokens 0-7, chunk 0) (8-15, 0) (0-7, 1) (8-15, 1).
      const bool paired =
          kMayPairRows<Cache, kMaxHeadSize, kForm> && layout.key_step < 16 * kColumnBytes;
      const int line_shift = paired ? 1 : 0;
      const int token = row + second * 8, line = token >> line_shift;
      key_row = line * kColumnBytes;
      key_chunk = ((token & line_shift) * 4 + upper ^ line % 8) * 16;
      // ldmatrix of V, 16-bit, transposed: (dims 0-7, tokens 0-7) (8-15, 0-7) (0-7, 8-15) (8-15,
      // 8-15). 8-bit: as K.
      value_row = kCacheIs16Bit ? (row + upper * 8) * kColumnBytes : key_row;
      value_chunk = kCacheIs16Bit ? (second ^ row) * 16 : key_chunk;
    } else if constexpr (kCacheIs16Bit) {
      // ldmatrix of K: (rows 0-7, chunk 0) (8-15, 0) (0-7, 1) (8-15, 1). A chunk is 8 dimensions.
      const int chunk_bytes = page_tokens * 16;
      // Pages of 8 tokens: tokens 8-15 lie in the next page.
      const int within = page_tokens - 1, next_page = page_tokens == 8 ? 1 : 0;
      const int token = page_token(row, second);
      key_row = upper * chunk_bytes + (token & within) * 16 +
                (token >> 3 & next_page) * layout.page_stride;
      key_step = 2 * chunk_bytes;
      // V: 8-byte loads of 4 tokens, of dimensions lane / 4 and lane / 4 + 8. ldmatrix would reach
      // only half of the banks with rows of 16 tokens. Pages of 8 tokens would suit ldmatrix, and
      // have bank conflicts with these loads.
      const int four = lane % 4 * 4;
      value_row = lane / 4 * page_tokens * 2 + (four & within) * 2 +
                  (four >> 3 & next_page) * layout.page_bytes;
      value_step = 16 * page_tokens * 2;
    } else {
      // ldmatrix of K: (rows 0-7, chunk 0) (8-15, 0) (0-7, 1) (8-15, 1). A chunk is 16 dimensions.
      key_row = upper * page_tokens * 16 + page_token(row, second) * 16;
      key_step = page_tokens * 16;
      // ldmatrix of V: 32 dimensions x 16 tokens, so two steps at once.
      value_row = lane * page_tokens;
      value_step = 16 * page_tokens;
    }
  }
  // Keeps the addresses in registers: the compiler would otherwise recompute them for every stage.
  __device__ __forceinline__ void keep_addresses() {
    if constexpr (kIsLines) return;
    key_row = opaque(key_row);
    value_row = opaque(value_row);
    if constexpr (!kRows && kPageTokens == 0) {
      key_step = opaque(key_step);
      value_step = opaque(value_step);
    }
  }
  // This lane's byte offset for step k, from the start of the stage's K or V.
  __device__ __forceinline__ uint32_t key_at(int k) const {
    if constexpr (kIsLines) return pairs[k / 2];
    if constexpr (!kRows) return key_row + k * key_step;
    if constexpr (kIsPlain) return key_row + k * 16 * sizeof(Cache);
    return key_row + column_of(k, key_chunk);
  }
  __device__ __forceinline__ uint32_t value_at(int k) const {
    if constexpr (kIsLines) return pairs[k / 2];
    if constexpr (!kRows) return value_row + k * value_step;
    if constexpr (kIsPlain) return value_row + k * 16 * sizeof(Cache);
    return value_row + column_of(k, value_chunk);
  }
  static __device__ __forceinline__ uint32_t column_of(int k, uint32_t lane_chunk) {
    const int chunk = kCacheIs16Bit ? 2 * k : k;
    return chunk / 8 * kColumnStride<kTokens> + (lane_chunk ^ (chunk % 8 * 16));
  }

  // Loads this lane's registers of 16 dimensions x 16 tokens of V; `from` is its address of a step.
  // 8-bit packed pages: 32 dimensions x 16 tokens.
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

  // AND masks for this lane's V registers of 16 tokens; bit t of `tokens` keeps token t. V of
  // masked tokens must not reach an mma, whatever the memory holds: 0 * NaN is NaN.
  static __device__ __forceinline__ void value_masks(uint32_t (&masks)[2], uint32_t tokens,
                                                     int lane) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      masks[i] = 0;
      if constexpr (kCacheIs16Bit || kRows) {
        // Rows: masks[0] is tokens 2j, 2j + 1 and masks[1] the same + 8 (j = lane % 4). Packed
        // pages: masks[0] is tokens 4j, 4j + 1 and masks[1] is 4j + 2, 4j + 3.
        const uint32_t pair = tokens >> (kRows ? lane % 4 * 2 + 8 * i : lane % 4 * 4 + 2 * i);
        masks[i] = (pair & 1 ? 0xffffu : 0u) | (pair & 2 ? 0xffff0000u : 0u);
      } else {  // 8-bit packed pages: tokens 4j .. 4j + 3 in both
        const uint32_t four = tokens >> (lane % 4 * 4);
#pragma unroll
        for (int t = 0; t < 4; ++t) masks[i] |= four >> t & 1 ? 0xffu << 8 * t : 0u;
      }
    }
  }
};

}  // namespace vllm_kernels::cuda
