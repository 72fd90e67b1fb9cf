// An operator new that fails on request.
#pragma once

#include <cstdint>

namespace vllm_kernels::kv_cache {

// While it lives, the allocation with this number (from 0) on this thread throws std::bad_alloc.
class FailAllocation {
 public:
  explicit FailAllocation(int64_t number);
  ~FailAllocation();
  FailAllocation(const FailAllocation&) = delete;

  // Whether that allocation was reached.
  bool failed() const;
};

}  // namespace vllm_kernels::kv_cache
