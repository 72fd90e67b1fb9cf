// The tables that tell a gather which tokens of paged sequences to read.
#pragma once
#include <optional>

#include "ops/gather_cache.h"
#include "torch_ops/base/check.h"

namespace vllm_kernels {

// block_table int32 [>= num_seqs, blocks_per_seq]; cu_seq_lens int32 [num_seqs + 1]; seq_starts
// int32 [num_seqs] or none. num_seqs comes from cu_seq_lens; a `batch_size` that is given must
// agree.
class GatherTables {
 public:
  GatherTables(Expect& expect, const char* table_name, const Tensor& block_table,
               const Tensor& cu_seq_lens, const std::optional<Tensor>& seq_starts,
               std::optional<int64_t> batch_size = std::nullopt);

  void apart_from(const Argument& out) const;
  bool any() const { return num_seqs_ > 0; }
  // Packs the tables and checks their values (check_index). A sequence longer than its block table
  // is an error on the CPU. On CUDA its rows past the table are filled with zeros.
  PagedTokens pack(int64_t num_blocks, int64_t block_size, int64_t num_rows) const;

 private:
  const Expect& expect_;
  Argument table_;
  Argument ends_;
  std::optional<Argument> starts_;
  int64_t num_seqs_;
};

}  // namespace vllm_kernels
