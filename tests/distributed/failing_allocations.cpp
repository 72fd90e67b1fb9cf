// For ledger_traces.py: operator new that fails on request, as a library to preload.
// test_ledger.py compiles it together with tests/csrc/kv_cache/failing_new.cpp.
#include <cstdint>
#include <optional>

#include "kv_cache/failing_new.h"

namespace {

thread_local std::optional<vllm_kernels::kv_cache::FailAllocation> failing;

}  // namespace

extern "C" void fail_allocation(int64_t number) {
  failing.emplace(number);
}

// Returns whether that allocation was reached.
extern "C" bool stop_failing() {
  const bool failed = failing->failed();
  failing.reset();
  return failed;
}
