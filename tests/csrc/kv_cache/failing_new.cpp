#include "kv_cache/failing_new.h"

#include <cstdlib>
#include <new>

namespace {

// Allocations until the failing one; negative: none is to fail.
thread_local int64_t allocations_left = -1;
thread_local bool allocation_failed = false;

}  // namespace

void* operator new(std::size_t size) {
  if (allocations_left >= 0 && allocations_left-- == 0) {
    allocation_failed = true;
    throw std::bad_alloc();
  }
  void* memory = std::malloc(size == 0 ? 1 : size);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

void operator delete(void* memory) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}

namespace vllm_kernels::kv_cache {

FailAllocation::FailAllocation(int64_t number) {
  allocation_failed = false;
  allocations_left = number;
}

FailAllocation::~FailAllocation() {
  allocations_left = -1;
}

bool FailAllocation::failed() const {
  return allocation_failed;
}

}  // namespace vllm_kernels::kv_cache
