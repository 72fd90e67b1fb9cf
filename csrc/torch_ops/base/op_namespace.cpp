// The op namespace. CMake defines it for this file alone: Hugging Face's `kernels` needs another.
#include "torch_ops/base/op_namespace.h"

namespace vllm_kernels {

const char kOpNamespace[] = VLLM_KERNELS_OP_NAMESPACE;
const char kChecksNamespace[] = VLLM_KERNELS_OP_NAMESPACE "_checks";

}  // namespace vllm_kernels
