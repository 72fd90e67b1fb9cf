// What libvllm_kernels.so shows to `_C`; everything else is hidden.
#pragma once
#define VLLM_KERNELS_EXPORT __attribute__((visibility("default")))
