// The tables that say which tokens of paged sequences a gather takes.
#pragma once
#include <optional>

#include "ops/gather_cache.h"
#include "torch_ops/base/check.h"

namespace vllm_kernels {

// block_table int32 [>= num_seqs, blocks_per_seq], cu_seq_lens int32 [num_seqs + 1], seq_starts
// int32 [num_seqs] or none. num_seqs is `batch_size` where given, else what cu_seq_lens shows.
class GatherTables {
 public:
  GatherTables(Expect& expect, const char* table_name, const Tensor& block_table,
               const Tensor& cu_seq_lens, const std::optional<Tensor>& seq_starts,
               std::optional<int64_t> batch_size = std::nullopt);

  void apart_from(const Argument& out) const;
  bool any() const { return num_seqs_ > 0; }
  // With the checks of values (check_index). Sequences that are longer than their block table are
  // an error on the CPU; on CUDA the rows behind it get zeros.
  PagedTokens pack(int64_t num_blocks, int64_t block_size, int64_t num_rows) const;

 private:
  const Expect& expect_;
  Argument table_;
  Argument ends_;
  std::optional<Argument> starts_;
  int64_t num_seqs_;
};

}  // namespace vllm_kernels
