// Check mode on CUDA (VLLM_KERNELS_CHECK=1). Scans run on the op's stream, also inside a CUDA
// graph. They report the first bad index in pinned host memory, which the host reads without a
// sync.
#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "ops/index_check.h"

namespace vllm_kernels::cuda {

// Enqueues a scan of one index argument on `stream` of the current device.
void scan_indices(const IndexCheckParams& params, void* stream);

// Returns the devices on which a scan was enqueued.
std::vector<int64_t> scanned_devices();

// Takes one unread report of a finished scan, from the lowest device that has one. A report holds
// the first bad index that a scan found.
std::optional<BadIndex> take_bad_index();

}  // namespace vllm_kernels::cuda
