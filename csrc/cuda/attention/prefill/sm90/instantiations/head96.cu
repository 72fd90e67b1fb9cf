// The sm90 prefill kernels of head size 96, for wgmma (prefill_kernel.cuh).
#include "cuda/attention/prefill/sm90/prefill_kernel.cuh"

template struct vllm_kernels::cuda::PrefillSm90Kernels<96>;
