# csrc/cpu/<op>.cpp is compiled once per instruction-set level; level.cpp picks one at run time.
# An architecture without levels here (aarch64) gets its compiler's baseline.
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(CPU_LEVELS baseline avx2 avx512 avx512_bf16 avx512_amx)
  set(CPU_FLAGS_baseline -O1)  # for processors of before 2013: a third less to compile
else()
  set(CPU_LEVELS baseline)
  set(CPU_FLAGS_baseline "")
endif()
set(CPU_FLAGS_avx2 -march=x86-64-v3)
set(CPU_FLAGS_avx512 -march=x86-64-v4 -mprefer-vector-width=512)
set(CPU_FLAGS_avx512_bf16 -march=x86-64-v4 -mprefer-vector-width=512 -mavx512bf16)
set(CPU_FLAGS_avx512_amx ${CPU_FLAGS_avx512_bf16} -mamx-tile -mamx-bf16)
# Ops whose kernels gain from bf16 dot products, and from products of tiles; the others run their
# kernel of the level below.
set(CPU_OPS_avx512_bf16 attention/paged_attention attention/paged_attention_decode)
set(CPU_OPS_avx512_amx attention/paged_attention)

function(add_cpu_kernels result)
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${ROOT}/cpu/*.cpp)
  list(REMOVE_ITEM sources ${ROOT}/cpu/level.cpp)
  add_library(level_choice OBJECT ${ROOT}/cpu/level.cpp)
  target_include_directories(level_choice PRIVATE ${ROOT})
  set(objects $<TARGET_OBJECTS:level_choice>)
  foreach(level ${CPU_LEVELS})
    set(level_sources ${sources})
    if(CPU_OPS_${level})
      list(TRANSFORM CPU_OPS_${level} PREPEND ${ROOT}/cpu/ OUTPUT_VARIABLE level_sources)
      list(TRANSFORM level_sources APPEND .cpp)
    endif()
    set(finished "")
    if(NOT level IN_LIST SANITIZED_LEVELS)
      finished_objects(finished cpu_${level})
    endif()
    if(finished)
      list(APPEND objects ${finished})
    elseif(level_sources)
      add_library(cpu_${level} OBJECT ${level_sources})
      target_include_directories(cpu_${level} PRIVATE ${ROOT})
      target_compile_definitions(cpu_${level} PRIVATE VLLM_KERNELS_CPU_LEVEL=${level})
      # GCC 12 warns about its own AVX-512 headers (maybe-uninitialized) and about vector arguments
      # of inlined functions (psabi).
      target_compile_options(
        cpu_${level} PRIVATE -O2 -fno-math-errno -fno-trapping-math -ffp-contract=off -Wall -Wextra
                             -Wno-maybe-uninitialized -Wno-uninitialized -Wno-psabi
                             ${CPU_FLAGS_${level}})
      sanitize_level(cpu_${level} ${level})
      list(APPEND objects $<TARGET_OBJECTS:cpu_${level}>)
    endif()
  endforeach()
  set(${result} ${objects} PARENT_SCOPE)
endfunction()
