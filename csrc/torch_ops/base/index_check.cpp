// Checks of index tensors, and the text of their errors. CPU: a scan on every call. CUDA: a scan
// kernel in check mode (cuda/base/index_check.h).
#include "torch_ops/base/index_check.h"

#include <algorithm>
#include <cfloat>
#include <stdexcept>

#include "torch_ops/base/device.h"

namespace vllm_kernels {
namespace {

std::string value_text(const BadIndex& bad) {
  if (!bad.bounds.is_scale) return std::to_string(bad.value);
  return number_text(bad.scale());
}

[[noreturn]] void fail(const BadIndex& bad) {
  const IndexBounds& bounds = bad.bounds;
  std::string text = std::string(bad.op) + ": " + bad.argument + "[" +
                     std::to_string(bad.one_dimensional ? bad.row + bad.column : bad.row) +
                     (bad.one_dimensional ? "" : ", " + std::to_string(bad.column)) +
                     "] = " + value_text(bad) + ": expected ";
  if (bounds.is_scale) {
    text += bounds.noun;
  } else if (bad.repeated) {
    text += std::string(bounds.noun) + " that no earlier element names";
  } else if (bounds.query_start_loc != nullptr && bad.value > 0 && bad.value < bounds.low) {
    text += "at least its " + std::to_string(bounds.low) + " query tokens";
  } else {
    text += std::string(bounds.skip ? "-1 (skipped) or " : "") + bounds.noun + " in [" +
            std::to_string(bounds.low) + ", " + std::to_string(bounds.high) + ")";
  }
  throw std::runtime_error(text);
}

#if defined(VLLM_KERNELS_DEVICE_CUDA)

void scan(const IndexCheckParams& params, const Argument& values) {
  if (!check_mode()) return;
  run_on_stream(values, [&](cuda::Stream stream) { cuda::scan_indices(params, stream); });
}

#else

template <typename Int>
void scan_as(const IndexCheckParams& p) {
  IndexBounds bounds = p.bounds;
  const bool varies =
      bounds.max_increase >= 0 || bounds.query_start_loc != nullptr || p.shard_lens != nullptr;
  for (int64_t row = 0; row < p.rows; ++row) {
    const Int* values = static_cast<const Int*>(p.values) + row * p.row_stride;
    if (varies) bounds = p.bounds_of(row, values[0], row > 0 ? values[-p.row_stride] : 0);
    const ColumnRange used = p.used_columns(row);
    for (int64_t column = used.begin; column < used.end; ++column) {
      const int64_t value = values[column];
      if (value >= bounds.low && value < bounds.high) continue;
      if (bounds.skip && value == -1) continue;
      fail({p.op, p.argument, bounds, p.one_dimensional, false, p.row_of_tensor(row), column,
            value});
    }
  }
}

void scan(const IndexCheckParams& params, const Argument&) {
  params.is_int64 ? scan_as<int64_t>(params) : scan_as<int32_t>(params);
}

#endif

}  // namespace

void check_index(const Expect& expect, const Argument& values, const IndexBounds& bounds,
                 const UsedColumns& used) {
  if (values.data() == nullptr) return;  // no elements, or a meta tensor
  const bool flat = values.dim() <= 1;
  scan({.op = expect.op(),
        .argument = values.name(),
        .bounds = bounds,
        .values = values.data(),
        .is_int64 = values.is_int64(),
        .one_dimensional = flat,
        .rows = used.rows.value_or(flat ? values.numel() : values.size(0)),
        .columns = flat ? 1 : values.size(1),
        .row_stride = flat ? 1 : values.stride(0),
        .row_lengths = used.row_lengths,
        .tokens_per_column = used.tokens_per_column,
        .query_start_loc = used.query_start_loc,
        .sliding_window = used.sliding_window,
        .cumulative_lengths = used.cumulative_lengths,
        .row_starts = used.row_starts,
        .stripe = used.stripe},
       values);
}

void check_page_ids(const Expect& expect, const Argument& ids, const Argument& indptr,
                    int64_t num_blocks) {
  if (ids.data() == nullptr || indptr.data() == nullptr) return;
  const int32_t* starts = indptr.as<const int32_t>();
  scan({.op = expect.op(),
        .argument = ids.name(),
        .bounds = {.noun = "a block", .high = num_blocks},
        .values = ids.data(),
        .is_int64 = false,
        .one_dimensional = true,
        .rows = indptr.numel() - 1,
        .columns = ids.numel(),
        .row_stride = 0,
        .cumulative_lengths = starts,
        .row_starts = starts},
       ids);
}

void check_total_lens(const Expect& expect, const Argument& lens, const Stripe& stripe,
                      const int32_t* shard_lens) {
  if (lens.data() == nullptr) return;
  scan({.op = expect.op(),
        .argument = lens.name(),
        .bounds = {.noun = "a length that has the seq_lens tokens of this shard,",
                   .high = int64_t{INT32_MAX} + 1},
        .values = lens.data(),
        .is_int64 = false,
        .one_dimensional = true,
        .rows = lens.numel(),
        .columns = 1,
        .row_stride = 1,
        .shard_lens = shard_lens,
        .stripe = stripe},
       lens);
}

void check_scale(const Expect& expect, const Argument& scale) {
  if (scale.data() == nullptr) return;  // no elements, or a meta tensor
  const int64_t count = scale.numel();
  if constexpr (kOnCpu) {
    const float* values = scale.as<const float>();
    const auto good = [](float value) { return value > 0 && value <= FLT_MAX; };
    if (std::all_of(values, values + count, good)) return;
  }
  scan({.op = expect.op(),
        .argument = scale.name(),
        .bounds = {.noun = "a finite number > 0",
                   .low = 1,
                   .high = IndexBounds::kInfinityBits,
                   .is_scale = true},
        .values = scale.data(),
        .is_int64 = false,
        .one_dimensional = true,
        .rows = count,
        .columns = 1,
        .row_stride = 1},
       scale);
}

void check_unique(const Expect& expect, const Argument& values, int64_t column,
                  const IndexBounds& bounds) {
  if (kOnCpu || values.data() == nullptr) return;
  IndexBounds unique = bounds;
  unique.low = INT64_MIN;  // their range is another check's
  unique.high = INT64_MAX;
  unique.unique = true;
  scan({.op = expect.op(),
        .argument = values.name(),
        .bounds = unique,
        .values = values.as<const int64_t>() + column,
        .is_int64 = true,
        .one_dimensional = false,
        .rows = values.size(0),
        .columns = 1,
        .row_stride = values.stride(0),
        .first_column = column},
       values);
}

void raise_bad_index() {
#if defined(VLLM_KERNELS_DEVICE_CUDA)
  if (!check_mode()) return;
  if (const std::optional<BadIndex> bad = cuda::take_bad_index()) fail(*bad);
#endif
}

}  // namespace vllm_kernels

#if defined(VLLM_KERNELS_DEVICE_CUDA)
// These ops have no tensor argument. This key serves every dispatch.
VLLM_KERNELS_IMPL_WITH_KEY(CompositeExplicitAutograd, library) {
  library.impl("scanned_devices", TORCH_BOX(&vllm_kernels::cuda::scanned_devices));
  library.impl("raise_bad_index", TORCH_BOX(&vllm_kernels::raise_bad_index));
}
#endif
