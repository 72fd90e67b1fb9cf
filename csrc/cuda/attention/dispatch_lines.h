// When decode takes several KV heads a work tile, in form kLines. Host code, a part of
// dispatch.cpp.
#pragma once
#include "cuda/attention/common/kernel_choice.h"
#include "cuda/base/device.h"
#include "ops/paged_attention.h"

namespace vllm_kernels::cuda {

// The KV heads of a work tile of decode in form kLines (lines_heads()). 1: another form. Query
// tiles are fewer and split further than with one head, so a batch has some. With fixed_split_size
// the form must not depend on the batch.
int heads_of_lines(const PagedAttentionParams& p, const DeviceModel& device);

// Sets the form, warps, stages and shared memory of such a launch.
void set_lines_shape(const PagedAttentionParams& p, const DeviceModel& device, int heads,
                     KernelChoice& choice);

// On an H100 or H200: whether stages of decode have 32 tokens in place of 16
// (kTilesOfHalvedStages). The rest of `choice` is set. With fixed_split_size that must not depend
// on the batch.
bool halves_stages(const PagedAttentionParams& p, const DeviceModel& device,
                   const KernelChoice& choice);

}  // namespace vllm_kernels::cuda
