// Online softmax: the threshold above which all attention kernels rescale.
#pragma once

namespace vllm_kernels::cuda {

// Conditional rescaling, as in FlashAttention-4: row_max is raised only when a logit exceeds it by
// more than this (log2 units). row_max need only keep p from overflow and underflow, and p up to
// 2^8 does neither in fp16.
constexpr float kRescaleThreshold = 8.0f;

}  // namespace vllm_kernels::cuda
