// The choice of the instruction-set level, by CPUID, once per process. This is the only .cpp here
// that is compiled once.
#include "cpu/level.h"

#include <stdexcept>
#include <string>
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "environment.h"

namespace vllm_kernels::cpu {
namespace {

#if defined(__x86_64__)
// Whether the processor has AMX for bf16 (CPUID 7: bits 22 and 24 of edx), and Linux grants this
// process the use of its registers. The process must ask for that.
bool has_amx() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  const bool supported = (d >> 22 & 1) != 0 && (d >> 24 & 1) != 0;
  return supported && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

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
    case Level::avx512_amx:
      return runs(Level::avx512_bf16) && has_amx();
  }
  return false;
}
#else
bool runs(Level level) {
  return level == Level::baseline;
}
#endif

constexpr const char* kNames[] = {"baseline", "avx2", "avx512", "avx512_bf16", "avx512_amx"};
constexpr Level kBestFirst[] = {Level::avx512_amx, Level::avx512_bf16, Level::avx512, Level::avx2,
                                Level::baseline};

Level choose() {
  const int forced = environment_choice("VLLM_KERNELS_ISA", kNames);
  if (forced < 0) {
    for (Level level : kBestFirst) {
      if (runs(level)) return level;
    }
    return Level::baseline;
  }
  const Level level = static_cast<Level>(forced);
  if (!runs(level)) {
    throw std::runtime_error(std::string("VLLM_KERNELS_ISA=") + level_name(level) +
                             ": this processor does not run that level");
  }
  return level;
}

}  // namespace

Level level() {
  static const Level chosen = choose();
  return chosen;
}

const char* level_name(Level level) {
  return kNames[static_cast<int>(level)];
}

}  // namespace vllm_kernels::cpu
