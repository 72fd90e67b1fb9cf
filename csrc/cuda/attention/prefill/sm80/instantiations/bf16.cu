// The sm80 prefill kernels for a cache of bfloat16, by mma.sync (prefill_kernel.cuh).
#include "cuda/attention/prefill/sm80/prefill_kernel.cuh"

template struct vllm_kernels::cuda::PrefillSm80Kernels<__nv_bfloat16, false>;
