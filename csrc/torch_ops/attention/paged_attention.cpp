#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>

#include "ops/report.h"
#include "torch_ops/attention/attention_arguments.h"
#include "torch_ops/base/device.h"
#include "torch_ops/base/index_check.h"
#include "torch_ops/cache/paged_kv.h"

namespace vllm_kernels {
namespace {

void paged_attention(const Tensor& out, const std::optional<Tensor>& lse, const Tensor& query,
                     const Tensor& key_cache, const Tensor& value_cache, const Tensor& block_tables,
                     const Tensor& seq_lens, const std::optional<Tensor>& query_start_loc,
                     double scale, const std::optional<Tensor>& alibi_slopes,
                     int64_t sliding_window, double softcap, const std::optional<Tensor>& sinks,
                     const std::optional<Tensor>& k_scale, const std::optional<Tensor>& v_scale,
                     const Text& layout, int64_t max_query_len,
                     const std::optional<Tensor>& workspace, int64_t fixed_split_size,
                     bool kv_ready, int64_t window_right) {
  Expect expect("paged_attention");
  CacheSizes sizes;
  Queries queries = read_queries(expect, out, lse, query, sizes.head_size);
  const KvLayout kv_layout = cache_layout(expect, layout);
  Argument k = expect.tensor("key_cache", key_cache);
  Argument v = expect.tensor("value_cache", value_cache);
  PagedKv kv = paged_cache(queries.query, k, v, kv_layout, sizes);
  // NHD and HND have as many dimensions: a wrong one shows here, if at all.
  check_sizes(queries, kv,
              kv_layout == KvLayout::kNHD   ? "dimension 2 of key_cache in layout \"NHD\""
              : kv_layout == KvLayout::kHND ? "dimension 1 of key_cache in layout \"HND\""
                                            : "key_cache");
  Arguments read;
  set_scales(expect, kv, k_scale, v_scale, read);
  check_numbers(expect, sliding_window, softcap, fixed_split_size);
  check_query_len(expect, max_query_len);
  const int32_t right = right_window(expect, window_right);
  const float* slopes =
      read_per_head(expect, "alibi_slopes", alibi_slopes, queries.num_heads, read);
  const float* sink_logits = read_per_head(expect, "sinks", sinks, queries.num_heads, read);
  const std::optional<Argument> scratch = read_workspace(expect, workspace);
  read_query_start_loc(expect, queries, query_start_loc ? &*query_start_loc : nullptr,
                       max_query_len, read);
  const int32_t window = window_of(sliding_window);
  const Pages pages = read_pages(expect, block_tables, seq_lens, queries.num_seqs, kv,
                                 queries.query_start_loc, window);
  read.add(queries.query, k, v, pages.tables, pages.lens);
  require_apart(expect, queries, scratch, read);
  if (queries.num_seqs == 0 || queries.num_tokens == 0) return;

  const int32_t longest = query_start_loc ? at_most_int32(max_query_len) : 1;
  const PagedAttentionParams params{
      .out = queries.out.mutable_data(),
      .query = queries.query.data(),
      .query_stride = queries.query.stride(0),
      .kv = kv,
      .block_tables = pages.tables.as<const int32_t>(),
      .block_table_stride = pages.tables.stride(0),
      .max_blocks_per_seq = pages.max_blocks,
      .seq_lens = pages.lens.as<const int32_t>(),
      .alibi_slopes = slopes,
      .num_seqs = static_cast<int32_t>(queries.num_seqs),
      .num_heads = static_cast<int32_t>(queries.num_heads),
      .max_seq_len = static_cast<int64_t>(pages.max_blocks) * kv.block_size,
      .scale = static_cast<float>(scale),
      .dtype = queries.query.dtype(),
      .sparse = {},
      .query_start_loc = queries.query_start_loc,
      .num_tokens = static_cast<int32_t>(queries.num_tokens),
      .max_query_len = longest,
      .out_stride = queries.out.stride(0),
      .lse = queries.lse ? queries.lse->as<float>() : nullptr,
      .sinks = sink_logits,
      .sliding_window = window,
      .window_right = longest <= 1 ? 0 : right,  // nothing comes after a sequence's last token
      .softcap = static_cast<float>(softcap),
      .fixed_split_size = at_most_int32(fixed_split_size),
      .kv_ready = kv_ready};
  raise_bad_index();
  launch_paged_attention(params, query, scratch ? &*scratch : nullptr);
}

}  // namespace

// --- what the ops share (torch_ops/attention/attention_arguments.h)

#if defined(VLLM_KERNELS_DEVICE_CUDA)
void launch_paged_attention(const PagedAttentionParams& params, const Tensor& query,
                            const Argument* workspace) {
  const int32_t device = query.device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  cuda::launch_paged_attention(params, workspace == nullptr ? nullptr : workspace->mutable_data(),
                               current_stream(device));
}
#else
bool report_cpu_kernel(const char* op, const char* kernel) {
  return report(op, [&] {
    return std::string("CPU, ") + kernel + " kernel, level " + cpu::level_name(cpu::level());
  });
}

void launch_paged_attention(const PagedAttentionParams& given, const Tensor& query,
                            const Argument*) {
  const PagedAttentionParams params = cpu::as_the_batch_has_it(given);
  if (cpu::is_plain_decode(params)) return launch_decode(params, query);
  if (report_cpu_kernel("paged_attention", "general (several query tokens, windows, any mask)"))
    return;
  cpu::GeneralAttentionWork work =
      cpu::cut_general_attention(params, torch::stable::get_num_threads());
  if (work.tasks == 1) return launch(work, query);
  const std::unique_ptr<float[]> partials(new float[2 * work.tasks * work.partial_size()]);
  work.partials = partials.get();
  launch(work, query);
  launch(cpu::GeneralAttentionMerge{work}, query);
}
#endif

Queries read_queries(Expect& expect, const Tensor& out, const std::optional<Tensor>& lse,
                     const Tensor& query, Size& head_size) {
  Queries queries;
  Size &num_tokens = queries.num_tokens, &num_heads = queries.num_heads;
  queries.query =
      expect.tensor("query", query).floating().shape({&num_tokens, &num_heads, &head_size});
  require_contiguous_heads(queries.query, num_tokens);
  queries.out = expect.tensor("out", out).same_dtype(queries.query).same_shape(queries.query);
  require_contiguous_heads(queries.out, num_tokens);
  queries.out.written();
  if (lse) {
    queries.lse = expect.tensor("lse", *lse)
                      .float32()
                      .shape({&num_tokens, &num_heads})
                      .contiguous()
                      .written();
  }
  return queries;
}

void read_query_start_loc(Expect& expect, Queries& queries, const Tensor* query_start_loc,
                          int64_t max_query_len, Arguments& read) {
  if (query_start_loc == nullptr) {
    queries.num_seqs =
        Size("num_seqs = num_tokens", queries.num_tokens, "query, without query_start_loc");
    return;
  }
  const Argument starts =
      expect.tensor("query_start_loc", *query_start_loc).int32().rank(1, 1).contiguous();
  if (starts.size(0) < 1) starts.fail("expected num_seqs + 1 elements, got shape [0]");
  queries.num_seqs = Size("num_seqs", starts.size(0) - 1, "query_start_loc");
  check_index(expect, starts,
              {.noun = "a token of query, at most max_query_len past the one before,",
               .high = queries.num_tokens + 1,
               .most_rise = max_query_len});
  queries.query_start_loc = starts.as<const int32_t>();
  read.add(starts);
}

void check_sizes(const Queries& queries, const PagedKv& kv, const char* source) {
  const int64_t heads = queries.num_heads;
  if (kv.num_kv_heads <= 0 || heads <= 0 || heads % kv.num_kv_heads != 0) {
    queries.query.fail(
        "expected num_heads to be a multiple of num_kv_heads = " + std::to_string(kv.num_kv_heads) +
        " (from " + source + "), got shape " + queries.query.shape_text());
  }
  check_head_size(queries.query, kv);
}

void require_apart(const Expect& expect, const Queries& queries,
                   const std::optional<Argument>& scratch, Arguments& others) {
  expect.apart(queries.out, others);
  others.add(queries.out);
  if (queries.lse) {
    expect.apart(*queries.lse, others);
    others.add(*queries.lse);
  }
  if (scratch) expect.apart(*scratch, others);
}

void require_contiguous_heads(const Argument& heads, const Size& num_tokens) {
  if (heads.stride(2) != 1 || (heads.size(1) > 1 && heads.stride(1) != heads.size(2))) {
    heads.fail(std::string("expected contiguous heads (only the stride of ") + num_tokens.name +
               " is free), got shape " + heads.shape_text() + " with stride " +
               std::to_string(heads.stride(1)) + " between heads; call .contiguous()");
  }
}

void check_head_size(const Argument& named, const PagedKv& kv) {
  const int32_t step = size_of(kv.dtype) == 1 ? 16 : 8;
  if (kv.head_size < 32 || kv.head_size > 256 || kv.head_size % step != 0) {
    named.fail("expected a head_size of 32 to 256 in steps of " + std::to_string(step) + " for a " +
               name_of(kv.dtype) + " cache, got " + std::to_string(kv.head_size));
  }
}

void check_numbers(const Expect& expect, int64_t sliding_window, double softcap,
                   int64_t fixed_split_size) {
  if (sliding_window < 0) {
    expect.fail("sliding_window: expected a number of tokens >= 0 (0: none), got " +
                std::to_string(sliding_window));
  }
  if (!(softcap >= 0.0) || std::isinf(softcap)) {
    expect.fail("softcap: expected a finite number >= 0 (0: none), got " + std::to_string(softcap));
  }
  if (fixed_split_size < 0) {
    expect.fail("fixed_split_size: expected a number of tokens >= 0 (0: as suits the batch), got " +
                std::to_string(fixed_split_size));
  }
}

void check_query_len(const Expect& expect, int64_t max_query_len) {
  if (max_query_len < 0) {
    expect.fail("max_query_len: expected a length >= 0, got " + std::to_string(max_query_len));
  }
}

int32_t right_window(const Expect& expect, int64_t window_right) {
  if (window_right < -1) {
    expect.fail("window_right: expected a number of tokens >= 0 (-1: all), got " +
                std::to_string(window_right));
  }
  return window_right < 0 ? std::numeric_limits<int32_t>::max() : at_most_int32(window_right);
}

int32_t at_most_int32(int64_t value) {
  return static_cast<int32_t>(std::min<int64_t>(value, std::numeric_limits<int32_t>::max()));
}

int32_t window_of(int64_t sliding_window) {
  // Positions may be negative (more query tokens than tokens): position - window stays in range.
  constexpr int64_t kLongest = int64_t{1} << 30;
  return static_cast<int32_t>(std::min(sliding_window, kLongest));
}

const float* read_per_head(Expect& expect, const char* name, const std::optional<Tensor>& values,
                           Size& num_heads, Arguments& read) {
  if (!values) return nullptr;
  const Argument argument = expect.tensor(name, *values).float32().shape({&num_heads}).contiguous();
  read.add(argument);
  return argument.as<const float>();
}

std::optional<Argument> read_workspace(Expect& expect, const std::optional<Tensor>& workspace) {
  if (!workspace) return std::nullopt;
  const Argument scratch = expect.tensor("workspace", *workspace).uint8().contiguous();
  constexpr int64_t bytes = kPagedAttentionWorkspaceBytes;
  if (!kOnCpu &&
      (scratch.numel() < bytes || reinterpret_cast<uintptr_t>(scratch.data()) % 256 != 0)) {
    scratch.fail("expected at least " + std::to_string(bytes) +
                 " bytes, aligned to 256 (vllm_kernels.paged_attention_workspace gives them), got "
                 "shape " +
                 scratch.shape_text());
  }
  return scratch;
}

Pages read_pages(Expect& expect, const Tensor& block_tables, const Tensor& seq_lens, Size& num_seqs,
                 const PagedKv& kv, const int32_t* query_start_loc, int32_t sliding_window) {
  Size max_blocks("max_blocks_per_seq");
  const Argument tables = expect.tensor("block_tables", block_tables)
                              .int32()
                              .shape({&num_seqs, &max_blocks})
                              .inner_contiguous();
  const Argument lens = expect.tensor("seq_lens", seq_lens).int32().shape({&num_seqs}).contiguous();
  check_index(expect, lens,
              {.noun = "a length that fits block_tables", .high = max_blocks * kv.block_size + 1});
  check_index(expect, tables, {.noun = "a block", .high = kv.num_blocks},
              {.row_lengths = lens,
               .tokens_per_column = kv.block_size,
               .query_start_loc = query_start_loc,
               .sliding_window = sliding_window});
  return {.tables = tables, .lens = lens, .max_blocks = static_cast<int32_t>(max_blocks)};
}

}  // namespace vllm_kernels

VLLM_KERNELS_IMPL(library) {
  library.impl("paged_attention", TORCH_BOX(&vllm_kernels::paged_attention));
}
