// copy_blocks: page pairs[i][0] of every cache is copied to page pairs[i][1] of the same cache.
// swap_blocks: page pairs[i][0] of one tensor is copied to page pairs[i][1] of another. (A page is
// a KV block.)
// swap_blocks_batch: bytes[i] bytes are copied from address from[i] to address to[i].
//
// The order of the copies is undefined on CUDA. So no page may be destination twice in one call,
// and copy_blocks may not read a page that another pair writes. Only where swap_blocks copies
// within one tensor do the copies have the order of the list.
#pragma once
#include <cstdint>

#include "ops/rows.h"

namespace vllm_kernels {

struct BlockCopy {
  const char* from;     // page 0
  char* to;             // page 0; for copy_blocks the same memory
  int64_t from_stride;  // bytes between pages
  int64_t to_stride;    // bytes between pages
};

struct CopyBlocksParams {
  const BlockCopy* copies;  // [num_copies], on the host: K and V of every layer
  int64_t num_copies;
  const int64_t* pairs;  // [num_pairs, 2], on the caches' device or on the host
  int64_t num_pairs;
  bool pairs_on_host;
  int64_t num_blocks;   // of every cache
  int64_t block_bytes;  // of every cache; a page is contiguous
};

// Source and destination may each be on the CPU or on a GPU.
struct SwapBlocksParams {
  BlockCopy copy;
  const int64_t* pairs;  // [num_pairs, 2], on the host, checked
  int64_t num_pairs;
  int64_t block_bytes;
  bool one_tensor;  // source and destination share memory: pairs must not be merged
};

// The copies have no order. The addresses may be those of the host or of the launch's GPU.
struct SwapBlocksBatchParams {
  const int64_t* from;   // [num_copies]; all three arrays are on the host
  const int64_t* to;     // [num_copies]
  const int64_t* bytes;  // [num_copies]
  int64_t num_copies;
  bool any_source_order;  // sources may be read at any time, also before earlier work of the stream
};

}  // namespace vllm_kernels
