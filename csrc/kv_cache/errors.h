// What the KV-cache manager throws. Whatever is thrown, the state is as it was before the call.
// Messages read "<call>: <argument>: expected <what>, got <what>".
#pragma once

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>

#include "export.h"

namespace vllm_kernels::kv_cache {

class VLLM_KERNELS_EXPORT Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// An argument outside its range, or buffers that do not fit.
class VLLM_KERNELS_EXPORT InvalidArgument : public Error {
 public:
  using Error::Error;
};

// A sequence id that the manager does not hold: never added, or already freed.
class VLLM_KERNELS_EXPORT UnknownSequence : public Error {
 public:
  using Error::Error;
};

// A sequence id that is already held, or that stands twice in one batch.
class VLLM_KERNELS_EXPORT DuplicateSequence : public Error {
 public:
  using Error::Error;
};

// One block more often shared than its counter can say.
class VLLM_KERNELS_EXPORT ReferenceOverflow : public Error {
 public:
  using Error::Error;
};

// check_integrity() found the manager's own state broken.
class VLLM_KERNELS_EXPORT IntegrityError : public Error {
 public:
  using Error::Error;
};

// Fewer blocks free than the call needs. Succeeds when repeated after enough blocks were freed.
class VLLM_KERNELS_EXPORT OutOfBlocks : public Error {
 public:
  OutOfBlocks(const std::string& call, int64_t needed, int64_t free)
      : Error(call + ": out of blocks: needed " + std::to_string(needed) + ", free " +
              std::to_string(free)),
        needed_(needed),
        free_(free) {}

  int64_t needed() const noexcept { return needed_; }
  int64_t free() const noexcept { return free_; }

 private:
  int64_t needed_;
  int64_t free_;
};

// One string out of parts that can be streamed.
template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

}  // namespace vllm_kernels::kv_cache
