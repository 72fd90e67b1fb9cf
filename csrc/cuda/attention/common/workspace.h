// What paged_attention's blocks tell each other: which item is next, and the pieces of segments
// that several of them share.
#pragma once
#include "ops/paged_attention.h"

namespace vllm_kernels::cuda {

constexpr int kMaxDecodeSlots = 8192;  // items of a launch that has split segments

#if defined(__CUDACC__)
struct SplitPartials {
  float2* stats;  // [slots][rows] maximum and sum
  float* out;     // [slots][rows][head_size]
};
struct DecodeWorkspace {
  uint32_t* next;  // items handed out; 0 before and after every launch
  uint32_t*
      semaphores;  // [slots] pieces done of the segment whose piece 0 has that slot; likewise 0
  SplitPartials counted;  // of pieces that are there once `finished` says so
  SplitPartials flagged;  // of those that say so themselves (split_exchange.cuh): [kFlaggedRows]
};
#endif

constexpr int64_t kDecodeCounterBytes = (4 * (kMaxDecodeSlots + 2) + 255) / 256 * 256;
// Of 65536 query rows; kDecodeOutBytes are about as many where heads have 128 dimensions.
constexpr int64_t kDecodeStatsBytes = int64_t{65536} * 8;
constexpr int64_t kFlaggedRows = 16384;
constexpr int64_t kFlaggedStatsBytes = kFlaggedRows * 8;
constexpr int64_t kFlaggedOutBytes = (int64_t{8} << 20) - kFlaggedStatsBytes;
constexpr int64_t kDecodeOutBytes = kPagedAttentionWorkspaceBytes - kDecodeCounterBytes -
                                    kDecodeStatsBytes - kFlaggedStatsBytes - kFlaggedOutBytes;

// kPagedAttentionWorkspaceBytes, zeroed, which belong to a stream of the current device: made at
// its first call (also while the stream is captured into a graph), kept as long as the process.
void* stream_workspace(void* stream);

#if defined(__CUDACC__)
// In `memory`, null for the stream's own.
DecodeWorkspace decode_workspace(void* memory, void* stream);

// The kernel for many query rows has a `next` of its own, behind `finished`.
inline uint32_t* prefill_next(const DecodeWorkspace& workspace) {
  return workspace.semaphores + kMaxDecodeSlots;
}
#endif

}  // namespace vllm_kernels::cuda
