// Choice of the tile and of the objective, and launches of one block for each chunk.
#pragma once

#include <algorithm>
#include <type_traits>

#include "lattice/kernels.h"
#include "tile/instance.h"
#include "tile/launch.h"

namespace girih::kernels::lattice {

// Calls launch(tokens, D, M) with the smallest tile that holds the sizes.
template <class Launch>
inline cudaError_t dispatch_size(const LatticeShape& shape, const Launch& launch) {
  return dispatch_width<16, 32, kMaxChunk>(shape.grid.size, [&](auto tokens) {
    return dispatch_width<64, kLatticeMaxWidth>(shape.D, [&](auto D) {
      return dispatch_width<64, kLatticeMaxWidth>(shape.M, [&](auto M) { return launch(tokens, D, M); });
    });
  });
}

// Calls launch(objective).
template <LatticeObjective kObjective>
using Objective = std::integral_constant<LatticeObjective, kObjective>;
template <class Launch>
inline cudaError_t dispatch_objective(const LatticeShape& shape, const Launch& launch) {
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

// Whether the instances with Sizes::kPlain serve the call.
inline bool is_plain_call(const LatticeShape& shape) {
  return shape.query_heads == shape.heads && shape.grid.position == nullptr;
}

// Launches a block for every chunk and head. `resume_bytes`: further bytes of shared memory
// if chunks may be resumed.
template <auto Kernel, class Problem>
cudaError_t launch_chunks(const Problem& p, int threads, int bytes, int resume_bytes, cudaStream_t stream) {
  const int64_t blocks = chunk_count(p.shape.grid) * p.shape.heads;
  int limit = 0;
  if (const cudaError_t error = shared_limit(limit); error != cudaSuccess) return error;
  return launch_kernel<Kernel>(p, blocks, threads,
                               p.shape.grid.position == nullptr ? bytes : bytes + resume_bytes, stream,
                               std::min(bytes + resume_bytes, limit));
}

}  // namespace girih::kernels::lattice
