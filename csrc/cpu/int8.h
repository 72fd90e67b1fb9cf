// Symmetric 8-bit integers of the cache. See cpu/vec.h for the anonymous namespace.
#pragma once
#include "cpu/vec.h"

namespace vllm_kernels::cpu {
namespace {

struct Int8 {
  int8_t bits;
};

inline Vec load(const Int8* from) {
  typedef int8_t VecInt8 __attribute__((vector_size(kLanes)));
  return __builtin_convertvector(load_raw<VecInt8>(from), Vec);
}

}  // namespace
}  // namespace vllm_kernels::cpu
