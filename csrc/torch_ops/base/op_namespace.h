// The namespaces that this build's ops have in torch.ops. They are chosen when a library is linked:
// another one in the same process, such as Hugging Face's kernels load, has its own.
#pragma once
#include <torch/csrc/stable/library.h>

namespace vllm_kernels {

extern const char kOpNamespace[];
extern const char kChecksNamespace[];  // the ops for meta tensors, which check their arguments

}  // namespace vllm_kernels

// STABLE_TORCH_LIBRARY and STABLE_TORCH_LIBRARY_IMPL, with a namespace that is no token.
// kind: DEF or IMPL. key: a dispatch key, nullptr for DEF. function: void(StableLibrary&).
#define VLLM_KERNELS_REGISTER(kind, op_namespace, key, function)                            \
  static const torch::stable::detail::StableTorchLibraryInit C10_CONCATENATE(               \
      registration_, C10_UID)(torch::stable::detail::StableLibrary::Kind::kind, (function), \
                              vllm_kernels::op_namespace, (key), __FILE__, __LINE__)
