// Addresses of the rows of a tensor [..., width]: the leading dimensions folded to two strides.
#pragma once
#include <cstdint>

#if defined(__CUDACC__)
#define VLLM_KERNELS_HOST_DEVICE __host__ __device__
#else
#define VLLM_KERNELS_HOST_DEVICE
#endif

namespace vllm_kernels {

// Row r starts at element (r / inner_count) * outer_stride + (r % inner_count) * inner_stride. If
// the leading dimensions fold to one stride, inner_count == count.
struct Rows {
  int64_t count = 0;
  int64_t inner_count = 1;
  int64_t outer_stride = 0;  // elements
  int64_t inner_stride = 0;  // elements

  VLLM_KERNELS_HOST_DEVICE int64_t offset(int64_t row) const {
    if (inner_count >= count) return row * inner_stride;
    return (row / inner_count) * outer_stride + (row % inner_count) * inner_stride;
  }
};

// The tokens of a sequence that one shard of its cache has (context parallelism). Token t of a
// sequence is in shard t / interleave % shards. A shard stores its tokens one after
// the other, and seq_lens counts these.
struct Stripe {
  const int32_t* total_lens = nullptr;  // [num_seqs] tokens of all shards; null: there is but one
  int32_t others = 0;                   // number of other shards
  int32_t shard = 0;
  int32_t shift = 0;  // log2 of interleave

  VLLM_KERNELS_HOST_DEVICE bool any() const { return total_lens != nullptr; }
  // The place in the sequence of the shard's token `stored`; `stored` itself if there is one shard.
  template <typename Int>
  VLLM_KERNELS_HOST_DEVICE Int position_of(Int stored) const {
    return stored + (((stored >> shift) * others + shard) << shift);
  }
  // How many tokens of the shard have a place in the sequence before `position`.
  VLLM_KERNELS_HOST_DEVICE int32_t count_before(int32_t position) const {
    if (position <= 0) return 0;
    const uint32_t period = static_cast<uint32_t>(others + 1) << shift, most = 1u << shift;
    const uint32_t whole = static_cast<uint32_t>(position) / period;
    const int32_t rest = static_cast<int32_t>(position - whole * period) - (shard << shift);
    const uint32_t more = rest <= 0 ? 0 : static_cast<uint32_t>(rest) < most ? rest : most;
    return static_cast<int32_t>((whole << shift) + more);
  }
};

}  // namespace vllm_kernels
