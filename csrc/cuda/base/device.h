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
  int l2_bytes = 0;
  int clock_khz = 0;         // SMs, highest
  int memory_clock_khz = 0;  // highest; two transfers a cycle
  int bus_bits = 0;

  // DRAM's peak rate. 0: unknown.
  float bytes_per_ns() const { return memory_clock_khz * 2e-6f * bus_bits / 8; }
};

}  // namespace vllm_kernels::cuda
