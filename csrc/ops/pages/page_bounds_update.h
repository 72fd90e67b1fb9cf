// page_bounds_update: per page and KV head the minimum and maximum of K by component (Quest,
// arXiv:2406.10774).
//
// The slots of a call say how far their pages are filled. Bounds of a page that has a slot in the
// call become those of its slots 0 to h, where h is its highest slot in the call. Earlier bounds
// do not count. So the result depends neither on the order of the slots nor on calls before.
//
// K of an 8-bit cache is element * k_scale in float32. Bounds of 16 bits are then rounded outwards.
// A NaN makes both bounds of its component NaN.
#pragma once
#include "ops/paged_kv.h"

namespace vllm_kernels {

struct PageBoundsUpdateParams {
  void* bounds;                 // [num_blocks, num_kv_heads, 2, head_size]: minimum, maximum
  int64_t block_stride;         // elements; a page's bounds are contiguous
  PagedKv kv;                   // K only
  const int64_t* slot_mapping;  // [num_slots], -1: skipped
  int32_t num_slots;
  DType dtype;                    // of the bounds; a 16- or 32-bit cache has the same
  int32_t* last_names = nullptr;  // CPU: scratch [num_blocks]

  // Returns `slot`, or -1 for one that is skipped. A cache holds < 2^31 tokens.
  VLLM_KERNELS_HOST_DEVICE int32_t usable(int64_t slot) const {
    const bool good = slot >= 0 && slot < kv.num_blocks * kv.block_size;
    return good ? static_cast<int32_t>(slot) : -1;
  }
};

// CPU, before PageBoundsUpdateParams: last_names[page] becomes the index of the page's highest
// slot, the last one of equals. Pages without a slot keep any value.
struct PageNamesParams {
  PageBoundsUpdateParams update;
};

}  // namespace vllm_kernels
