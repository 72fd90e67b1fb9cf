// Every op of torch.ops.vllm_kernels: the table of contents. `!` marks what an op writes.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(vllm_kernels, library) {
  // --- norms
  library.def("rms_norm(Tensor! out, Tensor input, Tensor weight, float epsilon) -> ()");
  library.def(
      "fused_add_rms_norm(Tensor! input, Tensor! residual, Tensor weight, float epsilon) -> ()");

  // --- rotary and activations
  library.def(
      "rotary_embedding(Tensor positions, Tensor! query, Tensor!? key, int head_size, "
      "Tensor cos_sin_cache, bool is_neox) -> ()");
  library.def("silu_and_mul(Tensor! out, Tensor input) -> ()");
  library.def("mul_and_silu(Tensor! out, Tensor input) -> ()");
  library.def("gelu_and_mul(Tensor! out, Tensor input) -> ()");
  library.def("gelu_tanh_and_mul(Tensor! out, Tensor input) -> ()");
  library.def("gelu_new(Tensor! out, Tensor input) -> ()");
  library.def("gelu_fast(Tensor! out, Tensor input) -> ()");
  library.def("gelu_quick(Tensor! out, Tensor input) -> ()");

  // --- cache

  // --- attention
}
