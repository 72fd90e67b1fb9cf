# torch's headers and libraries through the Python package: find_package(Torch) would want all of
# CUDA's development files. Gives TORCH_DIR, TORCH_VERSION and the target torch_stable.
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)

execute_process(
  COMMAND ${Python_EXECUTABLE} -c
          "import importlib.util as u, importlib.metadata as m, os; s = u.find_spec('torch'); print(os.path.realpath(s.submodule_search_locations[0]) + ';' + m.version('torch'))"
  OUTPUT_VARIABLE TORCH_FOUND OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE TORCH_MISSING ERROR_QUIET)
if(TORCH_MISSING)
  message(FATAL_ERROR "vllm_kernels: ${Python_EXECUTABLE} has no torch. Install torch >= 2.11 first, "
                      "or build with pip's isolation, which brings its own.")
endif()
list(GET TORCH_FOUND 0 TORCH_DIR)
list(GET TORCH_FOUND 1 TORCH_VERSION)
if(TORCH_VERSION VERSION_LESS 2.11)
  message(FATAL_ERROR "vllm_kernels: torch ${TORCH_VERSION} is too old to build against, expected >= 2.11.")
endif()

add_library(torch_stable INTERFACE)
target_include_directories(torch_stable SYSTEM INTERFACE ${TORCH_DIR}/include)
target_compile_definitions(torch_stable INTERFACE TORCH_TARGET_VERSION=0x020b000000000000)
target_compile_options(torch_stable INTERFACE -Wall -Wextra)
target_link_libraries(torch_stable INTERFACE ${TORCH_DIR}/lib/libtorch_cpu.so ${TORCH_DIR}/lib/libc10.so)
