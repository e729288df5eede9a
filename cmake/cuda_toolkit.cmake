# Finds nvcc, GIRIH_NVCC, and uses its toolkit. `toolkit_hints`: folders that hold nvcc.
find_program(GIRIH_NVCC nvcc HINTS ${toolkit_hints} ENV CUDA_PATH PATH_SUFFIXES bin PATHS /usr/local/cuda/bin)
if(GIRIH_NVCC)
  get_filename_component(toolkit ${GIRIH_NVCC} REALPATH)
  get_filename_component(toolkit ${toolkit}/../.. ABSOLUTE)
  set(CMAKE_CUDA_COMPILER ${GIRIH_NVCC} CACHE FILEPATH "")
  set(CUDAToolkit_ROOT ${toolkit} CACHE PATH "")
  set(CUDA_TOOLKIT_ROOT_DIR ${toolkit} CACHE PATH "")
endif()
