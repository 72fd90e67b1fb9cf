// The online softmax that all attention kernels share: when a running maximum is raised.
#pragma once

namespace vllm_kernels::cuda {

// A maximum is raised only when a logit exceeds it by more than this (log2 units): its purpose is
// that weights neither overflow nor vanish, and 2^8 does neither in fp16. (FlashAttention-4's
// conditional rescaling.)
constexpr float kRescaleThreshold = 8.0f;

}  // namespace vllm_kernels::cuda
