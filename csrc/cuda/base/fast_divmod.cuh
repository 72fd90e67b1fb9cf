// Division by a number known at launch, in a multiplication and a shift: a general integer division
// is dozens of instructions, and a kernel of few microseconds waits for every line of its code.
#pragma once
#include <bit>
#include <cstdint>

#include "ops/rows.h"

namespace vllm_kernels::cuda {

// Exact for dividends and divisors from 1 below 2^31 (and dividend 0).
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

// Rows::offset on the device, for fewer than 2^31 rows.
class RowOffsets {
 public:
  explicit RowOffsets(const Rows& rows) : stride_(rows.inner_stride) {
    if (rows.inner_count >= rows.count) return;
    inner_ = FastDivisor(rows.inner_count);
    jump_ = rows.outer_stride - rows.inner_count * rows.inner_stride;
  }

  // Elements from the start of row 0.
  __device__ __forceinline__ int64_t of(uint32_t row) const {
    return row * stride_ + inner_.divide(row) * jump_;
  }

 private:
  FastDivisor inner_;
  int64_t stride_;
  int64_t jump_ = 0;  // from the end of the inner rows to the next outer one
};

}  // namespace vllm_kernels::cuda
