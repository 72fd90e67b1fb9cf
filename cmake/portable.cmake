# Libraries built on a new Linux also load on an old one, down to manylinux_2_28: glibc 2.28 and the
# libstdc++ of GCC 8. Gives the target `portable`, which every library links.
# tools/check_wheel.py checks the result.
add_library(old_runtime OBJECT ${ROOT}/stubs/old_runtime.cpp)
add_library(portable INTERFACE)
target_link_libraries(portable INTERFACE $<TARGET_OBJECTS:old_runtime>)

execute_process(
  COMMAND ${Python_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/glibc_stubs.py ${CMAKE_CXX_COMPILER}
          ${CMAKE_CURRENT_BINARY_DIR}/glibc_stubs
  OUTPUT_VARIABLE glibc_stubs OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
target_link_libraries(portable INTERFACE ${glibc_stubs})
