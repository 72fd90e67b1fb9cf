// Check mode on CUDA (VLLM_KERNELS_CHECK=1): scans run on the op's stream, also inside a CUDA
// graph, and leave the first bad index in pinned host memory, which is looked at without a sync.
#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "ops/index_check.h"

namespace vllm_kernels::cuda {

// Whether VLLM_KERNELS_CHECK is set to anything but 0; read once.
bool check_mode();

// Enqueues a scan on `stream` of the current device.
void scan_indices(const IndexCheckParams& params, void* stream);

// The devices that have enqueued one.
std::vector<int64_t> scanned_devices();

// The first bad index that finished scans have reported on any device since the last call.
std::optional<BadIndex> take_bad_index();

}  // namespace vllm_kernels::cuda
