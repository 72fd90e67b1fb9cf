# Libraries built on a new Linux also load on an old one, down to manylinux_2_28: glibc 2.28 and the
# libstdc++ of GCC 8. Gives the target `portable`, which every library links.
# tools/check_wheel.py checks the result.
add_library(portable INTERFACE)

# old_runtime.cpp calls functions that only a shared libstdc++ has, with their versions. A compiler
# that links a static one needs no old functions.
set(old_runtime ${ROOT}/stubs/old_runtime.cpp)
execute_process(
  COMMAND ${CMAKE_CXX_COMPILER} -std=c++20 -fPIC -shared -Wl,--no-undefined ${old_runtime}
          -o ${CMAKE_CURRENT_BINARY_DIR}/old_runtime_links.so
  RESULT_VARIABLE old_runtime_fails OUTPUT_QUIET ERROR_QUIET)
if(old_runtime_fails)
  set(PORTABLE_PLAN "this system or newer: the compiler links no shared libstdc++")
else()
  set(PORTABLE_PLAN "glibc 2.28 and the libstdc++ of GCC 8")
  add_library(old_runtime OBJECT ${old_runtime})
  target_link_libraries(portable INTERFACE $<TARGET_OBJECTS:old_runtime>)
endif()

execute_process(
  COMMAND ${Python_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/glibc_stubs.py ${CMAKE_CXX_COMPILER}
          ${CMAKE_CURRENT_BINARY_DIR}/glibc_stubs
  OUTPUT_VARIABLE glibc_stubs OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
target_link_libraries(portable INTERFACE ${glibc_stubs})
