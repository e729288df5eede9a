# How every target is compiled.
#
# Warnings are printed. With -DCMAKE_COMPILE_WARNING_AS_ERROR=ON, as CI has it, they are errors.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_VISIBILITY_PRESET default)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()
find_program(CCACHE ccache)
if(CCACHE)
  # Without this sloppiness ccache does not cache files with a precompiled header.
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros ${CCACHE})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${CCACHE})
endif()
# The C++ library that PyTorch loads, by its file's name. Where a compiler has the static one alone, -lstdc++ would put
# a second copy into libgirih.so, whose locales are not those of PyTorch's streams: printing a number crashes.
set(shared_libstdcxx -l:libstdc++.so.6)
link_libraries(${shared_libstdcxx})
