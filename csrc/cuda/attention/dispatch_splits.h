// What the host decides about splits: whether prefill sm90 splits the keys of its work tiles, and
// the grid of decode. Host code, a part of dispatch.cpp.
#pragma once
#include "cuda/attention/common/kernel_choice.h"
#include "cuda/base/device.h"
#include "ops/paged_attention.h"

namespace vllm_kernels::cuda {

// Whether splits may pay. The device decides by the lengths, of which the host has the longest.
// Equal ones may gain. So may unequal ones if the longest is long, but its tiles are too few for
// all SMs. The longest of contiguous keys is estimated if the caller does not give it. Over 8-bit
// ones an error costs 5%, unless products have 8 bits. (prefill/splits.md, c_b32_n4_fp8,
// contiguous: 170 to 178 us.)
bool gains_by_splits(const PagedAttentionParams& p, const DeviceModel& device,
                     bool has_8_bit_products);

// Whether prefill sm90, if it can split its tiles, is faster than decode. A sequence has more than
// kDecodeRowsOfSplits rows, up to kDecodeRows. Over 8-bit caches prefill dequantizes keys more
// slowly than memory gives them.
bool beats_decode(const PagedAttentionParams& p, const DeviceModel& device);

// The most tokens that a query token may see, by the bound on the lengths and by the window.
int64_t seen_tokens(const PagedAttentionParams& p);

// Whether decode gains by CTAs of half an SM, with half the warps each: 0, or the grid's CTAs per
// SM, 1 or 2. `padded`: the head size of its kernel.
int ctas_of_half_an_sm(const PagedAttentionParams& p, const DeviceModel& device, int padded);

// Sets few_ctas and the grid of decode: few_ctas for one sequence that is small at the bound.
void set_decode_grid(const PagedAttentionParams& p, const DeviceModel& device,
                     KernelChoice& choice);

}  // namespace vllm_kernels::cuda
