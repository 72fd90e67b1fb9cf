// Which attention kernel runs, and why: the one decision of paged_attention, varlen_attention,
// fused_decode_attention, paged_attention_v1 and _v2. Host code without CUDA: it follows no pointer
// and looks at alignments only.
#pragma once
#include <string>

#include "cuda/attention/common/kernel_choice.h"
#include "cuda/base/device.h"
#include "ops/paged_attention.h"

namespace vllm_kernels::cuda {

AttentionChoice choose_kernel(const PagedAttentionParams& params, const DeviceModel& device);

// The parameters of the concurrent decode launch.
PagedAttentionParams concurrent_params(const PagedAttentionParams& params,
                                       const AttentionChoice& choice);

// fused_decode_attention in one launch: false where two launches are better. `new_token_threads`:
// threads that a CTA needs to prepare the new token's heads.
bool choose_fused_decode(const PagedAttentionParams& params, const DeviceModel& device,
                         int new_token_threads, KernelChoice& choice);

// The choice in words: kernel, instantiation, launch shape, and what each faster kernel lacked.
std::string describe(const AttentionChoice& choice, const DeviceModel& device);
std::string describe(const KernelChoice& choice, const DeviceModel& device);

}  // namespace vllm_kernels::cuda
