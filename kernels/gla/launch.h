// The kernels by element type and tile of channels; each is compiled in a file of its own.
#pragma once

#include "gla/gla.h"

namespace girih::kernels {

template <typename T, int M>
cudaError_t launch_gla_output(const GlaOutput& problem, cudaStream_t stream);
template <typename T, int M>
cudaError_t launch_gla_rows(const GlaRows& problem, cudaStream_t stream);

}  // namespace girih::kernels
