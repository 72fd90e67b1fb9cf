// PipelineLayout: what the host tells the kernels about the stages of kv_pipeline.cuh, and
// set_stage_layout(), which computes it.
#pragma once
#include <cuda.h>

#include <algorithm>
#include <bit>

#include "cuda/attention/common/heuristics.h"
#include "cuda/attention/common/kv_smem_layout.cuh"
#include "cuda/base/fast_divmod.cuh"
#include "cuda/base/launch.cuh"
#include "ops/paged_attention.h"

namespace vllm_kernels::cuda {

struct PipelineLayout {
  int stages;           // of one pipeline, 2 .. kMaxPipelineStages
  int key_offset;       // bytes from a stage's V to its K
  int stage_bytes;      // a multiple of 128; of 1024 in forms kSwizzledRows and kLines
  int page_shift;       // log2 of the tokens of a page
  int pages_shift;      // log2 of the pages of a stage; 0 where a page is longer
  int page_bytes;       // K or V: bytes of a head's page, of a stage's share of it, or of a box
  int page_stride;      // bytes in shared memory from one page's (or box's) K to the next
  int columns;          // kSwizzledRows, kLines: columns of 128 bytes in a row
  int chunks;           // kSwizzledRows: 16-byte chunks in a row
  bool by_lanes;        // kSwizzledRows, sm_90 on, not kShared: no TMA boxes, lanes copy 16 bytes
  uint8_t line_shift;   // kSwizzledRows: log2 of the tokens of a 128-byte line, 0 or 1
  bool uses_tma_boxes;  // kPlainRows: a head's page is not contiguous in global memory
  FastDivisor chunk_divisor;
  int copy_stages;  // stages that a warp's lanes start together; unused in forms kPackedBoxes and
                    // kLines
  int copy_lanes;   // lanes per stage: its pages; kSwizzledRows: pages x columns x {K, V}
  FastDivisor lane_divisor;  // by copy_lanes
  // Strides between pages and between heads, in units of 16 bytes.
  uint32_t key_block, key_head, value_block, value_head;
};

// Tensor maps of K and V, for forms that copy TMA boxes (sm_90 and later).
struct KvTensorMaps {
  CUtensorMap key, value;
};

// Forms in which a page of a head, or a stage's share of it, is contiguous in shared memory. It is
// also contiguous in global memory, unless PipelineLayout::uses_tma_boxes says otherwise.
constexpr bool is_whole(KvForm form) {
  return form == KvForm::kPackedPages || form == KvForm::kPlainRows;
}

// Sets both layouts, except for the number of stages.
template <typename Cache, int kMaxHeadSize, int kTokens, KvForm kForm>
void set_stage_layout(const PagedKv& kv, PipelineLayout& pipeline, KvStageLayout& layout) {
  constexpr int kBytes = sizeof(Cache), kShift = kStageShift<kTokens>;
  pipeline.page_shift = std::bit_width(static_cast<uint32_t>(kv.block_size)) - 1;
  pipeline.pages_shift = std::max(0, kShift - pipeline.page_shift);
  layout.page_tokens =
      kForm == KvForm::kPackedBoxes ? kBoxTokens<Cache, kTokens> : std::min(kv.block_size, 16);
  pipeline.page_bytes = layout.page_bytes = kv.head_size * layout.page_tokens * kBytes;
  pipeline.page_stride = layout.page_stride = kMaxHeadSize * layout.page_tokens * kBytes;
  pipeline.columns = row_columns(kv.head_size, kBytes);
  pipeline.chunks = kv.head_size * kBytes / 16;
  pipeline.chunk_divisor = FastDivisor(std::max(1, pipeline.chunks));
  const StageBytes bytes = stage_bytes(kv, kForm, std::max(kMaxHeadSize, kv.head_size), kTokens,
                                       current_device_model().architecture);
  pipeline.line_shift = static_cast<uint8_t>(bytes.line_shift);
  pipeline.key_offset = bytes.key_offset;
  pipeline.stage_bytes = bytes.total;
  pipeline.by_lanes =
      kv.block_size == 1 || kv.head_size * kBytes << pipeline.line_shift < kColumnBytes;
  pipeline.copy_lanes = (is_whole(kForm) ? 1 : 2 * pipeline.columns) << pipeline.pages_shift;
  pipeline.copy_stages = 32 / pipeline.copy_lanes;
  pipeline.lane_divisor = FastDivisor(pipeline.copy_lanes);
  if (kForm == KvForm::kSwizzledRows) {
    layout.key_step = layout.value_step = 16 * kColumnBytes >> pipeline.line_shift;
    layout.key_half = layout.value_half = 32 * kColumnBytes >> pipeline.line_shift;
  } else if (kForm == KvForm::kPlainRows) {
    constexpr int kRowBytes = kMaxHeadSize * kBytes;
    pipeline.uses_tma_boxes = !rows_are_contiguous(kv);
    pipeline.page_bytes = pipeline.page_stride = std::min(kv.block_size, kTokens) * kRowBytes;
    layout.key_step = layout.value_step = 16 * kRowBytes;
    layout.key_half = layout.value_half = 32 * kRowBytes;
  } else if (kForm == KvForm::kLines) {
    pipeline.page_bytes = pipeline.page_stride = kv.head_size * kBytes * kLineTokens;
    layout.key_step = layout.value_step = pipeline.page_bytes;
  } else {
    const bool within = layout.page_tokens == 32;  // the next 16 tokens are in the same page
    layout.key_step = within ? 16 * 16 : pipeline.page_stride * 16 / layout.page_tokens;
    layout.value_step = within ? 16 * kBytes : pipeline.page_bytes * 16 / layout.page_tokens;
    layout.key_half = 32 / layout.page_tokens * pipeline.page_stride;
    layout.value_half = 32 / layout.page_tokens * pipeline.page_bytes;
  }
  const auto in_16_bytes = [](int64_t stride) {
    return static_cast<uint32_t>(stride * kBytes / 16);
  };
  pipeline.key_block = in_16_bytes(kv.key_block_stride);
  pipeline.key_head = in_16_bytes(kv.key_head_stride);
  pipeline.value_block = in_16_bytes(kv.value_block_stride);
  pipeline.value_head = in_16_bytes(kv.value_head_stride);
}

}  // namespace vllm_kernels::cuda
