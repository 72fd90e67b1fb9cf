// The part of paged_attention's binding that reads a table in CSR form (ops/pages/page_list.h).
#include "ops/pages/page_list.h"

#include <algorithm>
#include <limits>

#include "torch_ops/attention/attention_arguments.h"
#include "torch_ops/base/allocate.h"
#include "torch_ops/base/device.h"
#include "torch_ops/base/index_check.h"

namespace vllm_kernels {

PageListParams read_page_list(Expect& expect, PagedAttentionParams& params,
                              const Tensor& kv_indices, const Tensor& last_page_len,
                              const Tensor& kv_indptr, int64_t max_pages, Size& num_seqs,
                              Arguments& read) {
  Size ends("num_seqs + 1", num_seqs + 1, num_seqs.source), size("num_page_ids");
  const Argument indptr = expect.tensor("kv_indptr", kv_indptr).int32().shape({&ends}).contiguous();
  const Argument ids = expect.tensor("kv_indices", kv_indices).int32().shape({&size}).contiguous();
  const Argument last =
      expect.tensor("last_page_len", last_page_len).int32().shape({&num_seqs}).contiguous();
  const int64_t most = number_of_tokens(expect, max_pages, -1,
                                        "max_pages: expected a number of pages >= 0 (-1: any)");
  const int32_t block_size = params.kv.block_size;
  // The tokens of a sequence are counted in 32 bits.
  const int64_t longest = std::numeric_limits<int32_t>::max() / block_size;
  const int64_t width = std::min({most < 0 ? int64_t{size} : most, int64_t{size}, longest});
  check_index(expect, indptr,
              {.noun = "a rising end of a list, at most max_pages past the one before,",
               .high = size + 1,
               .max_increase = width});
  check_index(expect, last, {.noun = "a number of tokens of a page", .high = block_size + 1});
  check_page_ids(expect, ids, indptr, params.kv.num_blocks);
  read.add(indptr, ids, last);
  params.max_blocks_per_seq = clamped_int32(width);
  params.block_table_stride = width;
  params.max_seq_len = width * block_size;
  return {.indptr = indptr.as<const int32_t>(),
          .ids = ids.as<const int32_t>(),
          .last_page_len = last.as<const int32_t>(),
          .num_seqs = int32_size(indptr, "num_seqs", num_seqs),
          .num_ids = int32_size(ids, "num_page_ids", size),
          .block_size = block_size,
          .width = clamped_int32(width),
          .tables = nullptr,
          .seq_lens = nullptr};
}

BlockTables make_tables(Expect& expect, PagedAttentionParams& params, PageListParams list,
                        const Tensor& query) {
  const auto make = [&](std::initializer_list<int64_t> sizes) {
    return empty(sizes, aoti_torch_dtype_int32(), query);
  };
  BlockTables made{make({list.num_seqs, list.width}), make({list.num_seqs})};
  params.block_tables = list.tables = static_cast<int32_t*>(made.tables->data());
  params.seq_lens = list.seq_lens = static_cast<int32_t*>(made.seq_lens->data());
  launch(list, query);
  // Not causal, all query tokens see the same tokens, however many there are.
  check_index(expect, expect.tensor("length", *made.seq_lens),
              {.noun = "a length",
               .high = params.max_seq_len + 1,
               .query_start_loc = params.window_right == 0 ? params.query_start_loc : nullptr});
  return made;
}

}  // namespace vllm_kernels
