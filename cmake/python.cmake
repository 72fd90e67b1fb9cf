# The pybind11 module. Importing it loads libvllm_kernels.so from its own folder, which registers
# torch.ops.vllm_kernels.
execute_process(COMMAND ${Python_EXECUTABLE} -m pybind11 --cmakedir
                OUTPUT_VARIABLE pybind11_DIR OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
if(NOT pybind11_DIR)
  message(FATAL_ERROR "vllm_kernels: ${Python_EXECUTABLE} has no pybind11: pip install \"pybind11>=3.0\"")
endif()
set(PYBIND11_FINDPYTHON ON)
find_package(pybind11 3 CONFIG REQUIRED)

file(GLOB PYTHON_SOURCES CONFIGURE_DEPENDS ${ROOT}/python/*.cpp)
add_library(bindings OBJECT ${PYTHON_SOURCES})
set_target_properties(bindings PROPERTIES UNITY_BUILD ON)  # pybind11's headers once
target_include_directories(bindings PRIVATE ${ROOT})
# Bindings only (the manager is compiled in its own room): -O1 halves their compile time.
target_compile_options(bindings PRIVATE -O1 -Wall -Wextra)
target_compile_definitions(bindings PRIVATE VLLM_KERNELS_VERSION="${VLLM_KERNELS_VERSION}"
                                            VLLM_KERNELS_TORCH_VERSION="${TORCH_VERSION}"
                                            VLLM_KERNELS_CUDA_PLAN="${CUDA_PLAN}")
target_link_libraries(bindings PRIVATE pybind11::module)

pybind11_add_module(_C MODULE NO_EXTRAS $<TARGET_OBJECTS:bindings>)
target_link_libraries(_C PRIVATE vllm_kernels portable)
# The ops register themselves when the library loads; keep it although little of it is named here.
target_link_options(_C PRIVATE LINKER:--no-as-needed)
install(TARGETS _C LIBRARY DESTINATION .)
