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

// A bfloat16 query over layout NHD: 8 KV heads in 1000 pages of 16 tokens. The batch is missing.
inline PagedAttentionParams nhd_call(DType stored, int head_size, int num_heads) {
  PagedAttentionParams p = {};
  p.scale = 0.1f;
  p.dtype = DType::kBFloat16;
  p.kv.dtype = stored;
  p.kv.layout = KvLayout::kNHD;
  p.kv.head_size = head_size;
  p.kv.block_size = 16;
  p.kv.num_kv_heads = 8;
  p.kv.num_blocks = 1000;
  p.kv.key = const_cast<void*>(at(4096));
  p.kv.value = const_cast<void*>(at(8192));
  set_strides(p.kv);
  p.num_heads = num_heads;
  p.query_stride = p.out_stride = num_heads * head_size;
  p.max_blocks_per_seq = 1000;
  return p;
}

}  // namespace vllm_kernels::cuda
