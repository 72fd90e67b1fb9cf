// What the architecture that the code at hand is compiled for has. With VLLM_KERNELS_BEFORE_HOPPER,
// a build for tests, all code is what sm_80 gets.
#pragma once

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && !defined(VLLM_KERNELS_BEFORE_HOPPER)
#define VLLM_KERNELS_HAS_SM90 1  // bulk copies, programmatic dependent launch
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define VLLM_KERNELS_HAS_WGMMA 1  // warpgroup products: sm_90a alone
#endif
#endif

// Conversions of fp8.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890 && !defined(VLLM_KERNELS_BEFORE_HOPPER)
#define VLLM_KERNELS_HAS_FP8 1
#endif

namespace vllm_kernels::cuda {

// What this library is built for (cmake/cuda.cmake): sm_90a, and any other architecture.
#if defined(VLLM_KERNELS_CODE_SM90A)
constexpr bool kHasCodeForSm90a = true;
#else
constexpr bool kHasCodeForSm90a = false;
#endif
#if defined(VLLM_KERNELS_CODE_OTHER)
constexpr bool kHasCodeForOthers = true;
#else
constexpr bool kHasCodeForOthers = false;
#endif

}  // namespace vllm_kernels::cuda
