# The CUDA library. It builds wherever nvcc is, also where torch is a CPU build: the one symbol it
# needs of libtorch_cuda comes from a stub with that library's SONAME. Gives CUDA_PLAN.
string(TOLOWER "${VLLM_KERNELS_CUDA}" VLLM_KERNELS_CUDA)
if(NOT VLLM_KERNELS_CUDA MATCHES "^(auto|on|off)$")
  message(FATAL_ERROR "vllm_kernels: VLLM_KERNELS_CUDA: expected auto, on or off, got ${VLLM_KERNELS_CUDA}")
endif()
if(VLLM_KERNELS_CUDA STREQUAL "off")
  set(CUDA_PLAN "off (VLLM_KERNELS_CUDA=off)")
  return()
endif()

if(DEFINED ENV{CUDA_HOME} AND NOT DEFINED CMAKE_CUDA_COMPILER)
  set(CMAKE_CUDA_COMPILER $ENV{CUDA_HOME}/bin/nvcc)
endif()
include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  if(VLLM_KERNELS_CUDA STREQUAL "on")
    message(FATAL_ERROR "vllm_kernels: VLLM_KERNELS_CUDA=on, but no nvcc: set CUDA_HOME or put it on PATH.")
  endif()
  set(CUDA_PLAN "off (no nvcc found: set CUDA_HOME or put it on PATH)")
  return()
endif()

# PTX 8.3: 16-byte registers (.b128).
execute_process(COMMAND ${CMAKE_CUDA_COMPILER} --version OUTPUT_VARIABLE nvcc_version)
if(nvcc_version MATCHES "release ([0-9.]+)" AND CMAKE_MATCH_1 VERSION_LESS 12.3)
  if(VLLM_KERNELS_CUDA STREQUAL "on")
    message(FATAL_ERROR "vllm_kernels: VLLM_KERNELS_CUDA=on: expected nvcc 12.3 or newer, got ${CMAKE_MATCH_1} (${CMAKE_CUDA_COMPILER})")
  endif()
  set(CUDA_PLAN "off (nvcc 12.3 or newer is needed, ${CMAKE_CUDA_COMPILER} is ${CMAKE_MATCH_1})")
  return()
endif()

include(${CMAKE_CURRENT_LIST_DIR}/cuda_architectures.cmake)
set(CMAKE_CUDA_ARCHITECTURES ${CUDA_ARCHITECTURES})
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
enable_language(CUDA)
# Host code alone: ptxas has its own level. -O3 makes the library 0.5 MB larger.
string(REPLACE "-O3" "-O2" CMAKE_CUDA_FLAGS_RELEASE "${CMAKE_CUDA_FLAGS_RELEASE}")
list(JOIN architectures "," names)  # CMake would split a definition at ";"
set(CUDA_PLAN "nvcc ${CMAKE_CUDA_COMPILER_VERSION} (${CMAKE_CUDA_COMPILER}), architectures ${names}")

add_library(torch_cuda SHARED ${ROOT}/stubs/torch_cuda.cpp)  # never installed
set_target_properties(torch_cuda PROPERTIES CXX_VISIBILITY_PRESET default)

file(GLOB_RECURSE CUDA_SOURCES CONFIGURE_DEPENDS ${ROOT}/cuda/*.cu)
file(GLOB_RECURSE CUDA_HOST_SOURCES CONFIGURE_DEPENDS ${ROOT}/cuda/*.cpp)  # no CUDA header
add_library(cuda_host OBJECT ${CUDA_HOST_SOURCES})
target_include_directories(cuda_host PRIVATE ${ROOT})
target_compile_options(cuda_host PRIVATE -Wall -Wextra)
list(TRANSFORM CUDA_ARCHITECTURES REPLACE "^(.*)-real$" "sm_\\1" OUTPUT_VARIABLE built_for)
list(TRANSFORM built_for REPLACE "^(.*)-virtual$" "PTX of sm_\\1")
list(JOIN built_for ", " built_for)
set_source_files_properties(${ROOT}/cuda/base/built_for.cpp PROPERTIES
                            COMPILE_DEFINITIONS "VLLM_KERNELS_CUDA_ARCHITECTURES=\"${built_for}\"")
add_library(cuda_kernels OBJECT ${CUDA_SOURCES})
target_include_directories(cuda_kernels PRIVATE ${ROOT})
# -Xptxas -v: tools/check_resources.py reads registers, spills and stack frames from what it prints.
set_target_properties(cuda_kernels PROPERTIES CUDA_COMPILER_LAUNCHER ${ROOT}/../tools/keep_output.sh)
target_compile_options(cuda_kernels PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:-Xptxas=-v;--expt-relaxed-constexpr;-diag-suppress=177>")
# 40% of the size. (Older compilers' drivers may not know the compression.)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13)
  target_compile_options(cuda_kernels PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:--compress-mode=size>")
endif()

# Instantiations that no architecture of this build would run are left out: on sm_90a the decode
# kernels of several warps a pipeline (wgmma has their work), elsewhere the wgmma kernels.
if("90a-real" IN_LIST CUDA_ARCHITECTURES OR "90a-virtual" IN_LIST CUDA_ARCHITECTURES)
  target_compile_definitions(cuda_kernels PRIVATE VLLM_KERNELS_CODE_SM90A)
endif()
set(other_architectures ${CUDA_ARCHITECTURES})
list(FILTER other_architectures EXCLUDE REGEX "^90a")
if(other_architectures OR "$ENV{VLLM_KERNELS_BEFORE_HOPPER}")
  target_compile_definitions(cuda_kernels PRIVATE VLLM_KERNELS_CODE_OTHER)
endif()

# For tests: what sm_80 gets, on whatever it is built for.
if("$ENV{VLLM_KERNELS_BEFORE_HOPPER}")
  target_compile_definitions(cuda_kernels PRIVATE VLLM_KERNELS_BEFORE_HOPPER)
  string(APPEND CUDA_PLAN ", as before Hopper (VLLM_KERNELS_BEFORE_HOPPER)")
endif()
if("$ENV{VLLM_KERNELS_RACECHECK}")
  target_compile_definitions(cuda_kernels PRIVATE VLLM_KERNELS_RACECHECK)
  string(APPEND CUDA_PLAN ", for racecheck (VLLM_KERNELS_RACECHECK)")
endif()

add_library(vllm_kernels_cuda SHARED ${OP_BINDINGS} $<TARGET_OBJECTS:cuda_kernels>
            $<TARGET_OBJECTS:cuda_host>)
target_include_directories(vllm_kernels_cuda PRIVATE ${ROOT})
target_precompile_headers(vllm_kernels_cuda PRIVATE ${ROOT}/torch_ops/base/check.h)
target_compile_definitions(vllm_kernels_cuda PRIVATE VLLM_KERNELS_DEVICE_CUDA USE_CUDA)
# --no-as-needed keeps torch_cuda in the list of needed libraries.
target_link_options(vllm_kernels_cuda PRIVATE LINKER:--no-undefined LINKER:--no-as-needed
                    LINKER:--exclude-libs,ALL)
target_link_libraries(vllm_kernels_cuda PRIVATE torch_stable torch_cuda portable op_namespace)
set_target_properties(vllm_kernels_cuda PROPERTIES CUDA_RUNTIME_LIBRARY Static LINKER_LANGUAGE CUDA
                      CUDA_RESOLVE_DEVICE_SYMBOLS OFF)
install(TARGETS vllm_kernels_cuda LIBRARY DESTINATION .)
add_hub_library(vllm_kernels_cuda $<TARGET_OBJECTS:cuda_kernels> $<TARGET_OBJECTS:cuda_host>)
target_link_options(vllm_kernels_cuda_hub PRIVATE LINKER:--no-as-needed LINKER:--exclude-libs,ALL)
target_link_libraries(vllm_kernels_cuda_hub PRIVATE torch_cuda)
set_target_properties(vllm_kernels_cuda_hub PROPERTIES CUDA_RUNTIME_LIBRARY Static LINKER_LANGUAGE CUDA
                      CUDA_RESOLVE_DEVICE_SYMBOLS OFF)
