#include "torch_ops/base/op_namespace.h"

namespace vllm_kernels {

const char kOpNamespace[] = VLLM_KERNELS_OP_NAMESPACE;
const char kChecksNamespace[] = VLLM_KERNELS_OP_NAMESPACE "_checks";

}  // namespace vllm_kernels
