// Thresholds of the RMS norm launchers. Each has its unit and the measured row that supports it:
// one H200, bf16, hidden size 4096 unless named (docs/lab/small_ops/norms.md).
#pragma once
#include <cstdint>

namespace vllm_kernels::cuda {

// Max rows, and max bytes as a fraction of L2, up to which CTAs prefetch rows before the PDL wait.
// (The fraction is 6 MB on an H200.) Above either, memory is busy anyway. (rms_norm, 256 rows: 2.61
// to 2.21 us. 256 rows of 8192 with a residual, 8 MB: 6.2 to 7.3 us.)
constexpr int64_t kPrefetchRows = 512;
constexpr double kPrefetchShareOfL2 = 0.0954;

// From this many rows on a thread has two Vecs of its row, so two loads are in flight. With few
// CTAs one Vec is faster. (4096 rows: 18.3 us. No row for this value.)
constexpr int64_t kManyRows = 1024;

// Max threads of a CTA with one Vec a thread, where an SM gets more than one row. (256 rows of
// 8192: 4.5 us with 1024 threads, 3.7 us with 512.)
constexpr int64_t kThreadsOfSharedSm = 512;

}  // namespace vllm_kernels::cuda
