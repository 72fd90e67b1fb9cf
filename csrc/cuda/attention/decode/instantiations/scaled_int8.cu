// paged_attention's decode kernels for a cache of int8 with a scale a token.
#include "cuda/attention/decode/decode_launch.cuh"

template struct vllm_kernels::cuda::DecodeKernels<vllm_kernels::cuda::ScaledInt8>;
