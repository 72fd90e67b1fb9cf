#include "cpu/level.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace vllm_kernels::cpu {
namespace {

#if defined(__x86_64__)
bool runs(Level level) {
  switch (level) {
    case Level::baseline:
      return true;
    case Level::avx2:
      return __builtin_cpu_supports("x86-64-v3") != 0;
    case Level::avx512:
      return __builtin_cpu_supports("x86-64-v4") != 0;
    case Level::avx512_bf16:
      return __builtin_cpu_supports("x86-64-v4") != 0 && __builtin_cpu_supports("avx512bf16") != 0;
  }
  return false;
}
#else
bool runs(Level level) {
  return level == Level::baseline;
}
#endif

constexpr Level kBestFirst[] = {Level::avx512_bf16, Level::avx512, Level::avx2, Level::baseline};

Level choose() {
  const char* forced = std::getenv("VLLM_KERNELS_ISA");
  if (forced == nullptr || *forced == '\0') {
    for (Level level : kBestFirst) {
      if (runs(level)) return level;
    }
    return Level::baseline;
  }
  for (Level level : kBestFirst) {
    if (std::string(forced) != level_name(level)) continue;
    if (!runs(level)) {
      throw std::runtime_error(std::string("VLLM_KERNELS_ISA=") + forced +
                               ": this processor does not run that level");
    }
    return level;
  }
  throw std::runtime_error(std::string("VLLM_KERNELS_ISA=") + forced +
                           ": expected baseline, avx2, avx512 or avx512_bf16");
}

}  // namespace

Level level() {
  static const Level chosen = choose();
  return chosen;
}

const char* level_name(Level level) {
  switch (level) {
    case Level::baseline:
      return "baseline";
    case Level::avx2:
      return "avx2";
    case Level::avx512:
      return "avx512";
    case Level::avx512_bf16:
      return "avx512_bf16";
  }
  return "unknown";
}

}  // namespace vllm_kernels::cpu
