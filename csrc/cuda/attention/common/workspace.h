// Global-memory workspace of the decode and prefill kernels: the counter of the next work tile, and
// the partials of split query tiles, in decode with their semaphores.
#pragma once
#include <algorithm>

#include "ops/paged_attention.h"

namespace vllm_kernels::cuda {

constexpr int kMaxDecodeSlots = 8192;  // max work tiles of a launch that splits any query tile

#if defined(__CUDACC__)
struct SplitPartials {
  float2* stats;  // [slots][rows] row_max (log2 units) and row_sum
  float* out;     // [slots][rows][head_size] unnormalized output
};
struct DecodeWorkspace {
  uint32_t* next;        // work tiles handed out; 0 before and after every launch
  uint32_t* semaphores;  // [slots] finished splits of the query tile whose split 0 has this slot;
                         // also 0 between launches
  // Partials that are complete once their semaphore says so, or in prefill once the launch has
  // ended.
  SplitPartials by_semaphore;
  SplitPartials flagged;  // flag-in-data partials (split_exchange.cuh), [kFlaggedRows] rows
};
#endif

constexpr int64_t kDecodeCounterBytes = (4 * (kMaxDecodeSlots + 2) + 255) / 256 * 256;
// Room for 65536 query rows. kDecodeOutBytes holds about as many rows of 128 dimensions.
constexpr int64_t kDecodeStatsBytes = int64_t{65536} * 8;
constexpr int64_t kFlaggedRows = 16384;
constexpr int64_t kFlaggedStatsBytes = kFlaggedRows * 8;
constexpr int64_t kFlaggedOutBytes = (int64_t{8} << 20) - kFlaggedStatsBytes;
constexpr int64_t kDecodeOutBytes = kPagedAttentionWorkspaceBytes - kDecodeCounterBytes -
                                    kDecodeStatsBytes - kFlaggedStatsBytes - kFlaggedOutBytes;

// Rows of `head_size` dimensions that the workspace has room for.
constexpr int64_t workspace_rows(int head_size) {
  return std::min(kDecodeStatsBytes / 8, kDecodeOutBytes / (4 * head_size));
}
// Workspace slots for work tiles of 2^row_shift such rows.
inline int workspace_slots(int row_shift, int head_size) {
  return static_cast<int>(
      std::min(int64_t{kMaxDecodeSlots}, workspace_rows(head_size) >> row_shift));
}
// The same for prefill sm90, whose tiles have `rows` rows. The room of one more slot holds
// PrefillSplits::num_tiles and ::tiles.
constexpr int64_t prefill_slots(int rows, int head_size) {
  return workspace_rows(head_size) / rows - 1;
}

// Whether the workspace has room for one flag-in-data partial per CTA (split_exchange.cuh).
inline bool may_flag_in_data(int ctas, int row_shift, int head_size) {
  const int64_t rows = int64_t{ctas} << row_shift;
  return rows <= kFlaggedRows && rows * head_size * 4 <= kFlaggedOutBytes;
}

// A zeroed workspace of kPagedAttentionWorkspaceBytes for one stream of the current device. It is
// allocated at the stream's first call, also during graph capture, and lives as long as the
// process.
void* stream_workspace(void* stream);

#if defined(__CUDACC__)
// The workspace in `memory`, or the stream's own if `memory` is null.
DecodeWorkspace decode_workspace(void* memory, void* stream);

// The prefill kernel's own counter of work tiles, after `semaphores`.
inline uint32_t* prefill_next(const DecodeWorkspace& workspace) {
  return workspace.semaphores + kMaxDecodeSlots;
}
#endif

}  // namespace vllm_kernels::cuda
