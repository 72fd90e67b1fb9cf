// Instruction-set levels: one binary carries the kernels once per level and picks at run time.
#pragma once

#include "export.h"

namespace vllm_kernels::cpu {

enum class Level { baseline, avx2, avx512, avx512_bf16, avx512_amx };

// The best level this machine runs, or the one VLLM_KERNELS_ISA names (an error if it cannot run).
VLLM_KERNELS_EXPORT Level level();

// "baseline", "avx2", "avx512", "avx512_bf16" or "avx512_amx".
VLLM_KERNELS_EXPORT const char* level_name(Level level);

}  // namespace vllm_kernels::cpu
