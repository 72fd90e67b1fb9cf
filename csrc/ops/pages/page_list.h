// paged_attention with a table in CSR form: the block table and the lengths that its kernels read.
//   tables[s, c]   ids[indptr[s] + c], for each page c of sequence s; other columns stay as they
//   are seq_lens[s]    (pages - 1) * block_size + last_page_len[s]; 0 without pages
#pragma once
#include "ops/paged_attention.h"

namespace vllm_kernels {

struct PageListParams {
  const int32_t* indptr;         // [num_seqs + 1]
  const int32_t* ids;            // [num_ids]
  const int32_t* last_page_len;  // [num_seqs]
  int32_t num_seqs;
  int32_t num_ids;
  int32_t block_size;
  int32_t width;      // columns of tables; width * block_size fits in 32 bits
  int32_t* tables;    // [num_seqs, width]
  int32_t* seq_lens;  // [num_seqs]

  // Iterations of a sequence: each takes every kLanes-th page.
  static constexpr int32_t kLanes = 1024;

  // Every iteration i < count() may run on its own.
  VLLM_KERNELS_HOST_DEVICE int64_t count() const { return int64_t{num_seqs} * kLanes; }
  VLLM_KERNELS_HOST_DEVICE void run(int64_t i) const {
    const int64_t seq = i / kLanes;
    const int32_t lane = static_cast<int32_t>(i % kLanes);
    const RowRange list = row_range(indptr[seq], indptr[seq + 1], num_ids);
    const int32_t pages = list.count < width ? list.count : width;
    if (lane == 0) {
      const int32_t last = last_page_len[seq];
      const int32_t of_last = last < 0 ? 0 : last < block_size ? last : block_size;
      seq_lens[seq] = pages == 0 ? 0 : (pages - 1) * block_size + of_last;
    }
    for (int32_t page = lane; page < pages; page += kLanes) {
      tables[seq * width + page] = ids[list.first + page];
    }
  }
};

}  // namespace vllm_kernels
