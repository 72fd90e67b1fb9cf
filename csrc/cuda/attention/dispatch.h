// Which attention kernel runs, and why: the one decision of every op that launches attention (list:
// launchers.h), and of fused_decode_attention. Host code without CUDA: it follows no pointer
// and looks at alignments only.
#pragma once
#include <string>

#include "cuda/attention/common/kernel_choice.h"
#include "cuda/base/device.h"
#include "ops/paged_attention.h"

namespace vllm_kernels::cuda {

// `has_8_bit_products`: so prefill sm90 would have, for e4m3 queries.
AttentionChoice choose_kernel(const PagedAttentionParams& params, const DeviceModel& device,
                              bool has_8_bit_products = false);
// The same where query has e4m3 elements.
AttentionChoice choose_e4m3_kernel(const PagedAttentionParams& params, const DeviceModel& device);

// The parameters of the concurrent decode launch.
PagedAttentionParams concurrent_params(const PagedAttentionParams& params,
                                       const AttentionChoice& choice);

// fused_decode_attention in one launch, unless the choice has obstacles: then two launches run.
// `new_token_threads`: threads that a CTA needs to prepare the new token's heads.
KernelChoice choose_fused_decode(const PagedAttentionParams& params, const DeviceModel& device,
                                 int new_token_threads);

// Throws if the workspace may lack slots for the splits of fixed_split_size. The host does not know
// the lengths, so it takes the bound from the block tables.
void check_fixed_split(const PagedAttentionParams& params, const KernelChoice& choice);

// The choice in words: kernel, instantiation, launch shape, and what each faster kernel lacked.
std::string describe(const AttentionChoice& choice);
std::string describe(const KernelChoice& choice);
// Obstacles in words, with "; because: " before the first.
std::string because(uint32_t obstacles);

}  // namespace vllm_kernels::cuda
