// Thresholds of the RMS norm launchers, with measured rows of an H200: bf16, hidden size 4096
// unless named (docs/lab/small_ops/norms.md).
#pragma once
#include <cstdint>

namespace vllm_kernels::cuda {

// A CTA prefetches its row into L2 before the PDL wait up to this many rows and this share of L2
// (H200: 6 MB). Above either, memory is busy anyway. (rms_norm, 256 rows: 2.61 to 2.21 us. 256 rows
// of 8192 with a residual, 8 MB: 6.2 to 7.3 us.)
constexpr int64_t kPrefetchRows = 512;
constexpr double kPrefetchShareOfL2 = 0.0954;

// From this many rows on a thread has two Vecs of its row: two loads in flight. (4096 rows: 18.3
// us; one Vec is faster while CTAs are few.)
constexpr int64_t kManyRows = 1024;

// Threads of a CTA with one Vec a thread, where an SM gets more than one row. (256 rows of
// 8192: 4.5 us with 1024 threads, 3.7 with 512.)
constexpr int64_t kThreadsOfSharedSm = 512;

}  // namespace vllm_kernels::cuda
