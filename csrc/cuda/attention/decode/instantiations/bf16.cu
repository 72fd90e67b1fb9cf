// paged_attention's decode kernels for a cache of bfloat16.
#include "cuda/attention/decode/decode_launch.cuh"

template struct vllm_kernels::cuda::DecodeKernels<__nv_bfloat16>;
