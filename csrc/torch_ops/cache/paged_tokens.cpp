// The checks of paged_tokens.h.
#include "torch_ops/cache/paged_tokens.h"

#include "torch_ops/base/device.h"
#include "torch_ops/base/index_check.h"

namespace vllm_kernels {

GatherTables::GatherTables(Expect& expect, const char* table_name, const Tensor& block_table,
                           const Tensor& cu_seq_lens, const std::optional<Tensor>& seq_starts,
                           std::optional<int64_t> batch_size)
    : expect_(expect),
      table_(expect.tensor(table_name, block_table).int32().rank(2, 2).inner_contiguous()),
      ends_(expect.tensor("cu_seq_lens", cu_seq_lens).int32().rank(1, 1).contiguous()),
      num_seqs_(ends_.size(0) - 1) {
  if (batch_size && *batch_size != num_seqs_) {
    ends_.fail("expected batch_size + 1 = " + std::to_string(*batch_size + 1) +
               " elements, got shape " + ends_.shape_text());
  }
  if (num_seqs_ < 0) ends_.fail("expected num_seqs + 1 elements, got shape [0]");
  if (table_.size(0) < num_seqs_) {
    table_.fail("expected at least num_seqs = " + std::to_string(num_seqs_) +
                " (from cu_seq_lens) rows, got shape " + table_.shape_text());
  }
  if (seq_starts) {
    Size seqs("num_seqs", num_seqs_, "cu_seq_lens");
    starts_ = expect.tensor("seq_starts", *seq_starts).int32().shape({&seqs}).contiguous();
  }
}

void GatherTables::apart_from(const Argument& out) const {
  expect_.apart(out, table_);
  expect_.apart(out, ends_);
  if (starts_) expect_.apart(out, *starts_);
}

PagedTokens GatherTables::pack(int64_t num_blocks, int64_t block_size, int64_t num_rows) const {
  constexpr int64_t kMostRows = INT32_MAX - 64;
  expect_.that(num_rows <= kMostRows && table_.size(1) <= INT32_MAX,
               "expected fewer than 2^31 - 64 rows and as many blocks a sequence, got " +
                   std::to_string(num_rows) + " and " + std::to_string(table_.size(1)));
  const int64_t capacity = table_.size(1) * block_size;  // tokens of a sequence
  const PagedTokens tokens{.block_table = table_.as<const int32_t>(),
                           .block_table_stride = table_.stride(0),
                           .blocks_per_seq = static_cast<int32_t>(table_.size(1)),
                           .cu_seq_lens = ends_.as<const int32_t>(),
                           .seq_starts = starts_ ? starts_->as<const int32_t>() : nullptr,
                           .num_seqs = static_cast<int32_t>(num_seqs_),
                           .num_rows = static_cast<int32_t>(num_rows),
                           .num_blocks = num_blocks,
                           .block_size = static_cast<int32_t>(block_size)};
  check_index(expect_, ends_,
              {.noun = "a row", .low = 0, .high = num_rows + 1, .most_rise = capacity});
  if (starts_) check_index(expect_, *starts_, {.noun = "a token", .low = 0, .high = capacity + 1});
  if constexpr (kOnCpu) {
    for (int64_t seq = 0; starts_ && seq < num_seqs_; ++seq) {
      const int64_t length = tokens.cu_seq_lens[seq + 1] - tokens.cu_seq_lens[seq];
      if (length == 0 || tokens.seq_starts[seq] + length <= capacity) continue;
      expect_.fail("seq_starts[" + std::to_string(seq) +
                   "] = " + std::to_string(tokens.seq_starts[seq]) + ": expected at most " +
                   std::to_string(capacity - length) + ", for the sequence has " +
                   std::to_string(length) + " tokens and its blocks " + std::to_string(capacity));
    }
  }
  check_index(expect_, table_, {.noun = "a block", .low = 0, .high = num_blocks},
              GatheredColumns{.rows = num_seqs_,
                              .tokens_per_column = tokens.block_size,
                              .cumulative_lengths = tokens.cu_seq_lens,
                              .row_starts = tokens.seq_starts});
  return tokens;
}

}  // namespace vllm_kernels
