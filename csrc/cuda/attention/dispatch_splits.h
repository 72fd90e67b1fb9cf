// Whether prefill sm90 splits the keys of its work tiles, where it can. Host code, a part of
// dispatch.cpp.
#pragma once
#include "cuda/base/device.h"
#include "ops/paged_attention.h"

namespace vllm_kernels::cuda {

// Whether splits may pay. The device decides by the lengths, of which the host has the longest.
// Equal ones may gain. So may unequal ones if the longest is long, but its tiles are too few for
// all SMs. The longest of contiguous keys is estimated. Over 8-bit ones an error costs 5%, unless
// products have 8 bits. (prefill/splits.md, c_b32_n4_fp8, contiguous: 170 to 178 us.)
bool gains_by_splits(const PagedAttentionParams& p, const DeviceModel& device,
                     bool has_8_bit_products);

// Whether prefill sm90 with splits is faster than decode over an 8-bit cache, with 16-bit queries.
// `gathers`: it gathers keys first. Else it dequantizes them for each work tile.
bool splits_beat_decode(const PagedAttentionParams& p, const DeviceModel& device, bool gathers);

}  // namespace vllm_kernels::cuda
