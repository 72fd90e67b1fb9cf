// Which tokens of a sequence this rank holds, where several ranks hold a sequence together.
#pragma once

#include <algorithm>
#include <cstdint>

namespace vllm_kernels::kv_cache {

// Token i lives on rank (i / interleave) % count, as in vLLM's decode context parallelism
// (vllm-project/vllm, pull request 23734). A block is count * block_size tokens, and each rank has
// block_size of their slots. The slots are in the order of the tokens.
struct Shard {
  int64_t count;       // ranks, >= 1
  int64_t rank;        // this one
  int64_t interleave;  // consecutive tokens on one rank; divides block_size, equals it if count = 1
  int64_t block_size;  // slots of a block on each rank

  // The tokens of this rank among the first num_tokens ones.
  int64_t local_tokens(int64_t num_tokens) const noexcept {
    if (count == 1) return num_tokens;
    const int64_t base = num_tokens / interleave / count * interleave;
    const int64_t rest = num_tokens - count * base - rank * interleave;
    return base + std::clamp<int64_t>(rest, 0, interleave);
  }

  // Calls use(first, size, slot) for each run of tokens from `token` on, in order. `first` counts
  // from `token`. `slot` is the run's first one in this rank's slots of the sequence, or -1: the
  // run is on another rank. A run is never longer than `interleave`, and so lies in one block.
  template <typename Use>
  void for_each_run(int64_t token, int64_t num_tokens, const Use& use) const {
    const int64_t chunk = token / interleave;
    int64_t owner = chunk % count;
    int64_t slot = chunk / count * interleave;  // of the owner's chunk
    int64_t offset = token % interleave;
    for (int64_t first = 0; first < num_tokens;) {
      const int64_t size = std::min(interleave - offset, num_tokens - first);
      use(first, size, owner == rank ? slot + offset : -1);
      first += size;
      offset = 0;
      if (++owner == count) {
        owner = 0;
        slot += interleave;
      }
    }
  }
};

}  // namespace vllm_kernels::kv_cache
