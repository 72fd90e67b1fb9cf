// paged_attention's decode kernels for a cache of int8.
#include "cuda/attention/decode/decode_launch.cuh"

template struct vllm_kernels::cuda::DecodeKernels<int8_t>;
