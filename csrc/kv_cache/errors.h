// The errors of the KV-cache manager. After any of them the state is as it was before the call.
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

// A sequence id that the manager holds already, or that occurs twice in one batch.
class VLLM_KERNELS_EXPORT DuplicateSequence : public Error {
 public:
  using Error::Error;
};

// A block has as many references as its counter can count.
class VLLM_KERNELS_EXPORT ReferenceOverflow : public Error {
 public:
  using Error::Error;
};

// check_integrity() found the manager's own state broken.
class VLLM_KERNELS_EXPORT IntegrityError : public Error {
 public:
  using Error::Error;
};

// The call needs more blocks than are free. The same call succeeds once enough blocks were freed.
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

// Joins values that can be streamed into one string.
template <typename... Values>
std::string concat(const Values&... values) {
  std::ostringstream stream;
  (stream << ... << values);
  return stream.str();
}

// Checks that several files share. They throw InvalidArgument.

// Returns a value from min to max.
inline int64_t checked(const char* call, const char* argument, int64_t value, int64_t min,
                       int64_t max) {
  if (value < min || value > max) {
    throw InvalidArgument(
        concat(call, ": ", argument, ": expected ", min, " to ", max, ", got ", value));
  }
  return value;
}

// An array of one element a sequence.
inline void check_size(const char* call, const char* argument, size_t num_sequences, size_t size) {
  if (num_sequences == size) return;
  throw InvalidArgument(concat(call, ": ", argument, ": expected ", num_sequences,
                               " elements (as sequence_ids), got ", size));
}

// The caller's room for copies.
inline void check_copies(const char* call, int64_t needed, size_t room) {
  if (needed <= static_cast<int64_t>(room)) return;
  throw InvalidArgument(concat(call, ": copies: expected room for ", needed, " pairs, got ", room));
}

}  // namespace vllm_kernels::kv_cache
