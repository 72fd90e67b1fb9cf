// The checks of cache_blocks.h: blocks without gaps, caches that do not overlap.
#include "torch_ops/cache/cache_blocks.h"

#include <algorithm>

namespace vllm_kernels {
namespace {

// Whether two caches share memory; `second` does not start before `first`.
bool overlap(const Expect& expect, const PlacedCache& first, const PlacedCache& second) {
  if (second.start() >= first.end()) return false;
  if (first.argument.size(0) == 1) return true;
  const int64_t pitch = first.pitch();
  if (second.pitch() != pitch) {  // either pitch may be a multiple of the other
    return expect.overlap(first.argument, second.argument) &&
           expect.overlap(second.argument, first.argument);
  }
  const int64_t shift = (second.start() - first.start()) % pitch;
  return shift < first.bytes() || shift > pitch - second.bytes();
}

}  // namespace

int64_t dense_block_bytes(const Argument& cache) {
  int64_t elements = 1, span = 1;
  for (int64_t d = 1; d < cache.dim(); ++d) {
    elements *= cache.size(d);
    span += (cache.size(d) - 1) * cache.stride(d);
  }
  if (elements > 0 && span != elements) {
    cache.fail("expected blocks without gaps in memory, got " + std::to_string(elements) +
               " elements over a span of " + std::to_string(span) + " for shape " +
               cache.shape_text());
  }
  return elements * cache.element_size();
}

void require_apart(const Expect& expect, std::vector<PlacedCache>& caches) {
  if (caches.front().argument.data() == nullptr) return;  // no elements, or meta tensors
  std::ranges::sort(caches, {}, &PlacedCache::start);
  for (size_t first = 0, last; first < caches.size(); first = last) {
    // The caches [first, last) whose ranges hang together.
    int64_t end = caches[first].end();
    bool one_pitch = true;
    for (last = first + 1; last < caches.size() && caches[last].start() < end; ++last) {
      end = std::max(end, caches[last].end());
      one_pitch = one_pitch && caches[last].pitch() == caches[first].pitch();
    }
    // Of one pitch and within one pitch, neighbours decide; else all pairs.
    const PlacedCache& highest = caches[last - 1];
    const int64_t within = highest.start() - caches[first].start() + highest.bytes();
    const bool neighbours = one_pitch && within <= caches[first].pitch();
    for (size_t i = first + 1; i < last; ++i) {
      for (size_t j = neighbours ? i - 1 : first; j < i; ++j) {
        if (!overlap(expect, caches[j], caches[i])) continue;
        expect.fail(caches[j].text() + " and " + caches[i].text() + " overlap in memory");
      }
    }
  }
}

}  // namespace vllm_kernels
