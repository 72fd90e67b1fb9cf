// Binding of copy_slots: tokens of every cache from slots src to slots dst. A cache is K or V in
// `layout`, or has one element a token and head, [num_blocks, num_kv_heads, block_size].
#include "ops/pages/copy_slots.h"

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "torch_ops/base/check.h"
#include "torch_ops/base/device.h"
#include "torch_ops/base/index_check.h"
#include "torch_ops/cache/cache_blocks.h"
#include "torch_ops/cache/paged_kv.h"

namespace vllm_kernels {
namespace {

// The dimension of a cache that counts the tokens of a block.
int64_t token_dimension(const Argument& cache, KvLayout layout) {
  if (cache.dim() == 3 || layout == KvLayout::kHND) return 2;
  return layout == KvLayout::kNHD ? 1 : 3;
}

// A token's elements, the dimensions but the first and `token`, as runs at one stride. In a block
// without gaps only the tokens can lie between elements, so two strides are enough.
TokenGeometry token_geometry(const Argument& cache, int64_t token) {
  std::array<std::pair<int64_t, int64_t>, 8> dims{};  // (stride, size)
  size_t count = 0;
  for (int64_t d = 1; d < cache.dim(); ++d) {
    if (d != token && cache.size(d) != 1) dims.at(count++) = {cache.stride(d), cache.size(d)};
  }
  std::sort(dims.begin(), dims.begin() + count);
  size_t next = 0;
  const auto fold = [&](int64_t stride) {  // the elements at this stride
    int64_t elements = 1;
    for (; next < count && dims[next].first == stride * elements; ++next) {
      elements *= dims[next].second;
    }
    return elements;
  };
  const int64_t bytes = cache.element_size(), run = fold(1);
  const int64_t run_stride = next < count ? dims[next].first : run;
  const int64_t runs = fold(run_stride);
  return {.block_stride = block_stride_bytes(cache),
          .token_stride = cache.stride(token) * bytes,
          .run_stride = run_stride * bytes,
          .run_bytes = run * bytes,
          .runs = int32_size(cache, "runs", runs),
          .element_bytes = clamped_int32(bytes)};
}

// On the CPU, where it is a scan: no slot may be a destination twice.
void refuse_repeated(const Expect& expect, const Argument& dst) {
  if (!kOnCpu || dst.data() == nullptr) return;
  std::vector<std::pair<int64_t, int64_t>> slots;  // (slot, index)
  slots.reserve(dst.numel());
  for (int64_t i = 0; i < dst.numel(); ++i) {
    const int64_t slot = dst.as<const int64_t>()[i];
    if (slot >= 0) slots.emplace_back(slot, i);
  }
  std::ranges::sort(slots);
  const auto slot_of = [](const auto& one) { return one.first; };
  const auto found = std::ranges::adjacent_find(slots, {}, slot_of);
  if (found == slots.end()) return;
  expect.fail("dst[" + std::to_string(found[1].second) + "] = " + std::to_string(found[1].first) +
              ": expected a slot that no earlier element names");
}

Argument read_slots(Expect& expect, const char* name, const Tensor& tensor, Size& count) {
  return expect.tensor(name, tensor).int64().shape({&count}).contiguous();
}

void copy_slots(const std::vector<Tensor>& caches, const Tensor& src, const Tensor& dst,
                const Text& layout) {
  Expect expect("copy_slots");
  const KvLayout kv_layout = cache_layout(expect, layout);
  Size num_blocks("num_blocks"), block_size("block_size"), count("num_slots");
  std::vector<SlotCache> copies;
  std::vector<PlacedCache> placed;
  copies.reserve(caches.size());
  placed.reserve(caches.size());
  bool empty = caches.empty();
  for (const Tensor& tensor : caches) {
    const bool is_vllm = kv_layout == KvLayout::kVllm;
    Argument cache = expect.tensor("caches", tensor).rank(3, is_vllm ? 5 : 4);
    const int64_t token = token_dimension(cache, kv_layout);
    cache.at(0, num_blocks).at(token, block_size).written();
    if (cache.element_size() > 4) {
      cache.fail("expected elements of at most 4 bytes, got shape " + cache.shape_text());
    }
    dense_block_bytes(cache);
    copies.push_back({cache.as<char>(), token_geometry(cache, token)});
    placed.push_back({cache, &tensor - caches.data()});
    empty = empty || cache.numel() == 0;
  }
  const Argument from = read_slots(expect, "src", src, count);
  const Argument to = read_slots(expect, "dst", dst, count);
  if (count > kMaxCopiedSlots) {
    from.fail("expected at most " + std::to_string(kMaxCopiedSlots) + " slots, got shape " +
              from.shape_text());
  }
  for (const PlacedCache& cache : placed) {
    expect.apart(cache.argument, from);
    expect.apart(cache.argument, to);
  }
  if (empty || count == 0) return;
  require_apart(expect, placed);
  const int64_t num_slots = count_slots(placed.front().argument, num_blocks, block_size);
  const IndexBounds slots{.noun = "a slot", .high = num_slots, .skip = true};
  IndexBounds targets = slots;
  targets.unique = true;
  check_index(expect, from, slots);
  check_index(expect, to, targets);
  refuse_repeated(expect, to);
  launch(
      CopySlotsParams{.caches = copies.data(),
                      .num_caches = static_cast<int64_t>(copies.size()),
                      .src = from.as<const int64_t>(),
                      .dst = to.as<const int64_t>(),
                      .num_slots = clamped_int32(count),
                      .num_blocks = num_blocks,
                      .block_size = int32_size(placed.front().argument, "block_size", block_size)},
      src);
}

}  // namespace
}  // namespace vllm_kernels

VLLM_KERNELS_IMPL(library) {
  library.impl("copy_slots", TORCH_BOX(&vllm_kernels::copy_slots));
}
