// The results of trellis and ttt, and their ATen implementation, for any device, dtype and size.
#pragma once

#include "problem.h"

namespace girih::trellis {

// The saved tensors, with the shapes of Problem::saved().
struct SavedTensors {
  static auto arguments(auto& saved) {
    return std::tie(saved.chunk_memories[0], saved.chunk_memories[1], saved.z, saved.u, saved.map_stats);
  }
  Tensor chunk_memories[2], z, u, map_stats;
};

struct Outputs {
  Tensor o, chunk_start[2], memory[2], position;  // the final state, as in Call
  SavedTensors saved;
};

// The gradients of the outputs. An absent gradient is zero.
struct OutputGradients {
  static auto arguments(auto& g) {
    return std::tie(g.o, g.chunk_start[0], g.memory[0], g.chunk_start[1], g.memory[1], g.position);
  }
  OptionalTensor o, chunk_start[2], memory[2], position;
};

// o, the final state (first_k, k, first_v, v, position), the saved tensors (memories_k, memories_v, z, u,
// fit)
using Results =
    std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
inline Results to_results(const Outputs& out) {
  const auto& saved = out.saved;
  return {out.o,
          out.chunk_start[0],
          out.memory[0],
          out.chunk_start[1],
          out.memory[1],
          out.position,
          saved.chunk_memories[0],
          saved.chunk_memories[1],
          saved.z,
          saved.u,
          saved.map_stats};
}

// The ATen form of trellis and ttt, and the outputs on Meta.
Outputs run_aten(const Problem& problem, const Call& call, bool save);
Outputs run_meta(const Problem& problem, const Call& call, bool save);

Results forward(const Call& call, bool save);

}  // namespace girih::trellis
