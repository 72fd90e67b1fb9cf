// The sm80 prefill kernels for an 8-bit cache, by mma.sync (prefill_kernel.cuh).
#include "cuda/attention/prefill/sm80/prefill_kernel.cuh"

template struct vllm_kernels::cuda::PrefillSm80Kernels<__half, true>;
