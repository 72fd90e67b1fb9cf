// warpgroup_any(): a named barrier of a consumer warpgroup that also votes.
#pragma once
#include <cstdint>

namespace vllm_kernels::cuda {

#define VLLM_KERNELS_WARPGROUP_BARRIER(any, mine, kind, number)                         \
  asm volatile(                                                                         \
      "{\n.reg .pred mine, any;\nsetp.ne.b32 mine, %1, 0;\n"                            \
      "barrier.cta.red.or.pred.aligned any, %2, 128, mine;\nselp.b32 %0, 1, 0, any;\n}" \
      : "=r"(any)                                                                       \
      : "r"(static_cast<uint32_t>(mine)), kind(number)                                  \
      : "memory")
// Barrier of the 4 warps of consumer 0 .. kConsumers - 1: whether any of its threads passes true.
template <int kConsumers>
__device__ __forceinline__ bool warpgroup_any(int consumer, bool mine) {
  uint32_t any;
#if defined(VLLM_KERNELS_RACECHECK)  // racecheck only knows barriers with constant ids
  if (consumer == 0) {
    VLLM_KERNELS_WARPGROUP_BARRIER(any, mine, "n", 1);
  } else if (kConsumers == 2 || consumer == 1) {
    VLLM_KERNELS_WARPGROUP_BARRIER(any, mine, "n", 2);
  } else {
    VLLM_KERNELS_WARPGROUP_BARRIER(any, mine, "n", 3);
  }
#else
  VLLM_KERNELS_WARPGROUP_BARRIER(any, mine, "r", consumer + 1);
#endif
  return any != 0;
}
#undef VLLM_KERNELS_WARPGROUP_BARRIER

}  // namespace vllm_kernels::cuda
