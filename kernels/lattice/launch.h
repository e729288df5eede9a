// Launch functions by tile. Each is compiled in its own file.
#pragma once

#include <algorithm>
#include <type_traits>

#include "lattice/lattice.h"
#include "tile/instance.h"
#include "tile/launch.h"

namespace girih::kernels::lattice {

// Calls launch(tokens, D, M) with the smallest tile that holds the sizes.
template <class Launch>
inline cudaError_t by_size(const LatticeShape& shape, const Launch& launch) {
  return by_width<16, 32, kMostChunk>(shape.grid.size, [&](auto tokens) {
    return by_width<64, kLatticeWidest>(shape.D, [&](auto D) {
      return by_width<64, kLatticeWidest>(shape.M, [&](auto M) { return launch(tokens, D, M); });
    });
  });
}

// Calls launch(objective).
template <LatticeObjective kObjective>
using Objective = std::integral_constant<LatticeObjective, kObjective>;
template <class Launch>
inline cudaError_t by_objective(const LatticeShape& shape, const Launch& launch) {
  switch (shape.objective) {
    case LatticeObjective::decode:
      return launch(Objective<LatticeObjective::decode>());
    case LatticeObjective::encode:
      return launch(Objective<LatticeObjective::encode>());
    case LatticeObjective::similarity:
      return launch(Objective<LatticeObjective::similarity>());
  }
  return cudaErrorInvalidValue;
}

// Launch functions by element type.
template <typename T>
cudaError_t forward_of(const LatticeScan& scan, const LatticeRead& read, cudaStream_t stream);
template <typename T>
cudaError_t read_of(const LatticeRead& problem, cudaStream_t stream);
template <typename T>
cudaError_t reads_of(const LatticeReads& problem, cudaStream_t stream);
template <typename T>
cudaError_t reverse_of(const LatticeReverse& problem, const LatticeColumns& columns, cudaStream_t stream);
template <typename T>
cudaError_t columns_of(const LatticeColumns& problem, cudaStream_t stream);

// Whether the instances with Sizes::kPlain serve the call.
inline bool is_plain(const LatticeShape& shape) {
  return shape.query_heads == shape.heads && shape.grid.position == nullptr;
}

// Launches a block for every chunk and head. `more`: further bytes of shared memory if chunks may be resumed.
template <auto Kernel, class Problem>
cudaError_t launch_chunks(const Problem& p, int threads, int bytes, int more, cudaStream_t stream) {
  const int64_t blocks = chunk_count(p.shape.grid) * p.shape.heads;
  int limit = 0;
  if (const cudaError_t error = shared_limit(limit); error != cudaSuccess) return error;
  return launch_kernel<Kernel>(p, blocks, threads, p.shape.grid.position == nullptr ? bytes : bytes + more,
                               stream, std::min(bytes + more, limit));
}

}  // namespace girih::kernels::lattice
