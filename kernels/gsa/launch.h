// Launch functions for each element type and tile of slots. Each instance is compiled in its own file.
#pragma once

#include "gsa/gsa.h"

namespace girih::kernels {

template <typename T, int M>
cudaError_t launch_gsa_output(const GsaOutput& problem, cudaStream_t stream);
template <typename T, int M>
cudaError_t launch_gsa_rows(const GsaRows& problem, cudaStream_t stream);
// Memories: 2 for gsa, 1 for gla.
template <typename T, int M, int Memories>
cudaError_t launch_gated_columns(const GatedColumns& problem, cudaStream_t stream);

}  // namespace girih::kernels
