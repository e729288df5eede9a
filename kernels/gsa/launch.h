// The kernels by element type and tile of slots; each is compiled in a file of its own.
#pragma once

#include "gsa/gsa.h"

namespace girih::kernels {

template <typename T, int M>
cudaError_t launch_gsa_output(const GsaOutput& problem, cudaStream_t stream);
template <typename T, int M>
cudaError_t launch_gsa_rows(const GsaRows& problem, cudaStream_t stream);
// With two memories for gsa, one for gla.
template <typename T, int M, int Memories>
cudaError_t launch_gated_columns(const GatedColumns& problem, cudaStream_t stream);

}  // namespace girih::kernels
