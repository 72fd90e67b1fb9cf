// vllm_kernels._C: build information and the KV-cache manager. The ops are torch ops, not functions
// of this module; importing it loads libvllm_kernels.so, which registers them.
#include <pybind11/pybind11.h>

#include "cpu/level.h"

#include "ops/paged_attention.h"
#include "python/kv_cache.h"

namespace py = pybind11;

PYBIND11_MODULE(_C, module) {
  module.doc() = "vllm_kernels: build information and the KV-cache manager";
  module.attr("version") = VLLM_KERNELS_VERSION;
  module.attr("built_with_torch") = VLLM_KERNELS_TORCH_VERSION;
  module.attr("cuda_build") = VLLM_KERNELS_CUDA_PLAN;
  module.attr("paged_attention_workspace_bytes") = vllm_kernels::kPagedAttentionWorkspaceBytes;
  module.def(
      "cpu_level", [] { return vllm_kernels::cpu::level_name(vllm_kernels::cpu::level()); },
      "The instruction-set level the CPU kernels run at.");
  bind_kv_cache(module);
  bind_ledger(module);
}
