// The environment variables that the libraries read, each once per process. A value that is not
// known is an error, so that a typing error never passes for "off".
#pragma once
#include <cstdlib>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

namespace vllm_kernels {

// The index of the variable's value in `known`; -1 where it is unset or empty. Throws for others:
//   VLLM_KERNELS_CHECK=foo: expected 0 or 1
inline int environment_choice(const char* name, std::span<const char* const> known) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return -1;
  std::string expected;
  int index = 0;
  for (const char* word : known) {
    if (std::string_view(value) == word) return index;
    const bool last = ++index == static_cast<int>(known.size());
    expected += (index == 1 ? "" : last ? " or " : ", ") + std::string(word);
  }
  throw std::runtime_error(std::string(name) + "=" + value + ": expected " + expected);
}

inline bool environment_flag(const char* name) {
  constexpr const char* kFlag[] = {"0", "1"};
  return environment_choice(name, kFlag) == 1;
}

// VLLM_KERNELS_CHECK=1: CUDA ops scan their index tensors and scales.
inline bool check_mode() {
  static const bool kChecks = environment_flag("VLLM_KERNELS_CHECK");
  return kChecks;
}

// VLLM_KERNELS_LOG=1: attention ops print which kernel runs.
inline bool logs_reports() {
  static const bool kLogs = environment_flag("VLLM_KERNELS_LOG");
  return kLogs;
}

}  // namespace vllm_kernels
