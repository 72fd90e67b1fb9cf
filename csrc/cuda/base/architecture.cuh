// Feature macros of the architecture that this translation unit is compiled for.
// A test build defines VLLM_KERNELS_BEFORE_HOPPER: all device code is then the code for sm_80.
#pragma once

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && !defined(VLLM_KERNELS_BEFORE_HOPPER)
#define VLLM_KERNELS_HAS_SM90 1  // TMA, bulk copies, programmatic dependent launch (PDL)
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define VLLM_KERNELS_HAS_WGMMA 1  // wgmma exists on sm_90a only
#endif
#endif

// Hardware conversions from and to fp8.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890 && !defined(VLLM_KERNELS_BEFORE_HOPPER)
#define VLLM_KERNELS_HAS_FP8 1
#endif

namespace vllm_kernels::cuda {

// The targets of this build (cmake/cuda.cmake): sm_90a, and any other architecture.
#if defined(VLLM_KERNELS_CODE_SM90A)
constexpr bool kHasCodeForSm90a = true;
#else
constexpr bool kHasCodeForSm90a = false;
#endif
#if defined(VLLM_KERNELS_CODE_OTHER) || defined(VLLM_KERNELS_BEFORE_HOPPER)
constexpr bool kHasCodeForOthers = true;
#else
constexpr bool kHasCodeForOthers = false;
#endif

// A constant of sm_90a, measured there, or the one of all other architectures. With the first one
// ptxas would spill registers on some of those.
constexpr int sm90a_or([[maybe_unused]] int sm90a, [[maybe_unused]] int others) {
#if defined(VLLM_KERNELS_HAS_WGMMA)
  return sm90a;
#else
  return others;
#endif
}

}  // namespace vllm_kernels::cuda
