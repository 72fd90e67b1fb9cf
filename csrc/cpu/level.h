// Instruction-set levels. One binary has the kernels of each level and chooses at run time.
#pragma once

#include "export.h"

namespace vllm_kernels::cpu {

enum class Level { baseline, avx2, avx512, avx512_bf16, avx512_amx };

// The best level of this machine, or the one in VLLM_KERNELS_ISA. Throws if that cannot run here.
VLLM_KERNELS_EXPORT Level level();

// "baseline", "avx2", "avx512", "avx512_bf16" or "avx512_amx".
VLLM_KERNELS_EXPORT const char* level_name(Level level);

}  // namespace vllm_kernels::cpu
