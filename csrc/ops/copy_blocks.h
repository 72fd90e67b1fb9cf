// copy_blocks: block pairs[i][0] of every cache is copied to block pairs[i][1] of the same cache.
// swap_blocks: block pairs[i][0] of one tensor is copied to block pairs[i][1] of another.
//
// No block may be both a source and a destination of one call, or a destination twice: the order of
// the copies is not defined on CUDA (on the CPU they happen in the order of the list, and where
// swap_blocks copies within one tensor).
#pragma once
#include <cstdint>

#include "ops/rows.h"

namespace vllm_kernels {

struct BlockCopy {
  const char* from;     // block 0
  char* to;             // block 0; the same memory for copy_blocks
  int64_t from_stride;  // bytes between blocks
  int64_t to_stride;    // bytes between blocks
};

struct CopyBlocksParams {
  const BlockCopy* copies;  // [num_copies], on the host: the keys and values of every layer
  int64_t num_copies;
  const int64_t* pairs;  // [num_pairs, 2], on the device of the caches, or on the host
  int64_t num_pairs;
  bool pairs_on_host;
  int64_t num_blocks;   // of every cache
  int64_t block_bytes;  // of every cache; a block is contiguous
};

// Any of source and destination may be on the CPU or on a GPU.
struct SwapBlocksParams {
  BlockCopy copy;
  const int64_t* pairs;  // [num_pairs, 2] on the host, within bounds
  int64_t num_pairs;
  int64_t block_bytes;
  bool one_tensor;  // source and destination share memory: no two pairs may be joined
};

}  // namespace vllm_kernels
