// The last step of a binding: the launch on this library's device. Every file of torch_ops (but
// library.cpp and op_namespace.cpp) is compiled twice: for libvllm_kernels.so (CPU) and for
// libvllm_kernels_cuda.so (CUDA, with VLLM_KERNELS_DEVICE_CUDA).
#pragma once
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <optional>

#if defined(VLLM_KERNELS_DEVICE_CUDA)
#include "cuda/base/index_check.h"
#include "cuda/launchers.h"
#else
#include "cpu/kernels.h"
#endif
#include "torch_ops/base/op_namespace.h"
#include "torch_ops/base/schema_types.h"

namespace vllm_kernels {

#if defined(VLLM_KERNELS_DEVICE_CUDA)

constexpr bool kOnCpu = false;

inline cuda::Stream current_stream(int32_t device) {
  void* stream = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return stream;
}

// Calls `run` with the current stream of the tensor's device, which it makes the current device.
template <typename OnDevice, typename Run>
void run_on_stream(const OnDevice& tensor, const Run& run) {
  namespace accelerator = torch::stable::accelerator;
  const int32_t device = tensor.device_index();
  // A guard costs an allocation and a call of the driver.
  std::optional<accelerator::DeviceGuard> guard;
  if (accelerator::getCurrentDeviceIndex() != device) guard.emplace(device);
  run(current_stream(device));
}

// Launches on the current stream of the tensor's device.
template <typename Params>
void launch(const Params& params, const Tensor& on) {
  run_on_stream(on, [&](cuda::Stream stream) { cuda::launch(params, stream); });
}

#define VLLM_KERNELS_DISPATCH_KEY CUDA

#else

constexpr bool kOnCpu = true;

// Runs the tasks of the CPU kernel on torch's threads. Does nothing for meta tensors.
template <typename Params>
void launch(const Params& params, const Tensor& on) {
  if (on.is_meta()) return;
  const cpu::Kernel<Params> kernel = cpu::kernel<Params>();
  const int64_t tasks = kernel.num_tasks(params);
  if (tasks == 1) {
    kernel.run(params, 0, 1);
  } else if (tasks > 1) {
    torch::stable::parallel_for(
        0, tasks, 1, [&](int64_t begin, int64_t end) { kernel.run(params, begin, end); });
  }
}

#define VLLM_KERNELS_DISPATCH_KEY CPU

#endif

}  // namespace vllm_kernels

// Registers for this library's device, once a file:
//   VLLM_KERNELS_IMPL(library) { library.impl("<op>", TORCH_BOX(&<op>)); }
// The CPU library also registers the op's twin in the namespace of checks, for meta tensors.
#define VLLM_KERNELS_IMPL_WITH_KEY(key, library)                                \
  static void register_ops(torch::stable::detail::StableLibrary&);              \
  VLLM_KERNELS_REGISTER(IMPL, kOpNamespace, C10_STRINGIZE(key), &register_ops); \
  static void register_ops(torch::stable::detail::StableLibrary& library)
#if defined(VLLM_KERNELS_DEVICE_CUDA)
#define VLLM_KERNELS_IMPL(library) VLLM_KERNELS_IMPL_WITH_KEY(CUDA, library)
#else
#define VLLM_KERNELS_IMPL(library)                                      \
  static void register_ops(torch::stable::detail::StableLibrary&);      \
  VLLM_KERNELS_REGISTER(IMPL, kChecksNamespace, "Meta", &register_ops); \
  VLLM_KERNELS_IMPL_WITH_KEY(CPU, library)
#endif
