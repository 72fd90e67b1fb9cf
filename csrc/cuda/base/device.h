// The facts about a device that choose kernels and their launch shapes. No CUDA header: the choice
// compiles and is tested without CUDA.
#pragma once
#include <cstdint>

namespace vllm_kernels::cuda {

struct DeviceModel {
  int num_sms = 0;
  int architecture = 0;             // 90 for sm_90: of the device, or of the code if that is older
  int shared_memory_per_block = 0;  // bytes, after opt-in
  bool has_wgmma = false;           // the code is for sm_90a
};

}  // namespace vllm_kernels::cuda
