// Division by a launch-time constant as one multiplication and one shift. A general integer
// division takes dozens of instructions. A kernel that runs for a few microseconds also pays for
// each instruction cache line that it fetches.
#pragma once
#include <bit>
#include <cstdint>

#include "ops/rows.h"

namespace vllm_kernels::cuda {

// Exact for 0 <= dividend < 2^31 and 1 <= divisor < 2^31.
class FastDivisor {
 public:
  FastDivisor() = default;
  explicit FastDivisor(int64_t divisor) {
    const int bits = std::bit_width(static_cast<uint32_t>(divisor - 1));  // 2^bits >= divisor
    shift_ = 31 + bits;
    multiplier_ = static_cast<uint32_t>(((uint64_t{1} << shift_) + divisor - 1) / divisor);
  }
  VLLM_KERNELS_HOST_DEVICE uint32_t divide(uint32_t dividend) const {
    return static_cast<uint32_t>((uint64_t{dividend} * multiplier_) >> shift_);
  }

 private:
  uint32_t multiplier_ = 1u << 31;
  int32_t shift_ = 31;
};

// Rows::offset() without an integer division, for fewer than 2^31 rows.
class RowOffsets {
 public:
  explicit RowOffsets(const Rows& rows) : stride_(rows.inner_stride) {
    if (rows.inner_count >= rows.count) return;
    inner_ = FastDivisor(rows.inner_count);
    jump_ = rows.outer_stride - rows.inner_count * rows.inner_stride;
  }

  // Returns the offset of `row` from row 0, in elements.
  __device__ __forceinline__ int64_t of(uint32_t row) const {
    return row * stride_ + inner_.divide(row) * jump_;
  }

 private:
  FastDivisor inner_;
  int64_t stride_;
  int64_t jump_ = 0;  // elements from the end of the inner rows to the next outer row
};

}  // namespace vllm_kernels::cuda
