// Launch functions by element type and tile of slots and columns. Each is compiled in its own file.
#pragma once

#include "trellis/trellis.h"

namespace girih::kernels {

template <typename T, int Tile>
cudaError_t launch_trellis_scan(const TrellisScan& problem, cudaStream_t stream);
template <typename T, int Tile>
cudaError_t scan_reads(bool& reads);
template <typename T, int Tile>
cudaError_t launch_trellis_output(const TrellisOutput& problem, cudaStream_t stream);
template <typename T, int Tile>
cudaError_t launch_trellis_rows(const TrellisRows& problem, cudaStream_t stream);
template <typename T, int Tile>
cudaError_t launch_trellis_reverse(const TrellisReverse& problem, cudaStream_t stream);
// Instances with a weight of phi.
template <typename T, int Tile>
cudaError_t launch_weighted_scan(const TrellisScan& problem, cudaStream_t stream);
template <typename T, int Tile>
cudaError_t launch_weighted_reverse(const TrellisReverse& problem, cudaStream_t stream);

// Upper bound of the bytes of shared memory that a kernel needs.
int trellis_shared_bytes();

}  // namespace girih::kernels
