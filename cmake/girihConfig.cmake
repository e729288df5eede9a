# find_package(girih): the target girih::girih, built for the torch that is found.
include(CMakeFindDependencyMacro)
# A torch built with CUDA asks for a toolkit, which a program without kernels of its own does not need. Where none is
# found, there is a torch::cudart without anything, and torch asks no further.
if(NOT TARGET torch::cudart AND NOT CUDA_TOOLKIT_ROOT_DIR)
  find_package(CUDAToolkit QUIET)
  if(NOT CUDAToolkit_FOUND)
    add_library(torch::cudart INTERFACE IMPORTED)
  endif()
endif()
# The versions that girih was built for, and where the torch of each was then: the torch of CMAKE_PREFIX_PATH comes
# first.
file(GLOB folders ${CMAKE_CURRENT_LIST_DIR}/torch*/torch.cmake)
set(versions "")
set(prefixes "")
foreach(file IN LISTS folders)
  include(${file})
  list(APPEND prefixes ${girih_torch_prefix})
  string(REGEX REPLACE ".*/torch([0-9.]+)/torch.cmake" "\\1" version ${file})
  list(APPEND versions ${version})
endforeach()
list(SORT versions COMPARE NATURAL)
find_dependency(Torch PATHS ${prefixes})
string(REGEX MATCH "^[0-9]+\\.[0-9]+" version "${Torch_VERSION}")
if(NOT version IN_LIST versions)
  list(JOIN versions ", " versions)
  set(girih_FOUND FALSE)
  set(girih_NOT_FOUND_MESSAGE "girih was built for torch ${versions}, but ${Torch_DIR} is torch ${Torch_VERSION}: name \
one of these in CMAKE_PREFIX_PATH, or build girih for this one")
  return()
endif()
include(${CMAKE_CURRENT_LIST_DIR}/torch${version}/girihTargets.cmake)
