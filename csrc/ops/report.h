// Reports for VLLM_KERNELS_LOG=1 and vllm_kernels.explain(): which kernel runs a call, and why.
//
// A launcher calls report(op, describe) before it launches. The log prints each new line once to
// stderr. explain() collects the lines of a thread's calls, which then launch nothing. Each library
// (CPU, CUDA) has state of its own.
#pragma once
#include <cstdio>
#include <mutex>
#include <optional>
#include <set>
#include <string>

#include "environment.h"

namespace vllm_kernels {

inline thread_local std::optional<std::string> collected_reports;

inline void start_collecting_reports() {
  collected_reports.emplace();
}

inline std::string take_reports() {
  std::string text = collected_reports.value_or("");
  collected_reports.reset();
  return text;
}

inline void log_report(const std::string& line) {
  static std::mutex mutex;
  static std::set<std::string> logged;
  const std::lock_guard lock(mutex);
  if (logged.insert(line).second) std::fprintf(stderr, "vllm_kernels: %s\n", line.c_str());
}

// Returns true if the call is only explained and must not launch. `describe` is called only if its
// text is needed.
template <typename Describe>
bool report(const char* op, const Describe& describe) {
  if (!collected_reports.has_value() && !logs_reports()) return false;
  const std::string line = std::string(op) + ": " + describe();
  if (!collected_reports.has_value()) {
    log_report(line);
    return false;
  }
  *collected_reports += (collected_reports->empty() ? "" : "\n") + line;
  return true;
}

}  // namespace vllm_kernels
