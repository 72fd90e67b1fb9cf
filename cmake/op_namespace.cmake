# The ops' namespace in torch.ops is one object file. `add_hub_library(NAME OBJECTS...)` links the same
# other objects with another one, as NAME_hub: libraries for Hugging Face's kernels, without the
# manager. tools/build_kernels_layout.py builds them.
set(VLLM_KERNELS_HUB_NAMESPACE "vllm_kernels_hub" CACHE STRING "Op namespace of the *_hub libraries")

function(add_op_namespace target name)
  add_library(${target}_object OBJECT ${ROOT}/torch_ops/base/op_namespace.cpp)
  target_include_directories(${target}_object PRIVATE ${ROOT})
  target_compile_definitions(${target}_object PRIVATE VLLM_KERNELS_OP_NAMESPACE="${name}")
  target_link_libraries(${target}_object PRIVATE torch_stable)
  add_library(${target} INTERFACE)
  target_link_libraries(${target} INTERFACE $<TARGET_OBJECTS:${target}_object>)
endfunction()
add_op_namespace(op_namespace vllm_kernels)
add_op_namespace(hub_op_namespace "${VLLM_KERNELS_HUB_NAMESPACE}")

function(add_hub_library name)
  add_library(${name}_hub SHARED EXCLUDE_FROM_ALL $<TARGET_OBJECTS:${name}> ${ARGN})
  set_target_properties(${name}_hub PROPERTIES LINKER_LANGUAGE CXX)
  target_link_options(${name}_hub PRIVATE LINKER:--no-undefined)
  target_link_libraries(${name}_hub PRIVATE torch_stable portable hub_op_namespace)
endfunction()
