// Checks of slot_mapping, for every op that writes tokens into a paged cache.
#pragma once
#include "torch_ops/base/check.h"
#include "torch_ops/base/index_check.h"

namespace vllm_kernels {

// slot_mapping: int64 [n], n <= num_tokens.
inline Argument read_slots(Expect& expect, const Tensor& slot_mapping, const Size& num_tokens) {
  const Argument slots =
      expect.tensor("slot_mapping", slot_mapping).int64().rank(1, 1).inner_contiguous();
  if (slots.numel() > num_tokens) {
    slots.fail("expected at most num_tokens = " + std::to_string(num_tokens.value) + " (from " +
               num_tokens.source + ") slots, got shape " + slots.shape_text());
  }
  return slots;
}

// The number of slots of a cache. Kernels number slots in 31 bits.
inline int64_t count_slots(const Argument& cache, int64_t num_blocks, int64_t block_size) {
  const int64_t num_slots = num_blocks * block_size;
  if (num_slots > INT32_MAX) {
    cache.fail("expected num_blocks * block_size < 2^31, got " + std::to_string(num_slots));
  }
  return num_slots;
}

inline void check_slots(const Expect& expect, const Argument& slots, int64_t num_slots) {
  check_index(expect, slots,
              {.noun = "a slot", .low = 0, .high = num_slots, .skip = true, .unique = true});
}

}  // namespace vllm_kernels
