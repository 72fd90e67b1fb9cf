# Which GPU architectures are compiled. Gives, in torch's words, `architectures` ("8.0;9.0a;12.0+PTX"),
# and in CMake's CUDA_ARCHITECTURES ("80-real;90a-real;120-real;120-virtual").

# TORCH_CUDA_ARCH_LIST, else the GPUs that are here, else what an H100 or H200 runs.
set(asked "$ENV{TORCH_CUDA_ARCH_LIST}")
if(asked STREQUAL "")
  execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
                  OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET
                  RESULT_VARIABLE no_driver)
  string(REGEX MATCHALL "[0-9]+\\.[0-9]+" architectures "${found}")
  if(no_driver OR NOT architectures)
    set(architectures 9.0a)
  endif()
  list(REMOVE_DUPLICATES architectures)
  list(TRANSFORM architectures REPLACE "^9\\.0$" "9.0a")
else()
  string(REGEX REPLACE "[ ,]+" ";" architectures "${asked}")
  if("9.0" IN_LIST architectures AND NOT "9.0a" IN_LIST architectures)
    message(WARNING "vllm_kernels: TORCH_CUDA_ARCH_LIST has 9.0, which lacks the Hopper kernels for "
                    "many query rows: an H100 or H200 wants 9.0a.")
  endif()
endif()

set(CUDA_ARCHITECTURES "")
set(newest_plain "")
set(has_ptx OFF)
foreach(architecture ${architectures})
  if(NOT architecture MATCHES "^([0-9]+)\\.([0-9]+)([af]?)(\\+PTX)?$")
    message(FATAL_ERROR "vllm_kernels: TORCH_CUDA_ARCH_LIST: expected entries such as 8.0 or 9.0a or 12.0+PTX, got ${architecture}")
  endif()
  set(number "${CMAKE_MATCH_1}${CMAKE_MATCH_2}${CMAKE_MATCH_3}")
  list(APPEND CUDA_ARCHITECTURES "${number}-real")
  if(CMAKE_MATCH_4)
    list(APPEND CUDA_ARCHITECTURES "${number}-virtual")
    set(has_ptx ON)
  elseif("${CMAKE_MATCH_3}" STREQUAL "" AND ("${newest_plain}" STREQUAL "" OR architecture VERSION_GREATER newest_plain))
    set(newest_plain ${architecture})
  endif()
endforeach()

# A build for several gets PTX for GPUs to come, of a plain one: PTX of 9.0a runs nowhere else.
list(LENGTH architectures count)
if(count GREATER 1 AND NOT has_ptx AND newest_plain)
  string(REPLACE "." "" number ${newest_plain})
  list(APPEND CUDA_ARCHITECTURES "${number}-virtual")
  list(TRANSFORM architectures REPLACE "^${newest_plain}$" "${newest_plain}+PTX")
endif()
