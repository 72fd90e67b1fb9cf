// paged_attention's decode kernels for a cache of e5m2.
#include "cuda/attention/decode/decode_launch.cuh"

template struct vllm_kernels::cuda::DecodeKernels<__nv_fp8_e5m2>;
