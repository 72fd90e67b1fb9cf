// What paged_attention's blocks tell each other: pieces of segments that several blocks share.
#pragma once
#include <cstdint>

namespace vllm_kernels::cuda {

constexpr int kMaxDecodeBlocks = 264;  // of a launch; one a multiprocessor
constexpr int kMaxDecodeRows = 32;     // query rows of a segment
constexpr int kMaxDecodeHeadSize = 256;

#if defined(__CUDACC__)
struct DecodeWorkspace {
  uint32_t* counters;  // [max_blocks] finished pieces of the segment that begins in a block; 0
                       // before and after every launch
  float2* stats;       // [max_blocks][2][rows] maximum and sum
  float* out;          // [max_blocks][2][rows][head_size]
  unsigned max_blocks;
};
#endif

constexpr int64_t kDecodeCounterBytes = 2048;
constexpr int64_t kDecodeStatsBytes = int64_t{kMaxDecodeBlocks} * 2 * kMaxDecodeRows * 8;
// Zeroed once by its owner; launches that may run at the same time need one each.
constexpr int64_t kDecodeWorkspaceBytes =
    kDecodeCounterBytes + kDecodeStatsBytes +
    int64_t{kMaxDecodeBlocks} * 2 * kMaxDecodeRows * kMaxDecodeHeadSize * 4;

}  // namespace vllm_kernels::cuda
