// What the operators' files have in common: tensors as the Python tests describe them, and launches that may
// not fail.
#pragma once

#include <algorithm>

#include "emulator.h"
#include "tile/array.h"

struct Array {
  void* data;
  int dtype;
  int64_t stride[4];
};

template <template <int> class Kind, int Rank>
Kind<Rank> as(const Array& array) {
  Kind<Rank> result;
  result.data = array.data;
  result.dtype = static_cast<girih::kernels::DType>(array.dtype);
  std::copy(array.stride, array.stride + Rank, result.stride);
  return result;
}
template <int Rank>
girih::kernels::In<Rank> in(const Array& array) {
  return as<girih::kernels::In, Rank>(array);
}
template <int Rank>
girih::kernels::Out<Rank> out(const Array& array) {
  return as<girih::kernels::Out, Rank>(array);
}

inline void must(cudaError_t error) {
  if (error != cudaSuccess) emulated::fail("a launch is refused");
}
