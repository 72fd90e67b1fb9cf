// What the host knows about splits. Whether prefill sm90 splits the keys of its work tiles, where
// it can, and for how many CTAs decode splits a small batch. Host code, a part of dispatch.cpp.
#pragma once
#include "cuda/attention/common/kernel_choice.h"
#include "cuda/base/device.h"
#include "ops/paged_attention.h"

namespace vllm_kernels::cuda {

// Whether splits may pay. The device decides by the lengths, of which the host has the longest.
// Equal ones may gain. So may unequal ones if the longest is long, but its tiles are too few for
// all SMs. The longest of contiguous keys is estimated. Over 8-bit ones an error costs 5%, unless
// products have 8 bits. (prefill/splits.md, c_b32_n4_fp8, contiguous: 170 to 178 us.)
bool gains_by_splits(const PagedAttentionParams& p, const DeviceModel& device,
                     bool has_8_bit_products);

// Whether prefill sm90, if it can split its tiles, is faster than decode. A sequence has more than
// kDecodeRowsOfSplits rows, up to kDecodeRows. Over 8-bit caches prefill dequantizes keys more
// slowly than memory gives them.
bool beats_decode(const PagedAttentionParams& p, const DeviceModel& device);

// Sets few_ctas and the grid of decode. A batch that is small at the bound on its lengths gets no
// more CTAs than it may have work tiles.
void set_decode_grid(const PagedAttentionParams& p, const DeviceModel& device,
                     KernelChoice& choice);

}  // namespace vllm_kernels::cuda
