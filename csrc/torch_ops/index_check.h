// Index tensors (slots, positions, lengths, block tables) are checked by one call per argument.
#pragma once
#include "ops/index_check.h"
#include "torch_ops/check.h"

namespace vllm_kernels {

// Only the columns that a row's length reaches are looked at: block tables hold garbage behind
// them.
struct UsedColumns {
  const Argument& row_lengths;  // [rows] int32, in tokens
  int32_t tokens_per_column;    // block_size
};

// `values`: [n] or [rows, columns], int32 or int64, stride 1 in the last dimension.
//   CPU   scans at every call and throws, before anything is written:
//         reshape_and_cache: slot_mapping[5] = 999: expected -1 (skipped) or a slot in [0, 512)
//   CUDA  does nothing, for the kernel contains bad values; with VLLM_KERNELS_CHECK=1 enqueues a
//         scan, whose finding the next op or vllm_kernels.check() throws in the same words.
void check_index(const Expect& expect, const Argument& values, const IndexBounds& bounds);
void check_index(const Expect& expect, const Argument& values, const IndexBounds& bounds,
                 const UsedColumns& used);

// Throws what finished scans of earlier CUDA ops have found. launch() calls it; no sync.
void raise_bad_index();

}  // namespace vllm_kernels
