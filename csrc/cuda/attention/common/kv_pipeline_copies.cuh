// KvPipeline's copies of a stage into shared memory, a function per form (kv_pipeline.cuh, which
// includes this file). Each is called by all lanes of the producing warp.
#pragma once

namespace vllm_kernels::cuda {

// Copies the scales of a stage that begins at token `first`; lane `page` of blocks_ has its first
// page. All lanes call it; a lane copies the scales of 4 tokens.
template <typename Cache, int kMaxHeadSize, int kTokens, KvForm kForm, bool kShared>
__device__ __forceinline__ void
KvPipeline<Cache, kMaxHeadSize, kTokens, kForm, kShared>::copy_scales(const PagedAttentionParams& p,
                                                                      int stage, int page,
                                                                      int first) const {
  constexpr int kChunks = kTokens / 4;
  const int token = lane_ % kChunks * 4;
  const int of_page = token >> layout_.page_shift & (1 << layout_.pages_shift) - 1;
  const int32_t block = __shfl_sync(0xffffffffu, blocks_, page + of_page);
  const TokenScales& scales = p.token_scales;
  constexpr int kLanes = kScaleArrays<Cache> * kChunks;
  const bool is_value = kHasZeros<Cache> ? lane_ / kChunks % 2 != 0 : lane_ >= kChunks;
  if (static_cast<uint32_t>(block) >= p.kv.num_blocks || lane_ >= kLanes) return;
  const float* page_scales = is_value ? scales.value + scales.value_offset(block, kv_head_)
                                      : scales.key + scales.key_offset(block, kv_head_);
  if constexpr (kHasZeros<Cache>) {
    if (lane_ >= 2 * kChunks) {
      page_scales = is_value ? scales.value_zero + scales.value_offset(block, kv_head_)
                             : scales.key_zero + scales.key_offset(block, kv_head_);
    }
  }
  copy16_async(scales_of(stage) + lane_ * 16,
               page_scales + (first + token & (1 << layout_.page_shift) - 1));
}

template <typename Cache, int kMaxHeadSize, int kTokens, KvForm kForm, bool kShared>
__device__ __forceinline__ void KvPipeline<Cache, kMaxHeadSize, kTokens, kForm,
                                           kShared>::copy_pages(const PagedKv& kv, uint32_t stage,
                                                                uint32_t barrier, int page,
                                                                int pages, int32_t block,
                                                                bool is_valid, uint32_t lanes) {
  const int bytes = layout_.page_bytes;
  const char* key = key_page(block);
  const char* value = value_page(block);
  if constexpr (kForm == KvForm::kPlainRows) {
    key += skipped_bytes(first_token_);
    value += skipped_bytes(first_token_);
  }
  const uint32_t key_to = stage + layout_.key_offset + page * layout_.page_stride;
  const uint32_t value_to = stage + page * bytes;
#if defined(VLLM_KERNELS_HAS_SM90)
  if (lane_ == 0) {
    barrier_expect(barrier, 2 * bytes * __popc(lanes & (1u << pages) - 1));
  }
  if (is_valid && lane_ < pages) {
    copy_page(key_to, value_to, key, value, line_of(first_token_), block, barrier);
  }
#else
  // The lanes of a page copy it together.
  if (is_valid) {
    for (int byte = lane_ / pages * 16; byte < bytes; byte += 32 / pages * 16) {
      copy16_async(key_to + byte, key + byte);
      copy16_async(value_to + byte, value + byte);
    }
  }
  arrive_copies(barrier);
#endif
}

template <typename Cache, int kMaxHeadSize, int kTokens, KvForm kForm, bool kShared>
__device__ __forceinline__ void KvPipeline<Cache, kMaxHeadSize, kTokens, kForm, kShared>::copy_rows(
    const PagedKv& kv, uint32_t stage, uint32_t barrier, int page, int32_t block, bool is_valid) {
  if (!bulk(layout_)) return copy_chunks(kv, stage, barrier, block, is_valid);
#if defined(VLLM_KERNELS_HAS_SM90)
  // Each lane copies one column of K or V of one page.
  const bool is_value = lane_ & 1;
  const int column = lane_ >> 1 >> layout_.pages_shift;
  const bool copies = is_valid && column < layout_.columns;
  const uint32_t count = __popc(__ballot_sync(0xffffffffu, copies));
  if (lane_ == 0) barrier_expect(barrier, count * box_bytes());
  if (copies) {
    tma_copy_box(stage + (is_value ? 0 : layout_.key_offset) + column * kColumnStride<kTokens> +
                     page * box_bytes(),
                 is_value ? &maps_.value : &maps_.key, column * (kColumnBytes / 2),
                 line_of(first_token_), kv_head_, block, barrier, policy_);
  }
#endif
}

// Pages of one token whose rows have 2, 4 .. 32 chunks: a lane has the same chunk of all its rows.
// Rows without a page become 0. Few instructions, because a scheduler has two warps
// (small_ops/pages.md).
template <typename Cache, int kMaxHeadSize, int kTokens, KvForm kForm, bool kShared>
__device__ __forceinline__ void
KvPipeline<Cache, kMaxHeadSize, kTokens, kForm, kShared>::copy_single_tokens(uint32_t stage,
                                                                             int32_t block,
                                                                             bool is_valid) {
  const uint32_t first = layout_.chunk_divisor.divide(lane_),
                 chunk = lane_ - first * layout_.chunks;
  const uint32_t step = layout_.chunk_divisor.divide(32);
  const int end = seq_len_ - first_token_;
  const uint64_t key = key_ + chunk, value = value_ + chunk;
  const uint32_t column = stage + chunk / 8 * kColumnStride<kTokens>;
  const int32_t own = is_valid ? block : -1;
#pragma unroll 4
  for (uint32_t row = first; row < kTokens; row += step) {
    const int32_t found = __shfl_sync(0xffffffffu, own, row);
    const bool present = found >= 0 && static_cast<int>(row) < end;
    const uint64_t page = present ? static_cast<uint32_t>(found) : 0;
    const uint32_t to = column + row * kColumnBytes + (chunk ^ row) % 8 * 16;
    const auto copy = [&](uint32_t at, uint64_t from) {
      copy16_async(at, reinterpret_cast<const char*>(from << 4), present ? 16 : 0);
    };
    copy(to + layout_.key_offset, key + page * layout_.key_block);
    copy(to, value + page * layout_.value_block);
  }
}

// Adjacent lanes copy adjacent chunks of a row.
template <typename Cache, int kMaxHeadSize, int kTokens, KvForm kForm, bool kShared>
__device__ __forceinline__ void KvPipeline<Cache, kMaxHeadSize, kTokens, kForm,
                                           kShared>::copy_chunks(const PagedKv& kv, uint32_t stage,
                                                                 uint32_t barrier, int32_t block,
                                                                 bool is_valid) {
  const int all = layout_.chunks;
  if (layout_.page_shift == 0 && (all & all - 1) == 0 && all <= 32 && all * kTokens >= 32) {
    copy_single_tokens(stage, block, is_valid);
    return arrive_copies(barrier);
  }
  const int page_mask = (1 << layout_.page_shift) - 1;
#pragma unroll 1
  for (int first = 0; first < kTokens * layout_.chunks; first += 32) {
    const int row = layout_.chunk_divisor.divide(first + lane_);
    const int chunk = first + lane_ - row * layout_.chunks;
    const int of_row = row >> layout_.page_shift & (1 << layout_.pages_shift) - 1;
    const int32_t row_block = __shfl_sync(0xffffffffu, block, of_row);
    const bool row_is_valid = __shfl_sync(0xffffffffu, is_valid, of_row);
    if (!row_is_valid || row >= kTokens || first_token_ + row >= seq_len_) continue;
    const int64_t token = first_token_ + row & page_mask;
    const uint32_t to =
        stage + chunk / 8 * kColumnStride<kTokens> + row * kColumnBytes + ((chunk ^ row) % 8) * 16;
    copy16_async(to + layout_.key_offset,
                 key_page(row_block) + token * kv.key_token_stride * kBytes + chunk * 16);
    copy16_async(to, value_page(row_block) + token * kv.value_token_stride * kBytes + chunk * 16);
  }
  arrive_copies(barrier);
}

// Boxes of kTokensOfBox tokens. Form kPackedBoxes: cut from longer pages of layout vllm. Form
// kLines: rows of several KV heads.
template <typename Cache, int kMaxHeadSize, int kTokens, KvForm kForm, bool kShared>
__device__ __forceinline__ void
KvPipeline<Cache, kMaxHeadSize, kTokens, kForm, kShared>::copy_boxes(const PagedKv& kv,
                                                                     uint32_t stage,
                                                                     uint32_t barrier,
                                                                     int32_t block, bool is_valid) {
  constexpr int kTokensOfBox = cuda::kTokensOfBox<Cache, kTokens, kForm>;
  const int page_mask = (1 << layout_.page_shift) - 1;
#if defined(VLLM_KERNELS_HAS_SM90)
  // Each lane copies K or V of one box.
  const bool is_value = lane_ & 1;
  const int box_index = lane_ >> 1;
  const int token = first_token_ + kTokensOfBox * box_index & page_mask;
  const bool copies = is_valid && box_index < kTokens / kTokensOfBox;
  const uint32_t count = __popc(__ballot_sync(0xffffffffu, copies));
  if (lane_ == 0) barrier_expect(barrier, layout_.page_bytes * count);
  if (copies) {
    const uint32_t to = stage + (is_value ? box_index * layout_.page_bytes
                                          : layout_.key_offset + box_index * layout_.page_stride);
    const CUtensorMap* map = is_value ? &maps_.value : &maps_.key;
    if constexpr (kForm == KvForm::kLines) {
      tma_copy_box(to, map, 0, token, kv_head_ * layout_.columns, block, barrier, policy_);
    } else {
      tma_copy_box(to, map, token * (is_value ? static_cast<int>(kBytes) : 16) / 2, 0, kv_head_,
                   block, barrier, policy_);
    }
  }
#else
  const int token = first_token_ & page_mask;  // the page contains the whole stage
  const char* key = key_page(block) + token * 16;
  const char* value = value_page(block) + token * kBytes;
  constexpr int kChunks = kTokens * sizeof(Cache) / 16;  // 16-byte chunks in a stage's row of V
  constexpr int kBoxChunks =
      kTokensOfBox * sizeof(Cache) / 16;                     // 16-byte chunks in a box's row of V
  const int chunks = is_valid ? kv.head_size * kChunks : 0;  // of K; V has as many
  constexpr int kUnroll = kHasZeros<Cache> ? 1 : 2;          // zeros leave fewer registers
#pragma unroll kUnroll
  for (int i = lane_; i < chunks; i += 32) {
    const int t = i % kTokens, chunk = i / kTokens;
    copy16_async(stage + layout_.key_offset + t / kTokensOfBox * layout_.page_stride +
                     (chunk * kTokensOfBox + t % kTokensOfBox) * 16,
                 key + chunk * kv.key_chunk_stride * kBytes + t * 16);
    const int d = i / kChunks, at = i % kChunks;
    copy16_async(
        stage + at / kBoxChunks * layout_.page_bytes + (d * kBoxChunks + at % kBoxChunks) * 16,
        value + d * kv.value_dim_stride * kBytes + at * 16);
  }
  arrive_copies(barrier);
#endif
}

}  // namespace vllm_kernels::cuda
