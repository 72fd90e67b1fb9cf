// Bindings of concat_and_cache_mla, cp_gather_and_upconvert_fp8_kv_cache and concat_mla_q.
// ops/mla_cache.h has the formats of entries.
#include "ops/mla_cache.h"

#include "torch_ops/base/check.h"
#include "torch_ops/base/device.h"
#include "torch_ops/base/index_check.h"
#include "torch_ops/cache/paged_kv.h"

namespace vllm_kernels {
namespace {

// Checks entries of "fp8_ds_mla": uint8 [num_blocks, block_size, 656], accessed by 16 bytes.
void check_ds_mla(Argument& cache, Size& num_blocks, Size& block_size) {
  Size entry("fp8_ds_mla entry", kDsMlaEntry, nullptr);
  cache.uint8().shape({&num_blocks, &block_size, &entry}).inner_contiguous();
  const bool aligned = reinterpret_cast<uintptr_t>(cache.data()) % 16 == 0 &&
                       cache.stride(0) % 16 == 0 && cache.stride(1) % 16 == 0;
  if (!aligned) {
    cache.fail("expected entries at multiples of 16 bytes, got strides " +
               std::to_string(cache.stride(0)) + ", " + std::to_string(cache.stride(1)));
  }
}

void concat_and_cache_mla(const Tensor& kv_c, const Tensor& k_pe, const Tensor& kv_cache,
                          const Tensor& slot_mapping, const Text& kv_cache_dtype,
                          const Tensor& scale) {
  Expect expect("concat_and_cache_mla");
  const bool ds_mla = std::string_view(kv_cache_dtype) == "fp8_ds_mla";
  Size num_tokens("num_tokens"), num_blocks("num_blocks"), block_size("block_size");
  Size rank("kv_lora_rank"), pe_dim("pe_dim");
  if (ds_mla) {
    rank = Size("kv_lora_rank", kDsMlaLatent, "fp8_ds_mla");
    pe_dim = Size("pe_dim", kDsMlaRope, "fp8_ds_mla");
  }
  const Argument latent =
      expect.tensor("kv_c", kv_c).floating().shape({&num_tokens, &rank}).inner_contiguous();
  const Argument rope = expect.tensor("k_pe", k_pe)
                            .same_dtype(latent)
                            .shape({&num_tokens, &pe_dim})
                            .inner_contiguous();
  Argument cache = expect.tensor("kv_cache", kv_cache);
  DType stored = DType::kFp8E4M3;
  if (ds_mla) {
    check_ds_mla(cache, num_blocks, block_size);
  } else {
    stored = cache_dtype(expect, kv_cache_dtype, latent.dtype());
    Size entry("kv_lora_rank + pe_dim", rank + pe_dim, "kv_c and k_pe");
    cache.cache_dtype(stored, kv_cache_dtype)
        .shape({&num_blocks, &block_size, &entry})
        .inner_contiguous();
  }
  cache.written();
  if (block_size < 1) cache.fail("expected block_size >= 1, got shape " + cache.shape_text());
  const int32_t slots_per_block = int32_size(cache, "block_size", block_size);
  const Argument slots = read_slots(expect, slot_mapping, num_tokens);
  const Argument s = expect.tensor("scale", scale).float32().one_element();
  if (!ds_mla && size_of(stored) == 1) check_scale(expect, s);
  expect.apart(cache, {latent, rope, slots, s});
  const int64_t num_slots = count_slots(cache, num_blocks, block_size);
  if (slots.numel() == 0) return;
  check_slots(expect, slots, num_slots);
  if (cache.numel() == 0) return;

  const ConcatAndCacheMlaParams params{.kv_c = latent.data(),
                                       .k_pe = rope.data(),
                                       .kv_c_stride = latent.stride(0),
                                       .k_pe_stride = rope.stride(0),
                                       .kv_lora_rank = int32_size(latent, "kv_lora_rank", rank),
                                       .pe_dim = int32_size(rope, "pe_dim", pe_dim),
                                       .cache = cache.mutable_data(),
                                       .block_stride = cache.stride(0),
                                       .token_stride = cache.stride(1),
                                       .num_blocks = num_blocks,
                                       .block_size = slots_per_block,
                                       .dtype = latent.dtype(),
                                       .cache_dtype = stored,
                                       .ds_mla = ds_mla,
                                       .scale = s.as<const float>(),
                                       .slot_mapping = slots.as<const int64_t>(),
                                       .num_tokens = slots.numel()};
  launch(params, kv_c);
}

void cp_gather_and_upconvert_fp8_kv_cache(const Tensor& src_cache, const Tensor& dst,
                                          const Tensor& block_table, const Tensor& seq_lens,
                                          const Tensor& workspace_starts, int64_t batch_size) {
  Expect expect("cp_gather_and_upconvert_fp8_kv_cache");
  Size num_blocks("num_blocks"), block_size("block_size"), num_rows("num_rows");
  Size width("kv_lora_rank + pe_dim", kDsMlaLatent + kDsMlaRope, "fp8_ds_mla");
  Size seqs("batch_size", batch_size, "the argument");
  expect.that(batch_size >= 0, "batch_size: expected one >= 0, got " + std::to_string(batch_size));
  Argument src = expect.tensor("src_cache", src_cache);
  check_ds_mla(src, num_blocks, block_size);
  const int32_t tokens_per_block = int32_size(src, "block_size", block_size);
  const Argument out =
      expect.tensor("dst", dst).floating().shape({&num_rows, &width}).inner_contiguous().written();
  if (reinterpret_cast<uintptr_t>(out.data()) % 16 != 0 ||
      out.stride(0) * out.element_size() % 16 != 0) {
    out.fail("expected rows at multiples of 16 bytes, got stride " + std::to_string(out.stride(0)));
  }
  const Argument table =
      expect.tensor("block_table", block_table).int32().rank(2, 2).inner_contiguous();
  if (table.size(0) < batch_size) {
    table.fail("expected at least batch_size = " + std::to_string(batch_size) +
               " rows, got shape " + table.shape_text());
  }
  const int32_t columns = int32_size(table, "blocks_per_seq", table.size(1));
  const int32_t num_seqs = int32_size(table, "batch_size", batch_size);
  const Argument lengths = expect.tensor("seq_lens", seq_lens).int32().shape({&seqs}).contiguous();
  const Argument starts =
      expect.tensor("workspace_starts", workspace_starts).int32().shape({&seqs}).contiguous();
  expect.apart(out, {src, table, lengths, starts});
  if (out.numel() == 0 || batch_size == 0 || block_size < 1) return;
  const int64_t capacity = int64_t{columns} * tokens_per_block;
  check_index(expect, lengths, {.noun = "a length that fits block_table", .high = capacity + 1});
  check_index(expect, starts, {.noun = "a row", .low = 0, .high = num_rows + 1});
  const auto* counts = lengths.as<const int32_t>();
  if (kOnCpu && !starts.is_meta()) {
    const auto* firsts = starts.as<const int32_t>();
    for (int64_t seq = 0; seq < batch_size; ++seq) {
      if (int64_t{firsts[seq]} + counts[seq] <= num_rows) continue;
      expect.fail("workspace_starts[" + std::to_string(seq) + "] = " + std::to_string(firsts[seq]) +
                  ": expected at most " + std::to_string(num_rows - counts[seq]) +
                  ", for the sequence has " + std::to_string(counts[seq]) + " tokens and dst " +
                  std::to_string(num_rows.value) + " rows");
    }
  }
  check_index(expect, table, {.noun = "a block", .low = 0, .high = num_blocks},
              {.rows = batch_size, .tokens_per_column = tokens_per_block, .row_lengths = counts});
  const UpconvertMlaParams params{.cache = src.data(),
                                  .block_stride = src.stride(0),
                                  .token_stride = src.stride(1),
                                  .num_blocks = num_blocks,
                                  .block_size = tokens_per_block,
                                  .rows = out.mutable_data(),
                                  .row_stride = out.stride(0),
                                  .num_rows = num_rows,
                                  .dtype = out.dtype(),
                                  .block_table = table.as<const int32_t>(),
                                  .block_table_stride = table.stride(0),
                                  .blocks_per_seq = columns,
                                  .seq_lens = counts,
                                  .workspace_starts = starts.as<const int32_t>(),
                                  .num_seqs = num_seqs};
  launch(params, src_cache);
}

void concat_mla_q(const Tensor& ql_nope, const Tensor& q_pe, const Tensor& q_out) {
  Expect expect("concat_mla_q");
  Size num_tokens("num_tokens"), num_heads("num_heads"), nope_dim("nope_dim"), pe_dim("pe_dim");
  const Argument nope = expect.tensor("ql_nope", ql_nope)
                            .floating()
                            .shape({&num_tokens, &num_heads, &nope_dim})
                            .inner_contiguous();
  const Argument rope = expect.tensor("q_pe", q_pe)
                            .same_dtype(nope)
                            .shape({&num_tokens, &num_heads, &pe_dim})
                            .inner_contiguous();
  Size width("nope_dim + pe_dim", nope_dim + pe_dim, "ql_nope and q_pe");
  const Argument out = expect.tensor("q_out", q_out)
                           .same_dtype(nope)
                           .shape({&num_tokens, &num_heads, &width})
                           .inner_contiguous()
                           .written();
  expect.apart(out, {nope, rope});
  if (out.numel() == 0) return;
  const int64_t size = out.element_size();
  const ConcatMlaQParams params{.nope = nope.data(),
                                .rope = rope.data(),
                                .out = out.mutable_data(),
                                .nope_rows = expect.rows(nope),
                                .rope_rows = expect.rows(rope),
                                .out_rows = expect.rows(out),
                                .nope_bytes = int32_size(nope, "bytes of a row", nope_dim * size),
                                .rope_bytes = int32_size(rope, "bytes of a row", pe_dim * size),
                                .dtype = out.dtype()};
  launch(params, q_out);
}

}  // namespace
}  // namespace vllm_kernels

VLLM_KERNELS_IMPL(library) {
  library.impl("concat_and_cache_mla", TORCH_BOX(&vllm_kernels::concat_and_cache_mla));
  library.impl("cp_gather_and_upconvert_fp8_kv_cache",
               TORCH_BOX(&vllm_kernels::cp_gather_and_upconvert_fp8_kv_cache));
  library.impl("concat_mla_q", TORCH_BOX(&vllm_kernels::concat_mla_q));
}
