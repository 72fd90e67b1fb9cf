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

// Whether prefill sm90, if it can split its tiles, is faster than decode. A sequence has more than
// kDecodeRowsOfSplits rows, up to kDecodeRows. Over 8-bit caches prefill dequantizes keys more
// slowly than memory gives them.
bool beats_decode(const PagedAttentionParams& p, const DeviceModel& device);

}  // namespace vllm_kernels::cuda
