// The sm80 prefill kernels for a cache of float16, by mma.sync (prefill_kernel.cuh).
#include "cuda/attention/prefill/sm80/prefill_kernel.cuh"

template struct vllm_kernels::cuda::PrefillSm80Kernels<__half, false>;
