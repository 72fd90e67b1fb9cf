// Devices and caches of the tests of choose_kernel().
#pragma once
#include "cuda/attention/dispatch.h"

namespace vllm_kernels::cuda {

struct NamedDevice {
  const char* name;
  DeviceModel model;
};
inline const NamedDevice kDevices[] = {
    {"A100", {.num_sms = 108, .architecture = 80, .shared_memory_per_block = 166912}},
    {"L40S", {.num_sms = 142, .architecture = 89, .shared_memory_per_block = 101376}},
    {"H200",
     {.num_sms = 132, .architecture = 90, .shared_memory_per_block = 232448, .has_wgmma = true}},
    {"B200", {.num_sms = 148, .architecture = 100, .shared_memory_per_block = 232448}},
    {"RTX5090", {.num_sms = 170, .architecture = 120, .shared_memory_per_block = 101376}},
};

inline void set_strides(PagedKv& kv) {
  const int64_t page = int64_t{kv.block_size} * kv.head_size;
  kv.key_block_stride = kv.value_block_stride = page * kv.num_kv_heads;
  if (kv.layout == KvLayout::kVllm) {
    kv.x = 16 / size_of(kv.dtype);
    kv.key_head_stride = kv.value_head_stride = page;
    kv.key_token_stride = kv.x;
    kv.key_chunk_stride = int64_t{kv.block_size} * kv.x;
    kv.value_token_stride = 1;
    kv.value_dim_stride = kv.block_size;
    return;
  }
  const bool nhd = kv.layout == KvLayout::kNHD;
  kv.x = kv.head_size;
  kv.key_token_stride = nhd ? int64_t{kv.num_kv_heads} * kv.head_size : kv.head_size;
  kv.key_head_stride = nhd ? kv.head_size : page;
  kv.value_token_stride = kv.key_token_stride;
  kv.value_head_stride = kv.key_head_stride;
  kv.value_dim_stride = 1;
}

inline const void* at(uintptr_t address) {
  return reinterpret_cast<const void*>(address);
}

}  // namespace vllm_kernels::cuda
