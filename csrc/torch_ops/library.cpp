// The schema of every op of torch.ops.vllm_kernels: the table of contents. `!` marks the tensors
// that an op writes. The implementations register in the other files of this folder, once for CPU
// and once for CUDA. vllm_kernels/ops has the typed calls and the docstrings.
#include <string>

#include "torch_ops/base/op_namespace.h"

namespace {

// Those without a "->" return "()".
constexpr const char* kSchemas[] = {
    // --- norms
    "rms_norm(Tensor! out, Tensor input, Tensor weight, float epsilon)",
    "fused_add_rms_norm(Tensor! input, Tensor! residual, Tensor weight, float epsilon)",
    "rms_norm_weightless(Tensor! out, Tensor input, float epsilon)",
    "fused_add_rms_norm_weightless(Tensor! input, Tensor! residual, float epsilon)",
    "gemma_rms_norm(Tensor! out, Tensor input, Tensor weight, float epsilon)",
    "gemma_fused_add_rms_norm(Tensor! input, Tensor! residual, Tensor weight, float epsilon)",

    // --- norms with 8-bit results
    "rms_norm_static_fp8_quant(Tensor! out, Tensor input, Tensor weight, Tensor scale, "
    "float epsilon)",
    "fused_add_rms_norm_static_fp8_quant(Tensor! out, Tensor input, Tensor! residual, "
    "Tensor weight, Tensor scale, float epsilon)",
    "rms_norm_dynamic_per_token_quant(Tensor! out, Tensor input, Tensor weight, Tensor! scales, "
    "float epsilon, Tensor? scale_ub=None, Tensor!? residual=None)",
    "rms_norm_per_block_quant(Tensor! out, Tensor input, Tensor weight, Tensor! scales, "
    "float epsilon, Tensor? scale_ub, Tensor!? residual, int group_size, bool is_scale_transposed)",

    // --- rotary and activations
    "rotary_embedding(Tensor positions, Tensor! query, Tensor!? key, int head_size, "
    "Tensor cos_sin_cache, bool is_neox)",
    "batched_rotary_embedding(Tensor positions, Tensor! query, Tensor!? key, int head_size, "
    "Tensor cos_sin_cache, bool is_neox, int rot_dim, Tensor cos_sin_cache_offsets)",
    "silu_and_mul(Tensor! out, Tensor input)",
    "mul_and_silu(Tensor! out, Tensor input)",
    "gelu_and_mul(Tensor! out, Tensor input)",
    "gelu_tanh_and_mul(Tensor! out, Tensor input)",
    "silu_and_mul_split(Tensor! out, Tensor gate, Tensor up)",
    "fatrelu_and_mul(Tensor! out, Tensor input, float threshold)",
    "silu_and_mul_with_clamp(Tensor! out, Tensor input, float limit)",
    "swigluoai_and_mul(Tensor! out, Tensor input, float alpha=1.702, float limit=7.0)",
    "silu_and_mul_quant(Tensor! out, Tensor input, Tensor scale)",
    "silu_and_mul_per_block_quant(Tensor! out, Tensor input, Tensor! scales, int group_size, "
    "Tensor? scale_ub=None, bool is_scale_transposed=False)",
    "static_scaled_fp8_quant(Tensor! out, Tensor input, Tensor scale)",
    "dynamic_scaled_fp8_quant(Tensor! out, Tensor input, Tensor! scale)",
    "dynamic_per_token_scaled_fp8_quant(Tensor! out, Tensor input, Tensor! scales, "
    "Tensor? scale_ub=None)",
    "static_scaled_int8_quant(Tensor! out, Tensor input, Tensor scale, Tensor? azp=None)",
    "dynamic_scaled_int8_quant(Tensor! out, Tensor input, Tensor! scales, Tensor!? azp=None)",
    "gelu_new(Tensor! out, Tensor input)",
    "gelu_fast(Tensor! out, Tensor input)",
    "gelu_quick(Tensor! out, Tensor input)",

    // --- cache
    "reshape_and_cache(Tensor key, Tensor value, Tensor! key_cache, Tensor! value_cache, "
    "Tensor slot_mapping, str kv_cache_dtype, Tensor k_scale, Tensor v_scale)",
    "reshape_and_cache_flash(Tensor key, Tensor value, Tensor! key_cache, Tensor! value_cache, "
    "Tensor slot_mapping, str kv_cache_dtype, Tensor k_scale, Tensor v_scale)",
    "reshape_and_cache_per_token_quant(Tensor key, Tensor value, Tensor! key_cache, "
    "Tensor! value_cache, Tensor! key_scales, Tensor! value_scales, Tensor slot_mapping, "
    "str layout, Tensor!? key_zeros=None, Tensor!? value_zeros=None)",
    "cp_gather_cache(Tensor src_cache, Tensor! dst, Tensor block_table, Tensor cu_seq_lens, "
    "int batch_size, Tensor? seq_starts=None)",
    "gather_cache(Tensor src_cache, Tensor! dst, Tensor block_table, Tensor cu_seq_lens, "
    "int batch_size, Tensor? seq_starts=None)",
    "gather_and_maybe_dequant_cache(Tensor src_cache, Tensor! dst, Tensor block_table, "
    "Tensor cu_seq_lens, Tensor token_to_seq, int num_tokens, str kv_cache_dtype, Tensor scale, "
    "Tensor? seq_starts=None)",
    "gather_paged_kv(Tensor! key, Tensor! value, Tensor key_cache, Tensor value_cache, "
    "Tensor block_tables, Tensor cu_seq_lens, Tensor? seq_starts, Tensor? k_scale, "
    "Tensor? v_scale, str layout, Tensor? k_zero=None, Tensor? v_zero=None)",
    "concat_and_cache_mla(Tensor kv_c, Tensor k_pe, Tensor! kv_cache, Tensor slot_mapping, "
    "str kv_cache_dtype, Tensor scale)",
    "cp_gather_and_upconvert_fp8_kv_cache(Tensor src_cache, Tensor! dst, Tensor block_table, "
    "Tensor seq_lens, Tensor workspace_starts, int batch_size)",
    "concat_mla_q(Tensor ql_nope, Tensor q_pe, Tensor! q_out)",
    "copy_blocks(Tensor(a!)[] key_caches, Tensor(b!)[] value_caches, Tensor block_mapping)",
    "copy_blocks_mla(Tensor(a!)[] kv_caches, Tensor block_mapping)",
    "swap_blocks(Tensor src, Tensor! dst, Tensor block_mapping)",
    "swap_blocks_batch(Tensor src_ptrs, Tensor dst_ptrs, Tensor sizes, "
    "bool is_src_access_order_any=False, Tensor? on=None)",
    "convert_fp8(Tensor! output, Tensor input, float scale=1.0, str kv_dtype=\"fp8\")",

    // --- pages
    "page_bounds_update(Tensor! bounds, Tensor key_cache, Tensor slot_mapping, "
    "Tensor? k_scale=None, str layout=\"vllm\")",
    "select_pages(Tensor! tables, Tensor! lens, Tensor query, Tensor bounds, Tensor block_tables, "
    "Tensor seq_lens, int block_size, int sink_pages=1, int recent_pages=4)",
    "copy_slots(Tensor(a!)[] caches, Tensor src, Tensor dst, str layout=\"vllm\")",
    "sparq_attention(Tensor! out, Tensor!? lse, Tensor query, Tensor key_cache, "
    "Tensor value_cache, Tensor block_tables, Tensor seq_lens, float scale, int r, int k, "
    "int window, int sink_tokens, str select, Tensor? mean_value, Tensor? k_scale, "
    "Tensor? v_scale, str layout, Tensor!? workspace=None)",
    "value_mean_update(Tensor! mean, Tensor! counts, Tensor value, Tensor rows)",

    // --- a layer's heads between its QKV product and attention
    "fused_qk_norm_rope(Tensor! qkv, int num_heads_q, int num_heads_k, int num_heads_v, "
    "int head_dim, float eps, Tensor q_weight, Tensor k_weight, Tensor cos_sin_cache, "
    "bool is_neox, Tensor position_ids)",
    "rope_and_cache(Tensor positions, Tensor! query, Tensor key, Tensor value, "
    "Tensor cos_sin_cache, bool is_neox, Tensor! key_cache, Tensor! value_cache, "
    "Tensor slot_mapping, str layout=\"vllm\", Tensor? k_scale=None, Tensor? v_scale=None, "
    "Tensor? q_weight=None, Tensor? k_weight=None, float epsilon=1e-6)",

    // --- attention
    "paged_attention_v1(Tensor! out, Tensor query, Tensor key_cache, Tensor value_cache, "
    "int num_kv_heads, float scale, Tensor block_tables, Tensor seq_lens, int block_size, "
    "int max_seq_len, Tensor? alibi_slopes, str kv_cache_dtype, Tensor k_scale, Tensor v_scale, "
    "int tp_rank=0, int blocksparse_local_blocks=0, int blocksparse_vert_stride=0, "
    "int blocksparse_block_size=64, int blocksparse_head_sliding_step=0)",
    "paged_attention_v2(Tensor! out, Tensor! exp_sums, Tensor! max_logits, Tensor! tmp_out, "
    "Tensor query, Tensor key_cache, Tensor value_cache, int num_kv_heads, float scale, "
    "Tensor block_tables, Tensor seq_lens, int block_size, int max_seq_len, Tensor? alibi_slopes, "
    "str kv_cache_dtype, Tensor k_scale, Tensor v_scale, int tp_rank=0, "
    "int blocksparse_local_blocks=0, int blocksparse_vert_stride=0, "
    "int blocksparse_block_size=64, int blocksparse_head_sliding_step=0)",
    "paged_attention(Tensor! out, Tensor!? lse, Tensor query, Tensor key_cache, "
    "Tensor value_cache, Tensor block_tables, Tensor seq_lens, Tensor? query_start_loc, "
    "float scale, Tensor? alibi_slopes, int sliding_window, float softcap, Tensor? sinks, "
    "Tensor? k_scale, Tensor? v_scale, str layout, int max_query_len, Tensor!? workspace, "
    "int fixed_split_size=0, bool kv_ready=False, int window_right=0, Tensor? kv_indptr=None, "
    "int max_pages=-1, Tensor? k_token_scales=None, Tensor? v_token_scales=None, "
    "Tensor? tree_mask=None, bool zero_unowned=False, Tensor? k_token_zeros=None, "
    "Tensor? v_token_zeros=None, Tensor? total_seq_lens=None, int shards=1, int shard=0, "
    "int interleave=1, Tensor? q_scale=None)",
    "paged_attention.result(Tensor query, Tensor key_cache, Tensor value_cache, "
    "Tensor block_tables, Tensor seq_lens, float? scale=None, str layout=\"vllm\", "
    "int sliding_window=0, float softcap=0.0) -> Tensor",
    "varlen_attention(Tensor! out, Tensor!? lse, Tensor query, Tensor key, Tensor value, "
    "Tensor query_start_loc, Tensor key_start_loc, float scale, Tensor? alibi_slopes, "
    "int window_left, int window_right, float softcap, Tensor? sinks, Tensor? k_scale, "
    "Tensor? v_scale, int max_query_len, Tensor!? workspace=None, bool zero_unowned=False, "
    "Tensor? q_scale=None, int fixed_split_size=0, int max_key_len=0)",
    "varlen_attention.result(Tensor query, Tensor key, Tensor value, Tensor query_start_loc, "
    "Tensor key_start_loc, int max_query_len, float? scale=None, int window_left=-1, "
    "int window_right=0, float softcap=0.0, Tensor? sinks=None, int max_key_len=0) -> Tensor",
    "attention_with_kvcache(Tensor query, Tensor! key_cache, Tensor! value_cache, Tensor seq_lens, "
    "Tensor? block_tables=None, Tensor? key=None, Tensor? value=None, "
    "Tensor? query_start_loc=None, int max_query_len=0, float? scale=None, int sliding_window=0, "
    "int window_right=0, float softcap=0.0, Tensor? sinks=None, bool cumulative=False, "
    "str layout=\"NHD\") -> Tensor",
    "fused_decode_attention(Tensor! out, Tensor! qkv, Tensor? bias, Tensor positions, "
    "Tensor cos_sin_cache, bool is_neox, Tensor! key_cache, Tensor! value_cache, "
    "Tensor slot_mapping, Tensor block_tables, Tensor seq_lens, float scale, str layout=\"vllm\", "
    "Tensor? k_scale=None, Tensor? v_scale=None, Tensor? q_weight=None, Tensor? k_weight=None, "
    "float epsilon=1e-6, Tensor? alibi_slopes=None, int sliding_window=0, float softcap=0.0, "
    "Tensor? sinks=None, Tensor!? workspace=None, int fixed_split_size=0)",
    "merge_attn_states(Tensor! output, Tensor!? output_lse, Tensor prefix_output, "
    "Tensor prefix_lse, Tensor suffix_output, Tensor suffix_lse)",
    "combine_attn_partials(Tensor! output, Tensor!? output_lse, Tensor out_partial, "
    "Tensor lse_partial)",

    // --- sampling
    "sample(Tensor! tokens, Tensor logits, Tensor? temperature=None, Tensor? top_k=None, "
    "Tensor? top_p=None, Tensor? min_p=None, Tensor? uniforms=None, Tensor? seeds=None, "
    "Tensor? offsets=None, Tensor? bitmask=None, Tensor? bitmask_rows=None, "
    "Tensor? count_indptr=None, Tensor? count_tokens=None, Tensor? counts=None, "
    "Tensor? repetition=None, Tensor? frequency=None, Tensor? presence=None, "
    "Tensor? bias_indptr=None, Tensor? bias_tokens=None, Tensor? bias_values=None, "
    "Tensor? rows=None, Tensor!? logprobs=None, Tensor!? ids=None, Tensor!? ranks=None)",
    "top_k_top_p_mask_(Tensor! logits, Tensor? top_k=None, Tensor? top_p=None, "
    "Tensor? min_p=None)",
    "token_logprobs(Tensor! logprobs, Tensor! ids, Tensor! ranks, Tensor logits, Tensor tokens, "
    "Tensor? rows=None)",
    "softmax(Tensor! out, Tensor logits, Tensor? temperature=None)",
    "apply_token_bitmask_(Tensor! logits, Tensor bitmask, Tensor? bitmask_rows=None)",
    "apply_repetition_penalties(Tensor! logits, Tensor prompt_mask, Tensor output_mask, "
    "Tensor repetition_penalties)",
    "append_token_counts(Tensor! tokens, Tensor! counts, Tensor! lengths, Tensor indptr, "
    "Tensor new_tokens, Tensor? positions=None, Tensor!? next_positions=None)",
    "spec_verify(Tensor! tokens, Tensor! accepted, Tensor draft_tokens, "
    "Tensor? target_tokens=None, Tensor? target_probs=None, Tensor? draft_probs=None, "
    "Tensor? uniforms=None)",
};

using torch::stable::detail::StableLibrary;

// The fake kernels of vllm_kernels call these (vllm_kernels/ops/_fake.py).
void define_checks(StableLibrary& library) {
  for (const std::string schema : kSchemas) {
    library.def((schema.find("->") == schema.npos ? schema + " -> ()" : schema).c_str());
  }
}

void define_ops(StableLibrary& library) {
  define_checks(library);

  // --- check mode: the devices with scans of index tensors, and what throws their findings
  library.def("scanned_devices() -> int[]");
  library.def("raise_bad_index() -> ()");

  // --- vllm_kernels.explain(): `on` names the device by its own
  library.def("start_explaining(Tensor on) -> ()");
  library.def("take_explanation(Tensor on, Tensor! text) -> ()");
}

VLLM_KERNELS_REGISTER(DEF, kChecksNamespace, nullptr, &define_checks);
VLLM_KERNELS_REGISTER(DEF, kOpNamespace, nullptr, &define_ops);

}  // namespace
