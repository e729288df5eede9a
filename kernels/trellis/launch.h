// Launch functions by element type and by Width, the rows and columns of the tile of a memory: 64 or 128.
// Every element type is compiled in its own file.
#pragma once

#include "trellis/kernels.h"

namespace girih::kernels {

template <typename T, int Width>
cudaError_t launch_trellis_scan(const TrellisScan& problem, cudaStream_t stream);
template <typename T, int Width>
cudaError_t scan_has_output(bool& has_output);
template <typename T, int Width>
cudaError_t launch_trellis_output(const TrellisOutput& problem, cudaStream_t stream);
template <typename T, int Width>
cudaError_t launch_trellis_dq(const TrellisDq& problem, cudaStream_t stream);
template <typename T, int Width>
cudaError_t launch_trellis_reverse(const TrellisReverse& problem, cudaStream_t stream);
// Instances with a weight of phi.
template <typename T, int Width>
cudaError_t launch_weighted_scan(const TrellisScan& problem, cudaStream_t stream);
template <typename T, int Width>
cudaError_t launch_weighted_reverse(const TrellisReverse& problem, cudaStream_t stream);

// Upper bound of the bytes of shared memory that a kernel needs.
int trellis_shared_bytes();

}  // namespace girih::kernels
