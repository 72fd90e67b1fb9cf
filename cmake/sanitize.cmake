# VLLM_KERNELS_SANITIZE=address,undefined builds the bindings, the manager and the CPU kernels of
# SANITIZED_LEVELS with these sanitizers. `tools/sanitize.sh` runs tests on them. Other levels must not
# run: VLLM_KERNELS_ISA chooses one of these. They are linked from VLLM_KERNELS_OBJECTS, as the
# manager is, or else compiled quickly.
set(SANITIZED_LEVELS "baseline;avx2" CACHE STRING "CPU levels with sanitizers")
set(SANITIZED_OPTIMIZATION -O1 CACHE STRING "-O0 compiles in a third of the time")
set(VLLM_KERNELS_OBJECTS "" CACHE PATH "A finished build: its objects replace those without sanitizers")

# Sets `result` to the objects of `target` in that build; empty: compile it.
function(finished_objects result target)
  set(found "")
  if(VLLM_KERNELS_SANITIZE AND VLLM_KERNELS_OBJECTS)
    file(GLOB_RECURSE found ${VLLM_KERNELS_OBJECTS}/CMakeFiles/${target}.dir/*.o)
  endif()
  set(${result} ${found} PARENT_SCOPE)
endfunction()

function(sanitize target)
  if(NOT VLLM_KERNELS_SANITIZE)
    return()
  endif()
  target_compile_options(
    ${target} PRIVATE -fsanitize=${VLLM_KERNELS_SANITIZE} -fno-sanitize-recover=all
                      -fno-omit-frame-pointer -g1 ${SANITIZED_OPTIMIZATION})
  get_target_property(type ${target} TYPE)
  if(type STREQUAL "SHARED_LIBRARY")
    # The runtime comes with LD_PRELOAD, so its symbols stay undefined here.
    target_link_options(${target} PRIVATE -fsanitize=${VLLM_KERNELS_SANITIZE} LINKER:-z,undefs)
  endif()
endfunction()

# A CPU kernel library of one level.
function(sanitize_level target level)
  if(level IN_LIST SANITIZED_LEVELS)
    sanitize(${target})
  elseif(VLLM_KERNELS_SANITIZE)
    target_compile_options(${target} PRIVATE -O0)
  endif()
endfunction()
