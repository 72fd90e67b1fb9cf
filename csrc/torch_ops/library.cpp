// Every op of torch.ops.vllm_kernels: the table of contents. `!` marks what an op writes.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(vllm_kernels, library) {
  // --- norms
  library.def("rms_norm(Tensor! out, Tensor input, Tensor weight, float epsilon) -> ()");

  // --- rotary and activations

  // --- cache

  // --- attention
}
