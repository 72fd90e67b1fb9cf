// Kernel launch: one call that checks for errors and enables programmatic dependent launch (PDL).
// Also device properties and the PDL instructions for kernels.
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "cuda/base/architecture.cuh"
#include "cuda/base/built_for.h"
#include "cuda/base/device.h"

namespace vllm_kernels::cuda {

// Throws the line that mends a build without code for the current device.
[[noreturn]] inline void throw_no_code() {
  int device = 0, major = 0, minor = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  throw std::runtime_error(no_code_for_gpu(built_architectures(), major * 10 + minor));
}

inline void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  if (error == cudaErrorNoKernelImageForDevice) throw_no_code();
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

constexpr int kMaxDevices = 64;

// Architecture of the PTX from which this library's kernels come on the current device.
int code_architecture();
// Whether those kernels were compiled for sm_90a, with wgmma.
bool code_has_wgmma();

inline const DeviceModel& current_device_model() {
  static DeviceModel infos[kMaxDevices];
  static std::once_flag filled[kMaxDevices];
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  DeviceModel& info = infos[device % kMaxDevices];
  std::call_once(filled[device % kMaxDevices], [&] {
    const auto attribute = [device](cudaDeviceAttr which) {
      int value = 0;
      check(cudaDeviceGetAttribute(&value, which, device), "attribute");
      return value;
    };
    const int architecture = attribute(cudaDevAttrComputeCapabilityMajor) * 10 +
                             attribute(cudaDevAttrComputeCapabilityMinor);
    info.num_sms = attribute(cudaDevAttrMultiProcessorCount);
    info.architecture = std::min(architecture, code_architecture());
    info.shared_memory_per_block = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    info.has_wgmma = code_has_wgmma();
    info.l2_bytes = attribute(cudaDevAttrL2CacheSize);
    info.clock_khz = attribute(cudaDevAttrClockRate);
    info.memory_clock_khz = attribute(cudaDevAttrMemoryClockRate);
    info.bus_bits = attribute(cudaDevAttrGlobalMemoryBusWidth);
  });
  return info;
}

// Returns the dynamic shared memory in bytes that kKernel may use on the current device: the opt-in
// maximum minus the kernel's static shared memory. The first call for a kernel and a device also
// sets the kernel's attribute to this limit. Setting it for each launch to what that launch needs
// would race with launches from other threads.
template <auto kKernel>
int dynamic_shared_memory(const char* op) {
  static std::atomic<int> allowed[kMaxDevices];  // bytes; 0: not queried yet
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  std::atomic<int>& cached = allowed[device % kMaxDevices];
  int bytes = cached.load(std::memory_order_acquire);
  if (bytes == 0) {  // two threads may both get here; they set the same value
    cudaFuncAttributes attributes;
    check(cudaFuncGetAttributes(&attributes, kKernel), op);
    bytes = current_device_model().shared_memory_per_block -
            static_cast<int>(attributes.sharedSizeBytes);
    check(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), op);
    cached.store(bytes, std::memory_order_release);
  }
  return bytes;
}

// Raises the kernel's shared-memory limit and checks the size that choose_kernel() computed.
template <auto kKernel, typename Choice>
void check_shared_memory(const char* op, const Choice& choice) {
  const int limit = dynamic_shared_memory<kKernel>(op);
  if (choice.shared_bytes <= limit && choice.stages >= 2) return;
  throw std::runtime_error(
      std::string(op) + ": expected shared memory for 2 stages, the kernel wants " +
      std::to_string(choice.shared_bytes) + " bytes, the device leaves " + std::to_string(limit));
}

// An int as a type.
template <int kValue>
using Constant = std::integral_constant<int, kValue>;

inline int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// Returns the number of CTAs as a grid dimension x, and throws if it is too large.
inline unsigned grid_size(const char* op, int64_t blocks) {
  if (blocks > INT32_MAX) {
    throw std::runtime_error(std::string(op) + ": expected work for fewer than 2^31 blocks, got " +
                             std::to_string(blocks) + ": split the call");
  }
  return static_cast<unsigned>(blocks);
}

// Enqueues kernel<<<grid, block, shared_bytes, stream>>>(arguments...) and throws if the launch
// fails.
// From sm_90 on it uses PDL: the kernel may start while its primary kernel still runs. So every
// kernel launched here must call wait_for_primary_kernel() before it reads or writes global memory
// that another kernel may touch. (paged_attention reads indices earlier, and reads them again after
// the wait.) Code for older architectures cannot wait, so it is launched without PDL on any device.
template <typename... Parameters, typename... Arguments>
void launch_kernel(const char* op, void (*kernel)(Parameters...), dim3 grid, dim3 block,
                   size_t shared_bytes, void* stream, Arguments&&... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute dependent[1];
  dependent[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  dependent[0].val.programmaticStreamSerializationAllowed = 1;
  config.attrs = dependent;
  config.numAttrs = current_device_model().architecture >= 90 ? 1 : 0;
  const cudaError_t error =
      cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
  if (error == cudaErrorNoKernelImageForDevice) throw_no_code();
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string(op) +
                             ": kernel launch refused: " + cudaGetErrorString(error));
  }
}

#if defined(__CUDACC__)
// Allows the next kernel in the stream to be scheduled. That kernel still waits for this one's
// results.
__device__ __forceinline__ void launch_dependents() {
#if defined(VLLM_KERNELS_HAS_SM90)
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Reads one word of every 64 bytes of a kernel parameter and returns their xor. A call before
// wait_for_primary_kernel() brings the parameter into the constant cache during the wait.
template <typename Parameter>
__device__ __forceinline__ uint32_t touch(const Parameter& parameter) {
  uint32_t words = 0;
#pragma unroll
  for (size_t word = 0; word < sizeof(Parameter) / 4; word += 16) {
    words ^= reinterpret_cast<const uint32_t*>(&parameter)[word];
  }
  return words;
}

// Waits until every earlier kernel in the stream has finished and its writes are visible.
__device__ __forceinline__ void wait_for_primary_kernel() {
#if defined(VLLM_KERNELS_HAS_SM90)
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
#endif

}  // namespace vllm_kernels::cuda
