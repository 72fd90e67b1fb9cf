// Bindings of copy_blocks, copy_blocks_mla, swap_blocks and swap_blocks_batch. A cache is
// [num_blocks, ...], block_mapping [num_pairs, 2]. ops/copy_blocks.h has the rules for pairs.
#include "ops/copy_blocks.h"

#include <algorithm>
#include <initializer_list>
#include <utility>
#include <vector>

#include "torch_ops/base/check.h"
#include "torch_ops/base/device.h"
#include "torch_ops/base/index_check.h"
#include "torch_ops/cache/cache_blocks.h"

namespace vllm_kernels {
namespace {

Argument read_pairs(Expect& expect, const Tensor& block_mapping, bool any_device) {
  Size num_pairs("num_pairs"), two("2", 2, nullptr);
  Argument pairs = any_device ? expect.tensor_on_any_device("block_mapping", block_mapping)
                              : expect.tensor("block_mapping", block_mapping);
  return pairs.int64().shape({&num_pairs, &two}).contiguous();
}

// No page may be destination twice: the order of the copies would decide.
void refuse_duplicate_destinations(const Expect& expect, const int64_t* pairs, int64_t num_pairs) {
  if (num_pairs < 2) return;
  std::vector<std::pair<int64_t, int64_t>> destinations;  // (page, index of its pair)
  destinations.reserve(num_pairs);
  for (int64_t i = 0; i < num_pairs; ++i) destinations.emplace_back(pairs[2 * i + 1], i);
  std::ranges::sort(destinations);
  const auto page = [](const auto& destination) { return destination.first; };
  const auto found = std::ranges::adjacent_find(destinations, {}, page);
  if (found == destinations.end()) return;
  const auto& [block, pair] = found[1];
  expect.fail("block_mapping[" + std::to_string(pair) + ", 1] = " + std::to_string(block) +
              ": expected a block that no earlier element names");
}

// No page that a pair writes may be the source of another pair: the order would decide there too. A
// page copied to itself stays as it is, so other pairs may read it.
void refuse_written_sources(const Expect& expect, const int64_t* pairs, int64_t num_pairs) {
  if (num_pairs < 2) return;
  std::vector<int64_t> written;
  written.reserve(num_pairs);
  for (int64_t i = 0; i < num_pairs; ++i) {
    if (pairs[2 * i] != pairs[2 * i + 1]) written.push_back(pairs[2 * i + 1]);
  }
  std::ranges::sort(written);
  for (int64_t i = 0; i < num_pairs; ++i) {
    const int64_t source = pairs[2 * i];
    if (!std::ranges::binary_search(written, source)) continue;
    expect.fail("block_mapping[" + std::to_string(i) + ", 0] = " + std::to_string(source) +
                ": expected a block that no other pair writes");
  }
}

// Checks pairs in host memory before any copy, whatever the caches' device.
void check_pairs_on_host(const Expect& expect, const int64_t* pairs, int64_t num_pairs,
                         int64_t num_sources, int64_t num_destinations) {
  for (int64_t i = 0; i < 2 * num_pairs; ++i) {
    const int64_t limit = i % 2 == 0 ? num_sources : num_destinations;
    if (pairs[i] >= 0 && pairs[i] < limit) continue;
    expect.fail("block_mapping[" + std::to_string(i / 2) + ", " + std::to_string(i % 2) +
                "] = " + std::to_string(pairs[i]) + ": expected a block in [0, " +
                std::to_string(limit) + ")");
  }
}

struct NamedCaches {
  const char* name;
  const std::vector<Tensor>& caches;  // one per layer
};

// Copies within every cache of the lists. The first list must not be empty.
void copy_within(Expect& expect, std::initializer_list<NamedCaches> lists,
                 const Tensor& block_mapping) {
  const NamedCaches& front = *lists.begin();
  Size num_blocks("num_blocks");
  std::vector<BlockCopy> copies;
  std::vector<PlacedCache> placed;
  copies.reserve(lists.size() * front.caches.size());
  placed.reserve(copies.capacity());
  int64_t block_bytes = -1;
  for (const auto& [name, caches] : lists) {
    for (const Tensor& tensor : caches) {
      const Argument cache = expect.tensor(name, tensor).rank(2, 8).at(0, num_blocks).written();
      placed.push_back({cache, &tensor - caches.data()});
      const int64_t bytes = dense_block_bytes(cache);
      if (block_bytes < 0) block_bytes = bytes;
      if (bytes != block_bytes) {
        cache.fail("expected blocks of " + std::to_string(block_bytes) + " bytes (from " +
                   front.name + "[0]), got " + std::to_string(bytes) + " for shape " +
                   cache.shape_text());
      }
      char* start = cache.as<char>();
      const int64_t stride = block_stride_bytes(cache);
      copies.push_back({start, start, stride, stride});
    }
  }

  const bool on_host =
      kOnCpu || expect.tensor_on_any_device("block_mapping", block_mapping).is_cpu();
  const Argument pairs = read_pairs(expect, block_mapping, on_host && !kOnCpu);
  if (num_blocks > 0 && block_bytes > 0) require_apart(expect, placed);
  if (pairs.data() == nullptr || block_bytes == 0) return;  // none, or a meta tensor
  if (on_host) {
    check_pairs_on_host(expect, pairs.as<const int64_t>(), pairs.size(0), num_blocks, num_blocks);
    refuse_duplicate_destinations(expect, pairs.as<const int64_t>(), pairs.size(0));
    refuse_written_sources(expect, pairs.as<const int64_t>(), pairs.size(0));
  } else {
    const IndexBounds blocks{.noun = "a block", .low = 0, .high = num_blocks};
    check_index(expect, pairs, blocks);
    check_unique(expect, pairs, 1, blocks);
  }
  const CopyBlocksParams params{.copies = copies.data(),
                                .num_copies = static_cast<int64_t>(copies.size()),
                                .pairs = pairs.as<const int64_t>(),
                                .num_pairs = pairs.size(0),
                                .pairs_on_host = on_host,
                                .num_blocks = num_blocks,
                                .block_bytes = block_bytes};
  launch(params, front.caches[0]);
}

void copy_blocks(const std::vector<Tensor>& key_caches, const std::vector<Tensor>& value_caches,
                 const Tensor& block_mapping) {
  Expect expect("copy_blocks");
  expect.that(
      key_caches.size() == value_caches.size(),
      "value_caches: expected as many layers as key_caches = " + std::to_string(key_caches.size()) +
          ", got " + std::to_string(value_caches.size()));
  if (key_caches.empty()) return;
  copy_within(expect, {{"key_caches", key_caches}, {"value_caches", value_caches}}, block_mapping);
}

void copy_blocks_mla(const std::vector<Tensor>& kv_caches, const Tensor& block_mapping) {
  Expect expect("copy_blocks_mla");
  if (!kv_caches.empty()) copy_within(expect, {{"kv_caches", kv_caches}}, block_mapping);
}

// Whether blocks of two tensors that share memory coincide or are apart.
bool share_whole_blocks(const Argument& a, const Argument& b, int64_t block_bytes) {
  const int64_t gap = static_cast<const char*>(a.data()) - static_cast<const char*>(b.data());
  int64_t pitch = 0;  // the smaller one; a single block has none
  for (const Argument* one : {&a, &b}) {
    if (one->size(0) <= 1) continue;
    const int64_t bytes = block_stride_bytes(*one);
    if (bytes < block_bytes) return false;
    pitch = pitch == 0 ? bytes : std::min(pitch, bytes);
  }
  if (pitch == 0) return gap == 0;
  const auto whole = [&](const Argument& one) {
    return one.size(0) <= 1 || block_stride_bytes(one) % pitch == 0;
  };
  return gap % pitch == 0 && whole(a) && whole(b);
}

// torch calls the CUDA library if either tensor is on a GPU, and the CPU library if none is.
void swap_blocks(const Tensor& src, const Tensor& dst, const Tensor& block_mapping) {
  Expect expect("swap_blocks");
  Argument from = expect.tensor_on_any_device("src", src).rank(2, 8);
  Argument to = expect.tensor_on_any_device("dst", dst).rank(2, 8).same_dtype(from).written();
  if (!from.is_cpu() && !to.is_cpu() && from.device_index() != to.device_index()) {
    to.fail("expected a tensor on the GPU of src (cuda:" + std::to_string(from.device_index()) +
            ") or on cpu, got cuda:" + std::to_string(to.device_index()));
  }
  bool same_blocks = from.dim() == to.dim();
  for (int64_t d = 1; same_blocks && d < from.dim(); ++d) {
    same_blocks =
        from.size(d) == to.size(d) && (from.size(d) <= 1 || from.stride(d) == to.stride(d));
  }
  if (!same_blocks) {
    to.fail("expected blocks of the shape and strides of src's, got shape " + to.shape_text() +
            " for src of shape " + from.shape_text());
  }
  const int64_t block_bytes = dense_block_bytes(from);
  const Argument pairs = read_pairs(expect, block_mapping, true).on_cpu();
  if (pairs.data() == nullptr || block_bytes == 0) return;  // none, or a meta tensor
  check_pairs_on_host(expect, pairs.as<const int64_t>(), pairs.size(0), from.size(0), to.size(0));
  const bool one_tensor = from.data() == to.data() || expect.overlap(to, from);
  if (one_tensor && !share_whole_blocks(from, to, block_bytes)) {
    expect.fail("dst and src overlap in memory, and not by whole blocks");
  }
  // Within one tensor the copies have the order of the list.
  if (!one_tensor) {
    refuse_duplicate_destinations(expect, pairs.as<const int64_t>(), pairs.size(0));
  }

  const SwapBlocksParams params{.copy = {from.as<const char>(), to.as<char>(),
                                         block_stride_bytes(from), block_stride_bytes(to)},
                                .pairs = pairs.as<const int64_t>(),
                                .num_pairs = pairs.size(0),
                                .block_bytes = block_bytes,
                                .one_tensor = one_tensor};
  launch(params, to.is_cpu() ? src : dst);
}

// [num_copies] int64 on the CPU.
Argument read_numbers(Expect& expect, const char* name, const Tensor& tensor, Size& num_copies) {
  return expect.tensor_on_any_device(name, tensor)
      .int64()
      .shape({&num_copies})
      .contiguous()
      .on_cpu();
}

// `on`, any tensor of a GPU, makes torch call the CUDA library: the tensors of a call are on the
// CPU, wherever the addresses lead.
void swap_blocks_batch(const Tensor& src_ptrs, const Tensor& dst_ptrs, const Tensor& sizes,
                       bool is_src_access_order_any, const std::optional<Tensor>& on) {
  Expect expect("swap_blocks_batch");
  Size num_copies("num_copies");
  const Argument from = read_numbers(expect, "src_ptrs", src_ptrs, num_copies);
  const Argument to = read_numbers(expect, "dst_ptrs", dst_ptrs, num_copies);
  const Argument bytes = read_numbers(expect, "sizes", sizes, num_copies);
  if (from.data() == nullptr || to.data() == nullptr || bytes.data() == nullptr) return;
  const SwapBlocksBatchParams params{.from = from.as<const int64_t>(),
                                     .to = to.as<const int64_t>(),
                                     .bytes = bytes.as<const int64_t>(),
                                     .num_copies = num_copies,
                                     .any_source_order = is_src_access_order_any};
  for (int64_t i = 0; i < num_copies; ++i) {
    const auto refuse = [&](const Argument& list, int64_t value, const char* expected) {
      expect.fail(std::string(list.name()) + "[" + std::to_string(i) +
                  "] = " + std::to_string(value) + ": expected " + expected);
    };
    if (params.bytes[i] < 0) refuse(bytes, params.bytes[i], "a size >= 0");
    if (params.bytes[i] == 0) continue;
    if (params.from[i] == 0) refuse(from, 0, "an address");
    if (params.to[i] == 0) refuse(to, 0, "an address");
  }
  launch(params, on ? *on : src_ptrs);
}

}  // namespace
}  // namespace vllm_kernels

VLLM_KERNELS_IMPL(library) {
  library.impl("copy_blocks", TORCH_BOX(&vllm_kernels::copy_blocks));
  library.impl("copy_blocks_mla", TORCH_BOX(&vllm_kernels::copy_blocks_mla));
  library.impl("swap_blocks", TORCH_BOX(&vllm_kernels::swap_blocks));
  library.impl("swap_blocks_batch", TORCH_BOX(&vllm_kernels::swap_blocks_batch));
}
